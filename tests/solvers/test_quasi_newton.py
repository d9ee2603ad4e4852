"""What quasi-Newton steps remember, and what a minimum costs them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

import equilibria as eq
from benchmarks.energies import outside
from benchmarks.energy_bank import BANK, SIZE, Ridge, inputs
from equilibria.context import Context, State
from equilibria.operators import Dense
from equilibria.solvers.minimize.quasi_newton import PAIRS, Pairs
from tests.solvers.test_descent import TOLERANCE, layer_of, named

ROWS = 3


def quadratic(size: int) -> tuple[Tensor, Tensor]:
    """Hessians with eigenvalues from 1 to 5, and steps in all directions, of no special lengths."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    vectors = torch.linalg.qr(random(ROWS, size, size)).Q
    values = torch.linspace(1, 5, size, dtype=torch.float64)
    steps = torch.linalg.qr(random(ROWS, size, size)).Q * (1 + random(ROWS, size, 1).abs())
    return vectors @ torch.diag(values) @ vectors.mT, steps


@pytest.mark.parametrize("off", [0, 2])
@pytest.mark.parametrize("earlier", [0, PAIRS - 2])
def test_on_a_quadratic_function_steps_in_all_directions_give_its_newton_step(
    off: int, earlier: int
) -> None:
    """Whatever their lengths; units that are off are left out, and what is forgotten has gone."""
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
    weight[:, :off] = 0
    found, _ = pairs.direction(rows, gap, weight, torch.ones(ROWS, dtype=torch.float64))
    expected = torch.linalg.solve(hessian[:, off:, off:], gap[:, off:])
    torch.testing.assert_close(found[:, off:], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[:, :off], gap[:, :off])


def test_a_direction_points_down_whatever_is_remembered() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = Pairs(torch.zeros(ROWS, 9, dtype=torch.float64))
    rows = torch.arange(ROWS)
    length = torch.ones(ROWS, dtype=torch.float64)
    for _ in range(3 * PAIRS):
        step, noise, gap = torch.randn(3, ROWS, 9, generator=generator, dtype=torch.float64)
        pairs.add(rows, step, 4 * step + 3 * noise)
        weight = torch.rand(ROWS, 9, generator=generator, dtype=torch.float64)
        found, _ = pairs.direction(rows, gap, weight, length)
        assert (torch.linalg.vecdot(weight * gap, found) > 0).all()


def test_a_row_remembers_as_if_it_were_alone() -> None:
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
    found, _ = together.direction(torch.arange(ROWS), gap, gap, length)
    torch.testing.assert_close(found[:1], expected)


@pytest.mark.parametrize("name", ["Laplacian of a graph × 30", "quadratic form, condition 1e+02"])
def test_a_quadratic_form_costs_about_as_many_gradients_as_it_has_units(name: str) -> None:
    """As with conjugate gradients, and plain steps count."""
    solution = layer_of(named(name), "identity", torch.float64).solve(inputs(3))
    assert int(solution.iterations.max()) <= 1.25 * SIZE


@pytest.mark.parametrize("name", ["entropy", "quartic", "exponential"])
def test_a_map_that_swings_between_two_points_is_left_at_once(name: str) -> None:
    """Its residual does not grow, it stays: ten iterations used to go by, and many more."""
    solution = layer_of(named(name), "relu", torch.float64).solve(inputs(3))
    assert int(solution.iterations.max()) <= 25


def test_what_is_counted_is_what_is_evaluated() -> None:
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
def test_in_three_of_four_energies_it_needs_no_more_evaluations_than_an_outside_minimizer() -> None:
    x = inputs(1)
    behind, total = [], 0
    for entry in BANK:
        if entry.name.endswith("1e+06"):  # Thousands of evaluations, or never.
            continue
        for activation in ("relu", "identity"):
            minimizer = eq.solvers.Auto(tolerance=TOLERANCE, check_minimum=False)
            run = layer_of(entry, activation, torch.float64)
            ours = run.solve(x, solver=minimizer).sample_evaluations
            theirs = outside(entry, activation, x)
            total += 1
            if theirs is not None and ours > theirs:
                behind.append((entry.name, activation, ours, theirs))
    assert len(behind) <= total / 4, behind


@pytest.mark.parametrize(("known", "kept"), [(False, PAIRS + 5), (True, 3)])
def test_a_long_solve_keeps_no_more_states_than_a_descent_can_use(known: bool, kept: int) -> None:
    """All of them would be memory that grows with the iterations; a concave energy needs none."""
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    class Counted(eq.Quadratic):
        facts = eq.energies.Facts(
            is_concave=known, is_quadratic=True, vanishes_at_zero=True, owns_descent=True
        )

        def descent(self, state: State, context: Context) -> State:
            nonlocal most
            assert isinstance(state, Tensor)
            seen.append(weakref.ref(state))
            most = max(most, sum(one() is not None for one in seen))
            return super().descent(state, context)

    W = Dense.from_tensor(torch.diag(torch.linspace(0.9, 0.9999, 8, dtype=torch.float64)))
    energy = eq.Input(torch.eye(8, dtype=torch.float64)) + Counted(W)
    solution = eq.EquilibriumLayer(energy, tolerance=1e-10, max_iterations=1000).solve(
        torch.ones(2, 8, dtype=torch.float64)
    )
    assert bool(solution.converged.all())
    assert len(seen) > 3 * PAIRS
    assert most <= kept
