"""Contract of activations, tested for all registered ones."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equilibria.activations import (
    Activation,
    LeakyReLU,
    SoftThreshold,
    get_activation,
    list_activations,
)

ACTIVATIONS = [
    *(get_activation(name) for name in list_activations()),
    LeakyReLU(slope=0.5),
    LeakyReLU(slope=1.0),
    SoftThreshold(threshold=1.5),
]
FLOATS = st.floats(-30, 30, allow_subnormal=False)

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)


def points(low: float = -6.0, high: float = 6.0) -> Tensor:
    """Return a grid that avoids kinks, so that derivatives exist."""
    return torch.linspace(low, high, 240, dtype=torch.float64) + 1e-3 * math.pi


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@every_activation
@pytest.mark.parametrize("step", [1.0, 0.7, 0.05, 1e-6])
def test_prox_argument_gives_the_proximal_operator_of_a_scaled_penalty(
    activation: Activation, step: float
) -> None:
    """y = σ(a) with s·a + (1−s)σ(a) = v minimizes s·f(y) + ½(y − v)²."""
    y_of_grid = activation(points(-8, 8))
    v = y_of_grid + step * points(-3, 3)
    a = activation.prox_argument(v, torch.full((1,), step, dtype=torch.float64))
    y = activation(a)
    torch.testing.assert_close(step * a + (1 - step) * y, v, rtol=1e-12, atol=1e-12)
    minimum = step * activation.penalty(y) + (y - v).square() / 2
    for other in (y - 1e-3, y + 1e-3, 0.5 * y):
        value = step * activation.penalty(other) + (other - v).square() / 2
        assert (minimum <= value + 1e-9).all()


@every_activation
class TestDerivatives:
    def test_derivative_agrees_with_autograd(self, activation: Activation) -> None:
        a = points().requires_grad_()
        (expected,) = torch.autograd.grad(activation(a).sum(), a)
        torch.testing.assert_close(activation.derivative(a), expected, rtol=0, atol=1e-14)

    def test_derivative_agrees_with_finite_differences(self, activation: Activation) -> None:
        a, h = points(), 1e-6
        difference = (activation(a + h) - activation(a - h)) / (2 * h)
        torch.testing.assert_close(activation.derivative(a), difference, rtol=0, atol=1e-8)

    def test_derivative_lies_between_zero_and_the_lipschitz_constant(
        self, activation: Activation
    ) -> None:
        slope = activation.derivative(
            torch.cat([points(-60, 60), points(-1e-7, 1e-7), scalar(0)[None]])
        )
        assert (slope >= 0).all()
        assert (slope <= activation.lipschitz).all()

    def test_lipschitz_constant_is_attained(self, activation: Activation) -> None:
        slope = activation.derivative(torch.cat([points(-50, 50), scalar(0)[None]]))
        assert slope.max().item() == pytest.approx(activation.lipschitz, rel=1e-9)

    def test_second_derivatives(self, activation: Activation) -> None:
        a = points().requires_grad_()
        assert torch.autograd.gradcheck(activation.derivative, a)
        assert torch.autograd.gradgradcheck(activation, a)


@every_activation
class TestPrimitive:
    def test_its_derivative_is_the_activation(self, activation: Activation) -> None:
        a = torch.cat([points(), points(-50, 50)]).requires_grad_()
        (slope,) = torch.autograd.grad(activation.primitive(a).sum(), a)
        torch.testing.assert_close(slope, activation(a), rtol=1e-14, atol=1e-14)

    def test_gradcheck(self, activation: Activation) -> None:
        a = points().requires_grad_()
        assert torch.autograd.gradcheck(activation.primitive, a)
        assert torch.autograd.gradgradcheck(activation.primitive, a)

    def test_it_is_zero_at_zero(self, activation: Activation) -> None:
        assert activation.primitive(scalar(0)).item() == pytest.approx(0, abs=1e-15)


@every_activation
class TestProximalOperator:
    def test_fenchel_young_equality(self, activation: Activation) -> None:
        """S(a) + S*(y) = ay exactly where y = σ(a)."""
        a = torch.cat([points(), points(-50, 50)])
        y = activation(a)
        gap = activation.primitive(a) + activation.conjugate(y) - a * y
        torch.testing.assert_close(
            gap / a.square().clamp(min=1), torch.zeros_like(a), rtol=0, atol=1e-12
        )

    @pytest.mark.parametrize("a", [-7.3, -1.9, -0.4, -0.03, 0.0, 0.05, 0.6, 1.45, 2.2, 8.1])
    def test_value_minimizes_penalty_plus_distance(self, activation: Activation, a: float) -> None:
        """f(y) + ½(y − a)² increases from σ(a) by at least (y − σ(a))²/2L: S* is 1/L-convex."""

        def objective(y: Tensor) -> Tensor:
            return activation.penalty(y) + (y - a).square() / 2

        best = activation(scalar(a))
        y = best + torch.cat([points(-9, 9), points(-0.01, 0.01)])
        growth = (y - best).square() / (2 * activation.lipschitz)
        assert (objective(y) >= objective(best) + growth - 1e-13).all()
        assert objective(best).isfinite()

    def test_conjugate_is_convex(self, activation: Activation) -> None:
        y = activation(points(-9, 9))
        left, right = y[:-7], y[7:]
        chord = (activation.conjugate(left) + activation.conjugate(right)) / 2
        assert (activation.conjugate((left + right) / 2) <= chord + 1e-13).all()

    def test_penalty_is_convex_when_non_expansive(self, activation: Activation) -> None:
        if activation.lipschitz > 1:
            pytest.skip("the penalty is convex only for L ≤ 1")
        y = activation(points(-9, 9))
        left, right = y[:-7], y[7:]
        chord = (activation.penalty(left) + activation.penalty(right)) / 2
        assert (activation.penalty((left + right) / 2) <= chord + 1e-13).all()

    def test_minimal_subgradient_is_zero_at_the_value(self, activation: Activation) -> None:
        a = torch.cat([points(), scalar(0)[None]])
        y = activation(a)
        residual = activation.minimal_subgradient(y, y - a)
        torch.testing.assert_close(residual, torch.zeros_like(a), rtol=0, atol=1e-10)

    def test_minimal_subgradient_of_a_saturated_state(self, activation: Activation) -> None:
        """In saturation, only the rounding error of y, divided by σ′, remains."""
        a = points(-800, 800)
        y = activation(a)
        residual = activation.minimal_subgradient(y, y - a)
        eps, smallest = torch.finfo(y.dtype).eps, torch.finfo(y.dtype).smallest_normal
        rounding = eps * (y.abs() + smallest) / activation.derivative(a) + eps * a.abs()
        assert (residual.abs() <= 4 * rounding).all()

    def test_minimal_subgradient_is_the_slope_of_the_objective(
        self, activation: Activation
    ) -> None:
        """Away from the kinks of f it is gradient + f′(y)."""
        y = activation(points(-5, 5))
        y = y[(y.abs() > 1e-3) & (activation.penalty(y).isfinite())].requires_grad_()
        gradient = torch.randn_like(y)
        (slope,) = torch.autograd.grad(activation.penalty(y).sum(), y)
        expected = gradient + slope
        torch.testing.assert_close(activation.minimal_subgradient(y, gradient), expected)

    def test_minimal_subgradient_is_not_zero_at_other_points(self, activation: Activation) -> None:
        a = points(-5, 5)
        y = activation(a)
        for shift in (-0.5, 0.5):
            moved = activation(a + shift)
            residual = activation.minimal_subgradient(moved, moved - a)
            assert (residual.abs()[(moved - y).abs() > 1e-3] > 1e-3).all()


@every_activation
class TestNumerics:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_results_have_the_same_type_and_are_finite_for_large_arguments(
        self, activation: Activation, dtype: torch.dtype, device: torch.device
    ) -> None:
        if device.type == "mps" and dtype == torch.float64:
            pytest.skip("mps has no float64")
        a = torch.tensor([-1e4, -300.0, -50.0, -1.0, 0.0, 1.0, 50.0, 300.0, 1e4]).to(device, dtype)
        y = activation(a)
        results = {
            "value": y,
            "derivative": activation.derivative(a),
            "primitive": activation.primitive(a),
            "penalty": activation.penalty(y),
            "conjugate": activation.conjugate(y),
            "subgradient": activation.minimal_subgradient(y, y - a),
        }
        for name, result in results.items():
            assert result.dtype == dtype, name
            assert result.shape == a.shape, name
            assert result.isfinite().all(), name

    @pytest.mark.parametrize("method", ["primitive", "penalty", "derivative", "__call__"])
    def test_float32_agrees_with_float64(self, activation: Activation, method: str) -> None:
        a = points()
        argument = activation(a) if method == "penalty" else a
        argument = argument.float()
        function = getattr(activation, method)
        torch.testing.assert_close(
            function(argument).double(), function(argument.double()), rtol=1e-5, atol=1e-6
        )

    def test_nan_is_propagated(self, activation: Activation) -> None:
        nan = scalar(math.nan)
        assert activation(nan).isnan()
        assert activation.penalty(nan).isnan()
        assert activation.minimal_subgradient(nan, nan).isnan()


@every_activation
class TestLipschitz:
    @given(a=FLOATS, b=FLOATS)
    def test_monotone_and_lipschitz(self, activation: Activation, a: float, b: float) -> None:
        low, high = sorted((a, b))
        rise = (activation(scalar(high)) - activation(scalar(low))).item()
        assert rise >= 0
        assert rise <= activation.lipschitz * (high - low) + 1e-14


@every_activation
class TestValueObject:
    def test_copies_and_pickles_are_equal(self, activation: Activation) -> None:
        for other in (pickle.loads(pickle.dumps(activation)), copy.deepcopy(activation)):
            assert other == activation
            assert hash(other) == hash(activation)

    def test_it_is_immutable(self, activation: Activation) -> None:
        with pytest.raises(AttributeError):
            activation.slope = 3.0  # type: ignore[attr-defined]

    def test_it_is_registered(self, activation: Activation) -> None:
        assert type(get_activation(activation.name)) is type(activation)
