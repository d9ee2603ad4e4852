"""The checks of the results of contestants."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import equilibria as eq
from benchmarks import checks, problems
from benchmarks.cells import ProbedCell
from benchmarks.contest import Candidate, Settings, choose, compare
from benchmarks.problems import Problem
from benchmarks.rows.training import square_loss
from benchmarks.timing import Meter, TooSlow, interleaved_medians

SMALL = {"channels": 3, "size": 6, "batch": 3}


def bank() -> list[Problem]:
    return [
        problems.dense(width=8, batch=4, norm=0.9),
        problems.dense(width=8, batch=4, norm=0.9, hard=True),
        problems.conv(**SMALL, norm=0.8),
        problems.mixed(channels=3, size=6, batch=5, norm=0.9),
        problems.deep(**SMALL, norm=0.9),
        problems.mdeq(channels=4, size=6, batch=2),
    ]


@pytest.fixture(params=range(6), ids=["dense", "hard dense", "conv", "mixed", "deep", "mdeq"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return bank()[request.param]


def test_residual_is_small_at_the_solution_and_large_elsewhere(problem: Problem) -> None:
    assert checks.relative_residual(problem.cell, problem.x, problem.solution) < 2e-6
    wrong = problem.solution.clone()
    wrong[1] *= 1.01
    assert checks.relative_residual(problem.cell, problem.x, wrong) > 1e-4


def test_residual_is_infinite_if_one_sample_is_nan() -> None:
    problem = problems.dense(width=8, batch=4, norm=0.9)
    state = problem.solution.clone()
    state[2] = torch.nan
    assert checks.relative_residual(problem.cell, problem.x, state) == math.inf


def test_gradient_of_the_probe_is_the_adjoint(problem: Problem) -> None:
    """∂ℓ/∂p at p = 0 solves (I − Jᵀ)u = g, and pulls back to the gradient in the parameters."""
    cell, x = copy.deepcopy(problem.cell).double(), problem.x.double()
    start = problem.solution.double()
    gradient = torch.randn_like(start)
    probe = torch.zeros_like(start).requires_grad_()

    def equilibrium(of: eq.Cell) -> Tensor:
        solver = eq.Anderson(tolerance=1e-12, max_iterations=500)
        return eq.EquilibriumLayer(cell=of, solver=solver, gradient=eq.Implicit(tolerance=1e-12))(
            x, start
        )

    state = equilibrium(ProbedCell(cell, probe))
    (adjoint,) = torch.autograd.grad(state, probe, gradient)
    assert checks.adjoint_residual(cell, x, state, adjoint, gradient) < 1e-10
    assert checks.adjoint_residual(cell, x, state, 1.01 * adjoint, gradient) > 1e-4
    leaf = x.clone().requires_grad_()
    solver = eq.Anderson(tolerance=1e-12, max_iterations=500)
    layer = eq.EquilibriumLayer(cell=cell, solver=solver, gradient=eq.Implicit(tolerance=1e-12))
    timed = torch.autograd.grad(layer(leaf, start), [leaf, *cell.parameters()], gradient)
    expected = checks.pulled_back(cell, x, state, adjoint)
    assert checks.gradient_error(timed, expected) < 1e-8


def test_reference_gradient_is_that_of_the_unrolled_iteration() -> None:
    problem = problems.conv(**SMALL, norm=0.7)
    loss = square_loss(problem)
    cell, leaf = copy.deepcopy(problem.cell).double(), problem.x.double().requires_grad_()
    context = cell.inject(leaf)
    state = cell.initial_state(leaf, context)
    for _ in range(100):
        state = cell.step(state, context)
    unrolled = torch.autograd.grad(loss(state), [leaf, *cell.parameters()])
    reference = checks.reference_gradients(problem.cell, problem.x, loss)
    assert checks.gradient_error(unrolled, reference) < 1e-7
    assert checks.gradient_error([1.1 * g for g in unrolled], reference) == pytest.approx(0.1)


def test_hard_problems_have_active_units_and_slow_contraction() -> None:
    hard = problems.conv(**SMALL, norm=0.99, hard=True)
    easy = problems.conv(**SMALL, norm=0.99)
    assert hard.nonzero_share > 0.75 > easy.nonzero_share
    assert isinstance(hard.cell, eq.EnergyCell)
    bound = eq.EquilibriumLayer(cell=hard.cell).contraction_bound(hard.x)
    assert bound is not None
    assert (bound >= 0.99**2 * (1 - 1e-3)).all()
    mixed = problems.mixed(channels=3, size=6, batch=5, norm=0.99)
    active = (mixed.solution != 0).flatten(1).float().mean(dim=1)
    assert int(active.argmax()) == 2
    assert float(active[2]) > 0.75 > 0.5 > float(active[torch.arange(5) != 2].max())


def candidate(label: str, *, error: float, meter: Meter | None = None, work: int = 0) -> Candidate:
    def run() -> float:
        if meter is not None:
            meter.count_forward()
        sum(range(work))
        return error

    return Candidate(lambda: label, run, error=lambda result: result, evaluations=lambda: 1)


def test_first_rung_that_reaches_the_error_is_chosen() -> None:
    ladder = [candidate(f"{error:.0e}", error=error) for error in (1e-1, 1e-2, 1e-4, 1e-5)]
    assert choose([ladder], 1e-3)[0].label == "1e-04"


def test_contestant_that_misses_the_error_is_marked() -> None:
    sides = {
        "ours": [[candidate("good", error=1e-4)]],
        "tuned": [[candidate("bad", error=1.0)], [candidate("less bad", error=0.1)]],
    }
    results = compare(sides, 1e-3, Settings(repeats=1))
    assert results["ours"].reached
    assert not results["tuned"].reached
    assert results["tuned"].label == "less bad"


def test_meter_ends_a_slow_trial() -> None:
    meter = Meter()
    meter.reset(allowance=-1.0)
    with pytest.raises(TooSlow):
        meter.count_forward()
    meter.lift()
    meter.count_forward()
    assert meter.forward == 2


def test_contestants_take_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    medians = interleaved_medians(runs, repeats=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert set(medians) == {"a", "b"}


@pytest.mark.parametrize("seed", [0, 1])
def test_maps_written_by_hand_agree_with_the_cells(seed: int) -> None:
    for problem in (
        problems.dense(width=8, batch=4, norm=0.9, seed=seed),
        problems.conv(**SMALL, norm=0.8, seed=seed),
    ):
        assert problem.by_hand is not None
        with torch.no_grad():
            y = torch.rand_like(problem.x)
            expected = problem.cell.step(y, problem.cell.inject(problem.x))
            torch.testing.assert_close(problem.by_hand(y, problem.x), expected)
