"""Solving and differentiating large batches in blocks of samples does not change results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria.solvers import _cpu as blocks

SAMPLES = 7


@pytest.fixture
def three_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split seven samples into three blocks, whatever the size of the state."""
    monkeypatch.setattr(blocks, "sample_blocks", _three)
    monkeypatch.setattr("equilibria.gradients.implicit.sample_blocks", _three)


def _three(state: eq.State) -> list[slice]:
    return [slice(0, 3), slice(3, 4), slice(4, SAMPLES)]


@given(samples=st.integers(0, 300), size=st.integers(1, 2**20), threads=st.integers(1, 4))
def test_blocks_partition_the_samples_and_fit_into_the_block_size(
    samples: int, size: int, threads: int
) -> None:
    state = torch.empty(1).expand(samples, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        slices = blocks.sample_blocks(state)
    assert [i for rows in slices for i in range(samples)[rows]] == list(range(samples))
    counts = [rows.stop - rows.start for rows in slices]
    assert max(counts) - min(counts) <= 1
    capacity = threads * blocks.BLOCK_BYTES / (4 * size)
    assert len(slices) == 1 or max(counts) <= max(1, 2 * capacity)


def _conv() -> eq.EquilibriumLayer:
    torch.manual_seed(0)
    U, W = eq.Conv2d(2, 3, 3), eq.Conv2d(3, 3, 3, norm="bound", zeta=0.9)
    return eq.EquilibriumLayer(eq.Input(U) + eq.Quadratic(W), activation="tanh")


def _deep() -> eq.EquilibriumLayer:
    from equilibria.models import DeepOptEqCell, UnitLayer

    torch.manual_seed(0)
    units = [UnitLayer(eq.Conv2d(2, 2, 3, norm="bound"), eq.Conv2d(2, 2, 1)) for _ in range(2)]
    return eq.EquilibriumLayer(DeepOptEqCell(units))


def _branches() -> eq.EquilibriumLayer:
    torch.manual_seed(0)
    W = [eq.Conv2d(2, 3, 3, norm="bound", zeta=0.6) for _ in range(2)]
    pool = eq.operators.AveragePool(2)
    inputs = eq.energies.Branches(
        [eq.Input(eq.Conv2d(2, 3, 1)), eq.Input(eq.Conv2d(2, 3, 1) @ pool)]
    )
    coupled = eq.energies.HeritageDiversity(W, diversity=0.1, scales=(1, 2))
    return eq.EquilibriumLayer(_SummedCell(inputs + coupled))


class _SummedCell(eq.EnergyCell):
    def output(self, state: eq.State, context: eq.Context) -> Tensor:
        return torch.cat([tensor.flatten(1) for tensor in state], dim=1)


def _results(layer: eq.EquilibriumLayer, x: Tensor) -> tuple[eq.Solution, list[Tensor]]:
    x = x.clone().requires_grad_()
    tight = {"tolerance": 1e-11, "max_iterations": 500}
    solver = eq.solvers.Auto(**tight, check_minimum=False)  # type: ignore[arg-type]
    with eq.solving(layer, gradient=eq.Implicit(**tight), solver=solver):  # type: ignore[arg-type]
        y = layer(x)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        solution = layer.solve(x)
    return solution, [y.detach(), *gradients]


@pytest.mark.parametrize("make", [_conv, _deep, _branches])
def test_equilibria_and_gradients_match_the_whole_batch(
    make: object, request: pytest.FixtureRequest
) -> None:
    layer = make().double()  # type: ignore[operator]
    x = torch.randn(SAMPLES, 2, 6, 6, dtype=torch.float64)
    whole, expected = _results(layer, x)
    request.getfixturevalue("three_blocks")
    split, results = _results(layer, x)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    assert bool(split.converged.all())
    assert split.status.shape == split.residual.shape == split.iterations.shape == (SAMPLES,)
    torch.testing.assert_close(split.iterations, whole.iterations)
    assert split.evaluations == int(split.iterations.max())
    assert layer.last_backward is not None
    assert layer.last_backward.residual.shape == (SAMPLES,)
    assert float(layer.last_backward.residual.max()) <= 1e-11


def test_blocks_keep_the_memory_format(three_blocks: None) -> None:
    state = _conv().solve(torch.randn(SAMPLES, 2, 6, 6)).state
    assert isinstance(state, Tensor)
    assert state.is_contiguous(memory_format=torch.channels_last)


def test_warnings_number_failed_samples_by_their_place_in_the_batch(three_blocks: None) -> None:
    x = torch.randn(SAMPLES, 2, 6, 6)
    x[4] = torch.nan
    layer = _conv().train()
    with pytest.warns(eq.ConvergenceWarning, match="sample 4: diverged"):
        solution = layer.solve(x, solver=eq.Anderson(tolerance=1e-4))
    assert solution.status.tolist() == [0, 0, 0, 0, int(eq.Status.DIVERGED), 0, 0]


def test_second_derivatives_in_blocks(three_blocks: None) -> None:
    layer = _conv().double()
    x = torch.randn(SAMPLES, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    tight = {"tolerance": 1e-12, "max_iterations": 500}
    with eq.solving(layer, gradient=eq.Implicit(**tight), **tight):  # type: ignore[arg-type]
        assert torch.autograd.gradgradcheck(layer, (x,), atol=1e-5, fast_mode=True)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * self.norm(z) + x


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.parametrize("case", ["coupled", "batch norm", "trace"])
def test_coupled_batches_and_traced_solves_are_not_split(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: eq.State) -> list[slice]:
        raise AssertionError("split")

    monkeypatch.setattr(blocks, "sample_blocks", fail)
    x = torch.randn(SAMPLES, 3)
    if case == "coupled":
        term = eq.energy_term(lambda y, x: 0.01 * y.mean(0).square().sum(), couples_batch=True)
        layer = eq.EquilibriumLayer(eq.Input(eq.Dense(3, 3)) + term).train()
        layer.solve(x)
    elif case == "batch norm":
        eq.EquilibriumLayer(_Normed().train(), max_iterations=5).train().solve(x)
    else:
        layer = eq.EquilibriumLayer(eq.Input(eq.Dense(3, 3)))
        assert layer.solve(x, trace=True).trace is not None
    with pytest.raises(AssertionError, match="split"):
        eq.EquilibriumLayer(eq.Input(eq.Dense(3, 3))).solve(x)
