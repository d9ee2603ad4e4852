"""Input optimization: the optimum, what is promised of a result, and what is refused."""

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
def test_the_result_satisfies_the_optimality_conditions(bounded: bool) -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    constraint = L2Ball(x0, 0.5) & Box(-1.5, 1.5) if bounded else None
    x0 = x0.clamp(-1.5, 1.5)
    penalty = None if bounded else ridge
    found = optimize_input(model, loss, x0, constraint=constraint, penalty=penalty, **TIGHT)
    assert bool(found.converged.all())
    gradient = true_gradient(model, found.x, loss, penalty)
    moved = found.x - gradient
    moved = moved if constraint is None else constraint.project(moved)
    assert float((found.x - moved).norm(dim=1).max()) <= 1e-6
    torch.testing.assert_close(found.loss, true_loss(model, found.x, loss, penalty).detach())
    torch.testing.assert_close(found.initial_loss, true_loss(model, x0, loss, penalty).detach())
    assert bool((found.loss < found.initial_loss).all())
    assert "3 of 3 inputs converged" in found.summary()


def test_the_adjoint_is_that_of_a_dense_solve() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    found = optimize_input(model, loss, x0, penalty=ridge, iterations=5)
    cell, context = model.layer.cell, model.layer.cell.inject(model.stem(found.x))
    (z,), (mu,) = state_tensors(found.state), state_tensors(found.adjoint)
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
    found = optimize_input(
        model,
        loss,
        x0,
        penalty=ridge,
        engine={"name": engine, **options},
        iterations=200,
    )
    torch.testing.assert_close(found.loss, best.loss, rtol=1e-5, atol=1e-6)
    assert found.engine == engine
    assert found.evaluations > 0
    assert found.vjps > 0


def test_the_official_engine_lowers_the_loss() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    found = optimize_input(model, loss, x0, penalty=ridge, engine="official", iterations=80)
    assert bool((found.loss <= found.initial_loss).all())
    assert float(found.loss.mean()) < 0.95 * float(found.initial_loss.mean())


def test_an_attack_ends_on_the_ball() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    found = optimize_input(
        model,
        lambda outputs: -loss(outputs),
        x0,
        constraint=L2Ball(x0, 0.5),
        settings=SearchSettings(normalize=True),
    )
    distance = (found.x - x0).norm(dim=1)
    assert bool((distance <= 0.5).all())
    torch.testing.assert_close(distance, torch.full_like(distance, 0.5), rtol=1e-4, atol=0)
    assert bool((-found.loss > -found.initial_loss).all())


@pytest.mark.parametrize("size", [1e5, 1e10, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("kind", ["l2", "linf", "box", "l2 and box"])
def test_a_region_that_bounds_nothing_changes_nothing(kind: str, size: float) -> None:
    """Steps were measured by the region: the first one was too short to count, or infinite."""
    model, x0, loss = smooth_model().float(), inputs().float(), squared_distance()
    sets = {
        "l2": L2Ball(x0, size),
        "linf": LinfBall(x0, size),
        "box": Box(-size, size),
        "l2 and box": L2Ball(x0, size) & Box(-size, size),
    }
    options: dict[str, Any] = {"iterations": 40, "engine": {"name": "auto", "rule": "gradient"}}
    free = optimize_input(model, lambda o: loss(o).float(), x0, penalty=ridge, **options)
    held = optimize_input(
        model, lambda o: loss(o).float(), x0, penalty=ridge, constraint=sets[kind], **options
    )
    assert bool((held.loss < held.initial_loss).all())
    assert torch.equal(held.status, free.status)
    torch.testing.assert_close(held.x, free.x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_unit_of_the_loss_does_not_matter(normalize: bool) -> None:
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
def test_a_sample_alone_is_that_sample_in_a_batch(engine: str) -> None:
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


def test_nothing_is_changed_by_the_search() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    before, weights = x0.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    optimize_input(model, loss, x0, constraint=L2Ball(x0, 0.5), iterations=3)
    assert torch.equal(x0, before)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_sample_that_is_not_a_number_fails_alone() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    clean = optimize_input(model, loss, x0, penalty=ridge, **TIGHT)
    x0[1, 2] = torch.nan
    found = optimize_input(model, loss, x0, penalty=ridge, **TIGHT)
    assert found.status.tolist() == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
    torch.testing.assert_close(found.x[[0, 2]], clean.x[[0, 2]], rtol=1e-6, atol=1e-6)
    assert "check x0" in found.summary()


def test_samples_of_a_group_share_their_input() -> None:
    """Groups of different sizes, interleaved, against the same problem as an explicit sum."""
    model = smooth_model()
    loss = squared_distance(5)
    groups = torch.tensor([0, 1, 0, 0, 1])
    found = optimize_input(model, loss, inputs(2), groups=groups, penalty=ridge, **TIGHT)
    assert found.x.shape == (2, 4)
    assert bool(found.converged.all())
    leaf = found.x.clone().requires_grad_()
    total = loss(model(leaf[groups])).sum() + ridge(leaf).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    assert float(gradient.norm(dim=1).max()) <= 1e-6
    exact = loss(model(leaf[groups])).detach()
    expected = torch.stack([exact[groups == g].sum() for g in (0, 1)]) + ridge(leaf).detach()
    torch.testing.assert_close(found.loss, expected)


def test_a_singular_gram_matrix_ends() -> None:
    """A loss that x does not change leaves differences of zero to mix."""
    model = smooth_model()
    with torch.no_grad():
        model.stem.weight.zero_()
    found = optimize_input(model, squared_distance(), inputs(), engine="official", iterations=30)
    assert bool(torch.isfinite(found.x).all())
    torch.testing.assert_close(found.loss, found.initial_loss)


def test_the_result_is_never_worse_than_the_start() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    found = optimize_input(
        model, loss, x0, settings=SearchSettings(step_size=1e3), engine=Engine(), iterations=10
    )
    assert bool((found.loss <= found.initial_loss).all())


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
    found = optimize_input(
        smooth_model(), squared_distance(), inputs(), engine="test-three-sweeps", iterations=2
    )
    assert found.evaluations == 3 * 2


SIZES: dict[str, dict[str, Any]] = {
    "opteq-small": {"channels": 4, "width": 4},
    "deep-opteq-small": {"channels": 4, "widths": (4, 4)},
    "mopteq-small": {"channels": 4, "widths": (4, 4, 4)},
    "geq-small": {"channels": 4, "widths": (4, 4), "hidden": 8, "channel_split": 2},
    "mdeq-small": {"channels": (4, 4), "groups": 2, "outer_norm": "group", "final_channels": 8},
}


@pytest.mark.parametrize("name", SIZES)
def test_models_of_the_library(name: str) -> None:
    model = eq.create_model(name, in_channels=1, num_classes=3, **SIZES[name]).eval()
    images = torch.rand(2, 1, 8, 8)
    labels = torch.tensor([0, 2])

    def loss(logits: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(logits, labels, reduction="none")

    region = L2Ball(images, 1.0) & Box(0.0, 1.0)
    found = optimize_input(
        model,
        loss,
        images,
        constraint=region,
        settings=SearchSettings(normalize=True, check_tolerance=1e-4),
        iterations=8,
    )
    assert bool((found.loss < found.initial_loss).all())
    assert torch.equal(region.project(found.x), found.x)
    with torch.no_grad():
        torch.testing.assert_close(found.loss, loss(model(found.x)), rtol=1e-2, atol=1e-3)


def test_a_scalar_loss_is_refused() -> None:
    loss = squared_distance()
    with pytest.raises(ValueError, match=r"shape \(3,\), not \(\).*reduction='none'"):
        optimize_input(smooth_model(), lambda o: loss(o).sum(), inputs())
    with pytest.raises(ValueError, match=r"not \(3, 3\)"):
        optimize_input(smooth_model(), lambda o: o, inputs())
    with pytest.raises(ValueError, match="penalty must return"):
        optimize_input(smooth_model(), loss, inputs(), penalty=lambda x: x.sum())
    with pytest.raises(ValueError, match="can be differentiated"):
        optimize_input(smooth_model(), lambda o: o.detach().sum(dim=1), inputs())


def test_models_that_cannot_be_optimized_are_refused() -> None:
    loss, x0 = squared_distance(2), torch.rand(2, 1, 8, 8)
    small: dict[str, Any] = {"in_channels": 1, "num_classes": 3}
    model = eq.create_model("opteq-small", **small, **SIZES["opteq-small"])
    with pytest.raises(ValueError, match="BatchNorm"):
        optimize_input(model, loss, x0)
    model = eq.create_model("mdeq-small", **small, **SIZES["mdeq-small"], dropout=0.5)
    with pytest.raises(ValueError, match="draws at random"):
        optimize_input(model, loss, x0)
    frozen = {"sign": "freeze", "diversity": 0.1}
    model = eq.create_model("mopteq-small", **small, **SIZES["mopteq-small"], **frozen).eval()
    with pytest.raises(ValueError, match="renews its context"):
        optimize_input(model, loss, x0)
    with pytest.raises(TypeError, match="needs a stem"):
        optimize_input(nn.Linear(4, 3), loss, x0)
    coupled = smooth_model()
    coupled.layer.cell.couples_batch = True
    with pytest.raises(ValueError, match="couples the samples"):
        optimize_input(coupled, squared_distance(), inputs())


def test_a_running_statistic_is_refused_and_left_as_it_was() -> None:
    model = eq.create_model("geq-small", in_channels=1, num_classes=3, **SIZES["geq-small"]).eval()
    images = torch.rand(2, 1, 8, 8)
    model(images)
    model.layer.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="running statistics"):
        optimize_input(model, lambda o: o.sum(dim=1), 2 * images)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"engine": "andersen"}, "did you mean 'anderson'"),
        ({"groups": torch.tensor([0, 1, 3])}, "one row a group"),
        ({"groups": torch.tensor([0, 1, 1])}, "every group must have a sample"),
        ({"groups": torch.tensor([0.0, 1.0, 2.0])}, "whole numbers"),
        ({"engine": {"name": "secant", "alpha_z": 2.0}}, "alpha_z"),
        ({"engine": {"alpha_z": 0.5}}, "engine needs a name"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimize_input(smooth_model(), squared_distance(), inputs(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
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
def test_impossible_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchSettings(**options)


@pytest.mark.parametrize(("normalize", "name"), [(False, "secant"), (True, "momentum")])
def test_auto_with_options_is_the_engine_that_fits_the_steps(normalize: bool, name: str) -> None:
    options: dict[str, Any] = {"iterations": 2, "settings": SearchSettings(normalize=normalize)}
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    found = optimize_input(model, loss, x0, engine={"name": "auto", "alpha_z": 0.5}, **options)
    assert found.engine == name
    plain = optimize_input(model, loss, x0, engine=name, **options)
    by_object = optimize_input(model, loss, x0, engine=get_engine(name, alpha_z=0.5), **options)
    assert torch.equal(found.x, by_object.x)
    assert plain.engine == by_object.engine == name


def test_impossible_starts_are_refused() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        optimize_input(smooth_model(), squared_distance(), torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="one row a problem"):
        optimize_input(smooth_model(), squared_distance(), inputs()[0])
    with pytest.raises(TypeError, match="'secant'"):
        optimize_input(
            smooth_model(), squared_distance(), inputs(), engine={"name": "secant", "no_such": 1}
        )


@pytest.mark.parametrize("engine", ["gradient-warm", DAMPED, "anderson"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_a_kink_on_the_way_does_not_end_the_search(engine: str | Engine, tolerance: float) -> None:
    """It looks like a large curvature and shortens the steps, but not what is left to go."""

    def penalty(x: Tensor) -> Tensor:
        return 0.5 * (x - 2).square().sum(dim=1) - 3 * x.clamp(max=-0.5).sum(dim=1)

    found = optimize_input(
        smooth_model(),
        lambda outputs: 0 * outputs.flatten(1).sum(dim=1),
        -torch.ones_like(inputs()),
        penalty=penalty,
        engine=engine,
        iterations=200,
        settings=SearchSettings(tolerance=tolerance),
    )
    assert bool(found.converged.all())
    assert float((found.x - 2).abs().max()) <= tolerance


class TwoInputs(eq.Cell):
    """z = tanh(W z + u) ∘ g with two inputs, u and a gate g, both made of x."""

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
def test_a_stem_may_give_the_cell_several_inputs(groups: Tensor | None) -> None:
    """Gradients reach x through all of them: the gate alone, or u alone, would miss the optimum."""
    model, loss = TwoInputModel().double(), squared_distance()
    x0 = inputs(3 if groups is None else 2)
    found = optimize_input(model, loss, x0, penalty=ridge, groups=groups, **TIGHT)
    assert bool(found.converged.all()), found.summary()
    leaf = found.x.clone().requires_grad_()
    outputs = model(leaf if groups is None else leaf[groups])
    (gradient,) = torch.autograd.grad(loss(outputs).sum() + ridge(leaf).sum(), leaf)
    assert float(gradient.norm(dim=1).max()) <= 1e-6
    torch.testing.assert_close(found.outputs(), outputs.detach())
    value = eq.inputs.optimal_value(found).sum()
    (own,) = torch.autograd.grad(value, model.second.weight)
    fixed = model(found.x if groups is None else found.x[groups])
    (exact,) = torch.autograd.grad(loss(fixed).sum(), model.second.weight)
    torch.testing.assert_close(own, exact, rtol=1e-6, atol=1e-8)
    moved = eq.inputs.optimal_input(found).sum()
    assert bool(torch.autograd.grad(moved, model.second.weight)[0].any())
