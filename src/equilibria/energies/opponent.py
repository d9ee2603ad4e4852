"""Learned prior for color images: one prior for luminance, one for opponent colors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies.adaptive import AdaptiveRidgePrior
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts
from equilibria.energies.ridge import RidgePrior, noise_level
from equilibria.energies.terms import one_tensor

OPPONENT_AXES = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))
"""RGB directions of luminance, red–blue and green–magenta, before normalization."""


class OpponentPrior(Energy):
    """Image prior R_l(luminance; σ) + R_c(opponent colors; σ) at noise level σ.

    A grayscale image has R_l only. Luminance and the two opponent colors are an orthonormal basis
    of RGB, so white noise stays white. The luminance of a gray RGB image is √3 times as bright as
    the grayscale image. It is therefore treated like the grayscale image with noise σ/√3, and one
    prior serves both.

    Args:
        luminance: Prior of the luminance and of grayscale images.
        colors: Prior of each opponent color channel.

    Examples:
        >>> prior = eq.models.photo_prior()
        >>> type(prior).__name__, type(prior.luminance).__name__
        ('OpponentPrior', 'RidgePrior')
    """

    facts = Facts(vanishes_at_zero=True)

    def __init__(self, luminance: RidgePrior, colors: RidgePrior) -> None:
        super().__init__()
        self.luminance = luminance
        self.colors = colors
        basis = torch.tensor(OPPONENT_AXES, dtype=torch.float64)
        basis = (basis / basis.norm(dim=1, keepdim=True)).float()
        self.register_buffer("basis", basis, persistent=False)

    basis: Tensor

    @property
    def formula(self) -> str:
        return f"luminance {self.luminance.formula} + colors {self.colors.formula}"

    @property
    def size(self) -> int:
        """Side length of the filters, in pixels."""
        return max(self.luminance.size, self.colors.size)

    @property
    def is_adaptive(self) -> bool:
        """Whether the prior depends on the noisy image."""
        return isinstance(self.luminance, AdaptiveRidgePrior)

    def inject(self, *inputs: Tensor) -> Context:
        noise = noise_level(*inputs)
        image = inputs[0]
        is_gray, is_color = (image.dim() == 4 and image.shape[1] == count for count in (1, 3))
        luminance = self._rotated(image, self.basis)[:, :1] if is_color else None
        scales = {
            "gray": self.luminance.scales(noise, image if is_gray else None),
            "bright": self.luminance.scales(noise, luminance, 1 / math.sqrt(3)),
            "colors": self.colors.scales(noise, None),
        }
        parts = {name: Context(sample={"scales": values}) for name, values in scales.items()}
        return Context(parts=parts)

    def complete(self, context: Context, layout: Layout) -> Context:
        channels, *_ = layout[0]
        if channels not in (1, 3):
            raise ValueError(f"OpponentPrior needs images with 1 or 3 channels, got {channels}")
        priors = {"gray": self.luminance} if channels == 1 else self._color_parts
        return Context(
            parts={
                name: prior.complete(context.parts[name], layout) for name, prior in priors.items()
            }
        )

    def value(self, state: State, context: Context) -> Tensor:
        y = one_tensor(state, self)
        if y.shape[1] == 1:
            return self.luminance.value(y, context.parts["gray"])
        rotated = self._rotated(y, self.basis)
        return self.luminance.value(rotated[:, :1], context.parts["bright"]) + self.colors.value(
            rotated[:, 1:], context.parts["colors"]
        )

    def descent(self, state: State, context: Context) -> State:
        y = one_tensor(state, self)
        if y.shape[1] == 1:
            return self.luminance.descent(y, context.parts["gray"])
        rotated = self._rotated(y, self.basis)
        bright = self.luminance.descent(rotated[:, :1], context.parts["bright"])
        colors = self.colors.descent(rotated[:, 1:], context.parts["colors"])
        descent = torch.cat([one_tensor(bright, self), one_tensor(colors, self)], dim=1)
        return self._rotated(descent, self.basis.T)

    @property
    def limits(self) -> Bounds[float]:
        return self.luminance.limits.beside(self.colors.limits)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        luminance = self.luminance.bounds(context, layout)
        if layout[0][0] == 1:
            return luminance
        return luminance.beside(self.colors.bounds(context, layout))

    @property
    def _color_parts(self) -> dict[str, RidgePrior]:
        return {"bright": self.luminance, "colors": self.colors}

    def _rotated(self, y: Tensor, basis: Tensor) -> Tensor:
        return torch.einsum("ab,nbhw->nahw", basis.to(y), y)
