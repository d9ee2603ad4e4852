"""The experiment on Theorem 6, shortened: activation, constants, bound and output."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equilibria.papers.studies.study import Work
from equilibria.papers.studies.theorem6 import (
    STUDY,
    Network,
    SmoothLeakyReLU,
    WidthSetting,
    fitted_rate,
    tangent_spectrum,
    train,
)


def test_activation_meets_the_assumptions_of_the_theorem() -> None:
    activation = SmoothLeakyReLU(0.3)
    a = torch.linspace(-30, 30, 401, dtype=torch.float64, requires_grad=True)
    y = activation(a)
    (slope,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    torch.testing.assert_close(slope, activation.derivative(a))
    assert (slope > 0.3).all()
    assert (slope < 1).all()
    (curvature,) = torch.autograd.grad(slope.sum(), a)
    assert curvature.abs().max() <= 0.35 + 1e-9  # smooth with constant (1 − s)/2
    (density,) = torch.autograd.grad(activation.primitive(a).sum(), a)
    torch.testing.assert_close(density, y)
    torch.testing.assert_close(activation.inverse(y), a, rtol=1e-9, atol=1e-9)
    # Fenchel: S(a) + S*(σ(a)) = aσ(a), and σ = prox_f.
    torch.testing.assert_close(activation.primitive(a) + activation.conjugate(y), a * y)
    assert activation.minimal_subgradient(y, y - a).abs().max() < 1e-9
    with pytest.raises(ValueError, match="slope"):
        SmoothLeakyReLU(1.0)


def test_tangent_kernel_bounds_the_gradient_of_the_loss() -> None:
    """λ_min ≤ ‖∇ℓ‖²/2ℓ ≤ λ_max for every target."""
    setting = WidthSetting(width=12, feature=6, samples=4, inputs=6)
    generator = torch.Generator().manual_seed(0)
    network = Network(setting, generator)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    eigenvalues = tangent_spectrum(network, x)
    assert eigenvalues.shape == (4,)
    for _ in range(5):
        predictions, _ = network(x)
        target = torch.randn(4, 1, generator=generator, dtype=torch.float64)
        loss = 0.5 * (predictions - target).square().sum()
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        ratio = sum(float(g.square().sum()) for g in gradients) / (2 * loss.item())
        assert eigenvalues[0] * (1 - 1e-6) <= ratio <= eigenvalues[-1] * (1 + 1e-6)


def test_wide_network_trains_at_the_linear_rate() -> None:
    run = train(WidthSetting(width=256, feature=12, samples=6, inputs=12, steps=60))
    assert run.holds
    assert run.rises == 0
    assert not run.diverged
    assert run.largest_norm < 0.85
    assert run.movement < 0.02
    assert run.smallest_singular_value > 0.2
    assert run.gradient_ratio > 0.9
    # The rate of a linear model is (1 − ηQ₀)², twice the exponent of the theorem.
    assert run.rate < run.bound
    assert run.rate == pytest.approx(run.bound**2, abs=0.05)
    assert run.distance_rate < math.sqrt(run.bound)


def test_violated_bound_is_reported() -> None:
    run = train(WidthSetting(width=8, feature=12, samples=6, inputs=12, steps=2))
    first = run.losses[0]
    risen = replace(run, losses=[first, 2 * first, first])
    assert risen.rises == 1
    assert not risen.holds
    assert not replace(run, diverged=True).holds


def test_fitted_rate_ignores_values_below_the_floor() -> None:
    values = [5 * 0.8**k for k in range(20)]
    assert fitted_rate(values, 0.0) == pytest.approx(0.8)
    assert fitted_rate([*values, 1e-9, 1e-9], 1e-6) == pytest.approx(0.8)
    assert math.isnan(fitted_rate([1.0], 0.0))


def test_study_writes_a_table_and_a_figure(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    settings = STUDY.configure(["widths=[16,64]", "steps=12"])
    printed = STUDY.carry_out(settings, Work(folder)).text.split("```")[1]
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == ["16", "64"]
    picture = (folder / "theorem6.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
