"""Quasi-Newton pairs, and the number of evaluations of a minimization."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

import equilibria as eq
from benchmarks.energies import lbfgs_evaluations
from benchmarks.energy_bank import BANK, SIZE, Ridge, inputs
from equilibria.context import Context, State
from equilibria.operators import Dense
from equilibria.solvers.minimize.quasi_newton import PAIRS, Pairs
from tests.solvers.test_descent import TOLERANCE, entry_named, layer_of

ROWS = 3


def quadratic(size: int) -> tuple[Tensor, Tensor]:
    """Hessians with eigenvalues from 1 to 5, and steps of random lengths in all directions."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    vectors = torch.linalg.qr(random(ROWS, size, size)).Q
    values = torch.linspace(1, 5, size, dtype=torch.float64)
    steps = torch.linalg.qr(random(ROWS, size, size)).Q * (1 + random(ROWS, size, 1).abs())
    return vectors @ torch.diag(values) @ vectors.mT, steps


@pytest.mark.parametrize("inactive", [0, 2])
@pytest.mark.parametrize("earlier", [0, PAIRS - 2])
def test_pairs_in_all_directions_give_the_newton_step_of_a_quadratic_function(
    inactive: int, earlier: int
) -> None:
    """Steps can have any length. Inactive units are excluded, and forgotten pairs are not used."""
    size = 6
    hessian, steps = quadratic(size)
    pairs = Pairs(steps[:, 0])
    rows = torch.arange(ROWS)
    for k in range(earlier):
        pairs.add(rows, steps[:, k % size], 2 * steps[:, k % size])
    pairs.forget(rows)
    for k in range(size):
        pairs.add(rows, steps[:, k], (hessian @ steps[:, k, :, None])[:, :, 0])
    gap = torch.ones(ROWS, size, dtype=torch.float64)
    weight = torch.ones_like(gap)
    weight[:, :inactive] = 0
    direction, _ = pairs.direction(rows, gap, weight, torch.ones(ROWS, dtype=torch.float64))
    expected = torch.linalg.solve(hessian[:, inactive:, inactive:], gap[:, inactive:])
    torch.testing.assert_close(direction[:, inactive:], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(direction[:, :inactive], gap[:, :inactive])


def test_the_direction_is_a_descent_direction_for_any_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = Pairs(torch.zeros(ROWS, 9, dtype=torch.float64))
    rows = torch.arange(ROWS)
    length = torch.ones(ROWS, dtype=torch.float64)
    for _ in range(3 * PAIRS):
        step, noise, gap = torch.randn(3, ROWS, 9, generator=generator, dtype=torch.float64)
        pairs.add(rows, step, 4 * step + 3 * noise)
        weight = torch.rand(ROWS, 9, generator=generator, dtype=torch.float64)
        direction, _ = pairs.direction(rows, gap, weight, length)
        assert (torch.linalg.vecdot(weight * gap, direction) > 0).all()


def test_the_pairs_of_a_row_do_not_depend_on_other_rows() -> None:
    hessian, steps = quadratic(6)
    together, alone = Pairs(steps[:, 0]), Pairs(steps[:1, 0])
    for k in range(6):
        change = (hessian @ steps[:, k, :, None])[:, :, 0]
        rows = torch.arange(ROWS) if k % 2 else torch.arange(1, ROWS)
        together.add(rows, steps[rows, k], change[rows])
        if k % 2:
            alone.add(rows[:1], steps[:1, k], change[:1])
    gap = torch.ones(ROWS, 6, dtype=torch.float64)
    length = torch.ones(ROWS, dtype=torch.float64)
    expected, _ = alone.direction(rows[:1], gap[:1], gap[:1], length[:1])
    direction, _ = together.direction(torch.arange(ROWS), gap, gap, length)
    torch.testing.assert_close(direction[:1], expected)


@pytest.mark.parametrize("name", ["Laplacian of a graph × 30", "quadratic form, condition 1e+02"])
def test_a_quadratic_form_costs_about_as_many_gradients_as_it_has_units(name: str) -> None:
    """As with conjugate gradients; the plain steps before the descent are included."""
    solution = layer_of(entry_named(name), "identity", torch.float64).solve(inputs(3))
    assert int(solution.iterations.max()) <= 1.25 * SIZE


@pytest.mark.parametrize("name", ["entropy", "quartic", "exponential"])
def test_a_map_that_oscillates_between_two_points_is_abandoned_at_once(name: str) -> None:
    """The residual does not grow but stays constant, which must not wait for the patience."""
    solution = layer_of(entry_named(name), "relu", torch.float64).solve(inputs(3))
    assert int(solution.iterations.max()) <= 25


def test_reported_evaluations_are_the_actual_ones() -> None:
    class Counted(Ridge):
        count = 0
        limits = eq.energies.Bounds(concavity=0.0)

        def descent(self, y: State, context: Context) -> State:
            assert isinstance(y, Tensor)
            self.count += len(y)
            return super().descent(y, context)

    forms = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    term = Counted(lambda t: t.square() / 2, forms)
    pull = Dense.from_tensor(torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(1)))
    run = eq.EquilibriumLayer((eq.Input(pull) + term).double(), tolerance=TOLERANCE).eval()
    term.count = 0
    solution = run.solve(inputs(3))
    assert solution.solver == "Anderson, then Descent"
    assert solution.sample_evaluations == term.count


@pytest.mark.slow
def test_evaluations_do_not_exceed_those_of_lbfgsb_on_three_quarters_of_the_energies() -> None:
    x = inputs(1)
    slower, total = [], 0
    for entry in BANK:
        if entry.name.endswith("1e+06"):  # thousands of evaluations
            continue
        for activation in ("relu", "identity"):
            minimizer = eq.solvers.Auto(tolerance=TOLERANCE, check_minimum=False)
            run = layer_of(entry, activation, torch.float64)
            evaluations = run.solve(x, solver=minimizer).sample_evaluations
            reference = lbfgs_evaluations(entry, activation, x)
            total += 1
            if reference is not None and evaluations > reference:
                slower.append((entry.name, activation, evaluations, reference))
    assert len(slower) <= total / 4, slower


@pytest.mark.parametrize(("is_concave", "limit"), [(False, PAIRS + 5), (True, 3)])
def test_a_long_solve_stores_no_more_states_than_a_descent_uses(
    is_concave: bool, limit: int
) -> None:
    """Storing all of them would need memory for every iteration; concave energies need none."""
    states: list[weakref.ref[Tensor]] = []
    largest = 0

    class Counted(eq.Quadratic):
        facts = eq.energies.Facts(
            is_concave=is_concave, is_quadratic=True, vanishes_at_zero=True, owns_descent=True
        )

        def descent(self, state: State, context: Context) -> State:
            nonlocal largest
            assert isinstance(state, Tensor)
            states.append(weakref.ref(state))
            largest = max(largest, sum(state_ref() is not None for state_ref in states))
            return super().descent(state, context)

    W = Dense.from_tensor(torch.diag(torch.linspace(0.9, 0.9999, 8, dtype=torch.float64)))
    energy = eq.Input(torch.eye(8, dtype=torch.float64)) + Counted(W)
    solution = eq.EquilibriumLayer(energy, tolerance=1e-10, max_iterations=1000).solve(
        torch.ones(2, 8, dtype=torch.float64)
    )
    assert bool(solution.converged.all())
    assert len(states) > 3 * PAIRS
    assert largest <= limit
