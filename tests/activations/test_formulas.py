"""Closed forms, options and domains of the built-in activations."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import spence

from equilibria.activations import (
    Activation,
    LeakyReLU,
    ReLU,
    Sigmoid,
    Softplus,
    SoftThreshold,
    Tanh,
)
from equilibria.activations.dilogarithm import dilogarithm_exp, softplus, softplus_primitive


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestDomain:
    @pytest.mark.parametrize(
        ("activation", "inside", "outside"),
        [
            (ReLU(), [0.0, 3.0], [-1e-9, -2.0]),
            (Tanh(), [-1.0, 0.0, 1.0], [-1.01, 1 + 1e-9]),
            (Sigmoid(), [0.0, 0.5, 1.0], [-1e-9, 1.5]),
            (Softplus(), [0.0, 1e-300, 900.0], [-1e-9, -2.0]),
        ],
        ids=repr,
    )
    def test_penalty_is_finite_on_the_closed_domain_only(
        self, activation: Activation, inside: list[float], outside: list[float]
    ) -> None:
        assert activation.penalty(tensor(*inside)).isfinite().all()
        zero = torch.zeros(len(outside), dtype=torch.float64)
        assert (activation.penalty(tensor(*outside)) == math.inf).all()
        assert (activation.minimal_subgradient(tensor(*outside), zero) == math.inf).all()

    def test_values_at_the_ends(self) -> None:
        assert Tanh().conjugate(tensor(-1, 1)).tolist() == pytest.approx([math.log(2)] * 2)
        assert Sigmoid().conjugate(tensor(0, 1)).tolist() == pytest.approx([math.log(2)] * 2)
        assert Softplus().penalty(tensor(0)).item() == pytest.approx(math.pi**2 / 12)

    def test_a_saturated_state_is_stationary_only_for_a_saturating_input(self) -> None:
        """tanh(a) rounds to 1 for a > 19: y = 1 is stationary for a = 50, but not for a = 5."""
        one = tensor(1, 1)
        residual = Tanh().minimal_subgradient(one, one - tensor(50, 5))
        assert residual[0] == 0
        assert residual[1] > 10

    @pytest.mark.parametrize("activation", [Sigmoid(), Softplus()], ids=repr)
    def test_an_underflowed_state_is_stationary_only_for_such_an_input(
        self, activation: Activation
    ) -> None:
        """σ(a) rounds to 0 for a < −745: y = 0 is stationary for a = −800, but not for a = −100."""
        residual = activation.minimal_subgradient(tensor(0, 0), -tensor(-800, -100))
        assert residual[0] == 0
        assert residual[1] < -600


class TestSubgradientAtKinks:
    def test_relu(self) -> None:
        y, gradient = tensor(0, 0, 2), tensor(-3, 3, 3)
        assert ReLU().minimal_subgradient(y, gradient).tolist() == [-3, 0, 3]

    def test_soft_threshold(self) -> None:
        y, gradient = tensor(0, 0, 0, 2, -2), tensor(0.5, 3, -3, 3, 3)
        subgradient = SoftThreshold(threshold=1.0).minimal_subgradient(y, gradient)
        assert subgradient.tolist() == [0, 2, -2, 4, 2]


class TestOptions:
    def test_slope_changes_value_and_penalty(self) -> None:
        assert LeakyReLU(slope=0.2)(tensor(-1)).item() == -0.2
        assert LeakyReLU(slope=0.2).penalty(tensor(-1)).item() == pytest.approx(2)

    def test_threshold_changes_value_and_penalty(self) -> None:
        assert SoftThreshold(threshold=0.7)(tensor(1)).item() == pytest.approx(0.3)
        assert SoftThreshold(threshold=0.7).penalty(tensor(-2)).item() == pytest.approx(1.4)

    @pytest.mark.parametrize("slope", [0.0, -0.1, 1.1, math.nan])
    def test_slope_outside_its_range_raises(self, slope: float) -> None:
        with pytest.raises(ValueError, match="slope"):
            LeakyReLU(slope=slope)

    @pytest.mark.parametrize("threshold", [0.0, -1.0, math.inf, math.nan])
    def test_threshold_outside_its_range_raises(self, threshold: float) -> None:
        with pytest.raises(ValueError, match="threshold"):
            SoftThreshold(threshold=threshold)


class TestDilogarithm:
    """`scipy.special.spence(z)` is Li₂(1 − z)."""

    def test_values(self) -> None:
        t = torch.cat([torch.linspace(0, 3, 1001), torch.logspace(-12, 2, 200)]).double()
        expected = torch.from_numpy(spence(-torch.expm1(-t).numpy()))
        torch.testing.assert_close(dilogarithm_exp(t), expected, rtol=4e-15, atol=1e-16)

    def test_relative_precision_of_the_tail(self) -> None:
        """Li₂(x) = x + x²/4 + x³/9 + …"""
        t = torch.linspace(12, 700, 200, dtype=torch.float64)
        x = torch.exp(-t)
        torch.testing.assert_close(dilogarithm_exp(t), x + x**2 / 4 + x**3 / 9, rtol=1e-15, atol=0)

    def test_primitive(self) -> None:
        a = torch.linspace(-40, 40, 2001, dtype=torch.float64)
        expected = torch.from_numpy(-spence(1 + torch.exp(a).numpy())) - math.pi**2 / 12
        torch.testing.assert_close(softplus_primitive(a), expected, rtol=4e-15, atol=4e-15)

    def test_derivatives(self) -> None:
        t = torch.linspace(0.01, 4, 60, dtype=torch.float64, requires_grad=True)
        for function in (dilogarithm_exp, softplus_primitive):
            assert torch.autograd.gradcheck(function, t)
            assert torch.autograd.gradgradcheck(function, t)

    def test_derivative_next_to_the_singularity(self) -> None:
        """log(1 − e⁻ᵗ) computed from the rounded e⁻ᵗ would be −∞ for t < 1e-16."""
        t = tensor(1e-200, 1e-20, 1e-9).requires_grad_()
        (slope,) = torch.autograd.grad(dilogarithm_exp(t).sum(), t)
        torch.testing.assert_close(slope, t.detach().log(), rtol=1e-9, atol=0)

    def test_per_sample_gradients(self) -> None:
        a = torch.linspace(-2, 2, 5, dtype=torch.float64)
        slope = torch.func.vmap(torch.func.grad(softplus_primitive))(a)
        torch.testing.assert_close(slope, softplus(a))

    def test_softplus_is_exact_for_large_arguments(self) -> None:
        a = tensor(25.0)
        assert (softplus(a) - a).item() == pytest.approx(math.exp(-25), rel=1e-3)
