"""States that are sequences (B, C, T), tokens (B, T, F) or graph nodes (B, N, F)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context.state import Packing
from equilibria.operators import GraphConv, Identity, Incidence
from equilibria.solvers import Status
from tests.operators.bank import EDGES, dense

Make = Callable[[], eq.Energy]


def sequence() -> eq.Energy:
    return eq.Input(eq.Conv1d(2, 3, 3)) + eq.Quadratic(eq.Conv1d(4, 3, 5, norm="bound", zeta=0.9))


def tokens() -> eq.Energy:
    return eq.Input(eq.Dense(2, 3)) + eq.Quadratic(eq.Dense(4, 3, norm="bound", zeta=0.9))


def nodes() -> eq.Energy:
    return eq.Input(GraphConv(EDGES, 2, 3)) + eq.Quadratic(
        GraphConv(EDGES, 4, 3, norm="bound", zeta=0.9)
    )


def patches() -> eq.Energy:
    W = eq.Conv1d(3, 2, 3, norm="bound", zeta=0.9)
    W_h = eq.Dense(4, 3, norm="bound", zeta=1.0)
    return eq.GaussianKernel(eq.Conv1d(2, 2, 3), W, W_h, channel_split=2, gamma=0.5)


CASES: dict[str, tuple[tuple[int, ...], Make]] = {
    "sequence": ((2, 8), sequence),
    "tokens": ((5, 2), tokens),
    "nodes": ((6, 2), nodes),
    "patches": ((2, 7), patches),
}


def solved(name: str) -> tuple[eq.EquilibriumLayer, Tensor]:
    shape, make = CASES[name]
    layer = eq.EquilibriumLayer(make(), solver=eq.Anderson(tolerance=1e-10)).double().eval()
    # The samples need different numbers of iterations; the first ones are dropped early.
    x = torch.randn(4, *shape).double() * torch.tensor([0.0, 1e-3, 1.0, 20.0])[:, None, None]
    return layer, x


@pytest.mark.parametrize("name", list(CASES))
def test_samples_stop_separately_at_stationary_points(name: str) -> None:
    layer, x = solved(name)
    solution = layer.solve(x)
    assert (solution.status == Status.CONVERGED).all()
    objective = layer.objective(x)
    assert objective.value(solution.state).shape == (4,)
    size = solution.state.flatten(1).norm(dim=1)  # type: ignore[union-attr]
    # T contracts, so the residual of T(y) is below that of y, which meets the tolerance.
    assert (objective.residual(solution.state) <= 1e-9 * size).all()
    for i in range(4):
        alone = layer.solve(x[i : i + 1])
        assert int(alone.iterations[0]) == int(solution.iterations[i])
        torch.testing.assert_close(alone.state[0], solution.state[i])  # type: ignore[index]
    damaged = x.clone()
    damaged[1] = torch.nan
    with pytest.warns(eq.ConvergenceWarning, match="sample 1: diverged"):
        partial = layer.solve(damaged)
    assert partial.status.tolist() == [Status.CONVERGED, Status.DIVERGED] + 2 * [Status.CONVERGED]
    torch.testing.assert_close(partial.state[2], solution.state[2])  # type: ignore[index]


@pytest.mark.parametrize("name", list(CASES))
def test_contraction_bound_holds(name: str) -> None:
    layer, x = solved(name)
    x = x[2:3]
    context = layer.cell.inject(x)
    state = torch.randn_like(layer.cell.initial_state(x, context)).abs()
    packing = Packing.of(state)

    def descent(flat: Tensor) -> Tensor:
        return packing.pack(layer.cell.energy.descent(packing.unpack(flat), context))

    jacobian = torch.autograd.functional.jacobian(descent, packing.pack(state))
    true = torch.linalg.matrix_norm(jacobian.reshape(packing.size, -1), 2)
    bound, limit = layer.contraction_bound(x), layer.cell.limits.contraction
    assert bound is not None
    assert limit is not None
    assert float(true) <= float(bound[0]) * (1 + 1e-9) <= limit * (1 + 1e-8)
    assert limit == pytest.approx(0.81)


def laplacian() -> Tensor:
    D = dense(Incidence(EDGES).double(), (6,))
    return D.T @ D


def test_minimizer_of_a_laplacian_energy_solves_a_linear_system() -> None:
    """½‖y − x‖² + 3·½‖Dy‖² is minimal at (I + 3L)⁻¹x."""
    energy = eq.Input(Identity()) - 3 * eq.Quadratic(Incidence(EDGES).T)
    layer = eq.EquilibriumLayer(energy, activation="identity", tolerance=1e-11).double()
    x = torch.randn(3, 6, 2, dtype=torch.float64)
    system = torch.eye(6).double() + 3 * laplacian()
    torch.testing.assert_close(layer(x), torch.linalg.solve(system, x), rtol=1e-8, atol=1e-9)


@eq.energy_term
def rough(y: Tensor, x: Tensor, graph: Tensor) -> Tensor:
    """½ Σ_ij A_ij ‖y_i − y_j‖²/2 for one graph per sample, shape (B, N, N)."""
    return 0.25 * (graph * torch.cdist(y, y).square()).sum(dim=(1, 2))


@eq.energy_term
def smooth(y: Tensor, x: Tensor, graph: Tensor) -> Tensor:
    """The same energy as a quadratic form, ½⟨y, (D − A)y⟩."""
    degrees = graph.sum(dim=2, keepdim=True)
    return 0.5 * (y * (degrees * y - graph @ y)).sum(dim=(1, 2))


def random_graphs(count: int, size: int) -> Tensor:
    weights = torch.rand(count, size, size, dtype=torch.float64).triu(1)
    return weights + weights.mT


def test_gradients_reach_a_graph_that_is_an_input() -> None:
    layer = eq.EquilibriumLayer(
        eq.Input(Identity()) + smooth,
        activation="identity",
        tolerance=1e-12,
        gradient=eq.Implicit(tolerance=1e-13),
    ).double()
    x, graphs = torch.randn(3, 4, 2, dtype=torch.float64), random_graphs(3, 4)
    laplacians = torch.diag_embed(graphs.sum(dim=2)) - graphs
    expected = torch.linalg.solve(torch.eye(4).double() + laplacians, x)
    torch.testing.assert_close(layer((x, graphs)), expected, rtol=1e-8, atol=1e-9)
    assert rough.value(x, rough.inject(x, graphs)).allclose(
        smooth.value(x, smooth.inject(x, graphs))
    )

    def symmetric(x: Tensor, graphs: Tensor) -> Tensor:
        return layer((x, 0.5 * (graphs + graphs.mT)))

    inputs = (x.requires_grad_(), graphs.requires_grad_())
    assert torch.autograd.gradcheck(symmetric, inputs)
    assert torch.autograd.gradgradcheck(symmetric, inputs, fast_mode=True)


def test_samples_with_different_graphs_are_independent() -> None:
    """Sparse and dense graphs take different numbers of iterations."""
    energy = eq.Input(eq.Dense(2, 3)) + smooth
    layer = eq.EquilibriumLayer(energy, tolerance=1e-9).double().eval()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    graphs = random_graphs(3, 4) * torch.tensor([0.0, 0.05, 3.0])[:, None, None]
    together = layer.solve((x, graphs))
    assert together.converged.all()
    assert len(set(together.iterations.tolist())) > 1
    for i in range(3):
        alone = layer.solve((x[i : i + 1], graphs[i : i + 1]))
        torch.testing.assert_close(alone.state[0], together.state[i])  # type: ignore[index]


def test_inputs_can_be_integer_edge_lists() -> None:
    """One list of edges per sample, shape (B, 2, E)."""

    @eq.energy_term
    def differences(y: Tensor, x: Tensor, edges: Tensor) -> Tensor:
        ends = [y.gather(1, side[..., None].expand(-1, -1, y.shape[2])) for side in edges.unbind(1)]
        return 0.05 * (ends[0] - ends[1]).square().sum(dim=(1, 2))

    layer = eq.EquilibriumLayer(eq.Input(eq.Dense(2, 3)) + differences, tolerance=1e-11).double()
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    edges = torch.randint(4, (3, 2, 5))
    assert torch.autograd.gradcheck(lambda x: layer((x, edges)), x, fast_mode=True, atol=1e-4)


def test_errors_name_a_missing_batch_dimension() -> None:
    layer = eq.EquilibriumLayer(nodes())
    message = r"\(B, 6, 3\) .*single graph, pass x\[None\]\), got \(B, 3\)"
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(6, 2))
    assert layer(torch.zeros(1, 6, 2)).shape == (1, 6, 3)


@pytest.mark.parametrize("name", ["sequence", "tokens", "nodes"])
def test_autocast_of_sequences_tokens_and_graphs(name: str) -> None:
    layer, x = solved(name)
    layer, x = layer.float(), x.float()[2:]
    with eq.solving(layer, tolerance=2e-2):
        expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = layer(x).float()
    # With a contraction factor of 0.81, errors of 2 % per step accumulate to at most 11 %.
    assert (result - expected).norm() <= 0.25 * expected.norm()
