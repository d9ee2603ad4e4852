"""Number of host synchronizations: one per iteration of a solve and of a linear solve."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from benchmarks.synchronization import SynchronizationCounter
from equilibria.solvers import FixedPointProblem, _rows, anderson, conjugate_gradients, convergence


def _set_reads(monkeypatch: pytest.MonkeyPatch, *, cheap: bool) -> None:
    """Make solvers treat reads as free (a CPU), or as host synchronizations (a GPU)."""
    for module in (_rows, anderson, convergence):
        monkeypatch.setattr(module, "is_cheap_to_read", lambda tensor: cheap)


def _problem(rows: int = 6) -> FixedPointProblem:
    torch.manual_seed(0)
    W = torch.randn(12, 12, dtype=torch.float64)
    W = 0.9 * W / torch.linalg.matrix_norm(W, 2)
    context = eq.Context(sample={"c": torch.randn(rows, 12, dtype=torch.float64)})

    def step(state: eq.State, context: eq.Context) -> eq.State:
        assert isinstance(state, Tensor)
        return torch.relu(state @ W @ W.T + context["c"])

    return FixedPointProblem(step, context, torch.zeros(rows, 12, dtype=torch.float64))


def _synchronizations(solver: eq.solvers.Solver[Any]) -> tuple[int, eq.Solution]:
    with SynchronizationCounter() as synchronizations:
        solution = solver.solve(_problem())
    assert bool(solution.converged.all())
    return synchronizations.count, solution


@pytest.mark.parametrize("kind", [eq.Picard, eq.Accelerated, eq.Anderson])
def test_one_synchronization_per_iteration(
    kind: type[eq.solvers.Solver[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_reads(monkeypatch, cheap=False)
    short, long = (
        _synchronizations(kind(tolerance=tolerance, max_iterations=500, drop_share=1.0))
        for tolerance in (1e-3, 1e-9)
    )
    iterations = long[1].evaluations - short[1].evaluations
    assert iterations > 5
    assert long[0] - short[0] <= iterations


@pytest.mark.parametrize("kind", [eq.Picard, eq.Accelerated, eq.Anderson])
def test_check_every_changes_only_the_number_of_evaluations(
    kind: type[eq.solvers.Solver[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_reads(monkeypatch, cheap=False)
    limits: dict[str, Any] = {"tolerance": 1e-9, "max_iterations": 500, "drop_share": 1.0}
    default_count, default = _synchronizations(kind(**limits))
    count, solution = _synchronizations(kind(**limits, check_every=4))
    assert count < 0.5 * default_count
    torch.testing.assert_close(solution.iterations, default.iterations)
    assert isinstance(solution.state, Tensor)
    assert isinstance(default.state, Tensor)
    torch.testing.assert_close(solution.state, default.state, rtol=1e-12, atol=1e-12)
    assert default.evaluations <= solution.evaluations < default.evaluations + 4


@pytest.mark.parametrize(
    "solver",
    [
        eq.Picard(),
        eq.Accelerated(),
        eq.Anderson(),
        eq.Anderson(damping=1.3),
        eq.Anderson(restart_growth=1.01, damping=1.9),
        eq.Anderson(cap=1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("drop_share", [0.2, 1.0])
def test_results_do_not_depend_on_whether_reads_are_cheap(
    solver: eq.solvers.Solver[Any], drop_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _problem()
    problem.context["c"][1] = 0.0  # converges at once, with a residual of zero
    problem.context["c"][2, 0] = torch.nan
    problem.context["c"][3] *= 1e-3
    solver = dataclasses.replace(solver, tolerance=1e-9, max_iterations=300, drop_share=drop_share)
    solutions = []
    for cheap in (True, False):
        _set_reads(monkeypatch, cheap=cheap)
        solutions.append(solver.solve(problem))
    cpu, gpu = solutions
    assert cpu.status.tolist() == gpu.status.tolist() == [0, 0, 2, 0, 0, 0]
    assert cpu.iterations.tolist() == gpu.iterations.tolist()
    torch.testing.assert_close(cpu.residual, gpu.residual, rtol=1e-9, atol=0, equal_nan=True)
    torch.testing.assert_close(cpu.state, gpu.state, rtol=1e-12, atol=1e-12)


def test_one_synchronization_per_iteration_of_conjugate_gradients() -> None:
    torch.manual_seed(0)
    H = torch.randn(40, 40, dtype=torch.float64)
    H = 0.9 * (H + H.T) / torch.linalg.matrix_norm(H + H.T, 2)
    rhs = torch.randn(3, 40, dtype=torch.float64)
    weight = (torch.rand(3, 40, dtype=torch.float64) > 0.3).double()

    def synchronizations(tolerance: float) -> tuple[int, int]:
        with SynchronizationCounter() as counter:
            solution = conjugate_gradients(
                lambda v: v - (v * weight) @ H, rhs, weight, tolerance=tolerance, max_iterations=100
            )
        return counter.count, solution.evaluations

    (few, short), (many, long) = synchronizations(1e-2), synchronizations(1e-8)
    assert long - short > 5
    assert many - few <= long - short
