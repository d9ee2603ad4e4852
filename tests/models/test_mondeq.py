"""monDEQ: monotonicity, both splittings, exact inverses, guarantees, derivatives."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria.activations import SoftThreshold
from equilibria.context.state import Packing, map_state, state_tensors
from equilibria.models.mondeq.model import MonDEQCell, UnitKernel, mondeq
from equilibria.operators import circular

SPLITTINGS = ("forward-backward", "peaceman-rachford")
TIERS = [3, (2, 3), (2, 2, 3)]
M = 0.8
SIZE = 4


def random_cell(channels: Any, splitting: str = SPLITTINGS[1], **options: Any) -> MonDEQCell:
    torch.manual_seed(0)
    options = {"m": M, "splitting": splitting, **options}
    cell = MonDEQCell(2, channels, **options)
    with torch.no_grad():
        for module in cell.modules():
            if isinstance(module, UnitKernel):
                module.scale.uniform_(0.5, 1.5)
    return cell.double()


def inputs(batch: int = 3, size: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 2, size, size, generator=generator, dtype=torch.float64)


def layer_of(cell: MonDEQCell, **options: Any) -> eq.EquilibriumLayer:
    solver = eq.Anderson(tolerance=1e-13, max_iterations=2000)
    options = {"gradient": eq.Implicit(tolerance=1e-12), "strict": True, **options}
    return eq.EquilibriumLayer(cell=cell, solver=solver, **options)


def circular_matrix(kernel: Tensor, side: int, stride: int = 1) -> Tensor:
    """Return the dense matrix of a circular convolution."""
    size = kernel.shape[1] * side**2
    basis = torch.eye(size, dtype=kernel.dtype).view(size, kernel.shape[1], side, side)
    padded = F.pad(basis, (kernel.shape[-1] // 2,) * 4, mode="circular")
    return F.conv2d(padded, kernel, stride=stride).flatten(1).mT


def dense_w(cell: MonDEQCell, size: int = SIZE) -> Tensor:
    """Return the dense W = (1−m)I − AᵀA + B − Bᵀ of all tiers, including margins."""
    sides = [size // 2**i + 2 for i in range(len(cell.channels))]
    counts = [c * side**2 for c, side in zip(cell.channels, sides, strict=True)]
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    A = torch.zeros(offsets[-1], offsets[-1], dtype=torch.float64)
    B = torch.zeros_like(A)
    for i, side in enumerate(sides):
        block = slice(offsets[i], offsets[i + 1])
        A[block, block] = circular_matrix(cell.A[i](), side)
        B[block, block] = circular_matrix(cell.B[i](), side)
        if i + 1 < len(sides):
            after = slice(offsets[i + 1], offsets[i + 2])
            strided = circular_matrix(cell.N[i](), side, stride=2)
            # The next grid is one pixel wider, and that pixel is zero.
            maps = strided.view(-1, side // 2, side // 2, counts[i])
            A[after, block] = F.pad(maps, (0, 0, 0, 1, 0, 1)).reshape(counts[i + 1], counts[i])
    for i in range(len(sides) - 1):
        block, after = slice(offsets[i], offsets[i + 1]), slice(offsets[i + 1], offsets[i + 2])
        B[after, block] = -A[after, after].T @ A[after, block]
    return (1 - cell.m) * torch.eye(len(A), dtype=A.dtype) - A.T @ A + B - B.T


def inside(cell: MonDEQCell, size: int = SIZE) -> Tensor:
    """Return a mask of the entries of the packed state outside of margins."""
    masks = []
    for i, channels in enumerate(cell.channels):
        side = size // 2**i
        masks.append(F.pad(torch.ones(channels, side, side), (1, 1, 1, 1)).flatten().bool())
    return torch.cat(masks)


@pytest.mark.parametrize("channels", TIERS)
@torch.no_grad()
def test_w_is_that_of_the_paper_and_i_minus_w_is_monotone(channels: Any) -> None:
    # With σ = id and a = 1 a step is Wz + Ux + b, zero on the margin.
    cell = random_cell(channels, SPLITTINGS[0], activation="identity", step_size=1.0)
    context = cell.inject(inputs(1))
    packing = Packing.of(cell.initial_state(inputs(1), context))
    W, free = dense_w(cell), inside(cell)
    states = torch.randn(20, packing.size, dtype=torch.float64) * free
    many = context.keep(torch.zeros(20, dtype=torch.long))
    wide = replace(packing, samples=20)
    zero = wide.pack(cell.step(wide.unpack(torch.zeros_like(states)), many))
    images = wide.pack(cell.step(wide.unpack(states), many)) - zero
    torch.testing.assert_close(images, (states @ W.T) * free, rtol=1e-12, atol=1e-12)
    for matrix in (W, W[free][:, free]):
        monotone = torch.eye(len(matrix), dtype=W.dtype) - (matrix + matrix.T) / 2
        assert torch.linalg.eigvalsh(monotone)[0] >= M - 1e-12
    bound = cell.lipschitz_bound(packing.layout)
    norm = torch.linalg.matrix_norm(torch.eye(len(W)) - W, ord=2)
    assert bound >= norm - 1e-10
    if isinstance(channels, int):
        torch.testing.assert_close(bound, norm, rtol=1e-10, atol=0)
    else:
        assert bound <= 2.5 * norm


@pytest.mark.parametrize(
    ("channels", "activation"),
    [
        *((channels, "relu") for channels in TIERS),
        ((2, 3), "leaky_relu"),
        ((2, 3), SoftThreshold(0.01)),
    ],
)
@torch.no_grad()
def test_both_splittings_solve_the_equation(channels: Any, activation: Any) -> None:
    """z = σ(Wz + Ux + b) holds to 1e-10 in all tiers."""
    x = inputs()
    for splitting in SPLITTINGS:
        cell = random_cell(channels, splitting, activation=activation)
        solution = layer_of(cell).solve(x)
        tiers = cell.tiers(solution.state, solution.context)
        z = torch.cat([tier.flatten(1) for tier in tiers], dim=1)
        c = torch.zeros_like(z)
        first = cell.U(x).flatten(1)
        c[:, : first.shape[1]] = first
        free = inside(cell)
        W = dense_w(cell)[free][:, free]
        torch.testing.assert_close(z, cell.activation(z @ W.T + c), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer_of(cell)(x), tiers[-1])
        assert tiers[-1].abs().max() > 1e-3


@pytest.mark.parametrize("channels", TIERS)
@pytest.mark.parametrize("splitting", SPLITTINGS)
@pytest.mark.parametrize("step_size", [None, 0.5])
@torch.no_grad()
def test_steps_satisfy_the_contraction_bound(
    channels: Any, splitting: str, step_size: float | None
) -> None:
    cell = random_cell(channels, splitting, step_size=step_size)
    layer = layer_of(cell)
    bound = layer.contraction_bound(inputs(1))
    assert bound is not None
    if step_size is None or splitting == "peaceman-rachford":
        assert bound < 1  # Peaceman-Rachford is a contraction for every step size
    context = cell.inject(inputs(1)).keep(torch.zeros(64, dtype=torch.long))
    start = cell.initial_state(inputs(1), context)
    y, v = (map_state(lambda t: torch.randn_like(t), start) for _ in range(2))

    def distance(first: eq.State, second: eq.State) -> Tensor:
        pairs = zip(state_tensors(first), state_tensors(second), strict=True)
        return torch.stack([(a - b).flatten(1).square().sum(1) for a, b in pairs]).sum(0).sqrt()

    for _ in range(5):  # random directions are hardly stretched, so iterate first
        before = distance(y, v)
        y, v = cell.step(y, context), cell.step(v, context)
        assert (distance(y, v) <= bound * before * (1 + 1e-12)).all()


def test_one_step_solves_the_equation_without_a_and_b() -> None:
    """For A = B = 0, m = L and one Peaceman-Rachford step with a = 1/m is exact."""
    cell = random_cell(2)
    with torch.no_grad():
        for module in cell.modules():
            if isinstance(module, UnitKernel):
                module.scale.zero_()
    layer = layer_of(cell)
    assert layer.contraction_bound(inputs(1)) == pytest.approx(0, abs=1e-7)
    assert layer.solve(inputs()).iterations.max() <= 2


@pytest.mark.parametrize("channels", [3, (2, 3)])
@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_derivatives_against_finite_differences(channels: Any, splitting: str) -> None:
    cell = random_cell(channels, splitting, m=1.0)
    layer, x = layer_of(cell), inputs(2).requires_grad_()
    weight = torch.randn_like(layer(x))
    variables = [*cell.parameters(), x]
    gradients = torch.autograd.grad((layer(x) * weight).sum(), variables)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in variables]
        exact = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
        values = []
        with torch.no_grad():
            for h in (1e-6, -1e-6):
                moved = copy.deepcopy(layer)
                for p, d in zip(moved.parameters(), direction[:-1], strict=True):
                    p.add_(h * d)
                values.append((moved(x + h * direction[-1]) * weight).sum())
        difference = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close(exact, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_gradcheck_in_the_input(splitting: str) -> None:
    layer = layer_of(random_cell((2, 2), splitting, m=1.0, activation="leaky_relu"))
    x = inputs(1, size=2).requires_grad_()
    assert torch.autograd.gradcheck(layer, x, atol=1e-7, rtol=1e-6, fast_mode=True)
    if splitting == "peaceman-rachford":
        assert torch.autograd.gradgradcheck(
            lambda x: layer(x).square(), x, atol=1e-6, rtol=1e-5, fast_mode=True
        )


def test_implicit_and_unrolled_gradients_of_both_splittings_agree() -> None:
    results = []
    for splitting in SPLITTINGS:
        for rule in (eq.Implicit(tolerance=1e-12), eq.Unrolled(steps=450)):
            cell = random_cell((2, 3), splitting, m=1.0)
            layer = layer_of(cell, gradient=rule, strict=False)
            layer(inputs()).square().sum().backward()
            results.append({n: p.grad for n, p in cell.named_parameters()})
    for other in results[1:]:
        for name, gradient in results[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-7, atol=1e-8, msg=name)


@pytest.mark.parametrize("channels", [3, (2, 3)])
@pytest.mark.parametrize("splitting", SPLITTINGS)
@torch.no_grad()
def test_samples_do_not_depend_on_the_batch(channels: Any, splitting: str) -> None:
    layer = layer_of(random_cell(channels, splitting), strict=False)
    batch = inputs(4)
    batch[2] *= 30
    alone = torch.cat([layer(sample[None]) for sample in batch])
    torch.testing.assert_close(layer(batch), alone, rtol=1e-10, atol=1e-10)
    assert layer(batch[:0]).shape == (0, *alone.shape[1:])
    batch[1, 0, 0, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning, match="1 of 4 samples"):
        output = layer(batch)
    torch.testing.assert_close(output[[0, 2, 3]], alone[[0, 2, 3]], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_have_nearly_the_same_outputs(dtype: torch.dtype) -> None:
    exact = mondeq(channels=(4, 6), solving=eq.Solving(tolerance=1e-10)).double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model = copy.deepcopy(exact).to(dtype)
    with eq.solving(model, solver="anderson", tolerance=1e-5 if dtype is torch.float32 else 4e-2):
        logits = model(images.to(dtype))
    assert logits.dtype == dtype
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(logits.double(), exact(images), rtol=tolerance, atol=tolerance)
    logits.sum().backward()


@pytest.mark.parametrize(("channels", "splitting"), list(zip([8, (8, 8)], SPLITTINGS, strict=True)))
def test_training_reduces_the_loss_and_keeps_the_contraction(channels: Any, splitting: str) -> None:
    torch.manual_seed(0)
    model = mondeq(
        channels=channels, num_classes=3, splitting=splitting, solving=eq.Solving(strict=True)
    )
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    bound = model.eval().contraction_bound(images)
    assert bound is not None
    assert (bound < 1).all()
    assert model.solve(images).converged.all()


def test_parameter_counts_of_the_paper() -> None:
    """The paper's 1 M includes 46,080 weights for a margin of zeros."""

    def count(**options: Any) -> int:
        with torch.device("meta"):
            model = mondeq(stem_depth=0, pool=8, **options)
        return sum(p.numel() for p in model.parameters())

    assert count(channels=81) == 172_218
    assert count(channels=200) == 853_612
    assert count(channels=(64, 128, 128)) == 968_466


@torch.no_grad()
def test_circular_operators_against_matrices() -> None:
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    z = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    matrix = circular_matrix(kernel, 6)
    symbol = circular.symbol(kernel, (6, 6))
    expected = (z.flatten(1) @ matrix.T).view(2, 3, 6, 6)
    torch.testing.assert_close(circular.apply(symbol, z), expected)
    back = (expected.flatten(1) @ matrix).view(2, 2, 6, 6)
    torch.testing.assert_close(circular.apply(symbol.mH, expected), back)
    for stride in (1, 2):
        norm = torch.linalg.matrix_norm(circular_matrix(kernel, 6, stride), ord=2)
        torch.testing.assert_close(circular.norm(kernel, (6, 6), stride), norm)
    odd = torch.randn(1, 2, 5, 3, dtype=torch.float64)
    padded = F.pad(odd, (1, 1, 1, 1), mode="circular")
    result = circular.apply(circular.symbol(kernel, (5, 3)), odd)
    torch.testing.assert_close(result, F.conv2d(padded, kernel))
    assert circular.norm(0 * kernel, (6, 6)) == 0


def test_invalid_options_and_inputs_raise() -> None:
    with pytest.raises(ValueError, match="relu, leaky_relu, soft_threshold or identity"):
        MonDEQCell(2, 3, activation="softplus")
    with pytest.raises(ValueError, match="I − W is not monotone"):
        MonDEQCell(2, 3, m=0.0)
    with pytest.raises(ValueError, match="splitting must be one of"):
        MonDEQCell(2, 3, splitting="douglas-rachford")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be odd"):
        MonDEQCell(2, 3, kernel_size=2)
    with pytest.raises(ValueError, match="step_size must be positive"):
        MonDEQCell(2, 3, step_size=0.0)
    with pytest.raises(ValueError, match="one positive number per tier"):
        MonDEQCell(2, ())
    with pytest.raises(ValueError, match="set stem_depth"):
        mondeq(stem_depth=0, downsample=2)
    with pytest.raises(ValueError, match="divisible by 4, got 6×6"):
        mondeq(channels=(4, 4, 4))(torch.randn(1, 3, 6, 6))
    with pytest.raises(eq.equilibrium.NoObjectiveError):
        mondeq(channels=4).objective(torch.randn(1, 3, 4, 4))
