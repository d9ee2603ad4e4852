"""Projections return the nearest point and satisfy the constraint exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equilibria.inputs import Box, Constraint, L2Ball, LinfBall

seeds = st.integers(0, 2**31 - 1)
magnitudes = st.floats(1e-3, 1e3)


def random_rows(seed: int, spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(5, 3, 2, generator=generator, dtype=dtype)


@given(seeds, magnitudes, magnitudes)
def test_l2_ball_is_satisfied_exactly(seed: int, spread: float, radius: float) -> None:
    center, point = random_rows(seed, 1.0), random_rows(seed + 1, spread)
    projected = L2Ball(center, radius).project(point)
    limit = torch.tensor(radius)
    assert bool(((projected - center).flatten(1).norm(dim=1) <= limit).all())
    assert bool(((projected.double() - center.double()).flatten(1).norm(dim=1) <= limit).all())


@given(seeds, magnitudes, magnitudes)
def test_linf_ball_in_a_box_is_satisfied_exactly(seed: int, spread: float, radius: float) -> None:
    center, point = random_rows(seed, 1.0).clamp(-1, 1), random_rows(seed + 1, spread)
    projected = (LinfBall(center, radius) & Box(-1.0, 1.0)).project(point)
    assert bool(((projected - center).abs() <= torch.tensor(radius)).all())
    assert bool((projected.abs() <= 1).all())


@given(seeds, magnitudes, st.floats(0.1, 3.0))
def test_l2_ball_in_a_box_is_satisfied_exactly(seed: int, spread: float, radius: float) -> None:
    center, point = random_rows(seed, 0.7), random_rows(seed + 1, spread)
    low, high = torch.minimum(center, torch.tensor(-0.5)), torch.maximum(center, torch.tensor(0.5))
    projected = (L2Ball(center, radius) & Box(low, high)).project(point)
    assert bool(((projected - center).flatten(1).norm(dim=1) <= torch.tensor(radius)).all())
    assert bool(((low <= projected) & (projected <= high)).all())


@pytest.mark.parametrize("kind", ["l2", "linf", "box", "l2 and box", "linf and box"])
def test_projection_is_the_nearest_point(kind: str) -> None:
    """⟨y − Πy, p − Πy⟩ ≤ 0 for every p of the set, even if the center is outside the box."""
    center, y = (random_rows(seed, 1.5, torch.float64) for seed in (0, 1))
    sets: dict[str, Constraint] = {
        "l2": L2Ball(center, 1.2),
        "linf": LinfBall(center, 0.6),
        "box": Box(-1.0, 1.0),
        "l2 and box": L2Ball(center, 4.0) & Box(-1.0, 1.0),
        "linf and box": LinfBall(center, 3.0) & Box(-1.0, 1.0),
    }
    constraint = sets[kind]
    projected = constraint.project(3 * y)
    for seed in range(20):
        other = constraint.project(random_rows(10 + seed, 2.0, torch.float64))
        angle = ((3 * y - projected) * (other - projected)).flatten(1).sum(dim=1)
        assert float(angle.max()) <= 1e-7


@pytest.mark.parametrize("kind", ["l2", "l2 and box"])
def test_projection_is_differentiable(kind: str) -> None:
    center = 0.2 * random_rows(0, 1.0, torch.float64)
    constraint: Constraint = L2Ball(center, 1.0)
    if kind == "l2 and box":
        constraint = constraint & Box(-0.5, 0.5)
    region = constraint.region(center)
    y = random_rows(1, 2.0, torch.float64).flatten(1).requires_grad_()
    assert torch.autograd.gradcheck(region.project, (y,))


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("exponent", [-37, -30, -20, -10, 10, 18, 19, 20, 30, 38])
def test_balls_of_any_size_in_single_precision(exponent: int, boxed: bool) -> None:
    """The square of most of these radii underflows or overflows."""
    radius = 10.0**exponent
    point = torch.tensor([[1.5, -2.0, 0.0], [0.05, 0.0, 0.0]]) * radius
    constraint: Constraint = L2Ball(torch.zeros(2, 3), radius)
    if boxed:
        constraint = constraint & Box(-0.8 * radius, 0.8 * radius)
    projected = constraint.project(point)
    expected = torch.tensor([[0.6, -0.8, 0.0], [0.05, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(projected.double() / radius, expected, rtol=1e-5, atol=1e-6)
    assert bool((projected.double().norm(dim=1) <= torch.tensor(radius).double()).all())


def test_feasible_point_is_not_changed() -> None:
    center = random_rows(0, 0.1)
    point = center + 1e-3
    assert torch.equal((L2Ball(center, 1.0) & Box(-3.0, 3.0)).project(point), point)


def test_each_input_may_have_its_own_radius() -> None:
    center = torch.zeros(2, 3)
    projected = L2Ball(center, torch.tensor([1.0, 2.0])).project(torch.full((2, 3), 9.0))
    torch.testing.assert_close(projected.norm(dim=1), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (L2Ball(torch.zeros(2, 3), -1.0), "negative"),
        (LinfBall(torch.zeros(2, 3), float("nan")), "negative, got nan"),
        (L2Ball(torch.zeros(2, 3), float("inf")), "radius must be finite"),
        (LinfBall(torch.zeros(2, 3), 1e39), "finite in torch.float32"),
        (L2Ball(torch.tensor([0.0, torch.nan, 0.0]), 1.0), "center of a ball must be finite"),
        (LinfBall(torch.tensor([0.0, torch.inf, 0.0]), 1.0), "center of a ball must be finite"),
        (Box(torch.tensor([0.0, torch.nan, 0.0]), 1.0), "without NaN"),
        (Box(0.0, float("nan")) & L2Ball(torch.zeros(2, 3), 1.0), "without NaN"),
        (L2Ball(torch.zeros(2, 3), torch.ones(5)), "one entry for each"),
        (L2Ball(torch.full((2, 3), 5.0), 1.0) & Box(0.0, 1.0), "does not reach the box"),
        (LinfBall(torch.full((2, 3), 5.0), 1.0) & Box(0.0, 1.0), "exceeds an upper bound"),
        (Box(1.0, 0.0), "low <= high"),
        (L2Ball(torch.zeros(2, 4), 1.0), "must broadcast"),
        (L2Ball(torch.zeros(2, 3), 1.0) & L2Ball(torch.ones(2, 3), 1.0), "two L2 balls"),
    ],
)
def test_invalid_constraints_are_rejected(constraint: Constraint, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        constraint.project(torch.zeros(2, 3))


def test_input_without_batch_dimension_is_rejected() -> None:
    with pytest.raises(ValueError, match="one row per problem"):
        L2Ball(torch.zeros(3), 1.0).project(torch.ones(3))
