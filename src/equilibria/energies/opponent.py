"""A learned prior of colored pictures: one of the luminance, and one of the colors beside it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts
from equilibria.energies.ridge import RidgePrior, noise_level
from equilibria.energies.terms import one_tensor

OPPONENTS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))
"""Luminance, red against blue, and both against green; made orthonormal."""


class OpponentPrior(Energy):
    """R_l(luminance; σ) + R_c(two opponent colors; σ), the luminance alone for a gray picture.

    The three are an orthonormal basis of the colors, so that white noise stays white. The luminance
    of a gray picture in three colors is √3 times as bright, and is seen as that picture with noise
    σ/√3: one prior serves both.

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
        basis = torch.tensor(OPPONENTS, dtype=torch.float64)
        basis = (basis / basis.norm(dim=1, keepdim=True)).float()
        self.register_buffer("basis", basis, persistent=False)

    basis: Tensor

    @property
    def formula(self) -> str:
        return f"luminance {self.luminance.formula} + colors {self.colors.formula}"

    @property
    def size(self) -> int:
        """Pixels a side that a response sees."""
        return max(self.luminance.size, self.colors.size)

    def inject(self, *inputs: Tensor) -> Context:
        noise = noise_level(*inputs)
        gray = Context(sample={"scales": self.luminance.scales(noise)})
        bright = Context(sample={"scales": self.luminance.scales(noise, 1 / math.sqrt(3))})
        colors = Context(sample={"scales": self.colors.scales(noise)})
        return Context(parts={"gray": gray, "bright": bright, "colors": colors})

    def complete(self, context: Context, layout: Layout) -> Context:
        channels, *_ = layout[0]
        if channels not in (1, 3):
            raise ValueError(f"a picture is gray or has three colors, not {channels} channels")
        names = {"gray": self.luminance} if channels == 1 else self._parts
        return Context(
            parts={
                name: prior.complete(context.parts[name], layout) for name, prior in names.items()
            }
        )

    def value(self, state: State, context: Context) -> Tensor:
        y = one_tensor(state, self)
        if y.shape[1] == 1:
            return self.luminance.value(y, context.parts["gray"])
        seen = self._turned(y, self.basis)
        return self.luminance.value(seen[:, :1], context.parts["bright"]) + self.colors.value(
            seen[:, 1:], context.parts["colors"]
        )

    def descent(self, state: State, context: Context) -> State:
        y = one_tensor(state, self)
        if y.shape[1] == 1:
            return self.luminance.descent(y, context.parts["gray"])
        seen = self._turned(y, self.basis)
        bright = self.luminance.descent(seen[:, :1], context.parts["bright"])
        colors = self.colors.descent(seen[:, 1:], context.parts["colors"])
        both = torch.cat([one_tensor(bright, self), one_tensor(colors, self)], dim=1)
        return self._turned(both, self.basis.T)

    @property
    def limits(self) -> Bounds[float]:
        return self.luminance.limits.beside(self.colors.limits)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        luminance = self.luminance.bounds(context, layout)
        if layout[0][0] == 1:
            return luminance
        return luminance.beside(self.colors.bounds(context, layout))

    @property
    def _parts(self) -> dict[str, RidgePrior]:
        return {"bright": self.luminance, "colors": self.colors}

    def _turned(self, y: Tensor, basis: Tensor) -> Tensor:
        return torch.einsum("ab,nbhw->nahw", basis.to(y), y)
