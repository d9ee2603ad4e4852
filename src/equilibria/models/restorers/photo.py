"""The learned prior of photographs: its gradient step, the denoiser that trains it, and its file.

`equilibria.restoration.PhotoRestorer` uses the prior.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies import DataFidelity, Energy, OpponentPrior, Quadratic, RidgePrior
from equilibria.energies.adaptive import AdaptiveRidgePrior
from equilibria.energies.compose import Sum
from equilibria.equilibrium import EnergyCell, EquilibriumLayer, Solving, StepBounds, solving
from equilibria.models.base import EquilibriumModel
from equilibria.models.blocks import check_images
from equilibria.operators import Identity
from equilibria.registry import check_positive_pixels
from equilibria.solvers.convergence import Iterate, StoppingCriterion


@dataclass(frozen=True)
class GradientBelow(StoppingCriterion):
    """Root mean square of ∇G at most `gradient`, with T(y) − y = −`length`·∇G.

    Args:
        gradient: Largest root mean square of ∇G of each sample, shape (B,).
        length: Length of the gradient step.
    """

    gradient: Tensor
    length: float

    def notes(self) -> Mapping[str, Tensor]:
        return {"largest_gradient": self.gradient}

    def reached(self, iterate: Iterate) -> Tensor:
        size = math.sqrt(iterate.image.shape[1])
        largest = iterate.problem.context["largest_gradient"]
        return iterate.residuals.absolute <= self.length * size * largest


class PhotoCell(EnergyCell):
    """Gradient step of length 1/L on the objective G = data + prior with m ≤ ∇²G ≤ L.

    If m > 0, the step is a contraction with factor 1 − m/L.

    Args:
        data: Data term.
        prior: Prior term.
        curvature: L.
        convexity: m; −∞ if it is not known.
    """

    def __init__(
        self, data: DataFidelity, prior: Energy, curvature: float, convexity: float
    ) -> None:
        length = min(1.0, 1 / curvature)
        super().__init__(Sum(data, prior, Quadratic(Identity())), "identity", damping=length)
        self.curvature = curvature
        self.convexity = convexity

    @property
    def limits(self) -> StepBounds[float]:
        return StepBounds(None if self.convexity <= 0 else 1 - self.damping * self.convexity)

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        limit = self.limits.contraction
        return StepBounds(None if limit is None else torch.tensor(limit))


def photo_prior() -> OpponentPrior:
    """Load the trained prior shipped with the package.

    Examples:
        >>> prior = eq.models.photo_prior()
        >>> eq.restoration.PhotoMinimizer(prior, noise=0.1)(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 3, 16, 16])
    """
    with resources.as_file(resources.files("equilibria") / "weights") as folder:
        return load_prior(folder / "photo-prior.safetensors")


def save_prior(prior: OpponentPrior, file: Path) -> None:
    """Write the weights and options of a prior to a safetensors file.

    Args:
        prior: The prior.
        file: Path of the file; `load_prior` reads it.
    """
    part = prior.luminance
    options = {
        "channels": len(part.log_scales),
        "kernel_size": part.size,
        "concavity": part.concavity,
        "steepness": part.steepness,
        "adaptive": part.width if isinstance(part, AdaptiveRidgePrior) else 0,
    }
    save_file(prior.state_dict(), file, {"options": json.dumps(options)})


def load_prior(file: Path) -> OpponentPrior:
    """Load a prior in evaluation mode and without gradients.

    Args:
        file: File that `save_prior` wrote.
    """
    with safe_open(file, framework="pt") as weights:
        options = json.loads(weights.metadata()["options"])
        prior = photo_denoiser(**options).prior
        prior.load_state_dict({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118
    return prior.requires_grad_(False).eval()


class NoiseStem(nn.Module):
    """Return the images and the standard deviation of the noise of each image.

    Args:
        in_channels: Channels of the images; grayscale images are accepted too.
        noise: Standard deviation if the model is called without one, for pixels in [0, 1].
    """

    def __init__(self, in_channels: int, noise: float) -> None:
        super().__init__()
        check_positive_pixels(noise=noise)
        self.in_channels = in_channels
        self.noise = noise

    def forward(
        self, images: Tensor, noise: Tensor | Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        is_gray = images.dim() == 4 and images.shape[1] == 1
        check_images(images, 1 if is_gray else self.in_channels)
        level = noise if isinstance(noise, Tensor) else images.new_tensor(self.noise)
        return images, level.to(images).expand(len(images))


class PhotoDenoiser(EquilibriumModel):
    """Denoiser argmin_y ½‖y − x‖² + R_σ(y) of images x with noise σ, which trains a prior R.

    Solves start at x with less noise, and stop at a root mean square gradient of tolerance·σ.

    Args:
        prior: The prior R.
        stem: Passes on the images and their noise.
        solving: How the layer solves.
    """

    def __init__(self, prior: OpponentPrior, stem: NoiseStem, solving: Solving | None) -> None:
        curvature = prior.limits.curvature
        assert curvature is not None
        cell = PhotoCell(
            DataFidelity(),
            prior,
            1 + curvature,
            1 - max(prior.luminance.concavity, prior.colors.concavity),
        )
        super().__init__(stem, EquilibriumLayer(cell, solving=solving), nn.Identity())

    @property
    def prior(self) -> OpponentPrior:
        cell = self.layer.cell
        assert isinstance(cell, PhotoCell)
        energy = cell.energy
        assert isinstance(energy, Sum)
        prior = energy["opponent_prior"]
        assert isinstance(prior, OpponentPrior)
        return prior

    def features(self, *inputs: Any, start: State | None = None) -> Tensor:
        images, noise = self.stem(*inputs)
        if start is None:
            start = Identity().first_guess(images.detach(), noise[:, None, None, None])
        layer = self.layer
        assert isinstance(layer.cell, PhotoCell)
        stop = GradientBelow(layer.solver.tolerance * noise, layer.cell.damping)
        with solving(layer, solver=replace(layer.solver, stop=stop)):
            feature: Tensor = layer((images, noise), start)
        return feature


def photo_denoiser(
    *,
    in_channels: int = 3,
    channels: int = 48,
    kernel_size: int = 9,
    concavity: float = 0.9,
    steepness: float = 30.0,
    adaptive: int = 0,
    noise: float = 25 / 255,
    solving: Solving | None = None,
) -> PhotoDenoiser:
    """Build a denoiser whose trained prior can restore other kinds of damage too.

    Args:
        in_channels: Channels of the images.
        channels: Number of luminance filters; there are half as many color filters.
        kernel_size: Side of the luminance filters; color filters are two pixels smaller.
        concavity: Option of `RidgePrior`.
        steepness: Option of `RidgePrior`.
        adaptive: Channels of the network that adapts the luminance filters to the noisy image; 0
            for a prior that does not depend on it.
        noise: Standard deviation of the noise if the model is called without one, for pixels in
            [0, 1].
        solving: How the layer solves.

    Examples:
        >>> from equilibria.models.restorers.photo import photo_denoiser
        >>> model = photo_denoiser(in_channels=1, channels=4, kernel_size=5)
        >>> model(torch.rand(1, 1, 16, 16)).shape
        torch.Size([1, 1, 16, 16])
    """
    options: dict[str, Any] = {"concavity": concavity, "steepness": steepness}
    filters = {"channels": channels, "kernel_size": kernel_size}
    luminance = RidgePrior(**filters, **options)
    if adaptive:
        luminance = AdaptiveRidgePrior(width=adaptive, **filters, **options)
    colors = RidgePrior(max(1, channels // 2), max(2, kernel_size - 2), **options)
    prior = OpponentPrior(luminance, colors)
    return PhotoDenoiser(prior, NoiseStem(in_channels, noise), solving)
