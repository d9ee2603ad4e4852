"""Ridge prior whose scales a network reads from the noisy image."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context import Context
from equilibria.context.state import Packing
from equilibria.energies import RidgePrior
from equilibria.energies.adaptive import AdaptiveRidgePrior
from equilibria.models.restorers.photo import (
    PhotoDenoiser,
    load_prior,
    photo_denoiser,
    save_prior,
)
from equilibria.operators import Blur
from equilibria.restoration import PhotoMinimizer


def prior(std: float = 0.3, **options: float) -> AdaptiveRidgePrior:
    torch.manual_seed(2)
    made = {"channels": 6, "kernel_size": 3, "steepness": 3.0, "noise": 0.1} | options
    model = AdaptiveRidgePrior(width=5, depth=3, **made).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return model


def context_of(term: eq.Energy, y: Tensor, *inputs: Tensor) -> Context:
    return term.complete(term.inject(*inputs), Packing.of(y).layout)


@pytest.mark.parametrize("concavity", [0.0, 0.4, 0.93])
def test_curvature_in_y_is_within_its_bounds_for_every_image(concavity: float) -> None:
    """So ½‖y − x‖² + R(y; x, σ) is strongly convex in y with constant 1 − ρ."""
    model = prior(concavity=concavity)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = (0.3 * torch.randn(1, 1, 7, 7).double() for _ in range(2))
        context = context_of(model, y, x)
        scales = context["scales"]
        assert scales.std() > 0.1 * scales.mean()  # the network does adapt

        def value(v: Tensor, context: Context = context) -> Tensor:
            return model.value(v.view(1, 1, 7, 7), context).sum()

        hessian = torch.autograd.functional.hessian(value, y.flatten())
        eigenvalues = torch.linalg.eigvalsh(hessian)
        bounds = model.bounds(context, Packing.of(y).layout)
        assert bounds.concavity is not None
        assert -bounds.concavity - 1e-12 <= eigenvalues[0]
        assert float(bounds.concavity) == pytest.approx(concavity)
        assert eigenvalues[-1] <= 3.0 + 1e-12


def test_network_that_returns_zero_gives_the_prior_without_one() -> None:
    torch.manual_seed(0)
    plain = RidgePrior(6, 3, noise=0.1).double()
    adaptive = AdaptiveRidgePrior(width=5, channels=6, kernel_size=3, noise=0.1).double()
    adaptive.load_state_dict(plain.state_dict())
    y = torch.rand(2, 1, 9, 8).double()
    expected = plain.descent(y, context_of(plain, y, y))
    torch.testing.assert_close(adaptive.descent(y, context_of(adaptive, y, y)), expected)
    assert context_of(adaptive, y, y)["scales"].shape == (2, 6, 7, 6)


def test_scales_follow_the_pixels_under_each_filter() -> None:
    """Moving an image by two pixels, the reduction of the network, moves its scales."""
    model = prior()
    x = torch.zeros(1, 1, 40, 40).double()
    x[..., 16:22, 18:24] = torch.rand(6, 6).double()
    scales, moved = (
        model.scales(torch.tensor([0.1]).double(), image) for image in (x, x.roll((2, 4), (2, 3)))
    )
    inside = moved[..., 12:28, 12:28]
    torch.testing.assert_close(inside, scales.roll((2, 4), (2, 3))[..., 12:28, 12:28])
    brighter = model.scales(torch.tensor([0.1]).double(), x + 0.3)
    torch.testing.assert_close(brighter, scales)
    with pytest.raises(ValueError, match="one channel, got 3"):
        model.scales(torch.tensor([0.1]).double(), x.expand(-1, 3, -1, -1))


def denoiser(**options: float) -> PhotoDenoiser:
    torch.manual_seed(4)
    solving = eq.Solving(
        solver=eq.Anderson(memory=10, damping=3.0, max_iterations=500, tolerance=1e-9),
        gradient=eq.Implicit(tolerance=1e-10),
    )
    model = photo_denoiser(
        channels=4, kernel_size=3, steepness=5.0, adaptive=4, solving=solving, **options
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("channels", [1, 3])
def test_gradient_of_the_network_agrees_with_finite_differences(channels: int) -> None:
    model = denoiser()
    x = 0.5 + 0.2 * torch.randn(2, channels, 9, 8).double()
    noise, weights = torch.tensor([0.1, 0.2]).double(), torch.randn(x.shape).double()

    def loss() -> Tensor:
        total: Tensor = (weights * model(x, noise)).sum()
        return total

    loss().backward()
    for name, parameter in model.named_parameters():
        if "network" not in name:
            continue
        direction, step = torch.randn_like(parameter), 1e-5
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(step * direction)
            after = loss()
            parameter.sub_(2 * step * direction)
            before = loss()
            parameter.add_(step * direction)
        expected = (after - before) / (2 * step)
        torch.testing.assert_close(
            (parameter.grad * direction).sum(), expected, rtol=1e-4, atol=1e-7
        )


def test_gray_picture_in_three_channels_is_denoised_like_the_gray_one() -> None:
    """Equal noise in three colors is larger in the luminance by a factor √3."""
    model = denoiser()
    x, noise = 0.5 + 0.2 * torch.randn(1, 1, 9, 8).double(), torch.tensor([0.1]).double()
    with torch.no_grad():
        single = model(x, noise)
        three = model(x.expand(-1, 3, -1, -1), math.sqrt(3) * noise)
    torch.testing.assert_close(three[:, :1], single, rtol=0, atol=1e-7)


def test_restored_picture_has_a_bound_and_damage_other_than_noise_is_refused(
    tmp_path: Path,
) -> None:
    save_prior(denoiser().prior, tmp_path / "prior.safetensors")
    restorer = PhotoMinimizer(load_prior(tmp_path / "prior.safetensors").double(), noise=0.1)
    x = 0.5 + 0.1 * torch.randn(1, 1, 17, 16).double()
    restored = restorer.restore(x)
    assert restored.bound is not None
    assert restored.bound <= 1 / 255
    exact = PhotoMinimizer(restorer.prior, noise=0.1, accuracy=1e-9, max_iterations=2000).restore(x)
    assert (restored.images - exact.images).square().mean().sqrt() <= restored.bound
    with pytest.raises(ValueError, match="removes noise only"):
        restorer.restore(x, Blur(1.0).double())
