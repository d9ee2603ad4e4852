"""MDEQ: formula of the cell, norms, dropout, derivatives and parameter counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria.context.state import map_state, state_tensors
from equilibria.models import EquilibriumClassifier, MDEQCell
from equilibria.models.mdeq.cell import pack_branches, unpack_branches
from equilibria.models.mdeq.layers import CellConv2d, CellNorm
from equilibria.models.mdeq.model import mdeq
from tests.models.small import with_solving

BRANCHES = [4, (4, 8)]
NORMS = ("group", "batch")
STEP = 2e-7  # step of finite differences: short, because kinks of ReLU are near
LABELS = torch.tensor([0, 2, 1])


def small_mdeq(channels: Any = (4, 8), **options: Any) -> EquilibriumClassifier:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "num_classes": 3,
        "in_channels": 2,
        "tolerance": 1e-13,
        "max_iterations": 1000,
        "gradient": eq.Implicit(tolerance=1e-12),
    }
    return mdeq(channels=channels, **with_solving({**defaults, **options})).double()


def images(batch: int = 3, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 2, size, size, generator=generator, dtype=torch.float64)


def loss_of(model: EquilibriumClassifier, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), LABELS[: len(batch)])


def gradients(model: EquilibriumClassifier, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, batch).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def randomized(cell: MDEQCell) -> MDEQCell:
    """Set all parameters at random, because initial zeros and ones would hide errors."""
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_()
    return cell


def random_state(cell: MDEQCell, x: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    start = cell.initial_state(x, cell.inject(x))
    return tuple(
        torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in state_tensors(start)
    )


@pytest.mark.parametrize("weight_norm", [True, False])
@torch.no_grad()
def test_step_satisfies_the_formula_of_the_paper(weight_norm: bool) -> None:
    """The injection enters the first of three branches only."""
    torch.manual_seed(0)
    cell = MDEQCell((8, 4, 12), expansion=2, groups=2, weight_norm=weight_norm).double()
    randomized(cell)
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    state = random_state(cell, x)

    def conv(layer: CellConv2d, z: Tensor) -> Tensor:
        kernel = layer.direction
        if layer.length is not None:
            norms = kernel.flatten(1).norm(dim=1)
            kernel = kernel * (layer.length.flatten() / norms)[:, None, None, None]
        return F.conv2d(z, kernel, stride=layer.stride, padding=kernel.shape[-1] // 2)

    def norm(layer: CellNorm, z: Tensor) -> Tensor:
        return F.group_norm(z, layer.groups, layer.weight, layer.bias)

    blocks = []
    for i, (block, z) in enumerate(zip(cell.blocks, state, strict=True)):
        out = conv(block.narrow, norm(block.inner_norm, conv(block.widen, z)).relu())
        out = norm(block.injection_norm, out + x if i == 0 else out)
        blocks.append(norm(block.output_norm, (out + z).relu()))
    expected = []
    for i, mixer in enumerate(cell.mixers):
        total = blocks[i].clone()
        sources = [j for j in range(3) if j != i]
        for j, path in zip(sources, cell.paths[i], strict=True):
            z = blocks[j]
            if j > i:
                z = norm(path.norm, conv(path.convolution, z))
                total += z.repeat_interleave(2 ** (j - i), 2).repeat_interleave(2 ** (j - i), 3)
                continue
            assert len(path.convolutions) == i - j
            pairs = zip(path.convolutions, path.norms, strict=True)
            for k, (convolution, norm_layer) in enumerate(pairs):
                z = norm(norm_layer, conv(convolution, z.relu() if k else z))
            total += z
        expected.append(norm(mixer.norm, conv(mixer.convolution, total.relu())))
    images = cell.step(state, cell.inject(x))
    for a, b in zip(images, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert [tuple(t.shape[1:]) for t in images] == [(8, 8, 8), (4, 4, 4), (12, 2, 2)]


@torch.no_grad()
def test_single_branch_has_no_fusion() -> None:
    cell = randomized(MDEQCell(8).double())
    x = torch.randn(2, 8, 5, 7, dtype=torch.float64)  # maps of any size
    (z,) = random_state(cell, x)
    image = cell.step(z, cell.inject(x))
    assert isinstance(image, Tensor)
    assert not len(cell.mixers)
    assert all(name.startswith("blocks.0") for name, _ in cell.named_parameters())


@pytest.mark.parametrize("channels", BRANCHES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_derivatives_against_finite_differences(channels: Any, norm: str, training: bool) -> None:
    model = small_mdeq(channels, norm=norm)
    batch = images(size=8).requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            model(batch)
    model.train(training)
    variables = [*model.parameters(), batch]
    exact = torch.autograd.grad(loss_of(model, batch), variables)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in variables]
        derivative = sum((g * d).sum() for g, d in zip(exact, direction, strict=True))
        losses = []
        with torch.no_grad():
            for h in (STEP, -STEP):
                moved = copy.deepcopy(model)
                for p, d in zip(moved.parameters(), direction[:-1], strict=True):
                    p.add_(h * d)
                losses.append(loss_of(moved, batch + h * direction[-1]))
        difference = (losses[0] - losses[1]) / (2 * STEP)
        torch.testing.assert_close(derivative, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("channels", BRANCHES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_implicit_agrees_with_unrolling(channels: Any, norm: str, training: bool) -> None:
    results = []
    for gradient in (eq.Implicit(tolerance=1e-12), eq.Unrolled(steps=80)):
        model = small_mdeq(channels, norm=norm, gradient=gradient, tolerance=1e-12).train(training)
        results.append(gradients(model, images(size=8)))
        assert model.last_solution is not None
        assert model.last_solution.residual.max() < 1e-12
    implicit, unrolled = results
    assert implicit.keys() == unrolled.keys()
    for name in implicit:
        torch.testing.assert_close(implicit[name], unrolled[name], rtol=1e-8, atol=1e-9, msg=name)


def test_gradcheck_of_the_layer() -> None:
    layer = small_mdeq((4, 4), activation="softplus").layer
    x = torch.randn(1, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x, atol=1e-7, rtol=1e-6)
    assert torch.autograd.gradgradcheck(layer, x, atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("channels", BRANCHES)
@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_group_norm_does_not_couple_samples(channels: Any, training: bool) -> None:
    model = small_mdeq(channels).train(training)
    assert not model.layer.cell.couples_batch
    batch = images(4)
    batch[2] *= 30
    alone = torch.cat([model(sample[None]) for sample in batch])
    torch.testing.assert_close(model(batch), alone, rtol=1e-9, atol=1e-9)
    assert model(batch[:0]).shape == (0, 3)


@torch.no_grad()
def test_batch_norm_couples_samples_in_training_only() -> None:
    model = small_mdeq(norm="batch")
    batch = images(4)
    cell = model.layer.cell
    assert cell.couples_batch
    assert len(model.solve(batch).iterations) == 1  # the batch is one problem
    together = cell.inject(model.stem(batch))
    x = model.stem(batch)
    state = random_state(cell, x)
    both = cell.step(state, together)
    other = cell.step(tuple(z[:2] for z in state), cell.inject(x[:2]))
    assert (both[0][:2] - other[0]).abs().max() > 1e-3
    model(batch)
    model.eval()
    assert not cell.couples_batch
    alone = torch.cat([model(sample[None]) for sample in batch])
    torch.testing.assert_close(model(batch), alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_running_statistics_are_updated_once_per_solve_at_the_equilibrium() -> None:
    model = small_mdeq(norm="batch")
    cell = model.layer.cell
    before = {n: b.clone() for n, b in cell.named_buffers()}
    context = cell.inject(model.stem(images()))
    start = cell.initial_state(model.stem(images()), context)
    first, second = cell.step(start, context), cell.step(start, context)
    solution = model.solve(images())
    assert all(torch.equal(b, before[n]) for n, b in cell.named_buffers())
    assert all(map(torch.equal, state_tensors(first), state_tensors(second)))
    model.features(images())
    norm = cell.blocks[1].output_norm
    assert isinstance(norm, CellNorm)
    # Record the input of a norm at the equilibrium.
    inputs: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    cell.step(solution.state, solution.context)
    hook.remove()
    torch.testing.assert_close(norm.mean, 0.1 * inputs[0].mean(dim=(0, 2, 3)))
    variance = inputs[0].transpose(0, 1).flatten(1).var(dim=1)
    torch.testing.assert_close(norm.variance, 0.9 + 0.1 * variance)
    moved = {n: b.clone() for n, b in cell.named_buffers()}
    model.eval()(images())
    assert all(torch.equal(b, moved[n]) for n, b in cell.named_buffers())


@torch.no_grad()
def test_evaluation_is_close_to_training_after_many_equal_batches() -> None:
    model = small_mdeq(norm="batch", tolerance=1e-5)
    for _ in range(60):
        expected = model(images(8))
    # Running variances are unbiased, those of a batch are not: a factor n/(n−1), n ≥ 32.
    torch.testing.assert_close(model.eval()(images(8)), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("norm", NORMS)
def test_backward_pass_uses_the_mode_of_its_forward_pass(norm: str) -> None:
    model = small_mdeq(norm=norm, dropout=0.3)
    torch.manual_seed(3)
    expected = gradients(model, images())
    torch.manual_seed(3)
    model.zero_grad()
    loss = loss_of(model, images())
    model.eval()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-10)


def test_dropout_masks_are_drawn_once_per_solve() -> None:
    model = small_mdeq(dropout=0.4)
    cell, x = model.layer.cell, model.stem(images(64, size=2))
    context = cell.inject(x)
    masks = context.sample["masks"]
    assert [tuple(mask.shape) for mask in masks] == [(64, 4, 1, 1), (64, 8, 1, 1)]
    assert set(torch.cat([m.flatten() for m in masks]).tolist()) == {0.0, 1 / 0.6}
    state = random_state(cell, x)
    assert all(map(torch.equal, cell.step(state, context), cell.step(state, context)))
    assert not torch.equal(cell.inject(x).sample["masks"][0], masks[0])
    subset = context.keep(torch.tensor([5, 7]))
    images_of_subset = cell.step(map_state(lambda z: z[[5, 7]], state), subset)
    torch.testing.assert_close(images_of_subset[0], cell.step(state, context)[0][[5, 7]])
    assert "masks" not in model.eval().layer.cell.inject(x).sample
    assert torch.equal(model(images()), model(images()))


def test_weight_norm_is_computed_once_per_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[CellConv2d] = []
    original = CellConv2d.kernel

    def counted(self: CellConv2d) -> Tensor:
        calls.append(self)
        return original(self)

    monkeypatch.setattr(CellConv2d, "kernel", counted)
    model = small_mdeq()
    loss_of(model, images()).backward()
    convolutions = [m for m in model.modules() if isinstance(m, CellConv2d)]
    assert len(calls) == len(convolutions) == 8
    normalized = [c for c in convolutions if c.length is not None]
    assert len(normalized) == 6  # the residual blocks and the 1×1 after the fusion
    expected = model(images())
    with torch.no_grad():
        for convolution in normalized:
            convolution.direction.mul_(7.0)
    torch.testing.assert_close(model(images()), expected)
    assert not any("length" in n for n, _ in small_mdeq(weight_norm=False).named_parameters())


@pytest.mark.parametrize("channels", [32, (16, 32), (8, 16, 24, 32)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("outer_norm", NORMS)
@torch.no_grad()
def test_untrained_models_converge(channels: Any, norm: str, outer_norm: str) -> None:
    torch.manual_seed(0)
    solving = eq.Solving(tolerance=1e-3)
    model = mdeq(channels=channels, norm=norm, outer_norm=outer_norm, solving=solving)  # type: ignore[arg-type]
    batch = torch.randn(8, 3, 8, 8)
    for training in (True, False):
        solution = model.train(training).solve(batch)
        assert solution.converged.float().mean() > 0.8
        assert solution.solver == "Anderson"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels", [8, (8, 8)])
def test_training_reduces_the_loss_and_evaluation_converges(norm: str, channels: Any) -> None:
    model = small_mdeq(channels, norm=norm, tolerance=1e-4, dropout=0.1, gradient="auto").float()
    batch, labels = torch.randn(6, 2, 8, 8), torch.arange(6) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    model.eval()
    assert model.solve(batch).converged.all()
    assert torch.equal(model(batch), model(batch))


@torch.no_grad()
def test_packed_branches_unpack_to_the_same_tensors() -> None:
    for batch in (2, 0):
        shapes = [(3, 8, 12), (5, 4, 6), (1, 2, 3)]
        branches = [torch.randn(batch, *shape) for shape in shapes]
        packed = pack_branches(branches)
        assert packed.shape == (batch, 3 * 16 + 5 * 4 + 1, 2, 3)
        assert all(map(torch.equal, unpack_branches(packed, (3, 5, 1)), branches))


def test_parameter_counts_of_the_papers() -> None:
    """The counts agree with the published ones up to their rounding."""

    def count(**options: Any) -> int:
        with torch.device("meta"):
            model = mdeq(outer_norm="batch", **options)
        return sum(p.numel() for p in model.parameters())

    imagenet: dict[str, Any] = {"num_classes": 1000, "downsample": 4, "final_channels": 2048}
    assert count() == 134_842
    cifar = count(channels=(32, 64, 128, 256), head_channels=14, final_channels=1680)
    assert cifar == 11_098_398  # 10 M in MDEQ, 11 M in MOptEqs
    small = count(channels=(32, 64, 128, 256), head_channels=28, **imagenet)
    assert small == 18_614_456  # 18 M


def test_invalid_options_and_inputs_raise() -> None:
    with pytest.raises(ValueError, match="divisible by 2, got 5×5; resize or pad"):
        small_mdeq()(images(size=5))
    with pytest.raises(ValueError, match="norm must be one of group, batch"):
        small_mdeq(norm="layer")
    with pytest.raises(ValueError, match="dropout must be in"):
        small_mdeq(dropout=1.0)
    with pytest.raises(ValueError, match="downsample must be 1, 2 or 4"):
        small_mdeq(downsample=3)
    with pytest.raises(ValueError, match="one positive number per branch"):
        small_mdeq(())
    with pytest.raises(ValueError, match="expansion must be"):
        small_mdeq(expansion=0)
    with pytest.raises(ValueError, match="groups must be"):
        small_mdeq(groups=0)
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 2, height, width\)"):
        small_mdeq()(images()[:, :1])
    with pytest.raises(eq.equilibrium.NoObjectiveError):
        small_mdeq().objective(images())
    assert small_mdeq().contraction_bound(images()) is None
