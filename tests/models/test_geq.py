"""GEQ: parameter counts, convergence, hidden objective, attention and options."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import equilibria as eq
from equilibria.context.state import Packing
from equilibria.energies import Branches
from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.kernel_scale import RunningScale
from equilibria.equilibrium import BatchCouplingWarning
from equilibria.models import EquilibriumClassifier
from equilibria.models.geq.model import GEQCell, geq
from tests.models.small import with_solving

SIX_SCALES = (1, 2, 4, 4, 8, 8)


def small(**options: Any) -> EquilibriumClassifier:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "num_classes": 3,
        "in_channels": 2,
        "channels": 4,
        "widths": (5, 6),
        "channel_split": 3,
        "hidden": 14,
        "init_scale": 1.5,
        "tolerance": 1e-12,
        "max_iterations": 1000,
    }
    if options.get("kernel", "gaussian") != "gaussian":
        del defaults["channel_split"], defaults["hidden"]
    if isinstance(options.get("solver"), eq.solvers.Solver):
        del defaults["tolerance"], defaults["max_iterations"]
    return geq(**with_solving({**defaults, **options})).double()


def images(batch: int = 3, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 2, size, size, generator=generator, dtype=torch.float64)


def cell_of(model: EquilibriumClassifier) -> GEQCell:
    assert isinstance(model.layer.cell, GEQCell)
    return model.layer.cell


CIFAR = {"stem_depth": 2}
IMAGENET = {"stem_depth": 4, "stem_strides": 2, "hidden": 128, "num_classes": 100}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        # Appendix A.7.1: 5 M and 8 M on CIFAR-10.
        (5_035_274, {**CIFAR, "channels": 256, "widths": (64, 128, 128, 128, 256, 256)}),
        (7_857_738, {**CIFAR, "channels": 320, "widths": (80, 160, 160, 160, 320, 320)}),
        # Appendix A.7.2: 6 M and 13 M on ImageNet-100.
        (5_807_972, {**IMAGENET, "channels": 256, "widths": (32, 64, 128, 128, 256, 256)}),
        (13_012_708, {**IMAGENET, "channels": 384, "widths": (48, 96, 192, 192, 384, 384)}),
    ],
)
def test_parameter_counts_of_the_paper(count: int, options: dict[str, Any]) -> None:
    """27C + 9kC² + 18CΣwidths + 6·32·hidden + classifier, with k + 1 convolutions in the stem."""
    with torch.device("meta"):
        model = geq(scales=SIX_SCALES, pool=1, bias=False, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("kernel", ["gaussian", "polynomial", "sigmoid"])
def test_images_of_all_channels_and_sizes(channels: int, size: int, kernel: str) -> None:
    model = geq(in_channels=channels, kernel=kernel, solving=eq.Solving(tolerance=1e-4)).eval()  # type: ignore[arg-type]
    batch = torch.randn(2, channels, size, size)
    assert model(batch).shape == (2, 10)
    assert model(batch[:0]).shape == (0, 10)
    solution = model.solve(batch)
    assert solution.converged.all()
    objective = model.objective(batch)
    assert (objective.residual(solution.state) < 1e-2).all()
    bound = model.contraction_bound(batch)
    assert bound is not None
    assert ((bound > 0) & (bound < 1)).all()


def test_patches_may_be_larger_than_the_map_of_a_branch() -> None:
    model = small(widths=(6,) * 6, scales=SIX_SCALES).eval()
    solution = model.solve(images(2, size=8))
    assert solution.converged.all()
    assert [tuple(y.shape[2:]) for y in solution.state] == [
        (8, 8), (4, 4), (2, 2), (2, 2), (1, 1), (1, 1)
    ]  # fmt: skip
    assert all(y.norm() > 0 for y in solution.state)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("gamma", ["running", "per-sample", "paper", 0.05])
@pytest.mark.parametrize("init_scale", [0.5, 3.0])
def test_converges_from_random_weights(size: int, gamma: str | float, init_scale: float) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        solving = eq.Solving(tolerance=1e-5, max_iterations=30)
        model = geq(gamma=gamma, init_scale=init_scale, solving=solving)
        solution = model.solve(torch.randn(8, 3, size, size))
        assert solution.converged.all()
        assert (solution.residual <= 1e-5).all()


def expanding_cell(damping: float, product: float = 2.7) -> tuple[GEQCell, Tensor]:
    """Build a cell with ‖W‖‖W_h‖ = product and without norm control, and an input."""
    torch.manual_seed(0)
    W, W_h = torch.randn(8, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    W = math.sqrt(product) * W / torch.linalg.matrix_norm(W, 2)
    W_h = math.sqrt(product) * W_h / torch.linalg.matrix_norm(W_h, 2)
    kernel = eq.Conv2d.from_tensor(W[:, :, None, None])
    energy = GaussianKernel(
        eq.Conv2d(3, 8, 1), kernel, W_h, channel_split=8, patch=1, gamma="running"
    ).double()
    return GEQCell(energy, damping=damping), torch.randn(4, 3, 4, 4, dtype=torch.float64)


def test_damped_step_converges_if_the_plain_step_does_not() -> None:
    picard = eq.Picard(tolerance=1e-8, max_iterations=2000)
    cell, x = expanding_cell(1.0)
    layer = eq.EquilibriumLayer(cell, solver=picard).eval()
    with pytest.warns(eq.ConvergenceWarning, match="damping"):
        assert not layer.solve(x).converged.all()
    cell, x = expanding_cell(1 / (1 + 2.7**2))
    layer = eq.EquilibriumLayer(cell, solver=picard).eval()
    assert layer.solve(x).converged.all()
    context = cell.inject(x)
    layout = Packing.of(cell.initial_state(x, context)).layout
    bound = cell.energy.bounds(context, layout).curvature
    assert bound is not None
    assert bound.item() == pytest.approx(2.7**2, rel=1e-6)


def test_damped_steps_decrease_the_objective() -> None:
    cell, x = expanding_cell(1 / (1 + 2.7**2))
    with torch.no_grad():
        context = cell.inject(x)
        objective = cell.objective(context)
        for start in (0.0, 1.0, 5.0):
            y = start * torch.rand(4, 8, 4, 4, dtype=torch.float64)
            value = objective.value(y)
            for _ in range(60):
                image = cell.step(y, context)
                assert isinstance(image, Tensor)
                y, before = image, value
                value = objective.value(y)
                assert (value <= before + 1e-12).all()


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_equilibrium_minimizes_the_objective(damping: float) -> None:
    """For ‖W‖‖W_h‖ < 1, G is strongly convex; compare with scipy's minimizer over y ≥ 0."""
    torch.manual_seed(0)
    energy = GaussianKernel(
        eq.Conv2d(2, 4, 1),
        eq.Conv2d(3, 4, 3, norm="bound", zeta=0.95),
        eq.Dense(8, 10, norm="bound", zeta=1.0),
        channel_split=2,
    ).double()
    layer = eq.EquilibriumLayer(
        GEQCell(energy, damping=damping), solver=eq.Anderson(tolerance=1e-12, max_iterations=500)
    ).eval()
    x = 3 * torch.randn(1, 2, 3, 4, dtype=torch.float64)
    solution = layer.solve(x)
    assert isinstance(solution.state, Tensor)
    context = layer.cell.inject(x)

    def value_and_gradient(v: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.from_numpy(v).view(1, 3, 3, 4).requires_grad_()
        G = 0.5 * y.square().sum() + energy.value(y, context).sum()
        (gradient,) = torch.autograd.grad(G, y)
        return G.item(), gradient.flatten().numpy()

    expected = minimize(
        value_and_gradient, np.ones(36), jac=True, method="L-BFGS-B", bounds=[(0, None)] * 36,
        options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 5000},
    )  # fmt: skip
    assert expected.x.max() > 0.01
    np.testing.assert_allclose(solution.state.flatten().numpy(), expected.x, atol=1e-7)
    value = layer.objective(x).value(solution.state).item()
    assert value == pytest.approx(expected.fun, abs=1e-12)


def test_attention_has_one_weight_per_patch() -> None:
    model = small(channel_split=5, hidden=None, patch=2, widths=(10, 5), gamma=0.3).eval()
    cell, x = cell_of(model), model.stem(images())
    context = cell.inject(x)
    solution = model.solve(images())
    fine, coarse = cell.attention(solution.state, context)
    assert fine.shape == (3, 2, 3, 3)
    assert coarse.shape == (3, 1, 2, 2)
    kernel, part = cell.kernels()[0], context.parts["0"]
    r = part["c"] - kernel.W(solution.state[0], part.weights("W"))
    block = r[:, 5:10, 2:4, 4:6].square().flatten(1).sum(dim=1)
    torch.testing.assert_close(fine[:, 1, 1, 2], torch.exp(-0.3 * block))
    classifier = small(widths=(6,), scales=(1,)).eval()
    solved = classifier.solve(images())
    assert isinstance(solved.state, Tensor)
    (beta,) = cell_of(classifier).attention(solved.state, solved.context)
    assert beta.shape == (3, 2, 3, 3)
    assert ((beta > 0) & (beta <= 1)).all()
    with pytest.raises(TypeError, match="needs a GaussianKernel or Branches of them, got Input"):
        GEQCell(eq.Input(eq.Dense(2, 3))).kernels()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gamma", ["running", "per-sample"])
@pytest.mark.parametrize("kernel", ["gaussian", "polynomial", "sigmoid"])
def test_derivatives_against_finite_differences(training: bool, gamma: str, kernel: str) -> None:
    options = {"gamma": gamma} if kernel == "gaussian" else {}
    model = small(
        kernel=kernel, activation="softplus", gradient=eq.Implicit(tolerance=1e-12), **options
    )
    for _ in range(3):
        model.stem(images(8))
    model.train(training)
    batch = images().requires_grad_()
    labels = torch.tensor([0, 2, 1])
    variables = [*model.parameters(), batch]
    direction = [torch.randn_like(v) for v in variables]
    derivatives = torch.autograd.grad(F.cross_entropy(model(batch), labels), variables)
    exact = sum((g * d).sum() for g, d in zip(derivatives, direction, strict=True))

    @torch.no_grad()
    def loss_at(step: float) -> Tensor:
        for v, d in zip(variables, direction, strict=True):
            v.add_(step * d)
        loss = F.cross_entropy(model(batch), labels)
        for v, d in zip(variables, direction, strict=True):
            v.sub_(step * d)
        return loss

    difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    torch.testing.assert_close(exact, difference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gamma", ["running", "per-sample", 0.3])
def test_samples_do_not_depend_on_the_batch(gamma: str | float) -> None:
    model = small(gamma=gamma, tolerance=1e-6).eval()
    batch = images(4)
    batch[2] *= 40
    together = model(batch)
    for i in range(4):
        torch.testing.assert_close(model(batch[i : i + 1])[0], together[i], rtol=1e-9, atol=1e-9)


def test_gamma_of_the_paper_couples_the_batch() -> None:
    model = small(gamma="paper").eval()
    assert model.layer.cell.couples_batch
    with pytest.warns(BatchCouplingWarning, match="depends on the others in its batch"):
        together = model(images())
    alone = model(images()[:1])
    assert not torch.allclose(together[:1], alone, rtol=1e-9)
    solution = model.solve(images())
    assert solution.converged.all()
    step = model.layer.cell.step(solution.state, solution.context)
    for stepped, fixed in zip(step, solution.state, strict=True):
        torch.testing.assert_close(stepped, fixed, rtol=1e-8, atol=1e-9)
    assert model.contraction_bound(images()) is None
    with pytest.raises(eq.equilibrium.NoObjectiveError, match="gamma='running' has an objective"):
        model.objective(images())
    model(images()).sum().backward()
    assert model(images()[:0]).shape == (0, 3)


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_images_do_not_change_the_statistics(bad: float) -> None:
    model = small().eval()
    batch = images()
    batch[1, 0, 2, 3] = bad
    assert model.solve(batch[1:2]).status.tolist() == [eq.Status.DIVERGED]
    assert model.solve(batch).status.tolist() == [0, eq.Status.DIVERGED, 0]
    clean = small().eval()
    torch.testing.assert_close(model(batch)[[0, 2]], clean(images()[[0, 2]]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_updates_gamma_once(reentrant: bool) -> None:
    plain = small()
    with torch.no_grad():
        plain(2 * images(5, size=4))  # sets a γ that differs from that of the next batch
    wrapped = copy.deepcopy(plain)
    x = plain.stem(images()).detach().requires_grad_()
    plain.layer(x).sin().sum().backward()
    output = checkpoint(wrapped.layer, x, use_reentrant=reentrant)
    output.sin().sum().backward()
    for expected, actual in zip(plain.layer.parameters(), wrapped.layer.parameters(), strict=True):
        torch.testing.assert_close(expected.grad, actual.grad, rtol=1e-8, atol=1e-10)
    for expected, actual in zip(plain.layer.buffers(), wrapped.layer.buffers(), strict=True):
        torch.testing.assert_close(expected, actual)


def test_saved_and_loaded_models_are_equal() -> None:
    model = small()
    model(images()).sum().backward()
    model.eval()
    other = small(init_scale=0.7).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images()), model(images()))
    assert torch.equal(copy.deepcopy(model)(images()), model(images()))


@pytest.mark.parametrize("kernel", ["gaussian", "polynomial", "sigmoid"])
def test_training_reduces_the_loss(kernel: str) -> None:
    model = small(kernel=kernel, tolerance=1e-5).float()
    batch, labels = images().float(), torch.tensor([0, 2, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_autocast_has_nearly_the_same_outputs() -> None:
    model = small(tolerance=2e-2).float().eval()
    batch = images().float()
    full = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(batch)
    assert model.last_solution is not None
    assert model.last_solution.converged.all()
    torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.02)


def test_options_are_validated_and_applied() -> None:
    with pytest.raises(ValueError, match="2 widths and 3 scales"):
        geq(scales=(1, 2, 4))
    with pytest.raises(ValueError, match=r"kernel must be one of gaussian, .* got 'linear'"):
        geq(kernel="linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma belongs to kernel='gaussian'"):
        geq(kernel="sigmoid", gamma="paper")
    with pytest.raises(ValueError, match="degree belongs to kernel='polynomial'"):
        geq(degree=3)
    with pytest.raises(ValueError, match="rho belongs to kernel='polynomial' or 'sigmoid'"):
        geq(rho=0.2)
    with pytest.raises(ValueError, match="hidden=64 needs patches"):
        geq(patch=None)
    whole = small(patch=None, hidden=None).eval()
    assert whole(images()).shape == (3, 3)
    shared = RunningScale(momentum=0.5)
    model = small(gamma=shared)
    scales = [kernel.scale for kernel in cell_of(model).kernels()]
    assert scales[0] is not scales[1]
    assert all(isinstance(scale, RunningScale) and scale.momentum == 0.5 for scale in scales)
    assert isinstance(cell_of(model).energy, Branches)
    bound = small(zeta=0.5, zeta_hidden=0.8).contraction_bound(images())
    torch.testing.assert_close(bound, torch.full((3,), 0.16, dtype=torch.float64))
    assert small(kernel="polynomial", rho=0.01, zeta=0.5).layer.cell.limits.contraction == (
        pytest.approx(0.26)
    )
    cubic = small(kernel="polynomial", degree=3).eval()
    assert cubic.contraction_bound(images()) is None
    assert cubic.solve(images()).converged.all()
