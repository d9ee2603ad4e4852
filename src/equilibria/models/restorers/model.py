"""A restorer whose output minimizes an explicit objective: a data term and a learned prior.

After Gilton, Ongie, Willett, "Deep equilibrium architectures for inverse problems in imaging"
(2021), whose network takes the place of a proximal operator; here it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies import Bounds, Energy, Input
from equilibria.energies.compose import Sum
from equilibria.energies.terms import one_tensor
from equilibria.equilibrium import EnergyCell, EquilibriumLayer, Solving, StepBounds
from equilibria.models.base import EquilibriumModel
from equilibria.models.blocks import check_images
from equilibria.operators import AveragePool, Conv2d
from equilibria.registry import check_positive

LEAST_SIDE = 17
"""Of maps on which a norm is bounded for all sizes: by the symbol, as that of still smaller ones is
not, and no less than three kernels wide, so that it can be little larger elsewhere."""


class DataTerm(Energy):
    """(weight/2)·‖A z − ŷ‖² with z = Wᵀy, less the constant ‖ŷ‖²; A: a mask, then a mean of blocks.

    Its inputs are Aᵀŷ and the mask of what is known. With `side`, the norm of W is that on maps of
    side×side, whatever the size of z: W is then the same for all pictures.
    """

    def __init__(self, W: Conv2d, weight: float, factor: int = 1, side: int | None = None) -> None:
        super().__init__()
        check_positive(weight=weight)
        self.W = W
        self.weight = weight
        self.pool = AveragePool(factor)
        self.side = side

    @property
    def formula(self) -> str:
        return f"{self.weight / 2:g}·‖A Wᵀy − ŷ‖²"

    def inject(self, pulled: Tensor, known: Tensor) -> Context:
        return Context(sample={"pulled": pulled, "known": known})

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        channels, *plane = self.W.input_shape(layout[0])
        plane = plane if self.side is None else [self.side, self.side]
        return {"W": self.W.weights((channels, *plane))}

    def value(self, state: State, context: Context) -> Tensor:
        z = self.W.adjoint(one_tensor(state, self), context.weights("W"))
        seen = self.pool(z * context["known"])
        return self.weight * (
            0.5 * sum_per_sample(seen.square()) - sum_per_sample(z * context["pulled"])
        )

    def descent(self, state: State, context: Context) -> State:
        weights = context.weights("W")
        z = self.W.adjoint(one_tensor(state, self), weights)
        seen = self.pool.adjoint(self.pool(z * context["known"])) * context["known"]
        descent: Tensor = self.weight * self.W(context["pulled"] - seen, weights)
        return descent

    @property
    def limits(self) -> Bounds[float]:
        limit = self.W.norm_limit
        return Bounds(None if limit is None else self.weight * (limit / self.pool.scale) ** 2)

    @property
    def growth(self) -> float:
        """By how much the curvature may exceed its limit on maps larger than `side`.

        The symbol of W is a trigonometric polynomial of degree d, half the kernel, whose bound on
        N points a side is at most cos(πd/N)⁻² below its maximum (Ehlich and Zeller, 1964).
        """
        if self.side is None:
            return 1.0
        degree = max(self.W.kernel_size) // 2
        points = self.side + min(self.W.padding)
        return math.cos(math.pi * degree / points) ** -4


class RestoringCell(EnergyCell):
    """The proximal gradient step of length 1/(1 + L) on a strongly convex objective.

    L bounds the curvature of the data term, the only one there is. The step contracts by
    L/(1 + L), so that the minimizer is unique and is reached, however much the data weigh. On maps
    larger than the data term's `side` that stays so as long as the curvature is at most 2L.
    """

    def __init__(self, data: DataTerm, prior: Input) -> None:
        limit = data.limits.curvature
        if limit is None:
            raise ValueError("W needs a norm that is bounded by construction: norm='bound'")
        if data.growth > 2:
            raise ValueError(f"maps of {data.side} pixels a side are too small to bound W on")
        super().__init__(prior + data, "relu", damping=1 / (1 + limit))
        self.limit = limit

    @property
    def data(self) -> DataTerm:
        assert isinstance(self.energy, Sum)
        term = self.energy["data_term"]
        assert isinstance(term, DataTerm)
        return term

    @property
    def limits(self) -> StepBounds[float]:
        return StepBounds(self.limit / (1 + self.limit))

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        return StepBounds(torch.tensor(self.limit / (1 + self.limit)))

    def output(self, state: State, context: Context) -> Tensor:
        """The restored image z = Wᵀy."""
        weights = context.parts["data_term"].weights("W")
        return self.data.W.adjoint(one_tensor(state, self.data), weights)


class MeasurementStem(nn.Module):
    """Aᵀŷ and the mask of what is known, of a measurement ŷ and the operator that made it."""

    def __init__(self, in_channels: int, factor: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.factor = factor

    def forward(self, measured: Tensor, measurement: object | None = None) -> tuple[Tensor, Tensor]:
        check_images(measured, self.in_channels)
        factor = getattr(measurement, "scale", 1)
        if measurement is not None and factor != self.factor:
            raise ValueError(
                f"the model restores images of {self.factor} times the resolution, but the "
                f"measurement is one of {factor} times: set the model's option factor"
            )
        if hasattr(measurement, "width"):
            raise ValueError("the model undoes noise, masks and a lower resolution, but no blur")
        height, width = (size * self.factor for size in measured.shape[2:])
        known = getattr(measurement, "known", None)
        mask = measured.new_ones(()) if known is None else known.to(measured)
        pulled = AveragePool(self.factor).adjoint(measured) * mask
        return pulled, mask.expand(len(measured), 1, height, width)


class EquilibriumRestorer(EquilibriumModel):
    """The image z = Wᵀy whose code y ≥ 0 minimizes ½‖y‖² − ⟨Up + b, y⟩ + (weight/2)‖Az − ŷ‖².

    p is the picture of the measurement ŷ. The objective is strongly convex: there is one restored
    image, and `objective` tells its value. Called with a measurement alone it takes every pixel as
    seen; a measurement operator may say which are (`known`), or how much coarser they are
    (`scale`, which must be the model's factor).

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> restorer = deq_restorer(in_channels=1, channels=8)
        >>> restorer(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 1, 8, 8])
    """

    takes_measurement = True

    def __init__(self, cell: RestoringCell, in_channels: int, solving: Solving | None) -> None:
        self.factor = cell.data.pool.scale
        layer = EquilibriumLayer(cell, solving=solving)
        super().__init__(MeasurementStem(in_channels, self.factor), layer, nn.Identity())

    def reach(self, accuracy: float) -> int:
        """Return the reach of a restored pixel, in pixels of the restored image.

        A change beyond it changes the pixel by at most `accuracy` times that change.

        Two equilibria whose surroundings differ by e differ by S^½ M⁻¹ S^½ e with 0 ≤ S ≤ 1
        diagonal and M = I + S^½ H S^½, H the Hessian of the data term, in which a pixel reaches r
        pixels far. The inverse of such a matrix decays (Demko, Moss, Smith, 1984):

            ‖M⁻¹ between sets more than kr apart‖ ≤ (1 + √κ)²/2κ · ρᵏ⁺¹,  ρ = (√κ − 1)/(√κ + 1)

        with κ = 1 + L the condition of M.
        """
        check_positive(accuracy=accuracy)
        cell = self.layer.cell
        assert isinstance(cell, RestoringCell)
        half = max(cell.data.W.kernel_size) // 2
        root = math.sqrt(1 + cell.limit * cell.data.growth)
        decay, constant = (root - 1) / (root + 1), (1 + root) ** 2 / (2 * root**2)
        steps = max(1, math.ceil(math.log(accuracy / constant) / math.log(decay)))
        # What differs outside enters r pixels deep, and the image is half a kernel from its code.
        return half + steps * (2 * half + self.factor - 1) + 1


class _Prior(Input):
    """−⟨Up + b, y⟩, of the picture alone."""

    def inject(self, picture: Tensor, known: Tensor) -> Context:  # type: ignore[override]
        return super().inject(picture)


def deq_restorer(
    *,
    in_channels: int = 1,
    channels: int = 32,
    kernel_size: int = 7,
    weight: float = 2.0,
    factor: int = 1,
    image_size: int | None = None,
    solving: Solving | None = None,
) -> EquilibriumRestorer:
    """A convolutional code of `channels` maps, fitted to what was measured; of any size.

    weight: of the data term against ½‖y‖²; high for little noise. factor: of a lower resolution.
    image_size: of the images it is trained on, on which the norm of W is bounded; W is then the
        same for pictures of all sizes. If None, the norm is bounded for each size anew.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.tiles import answer
        >>> restorer = deq_restorer(channels=4, kernel_size=3)
        >>> seen = eq.restoration.Denoising(0.1).corrupt(torch.rand(1, 1, 9, 7))
        >>> answer(restorer, seen).shape
        torch.Size([1, 1, 9, 7])
    """
    W = Conv2d(in_channels, channels, kernel_size, norm="bound", zeta=1.0)
    prior = _Prior(Conv2d(in_channels, channels, kernel_size), bias=True)
    side = None if image_size is None else max(image_size, 3 * kernel_size, LEAST_SIDE)
    cell = RestoringCell(DataTerm(W, weight, factor, side), prior)
    return EquilibriumRestorer(cell, in_channels, solving)
