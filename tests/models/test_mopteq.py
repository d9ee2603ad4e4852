"""POptEqs and MOptEqs: the equations of the paper, ablations, PE and convergence."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import equilibria as eq
from equilibria.context.state import Packing, state_tensors
from equilibria.energies import BranchCoupling, HeritageDiversity
from equilibria.energies.branch_coupling import resampling
from equilibria.models import MOptEqCell, POptEqCell, heritage_diversity_loss
from equilibria.models.mopteq.cells import MOptEqFeatureCell, reconstructed_perturbations
from equilibria.models.mopteq.models import mopteq, perturbed_logits, popteq
from equilibria.operators import Identity


def operators(widths: Sequence[int], channels: int = 3) -> list[eq.Conv2d]:
    return [eq.Conv2d(channels, w, 3, norm="bound", zeta=0.9) for w in widths]


def cell_of(
    scales: Sequence[int] = (1, 1, 1), size: int = 4, **options: object
) -> tuple[MOptEqCell, Tensor]:
    torch.manual_seed(0)
    widths = [3 + i % 2 for i in range(len(scales))]
    names = ("pe", "epsilon", "perturb_for", "fusion")
    cell_options = {name: options.pop(name) for name in names if name in options}
    coupling = HeritageDiversity(operators(widths), scales=scales, **{"diversity": 0.05, **options})
    pairs = zip(widths, scales, strict=True)
    inputs = [eq.Input(eq.Conv2d(2, w, 3) @ eq.AveragePool(s)) for w, s in pairs]
    cell = MOptEqCell(inputs, coupling, **cell_options).double()
    return cell, torch.randn(2, 2, size, size, dtype=torch.float64)


@pytest.mark.parametrize("scales", [(1,), (1, 1), (1, 1, 1), (1, 2, 4), (1, 2, 2, 4)])
def test_step_is_eq_6_of_proposition_1(scales: tuple[int, ...]) -> None:
    """Compare with h computed channel by channel."""
    lam = 0.3
    cell, x = cell_of(scales, sign="hard", diversity=lam)
    context = cell.inject(x)
    y = [torch.rand_like(t) for t in cell.initial_state(x, context)]
    W = cell.heritage_diversity.operators()
    z = [w.adjoint(t) for w, t in zip(W, y, strict=True)]
    L = len(scales)

    def resample(feature: Tensor, to: Tensor) -> Tensor:
        ratio = feature.shape[2] / to.shape[2]
        if ratio >= 1:
            return F.avg_pool2d(feature, int(ratio))
        s = int(1 / ratio)
        return feature.repeat_interleave(s, 2).repeat_interleave(s, 3) / s**2

    for i in range(L):
        after, before = z[(i + 1) % L], z[i - 1]
        A, B = resample(after, z[i]), resample(before, z[i])
        h = 0.5 * (A + B)
        C = z[i].shape[1]
        for k in range(C):
            for l in range(C):  # noqa: E741
                if k == l:
                    continue
                sign_a = (z[i][:, k] * A[:, l]).sum(dim=(1, 2)).sign()[:, None, None]
                # M_{i-1:i} pairs the channels of P z_i with those of z_{i-1}.
                sign_b = (z[i][:, k] * B[:, l]).sum(dim=(1, 2)).sign()[:, None, None]
                h[:, k] -= lam / 2 * (sign_a * A[:, l] + sign_b * B[:, l])
        c = context.parts["branches"].parts[str(i)]["c"]
        expected = torch.relu(W[i](h) + c)
        torch.testing.assert_close(cell.step(tuple(y), context)[i], expected)


@pytest.mark.parametrize(("fine", "coarse"), [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 8)])
def test_resampling_up_is_the_transpose_of_resampling_down(fine: int, coarse: int) -> None:
    down = resampling(fine, coarse)
    up = resampling(coarse, fine)
    small = torch.randn(2, 3, 8 // coarse, 8 // coarse, dtype=torch.float64)
    other = torch.randn(2, 3, 8 // fine, 8 // fine, dtype=torch.float64)
    assert down(small).shape == other.shape
    torch.testing.assert_close(up(other), down.adjoint(other))
    torch.testing.assert_close((down(small) * other).sum(), (small * up(other)).sum())
    with pytest.raises(ValueError, match="do not divide"):
        resampling(2, 3)


def test_resampling_keeps_the_memory_format() -> None:
    z = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for P in (eq.AveragePool(2), eq.AveragePool(2).T):
        assert P(z).is_contiguous(memory_format=torch.channels_last)


def test_one_branch_without_diversity_is_opteq() -> None:
    cell, x = cell_of((1,), diversity=0.0)
    solver = eq.Anderson(tolerance=1e-13, max_iterations=500)
    feature = eq.EquilibriumLayer(cell=cell, solver=solver)(x)
    opteq = eq.models.OptEqCell(
        cell.heritage_diversity.operators()[0], cell.inputs()[0].U, bias=False
    )
    torch.testing.assert_close(eq.EquilibriumLayer(cell=opteq, solver=solver)(x), feature)


def test_mopteqs_without_heritage_and_diversity_are_popteqs() -> None:
    scales = (1, 2)
    cell, x = cell_of(scales, diversity=0.0, heritage=False)
    solver = eq.Anderson(tolerance=1e-13, max_iterations=500)
    parallel = POptEqCell(
        cell.heritage_diversity.operators(), [t.U for t in cell.inputs()], bias=False
    )
    layer, parallel_layer = (eq.EquilibriumLayer(cell=c, solver=solver) for c in (cell, parallel))
    torch.testing.assert_close(layer(x), parallel_layer(x))
    value = layer.objective(x).value(layer.solve(x).state)
    torch.testing.assert_close(
        value, parallel_layer.objective(x).value(parallel_layer.solve(x).state)
    )
    # Each branch is an independent OptEq.
    state = parallel_layer.solve(x).state
    for W, term, y in zip(cell.heritage_diversity.operators(), cell.inputs(), state, strict=True):
        alone = eq.models.OptEqCell(W, term.U, bias=False)
        torch.testing.assert_close(eq.EquilibriumLayer(cell=alone, solver=solver).solve(x).state, y)


@pytest.mark.parametrize("sign", ["smooth", "freeze"])
@pytest.mark.parametrize("scales", [(1, 1, 1), (1, 2, 4)])
@pytest.mark.parametrize("pe", ["off", "always"])
def test_both_spaces_have_the_same_equilibrium(sign: str, scales: tuple[int, ...], pe: str) -> None:
    cell, x = cell_of(scales, sign=sign, pe=pe, epsilon=0.01)
    solver = eq.Anderson(tolerance=1e-13, max_iterations=999)
    rule = eq.Implicit(tolerance=1e-13)
    x.requires_grad_()
    results = []
    for form in (cell, MOptEqFeatureCell(cell)):
        layer = eq.EquilibriumLayer(cell=form, solver=solver, gradient=rule, strict=True)
        output = layer(x)
        gradients = torch.autograd.grad(output.sin().sum(), [x, *cell.parameters()])
        solution = layer.solve(x)
        objective = form.objective(solution.context)
        assert (objective.residual(solution.state) < 1e-11).all()
        for gradient in state_tensors(objective.gradient(solution.state)):
            assert gradient.abs().max() < 1e-11
        results.append([output, *gradients, objective.value(solution.state)])
        assert layer.contraction_bound(x) == pytest.approx(
            eq.EquilibriumLayer(cell=cell).contraction_bound(x)
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sign", ["smooth", "freeze"])
@pytest.mark.parametrize("scales", [(1, 1, 1), (1, 2, 4)])
def test_equilibrium_is_stationary(sign: str, scales: tuple[int, ...]) -> None:
    cell, x = cell_of(scales, sign=sign)
    layer = eq.EquilibriumLayer(cell=cell, solver=eq.Anderson(tolerance=1e-13, max_iterations=999))
    solution = layer.solve(x)
    objective = cell.objective(solution.context)
    assert (objective.residual(solution.state) < 1e-11).all()
    for gradient in state_tensors(objective.gradient(solution.state)):
        assert gradient.abs().max() < 1e-11


@pytest.mark.parametrize(
    "options", [{"diversity": 0.0}, {"sign": "freeze"}, {"sign": "freeze", "heritage": False}]
)
@pytest.mark.parametrize("scales", [(1, 1, 1), (1, 2, 4), (1, 2)])
def test_curvature_is_below_its_bound(scales: tuple[int, ...], options: dict[str, object]) -> None:
    cell, x = cell_of(scales, **options)
    x = x[:1]
    context = cell.inject(x)
    packing = Packing.of(cell.initial_state(x, context))
    bound = cell.bounds(context, packing.layout).contraction
    assert bound is not None
    flat = torch.rand(1, packing.size, dtype=torch.float64)
    hessian = torch.autograd.functional.jacobian(
        lambda v: packing.pack(cell.energy.descent(packing.unpack(v), context)), flat
    ).reshape(packing.size, packing.size)
    assert torch.linalg.matrix_norm(hessian, 2) <= bound * (1 + 1e-9)
    limit = cell.limits.contraction
    assert limit is not None
    assert bound <= limit * (1 + 1e-6)


def test_signs_that_depend_on_the_state_have_no_curvature_bound() -> None:
    for sign in ("smooth", "hard"):
        cell, x = cell_of(sign=sign)
        assert cell.limits.contraction is None
        assert eq.EquilibriumLayer(cell=cell).contraction_bound(x) is None


def settled_model(
    size: int = 8, **options: object
) -> tuple[eq.models.EquilibriumClassifier, Tensor]:
    torch.manual_seed(0)
    solving = eq.Solving(tolerance=1e-5, max_iterations=100)
    model = mopteq(channels=32, zeta=0.95, solving=solving, **options)
    images = torch.randn(8, 3, size, size)
    with torch.no_grad():
        for _ in range(20):
            model.stem(images)
    return model.eval(), images


@pytest.mark.parametrize("diversity", [0.01, 1 / 32])
@pytest.mark.parametrize(
    ("scales", "widths", "size"),
    [((1, 1, 1), (64, 128, 128), 8), ((1, 2, 4, 8), (16, 32, 32, 64), 32)],
)
def test_smooth_signs_converge_within_40_iterations(
    diversity: float, scales: tuple[int, ...], widths: tuple[int, ...], size: int
) -> None:
    model, images = settled_model(size, scales=scales, widths=widths, diversity=diversity)
    solution = model.solve(images)
    assert solution.converged.all()
    assert solution.iterations.max() <= 40


def test_popteqs_converge_within_20_iterations() -> None:
    torch.manual_seed(0)
    solving = eq.Solving(tolerance=1e-5, max_iterations=100)
    model = popteq(channels=32, widths=(64, 128, 128), zeta=0.95, solving=solving)
    solution = model.solve(torch.randn(8, 3, 8, 8))
    assert solution.converged.all()
    assert solution.iterations.max() <= 20


@pytest.mark.parametrize("sign", ["smooth", "freeze"])
def test_pe_converges_for_all_samples(sign: str) -> None:
    model, images = settled_model(widths=(64, 128, 128), pe="always", epsilon=0.1, sign=sign)
    solution = model.solve(images)
    assert solution.converged.all()


def sign_flips(model: eq.models.EquilibriumClassifier, solution: eq.Solution) -> torch.Tensor:
    """Return the number of signs of M that differ between a state and its image, per sample."""
    cell = model.layer.cell
    assert isinstance(cell, MOptEqFeatureCell)
    states = (solution.state, cell.step(solution.state, solution.context))
    coupling = cell.lifted.heritage_diversity.coupling
    before, after = (coupling.signs(state_tensors(state)) for state in states)
    flips = [(before[k] != after[k]).flatten(1).sum(dim=1) for k in before]
    return torch.stack(flips).sum(dim=0)


def test_hard_signs_do_not_converge_and_warn_with_advice() -> None:
    model, images = settled_model(widths=(64, 128, 128), sign="hard", diversity=1 / 32)
    with pytest.warns(eq.ConvergenceWarning, match="signs of the diversity term alternate"):
        solution = model.solve(images)
    assert (solution.status == eq.Status.OUT_OF_ITERATIONS).all()
    assert (solution.residual < 0.1).all()
    assert (sign_flips(model, solution) > 0).all()
    smooth, _ = settled_model(widths=(64, 128, 128), sign="smooth", diversity=1 / 32)
    smooth_solution = smooth.solve(images)
    assert sign_flips(smooth, smooth_solution).float().mean() < 1


@pytest.mark.parametrize("space", ["y", "z"])
@pytest.mark.parametrize(("perturb_for", "freeze_after"), [(3, 12), (12, 3), (2, 2)])
def test_signs_and_perturbations_are_refreshed_for_separate_numbers_of_iterations(
    space: str, perturb_for: int, freeze_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifted, x = cell_of(
        pe="always", perturb_for=perturb_for, sign="freeze", freeze_after=freeze_after
    )
    cell = lifted if space == "y" else MOptEqFeatureCell(lifted)
    assert cell.refresh_until == max(perturb_for, freeze_after)
    refreshes = {"perturb": 0, "signs": 0}
    for owner, name in ((lifted, "perturb"), (lifted.heritage_diversity.coupling, "signs")):
        original = getattr(owner, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            refreshes[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)
    solution = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-12)).solve(x)
    assert solution.converged.all()
    assert refreshes == {"perturb": perturb_for, "signs": freeze_after + 1}  # one by `calibrate`


def test_frozen_signs_are_those_of_an_iterate() -> None:
    cell, x = cell_of(sign="freeze", freeze_after=3)
    assert cell.refresh_until == 3
    solution = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-12)).solve(x)
    with torch.no_grad():
        context = cell.inject(x)
        state: eq.State = cell.initial_state(x, context)
        for _ in range(3):
            state = cell.step(state, context)
            context = cell.refresh(state, context)
    for name in ("pair0", "pair1", "pair2"):
        assert torch.equal(
            context.parts["heritage_diversity"][name],
            solution.context.parts["heritage_diversity"][name],
        )


def test_reconstructed_perturbations_increase_the_objective_most() -> None:
    cell, x = cell_of((1, 2), pe="always", epsilon=0.2)
    state = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-10)).solve(x).state
    deltas = reconstructed_perturbations(cell, state, 0.2)
    generator = torch.Generator().manual_seed(0)
    for term, y, delta in zip(cell.inputs(), state_tensors(state), deltas, strict=True):
        assert delta.shape == x.shape
        assert delta.abs().max() <= 0.2

        def objective(d: Tensor, term: eq.Input = term, y: Tensor = y) -> Tensor:
            return -(term.U(x - d) * y).flatten(1).sum(dim=1)

        best = objective(delta)
        for _ in range(20):
            other = 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype).sign()
            assert (objective(other) <= best + 1e-12).all()


def test_pe_perturbs_the_branches_after_the_first() -> None:
    cell, x = cell_of((1, 1, 2), pe="train", epsilon=0.3, perturb_for=4)
    layer = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-12, max_iterations=500))
    assert cell.eval().refresh_until == 0
    clean = layer.solve(x)
    assert cell.train().refresh_until == 4
    perturbed = layer.solve(x)
    assert perturbed.evaluations >= 4
    inputs = [part["c"] for part in perturbed.context.parts["branches"].parts.values()]
    clean_inputs = [part["c"] for part in clean.context.parts["branches"].parts.values()]
    torch.testing.assert_close(inputs[0], clean_inputs[0])
    pairs = zip(inputs[1:], clean_inputs[1:], strict=True)
    assert all((a - b).abs().max() > 1e-3 for a, b in pairs)
    # The input of branch i is U(g − δ) with δ of the previous branch.
    state = perturbed.state
    deltas = reconstructed_perturbations(cell, state, 0.3)
    for term, delta, a, b in zip(
        cell.inputs()[1:], deltas, inputs[1:], clean_inputs[1:], strict=False
    ):
        exact = b - term.U(delta)
        # δ is that of the fourth iteration, whose signs are nearly all final.
        assert (a - exact).norm() < 0.3 * (a - b).norm()


def test_pe_has_no_effect_on_a_single_branch_and_is_off_by_default() -> None:
    cell, x = cell_of((1,), pe="always", diversity=0.0)
    other, _ = cell_of((1,), diversity=0.0)
    assert other.pe == "off"
    solver = eq.Picard(tolerance=1e-12, max_iterations=500)
    torch.testing.assert_close(
        eq.EquilibriumLayer(cell=cell, solver=solver)(x),
        eq.EquilibriumLayer(cell=other, solver=solver)(x),
    )


def test_gradients_with_pe_against_finite_differences() -> None:
    """δ is constant almost everywhere."""
    cell, x = cell_of((1, 2), pe="always", epsilon=0.1)
    layer = eq.EquilibriumLayer(
        cell=cell, solver=eq.Anderson(tolerance=1e-13), gradient=eq.Implicit(tolerance=1e-13)
    )
    parameters = list(layer.parameters())
    weight = torch.randn_like(layer(x).detach())
    gradients = torch.autograd.grad((layer(x) * weight).sum(), parameters)
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    exact = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    values = []
    for h in (1e-6, -1e-6):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(h * d)
            values.append((layer(x) * weight).sum())
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(h * d)
    torch.testing.assert_close(exact, (values[0] - values[1]) / 2e-6, rtol=1e-6, atol=1e-9)


def test_implicit_and_unrolled_gradients_with_pe_agree() -> None:
    cell, x = cell_of((1, 2), pe="always", epsilon=0.1)
    solver = eq.Picard(tolerance=1e-13, max_iterations=500)
    outputs = [
        eq.EquilibriumLayer(cell=cell, solver=solver, gradient=gradient)(x)
        for gradient in (eq.Implicit(tolerance=1e-13), eq.Unrolled(steps=300))
    ]
    implicit, unrolled = (torch.autograd.grad(o.square().sum(), cell.parameters()) for o in outputs)
    for a, b in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_proposition_2_for_random_opteqs() -> None:
    """max{G(z'; g−δ) − G(z*; g), √N ε‖z' − z*‖} ≥ ½(ε‖Uᵀy*‖₁ − Nε²)."""
    generator = torch.Generator().manual_seed(0)
    solver = eq.Anderson(tolerance=1e-12, max_iterations=1000)
    n = 6
    cases, worst = 0, float("inf")
    for seed in range(300):
        draw = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
        W, U = (0.95 * m / torch.linalg.matrix_norm(m, 2) for m in draw)
        epsilon = 0.02 * (1 + seed % 5)
        g = 2 * torch.randn(1, n, generator=generator, dtype=torch.float64)
        layer = eq.EquilibriumLayer(cell=eq.models.OptEqCell(W, U, bias=False), solver=solver)
        y = layer.solve(g).state
        delta = epsilon * (y @ U).sign()
        moved = layer.solve(g - delta).state
        increase = layer.objective(g - delta).value(moved) - layer.objective(g).value(y)
        distance = n**0.5 * epsilon * ((moved - y) @ W).norm()
        left_side = max(float(increase), float(distance))
        right_side = 0.5 * (epsilon * float((y @ U).abs().sum()) - n * epsilon**2)
        assert left_side >= right_side - 1e-9
        if right_side > 1e-6:
            cases += 1
            worst = min(worst, left_side / right_side)
    assert cases > 200
    assert worst >= 1


def test_heritage_diversity_loss_satisfies_its_formula() -> None:
    features = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    z = features.unflatten(1, (3, 2))
    expected = torch.zeros(2, dtype=torch.float64)
    for i in range(3):
        first, second = z[:, i], z[:, (i + 1) % 3]
        for k in range(2):
            for l in range(2):  # noqa: E741
                inner = (first[:, k] * second[:, l]).sum(dim=(1, 2))
                expected += -inner if k == l else 0.1 * inner.abs()
    torch.testing.assert_close(heritage_diversity_loss(z.unbind(dim=1), 0.1), expected)


def test_training_reduces_the_heritage_diversity_loss() -> None:
    torch.manual_seed(0)
    model = popteq(channels=4, widths=(3, 4), scales=(1, 1), fusion="none")
    images = torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        branches = model.features(images).chunk(2, dim=1)
        loss = 0.01 * heritage_diversity_loss(branches, 0.1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in pairwise(losses))


@pytest.mark.parametrize("fusion", ["average", "sum", "none", "conv"])
@pytest.mark.parametrize("make", [popteq, mopteq])
def test_features_of_all_fusions(fusion: str, make: object) -> None:
    torch.manual_seed(0)
    model = make(channels=4, widths=(3, 4), scales=(1, 2), fusion=fusion, num_classes=5)  # type: ignore[operator]
    images = torch.randn(2, 3, 8, 8)
    assert model(images).shape == (2, 5)
    features = model.features(images)
    solution = model.solve(images)
    cell = model.layer.cell
    in_z = isinstance(cell, MOptEqFeatureCell)
    branches = solution.state if in_z else cell.features(solution.state, solution.context)
    assert [b.shape[2] for b in branches] == [8, 4]
    lifted = [branches[0], branches[1].repeat_interleave(2, 2).repeat_interleave(2, 3)]
    expected = {
        "average": (lifted[0] + lifted[1]) / 2,
        "sum": lifted[0] + lifted[1],
    }.get(fusion, torch.cat(lifted, dim=1))
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-4)


def test_reconstructed_perturbations_change_logits_more_than_random_ones() -> None:
    """Figure 3a."""
    model, images = settled_model(widths=(16, 32), scales=(1, 1))
    with torch.no_grad():
        clean = model(images)
        moved = (perturbed_logits(model, images, 0.3) - clean).norm()
        feature = model.stem(images)
        random = [
            (model.head(model.layer(feature - 0.3 * torch.randn_like(feature).sign())) - clean)
            for _ in range(5)
        ]
    assert moved > 1.5 * torch.stack([r.norm() for r in random]).mean()
    with pytest.raises(TypeError, match="MOptEqs"):
        perturbed_logits(eq.create_model("opteq-small"), images, 0.1)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="one number per branch each, got 2 widths and 1 scales"):
        mopteq(widths=(3, 4), scales=(1,))
    with pytest.raises(ValueError, match=r"the smallest of scales .* must be 1"):
        popteq(widths=(3, 4), scales=(2, 4))
    with pytest.raises(ValueError, match="sign must be"):
        mopteq(sign="soft")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pe must be"):
        mopteq(pe="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel must be"):
        mopteq(kernel="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel='linear'"):
        mopteq(kernel="sigmoid", pe="train")
    with pytest.raises(ValueError, match="space must be"):
        mopteq(space="w")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="space='y'"):
        mopteq(kernel="sigmoid", space="z")
    with pytest.raises(ValueError, match="diversity must not be negative"):
        mopteq(diversity=-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mopteq(channels=4, widths=(3, 4), scales=(1, 4))
    with pytest.raises(ValueError, match="divisible by 4"):
        model(torch.randn(1, 3, 6, 6))


@pytest.mark.parametrize("space", ["y", "z"])
def test_zero_features_have_finite_derivatives_of_both_orders(space: str) -> None:
    """For W = 0 the scale t of smooth signs is at its lower limit."""
    torch.manual_seed(0)
    model = eq.create_model("mopteq-small", space=space, init_scale=0.0)
    with eq.solving(model, record="equilibria") as record:
        loss = model(torch.rand(3, 3, 8, 8)).square().sum()
    (equilibrium,) = record.equilibria
    penalty = eq.equilibrium.jacobian_penalty(
        model.layer.cell, equilibrium.state, equilibrium.context
    )
    (loss + penalty.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("heritage", [True, False])
@pytest.mark.parametrize("scales", [(1, 1, 1), (1, 2, 4), (2, 1), (1,)])
def test_derivatives_of_messages_agree_with_those_of_composed_messages(
    scales: tuple[int, ...], heritage: bool
) -> None:
    coupling = BranchCoupling(scales, diversity=0.3, heritage=heritage)

    def random_map(scale: int) -> Tensor:
        size = 4 // scale
        return torch.randn(2, 3, size, size, dtype=torch.float64)

    z = [random_map(scale).requires_grad_() for scale in scales]
    cotangents, directions = ([random_map(scale) for scale in scales] for _ in range(2))

    def derivatives(messages: Any) -> list[Tensor]:
        # The scales depend on the features, and derivatives must not go through them.
        t = coupling.scales(z)
        h = messages(z, t)
        first = torch.autograd.grad(h, z, cotangents, retain_graph=True)
        differentiable = torch.autograd.grad(h, z, cotangents, create_graph=True)
        second = torch.autograd.grad(differentiable, z, directions)
        return [*h, *first, *differentiable, *second]

    copies = [tensor.clone() for tensor in (*z, *cotangents)]
    pairs = zip(
        derivatives(coupling.messages), derivatives(coupling.composed_messages), strict=True
    )
    for result, expected in pairs:
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, copies, (*z, *cotangents))), "an input was overwritten"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # from forward mode itself
def test_forward_and_backward_derivatives_of_messages_agree() -> None:
    coupling = BranchCoupling((1, 2), diversity=0.3)
    z = [torch.randn(2, 3, n, n, dtype=torch.float64).requires_grad_() for n in (4, 2)]
    t = {f"pair{i}": torch.rand(2, 3, 3, dtype=torch.float64) for i in range(2)}
    backward = torch.autograd.grad(coupling.messages(z, t), z, [zi.detach() for zi in z])
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(zi, zi.detach()) for zi in z]
        forward = [forward_ad.unpack_dual(h).tangent for h in coupling.messages(dual, t)]
    for pushed, pulled in zip(forward, backward, strict=True):  # the Jacobian is symmetric
        torch.testing.assert_close(pushed, pulled, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("convolve", [True, False])
def test_step_does_not_overwrite_its_inputs(convolve: bool, recorded: bool) -> None:
    W: Any = operators([3, 3]) if convolve else [Identity(), Identity()]
    inputs = [eq.Input(U) for U in operators([3, 3])]
    coupling = HeritageDiversity(W, diversity=0.0, heritage=False)
    cell = MOptEqFeatureCell(MOptEqCell(inputs, coupling))
    x = torch.randn(2, 3, 4, 4)
    context = cell.inject(x)
    state = (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    inputs_of_step = [*state, *context.tensors()]
    before = [tensor.clone() for tensor in inputs_of_step]
    with torch.set_grad_enabled(recorded):
        first, second = cell.step(state, context), cell.step(state, context)
    assert all(map(torch.equal, inputs_of_step, before))
    assert all(map(torch.equal, state_tensors(first), state_tensors(second)))
