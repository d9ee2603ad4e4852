"""Bounds on derivatives add and scale like the energies they bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.context.state import Packing
from equilibria.energies import Bounds, Facts
from equilibria.energies.bounds import UnitBound

NAMES = ("curvature", "concavity", "input")
sizes = st.one_of(st.none(), st.floats(0, 1e3))


@st.composite
def some_bounds(draw: st.DrawFn) -> Bounds[float]:
    """Random bounds with a concavity of at most the curvature."""
    curvature = draw(sizes)
    concavity = None if curvature is None else draw(st.floats(0, 1)) * curvature
    return Bounds(curvature, concavity, draw(sizes))


def numbers(bounds: Bounds[float]) -> list[float | None]:
    return [getattr(bounds, name) for name in NAMES]


def assert_same(actual: Bounds[float], expected: Bounds[float]) -> None:
    for a, b in zip(numbers(actual), numbers(expected), strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, rel=1e-12, abs=1e-12)


@given(a=some_bounds(), b=some_bounds(), c=some_bounds())
def test_sums_commute_and_associate(a: Bounds[float], b: Bounds[float], c: Bounds[float]) -> None:
    assert_same(a + b, b + a)
    assert_same((a + b) + c, a + (b + c))
    assert_same(a + Bounds(0.0, input=0.0), a)


@given(bounds=some_bounds(), a=st.floats(0, 10), b=st.floats(0, 10))
def test_positive_multiples_distribute_over_sums(bounds: Bounds[float], a: float, b: float) -> None:
    assert_same(bounds * a * b, bounds * (a * b))
    assert_same(bounds * a + bounds * b, bounds * (a + b))
    assert_same(a * bounds, bounds * a)


@given(bounds=some_bounds(), factor=st.floats(-10, -0.1))
def test_negative_multiples_have_the_curvature_as_concavity(
    bounds: Bounds[float], factor: float
) -> None:
    scaled = bounds * factor
    assert scaled.concavity == scaled.curvature
    assert_same(scaled, Bounds(bounds.curvature, bounds.curvature, bounds.input) * -factor)


@given(a=some_bounds(), b=some_bounds())
def test_branches_have_the_maximal_curvature_and_the_joint_input_bound(
    a: Bounds[float], b: Bounds[float]
) -> None:
    both = a.beside(b)
    assert_same(both, b.beside(a))
    if a.curvature is not None and b.curvature is not None:
        assert both.curvature == max(a.curvature, b.curvature)
    if a.input is not None and b.input is not None:
        assert both.input == math.hypot(a.input, b.input)


@given(a=some_bounds(), b=some_bounds())
def test_bounds_of_a_sum_are_unknown_if_those_of_a_term_are(
    a: Bounds[float], b: Bounds[float]
) -> None:
    for name in NAMES:
        is_unknown = getattr(a, name) is None or getattr(b, name) is None
        assert (getattr(a + b, name) is None) == is_unknown


def test_concavity_defaults_to_the_curvature() -> None:
    assert Bounds(2.0).concavity == 2.0
    assert Bounds(2.0, 0.5).concavity == 0.5
    assert numbers(Bounds()) == [None, None, None]


def test_numbers_are_computed_once_on_first_access() -> None:
    computed: list[str] = []

    def recorded(name: str) -> Callable[[], float]:
        def compute() -> float:
            computed.append(name)
            return 1.0

        return compute

    bounds = Bounds(recorded("curvature"), input=recorded("input"))
    combined = 0.5 * (bounds + bounds)
    assert computed == []
    assert combined.curvature == 1.0
    assert combined.curvature == 1.0
    assert computed == ["curvature"]


def test_unit_bounds_of_quadratic_energies_add_like_matrix_rows() -> None:
    rows = torch.tensor([3.0, 1.0])
    a = Bounds(units=[UnitBound(rows, torch.zeros(2))])
    b = Bounds(units=[UnitBound(torch.zeros(2), rows)])
    assert (a + Bounds(1.0)).units is None
    (unit,) = (a + b + b).units or []
    torch.testing.assert_close(unit.input, rows)
    torch.testing.assert_close(unit.state, math.sqrt(2) * rows)
    (scaled,) = (4.0 * b).units or []
    torch.testing.assert_close(scaled.state, 2 * rows)
    assert (-1.0 * b).units is None
    assert len(a.beside(b).units or []) == 2


@pytest.mark.parametrize(
    "factor", [2.0, -0.5, torch.tensor(0.3), torch.nn.Parameter(torch.tensor(-0.3))]
)
def test_bounds_of_a_composed_energy_hold_for_its_dense_hessian(factor: float | Tensor) -> None:
    torch.manual_seed(0)
    W = eq.Dense(3, 4)
    energy = (eq.Input(torch.eye(4)) + factor * eq.Quadratic(W) + 0.5 * eq.Quadratic(W)).double()
    x = torch.randn(1, 4, dtype=torch.float64)
    layout = Packing.of(x).layout
    context = energy.complete(energy.inject(x), layout)
    hessian = torch.autograd.functional.hessian(
        lambda y: energy.value(y[None], context).sum(), x[0]
    )
    values = torch.linalg.eigvalsh(hessian)
    bounds = energy.bounds(context, layout)
    assert bounds.curvature is not None
    assert bounds.concavity is not None
    assert bounds.input is not None
    assert values.abs().max() <= bounds.curvature * (1 + 1e-9)
    assert -values.min() <= bounds.concavity * (1 + 1e-9)
    assert bounds.input.item() == pytest.approx(1.0)


def test_facts_of_a_sum_hold_for_every_term() -> None:
    strict = Facts(is_concave=True, is_quadratic=True, vanishes_at_zero=True)
    loose = Facts(couples_batch=True, has_gradient=False, calibrates=True, refresh_until=3)
    assert Facts.joined([strict, strict]) == strict
    joined = Facts.joined([strict, loose], owns_descent=True)
    assert joined == Facts(
        couples_batch=True,
        has_gradient=False,
        owns_descent=True,
        calibrates=True,
        refresh_until=3,
    )
    assert not (-1.0 * eq.Quadratic(torch.eye(2))).facts.is_concave
    assert (2.0 * eq.Quadratic(torch.eye(2))).facts.is_concave


def test_public_members_of_energy() -> None:
    members = {name for name in vars(eq.Energy) if not name.startswith("_")}
    assert members == {
        "value",
        "inject",
        "descent",
        "initial_state",
        "facts",
        "limits",
        "bounds",
        "prepare",
        "complete",
        "name",
        "formula",
    }
