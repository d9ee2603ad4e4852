"""Input optimization: optimality, guarantees of a result, and rejected arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.context.state import state_tensors
from equilibria.inputs import (
    Box,
    Engine,
    InputResult,
    L2Ball,
    LinfBall,
    SearchSettings,
    get_engine,
    list_engines,
    optimize_input,
    register_engine,
)
from equilibria.inputs.engines.solved import SolvedEngine
from equilibria.solvers import Status
from tests.inputs.small_problem import HIDDEN, inputs, ridge, smooth_model, squared_distance

DAMPED = Engine(alpha_z=0.8, alpha_mu=0.6)
TIGHT: dict[str, Any] = {"iterations": 200, "settings": SearchSettings(tolerance=1e-8)}


def true_loss(model: nn.Module, x: Tensor, loss: Any, penalty: Any = None) -> Tensor:
    value: Tensor = loss(model(x))
    return value if penalty is None else value + penalty(x)


def true_gradient(model: nn.Module, x: Tensor, loss: Any, penalty: Any = None) -> Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(true_loss(model, leaf, loss, penalty).sum(), leaf)
    return gradient


@pytest.mark.parametrize("bounded", [False, True])
def test_result_satisfies_the_optimality_conditions(bounded: bool) -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    constraint = L2Ball(x0, 0.5) & Box(-1.5, 1.5) if bounded else None
    x0 = x0.clamp(-1.5, 1.5)
    penalty = None if bounded else ridge
    result = optimize_input(model, loss, x0, constraint=constraint, penalty=penalty, **TIGHT)
    assert bool(result.converged.all())
    gradient = true_gradient(model, result.x, loss, penalty)
    moved = result.x - gradient
    moved = moved if constraint is None else constraint.project(moved)
    assert float((result.x - moved).norm(dim=1).max()) <= 1e-6
    torch.testing.assert_close(result.loss, true_loss(model, result.x, loss, penalty).detach())
    torch.testing.assert_close(result.initial_loss, true_loss(model, x0, loss, penalty).detach())
    assert bool((result.loss < result.initial_loss).all())
    assert "3 of 3 inputs converged" in result.summary()


def test_adjoint_agrees_with_a_dense_solve() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    result = optimize_input(model, loss, x0, penalty=ridge, iterations=5)
    cell, context = model.layer.cell, model.layer.cell.inject(model.stem(result.x))
    (z,), (mu,) = state_tensors(result.state), state_tensors(result.adjoint)
    for row in range(3):
        alone = context.keep(torch.tensor([row]))

        def step(y: Tensor, alone: eq.Context = alone) -> Tensor:
            return state_tensors(cell.step(y[None], alone))[0][0]

        def value(y: Tensor, row: int = row, alone: eq.Context = alone) -> Tensor:
            outputs = model.head(cell.output(y[None], alone))
            return loss(outputs.expand(3, -1))[row]

        jacobian = torch.autograd.functional.jacobian(step, z[row])
        rhs = torch.autograd.functional.jacobian(value, z[row])
        exact = torch.linalg.solve(torch.eye(HIDDEN).double() - jacobian.T, rhs)
        torch.testing.assert_close(mu[row], exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("engine", [name for name in list_engines() if name != "official"])
def test_engines_agree(engine: str) -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    best = optimize_input(model, loss, x0, penalty=ridge, **TIGHT)
    options = {"inner_tolerance": 1e-8} if isinstance(get_engine(engine), SolvedEngine) else {}
    result = optimize_input(
        model,
        loss,
        x0,
        penalty=ridge,
        engine={"name": engine, **options},
        iterations=200,
    )
    torch.testing.assert_close(result.loss, best.loss, rtol=1e-5, atol=1e-6)
    assert result.engine == engine
    assert result.evaluations > 0
    assert result.vjps > 0


def test_official_engine_lowers_the_loss() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    result = optimize_input(model, loss, x0, penalty=ridge, engine="official", iterations=80)
    assert bool((result.loss <= result.initial_loss).all())
    assert float(result.loss.mean()) < 0.95 * float(result.initial_loss.mean())


def test_attack_ends_on_the_ball() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    result = optimize_input(
        model,
        lambda outputs: -loss(outputs),
        x0,
        constraint=L2Ball(x0, 0.5),
        settings=SearchSettings(normalize=True),
    )
    distance = (result.x - x0).norm(dim=1)
    assert bool((distance <= 0.5).all())
    torch.testing.assert_close(distance, torch.full_like(distance, 0.5), rtol=1e-4, atol=0)
    assert bool((-result.loss > -result.initial_loss).all())


@pytest.mark.parametrize("size", [1e5, 1e10, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("kind", ["l2", "linf", "box", "l2 and box"])
def test_very_large_region_does_not_change_the_result(kind: str, size: float) -> None:
    """The size of such a region must not determine the length of steps."""
    model, x0, loss = smooth_model().float(), inputs().float(), squared_distance()
    sets = {
        "l2": L2Ball(x0, size),
        "linf": LinfBall(x0, size),
        "box": Box(-size, size),
        "l2 and box": L2Ball(x0, size) & Box(-size, size),
    }
    options: dict[str, Any] = {"iterations": 40, "engine": {"name": "auto", "rule": "gradient"}}
    free = optimize_input(model, lambda o: loss(o).float(), x0, penalty=ridge, **options)
    constrained = optimize_input(
        model, lambda o: loss(o).float(), x0, penalty=ridge, constraint=sets[kind], **options
    )
    assert bool((constrained.loss < constrained.initial_loss).all())
    assert torch.equal(constrained.status, free.status)
    torch.testing.assert_close(constrained.x, free.x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_result_does_not_depend_on_the_unit_of_the_loss(normalize: bool) -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    results = [
        optimize_input(
            model,
            lambda outputs, c=c: c * loss(outputs),
            x0,
            constraint=L2Ball(x0, 0.5),
            settings=SearchSettings(normalize=normalize, tolerance=1e-10),
            iterations=12,
        )
        for c in (1.0, 1024.0, 2.0**-20)
    ]
    for other in results[1:]:
        torch.testing.assert_close(other.x, results[0].x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["secant", "momentum", "anderson", "gradient-warm"])
def test_result_does_not_depend_on_the_batch(engine: str) -> None:
    model, x0 = smooth_model(), inputs()
    target = torch.randn(3, 3).double()
    options: dict[str, Any] = {"engine": engine, "iterations": 15, "penalty": ridge}
    if engine == "gradient-warm":
        options["engine"] = {"name": engine, "inner_tolerance": 1e-10}
    together = optimize_input(model, lambda o: (o - target).square().sum(dim=1), x0, **options)
    for row in range(3):
        alone = optimize_input(
            model,
            lambda o, row=row: (o - target[row]).square().sum(dim=1),
            x0[row : row + 1],
            **options,
        )
        torch.testing.assert_close(alone.x[0], together.x[row], rtol=1e-6, atol=1e-7)


def test_search_does_not_change_model_and_start() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    original, weights = x0.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    optimize_input(model, loss, x0, constraint=L2Ball(x0, 0.5), iterations=3)
    assert torch.equal(x0, original)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_nan_affects_only_its_sample() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    clean = optimize_input(model, loss, x0, penalty=ridge, **TIGHT)
    x0[1, 2] = torch.nan
    result = optimize_input(model, loss, x0, penalty=ridge, **TIGHT)
    assert result.status.tolist() == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
    torch.testing.assert_close(result.x[[0, 2]], clean.x[[0, 2]], rtol=1e-6, atol=1e-6)
    assert "check x0" in result.summary()


def test_samples_of_a_group_share_an_input() -> None:
    """Interleaved groups of different sizes agree with an explicit sum."""
    model = smooth_model()
    loss = squared_distance(5)
    groups = torch.tensor([0, 1, 0, 0, 1])
    result = optimize_input(model, loss, inputs(2), groups=groups, penalty=ridge, **TIGHT)
    assert result.x.shape == (2, 4)
    assert bool(result.converged.all())
    leaf = result.x.clone().requires_grad_()
    total = loss(model(leaf[groups])).sum() + ridge(leaf).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    assert float(gradient.norm(dim=1).max()) <= 1e-6
    exact = loss(model(leaf[groups])).detach()
    expected = torch.stack([exact[groups == g].sum() for g in (0, 1)]) + ridge(leaf).detach()
    torch.testing.assert_close(result.loss, expected)


def test_singular_gram_matrix_is_handled() -> None:
    """If the loss does not depend on x, all differences that are mixed are zero."""
    model = smooth_model()
    with torch.no_grad():
        model.stem.weight.zero_()
    result = optimize_input(model, squared_distance(), inputs(), engine="official", iterations=30)
    assert bool(torch.isfinite(result.x).all())
    torch.testing.assert_close(result.loss, result.initial_loss)


def test_result_is_never_worse_than_the_start() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    result = optimize_input(
        model, loss, x0, settings=SearchSettings(step_size=1e3), engine=Engine(), iterations=10
    )
    assert bool((result.loss <= result.initial_loss).all())


def test_options_change_behavior() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()

    def run(engine: Any = "auto", **changed: Any) -> InputResult:
        settings = SearchSettings(**{"tolerance": 1e-12, **changed})
        return optimize_input(
            model, loss, x0, penalty=ridge, iterations=6, engine=engine, settings=settings
        )

    plain = run()
    assert plain.evaluations == 3 * 6
    assert run(sweeps=2).evaluations == 2 * 6
    raw = run(polish=False)
    assert float(raw.adjoint_residual.max()) > 1e-6 > float(plain.adjoint_residual.max())
    damped = {"name": "secant", "alpha_z": 0.5}
    for other in (run(step_size=1e-3), run(normalize=True), run(engine=damped)):
        assert not torch.equal(other.x, plain.x)


def test_engines_can_be_added() -> None:
    register_engine("test-three-sweeps", lambda: Engine(sweeps=3), replace=True)
    result = optimize_input(
        smooth_model(), squared_distance(), inputs(), engine="test-three-sweeps", iterations=2
    )
    assert result.evaluations == 3 * 2


SIZES: dict[str, dict[str, Any]] = {
    "opteq-small": {"channels": 4, "width": 4},
    "deep-opteq-small": {"channels": 4, "widths": (4, 4)},
    "mopteq-small": {"channels": 4, "widths": (4, 4, 4)},
    "geq-small": {"channels": 4, "widths": (4, 4), "hidden": 8, "channel_split": 2},
    "mdeq-small": {"channels": (4, 4), "groups": 2, "outer_norm": "group", "final_channels": 8},
}


@pytest.mark.parametrize("name", SIZES)
def test_library_models_are_supported(name: str) -> None:
    model = eq.create_model(name, in_channels=1, num_classes=3, **SIZES[name]).eval()
    images = torch.rand(2, 1, 8, 8)
    labels = torch.tensor([0, 2])

    def loss(logits: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(logits, labels, reduction="none")

    region = L2Ball(images, 1.0) & Box(0.0, 1.0)
    result = optimize_input(
        model,
        loss,
        images,
        constraint=region,
        settings=SearchSettings(normalize=True, check_tolerance=1e-4),
        iterations=8,
    )
    assert bool((result.loss < result.initial_loss).all())
    assert torch.equal(region.project(result.x), result.x)
    with torch.no_grad():
        torch.testing.assert_close(result.loss, loss(model(result.x)), rtol=1e-2, atol=1e-3)


def test_loss_of_wrong_shape_is_rejected() -> None:
    loss = squared_distance()
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(\).*reduction='none'"):
        optimize_input(smooth_model(), lambda o: loss(o).sum(), inputs())
    with pytest.raises(ValueError, match=r"got \(3, 3\)"):
        optimize_input(smooth_model(), lambda o: o, inputs())
    with pytest.raises(ValueError, match="penalty must return"):
        optimize_input(smooth_model(), loss, inputs(), penalty=lambda x: x.sum())
    with pytest.raises(ValueError, match="result of loss is not differentiable"):
        optimize_input(smooth_model(), lambda o: o.detach().sum(dim=1), inputs())


def test_unsuitable_models_are_rejected() -> None:
    loss, x0 = squared_distance(2), torch.rand(2, 1, 8, 8)
    small: dict[str, Any] = {"in_channels": 1, "num_classes": 3}
    model = eq.create_model("opteq-small", **small, **SIZES["opteq-small"])
    with pytest.raises(ValueError, match="BatchNorm"):
        optimize_input(model, loss, x0)
    model = eq.create_model("mdeq-small", **small, **SIZES["mdeq-small"], dropout=0.5)
    with pytest.raises(ValueError, match="draws random numbers"):
        optimize_input(model, loss, x0)
    frozen = {"sign": "freeze", "diversity": 0.1}
    model = eq.create_model("mopteq-small", **small, **SIZES["mopteq-small"], **frozen).eval()
    with pytest.raises(ValueError, match="changes its context"):
        optimize_input(model, loss, x0)
    with pytest.raises(TypeError, match="must have the attributes stem"):
        optimize_input(nn.Linear(4, 3), loss, x0)
    coupled = smooth_model()
    coupled.layer.cell.couples_batch = True
    with pytest.raises(ValueError, match="couples the samples"):
        optimize_input(coupled, squared_distance(), inputs())


def test_running_statistics_are_rejected_and_not_changed() -> None:
    model = eq.create_model("geq-small", in_channels=1, num_classes=3, **SIZES["geq-small"]).eval()
    images = torch.rand(2, 1, 8, 8)
    model(images)
    model.layer.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="running statistics"):
        optimize_input(model, lambda o: o.sum(dim=1), 2 * images)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"engine": "andersen"}, "did you mean 'anderson'"),
        ({"groups": torch.tensor([0, 1, 3])}, "from 0 to 2, got 0 to 3"),
        ({"groups": torch.tensor([0, 1, 1])}, "row 2 of x0 has no sample"),
        ({"groups": torch.tensor([0.0, 1.0, 2.0])}, "tensor of integers"),
        ({"engine": {"name": "secant", "alpha_z": 2.0}}, "alpha_z"),
        ({"engine": {"alpha_z": 0.5}}, "engine needs a name"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize_input(smooth_model(), squared_distance(), inputs(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweeps": 0}, "sweeps must be at least 1"),
        ({"step_size": -1.0}, "step_size must be positive"),
        ({"step_size": float("inf")}, "step_size must be positive and finite"),
        ({"step_size": float("nan")}, "step_size must be positive"),
        ({"tolerance": float("nan")}, "tolerance must be in"),
        ({"check_tolerance": float("inf")}, "check_tolerance must be in"),
        ({"tolerance": 0.0}, "tolerance must be in"),
    ],
)
def test_invalid_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchSettings(**options)


@pytest.mark.parametrize(("normalize", "name"), [(False, "secant"), (True, "momentum")])
def test_auto_passes_options_to_the_default_engine(normalize: bool, name: str) -> None:
    options: dict[str, Any] = {"iterations": 2, "settings": SearchSettings(normalize=normalize)}
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    result = optimize_input(model, loss, x0, engine={"name": "auto", "alpha_z": 0.5}, **options)
    assert result.engine == name
    plain = optimize_input(model, loss, x0, engine=name, **options)
    by_object = optimize_input(model, loss, x0, engine=get_engine(name, alpha_z=0.5), **options)
    assert torch.equal(result.x, by_object.x)
    assert plain.engine == by_object.engine == name


def test_invalid_starts_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch.int64"):
        optimize_input(smooth_model(), squared_distance(), torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(problems, ...\)"):
        optimize_input(smooth_model(), squared_distance(), inputs()[0])
    with pytest.raises(TypeError, match="'secant'"):
        optimize_input(
            smooth_model(), squared_distance(), inputs(), engine={"name": "secant", "no_such": 1}
        )


@pytest.mark.parametrize("engine", ["gradient-warm", DAMPED, "anderson"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_kink_does_not_stop_the_search(engine: str | Engine, tolerance: float) -> None:
    """A kink looks like a large curvature. It must shorten steps but not the residual."""

    def penalty(x: Tensor) -> Tensor:
        return 0.5 * (x - 2).square().sum(dim=1) - 3 * x.clamp(max=-0.5).sum(dim=1)

    result = optimize_input(
        smooth_model(),
        lambda outputs: 0 * outputs.flatten(1).sum(dim=1),
        -torch.ones_like(inputs()),
        penalty=penalty,
        engine=engine,
        iterations=200,
        settings=SearchSettings(tolerance=tolerance),
    )
    assert bool(result.converged.all())
    assert float((result.x - 2).abs().max()) <= tolerance


class TwoInputs(eq.Cell):
    """z = tanh(W z + u) ∘ g with two inputs, u and a gate g, which both depend on x."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(5, 5, bias=False)

    def inject(self, u: Tensor, gate: Tensor) -> eq.Context:
        return eq.Context(sample={"u": u, "gate": gate})

    def initial_state(self, u: Tensor, gate: Tensor, context: eq.Context) -> Tensor:
        assert gate.shape == u.shape
        return torch.zeros_like(u)

    def step(self, state: Any, context: eq.Context) -> Tensor:
        return torch.tanh(0.4 * self.W(state) + context["u"]) * context["gate"]


class TwoInputModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)
        self.layer = eq.EquilibriumLayer(
            TwoInputs(),
            solver=eq.Anderson(tolerance=1e-12, max_iterations=500),
            gradient=eq.Implicit(tolerance=1e-12),
        )
        self.head = nn.Linear(5, 3)

    def stem(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), torch.sigmoid(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(x)))


@pytest.mark.parametrize("groups", [None, torch.tensor([0, 1, 0])])
def test_stem_may_return_several_inputs_of_the_cell(groups: Tensor | None) -> None:
    """The gradient in x includes all inputs; that of the gate or u alone misses the optimum."""
    model, loss = TwoInputModel().double(), squared_distance()
    x0 = inputs(3 if groups is None else 2)
    result = optimize_input(model, loss, x0, penalty=ridge, groups=groups, **TIGHT)
    assert bool(result.converged.all()), result.summary()
    leaf = result.x.clone().requires_grad_()
    outputs = model(leaf if groups is None else leaf[groups])
    (gradient,) = torch.autograd.grad(loss(outputs).sum() + ridge(leaf).sum(), leaf)
    assert float(gradient.norm(dim=1).max()) <= 1e-6
    torch.testing.assert_close(result.outputs(), outputs.detach())
    value = eq.inputs.optimal_value(result).sum()
    (gradient,) = torch.autograd.grad(value, model.second.weight)
    fixed = model(result.x if groups is None else result.x[groups])
    (exact,) = torch.autograd.grad(loss(fixed).sum(), model.second.weight)
    torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=1e-8)
    total = eq.inputs.optimal_input(result).sum()
    assert bool(torch.autograd.grad(total, model.second.weight)[0].any())
