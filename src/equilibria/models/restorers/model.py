"""Image restorer whose output minimizes an explicit objective: a data term and a learned prior.

After Gilton, Ongie, Willett, "Deep equilibrium architectures for inverse problems in imaging"
(2021), where a network replaces a proximal operator. Here it is an exact proximal operator.
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

MIN_SIDE = 17
"""Smallest side of the maps on which ‖W‖ is bounded for images of all sizes, in pixels.

From this side on the bound comes from the Fourier symbol. The side is also at least three kernels,
so that ‖W‖ is at most slightly larger on other maps.
"""


class DataTerm(Energy):
    """Data term (weight/2)·‖A Wᵀy − ŷ‖² of a code y and a measurement ŷ, without the constant.

    A multiplies by a mask and averages blocks of pixels. The inputs are Aᵀŷ and the mask.

    Args:
        W: Convolution from images to codes.
        weight: Weight of the term.
        factor: Side of the blocks that are averaged.
        side: Side of the maps on which ‖W‖ is normalized, which makes W the same for images of all
            sizes. By default ‖W‖ is normalized on maps of the size of z.
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
        measured = self.pool(z * context["known"])
        return self.weight * (
            0.5 * sum_per_sample(measured.square()) - sum_per_sample(z * context["pulled"])
        )

    def descent(self, state: State, context: Context) -> State:
        weights = context.weights("W")
        z = self.W.adjoint(one_tensor(state, self), weights)
        projected = self.pool.adjoint(self.pool(z * context["known"])) * context["known"]
        descent: Tensor = self.weight * self.W(context["pulled"] - projected, weights)
        return descent

    @property
    def limits(self) -> Bounds[float]:
        limit = self.W.norm_limit
        return Bounds(None if limit is None else self.weight * (limit / self.pool.scale) ** 2)

    @property
    def growth(self) -> float:
        """Factor by which the curvature may exceed its limit on maps larger than `side`.

        The symbol of W is a trigonometric polynomial of degree d, half the kernel. Its maximum is
        at most cos(πd/N)⁻² times that on a grid of N×N points (Ehlich and Zeller, 1964).
        """
        if self.side is None:
            return 1.0
        degree = max(self.W.kernel_size) // 2
        points = self.side + min(self.W.padding)
        return math.cos(math.pi * degree / points) ** -4


class RestoringCell(EnergyCell):
    """Cell of a restorer: a proximal gradient step of length 1/(1 + L) on its objective.

    The objective is strongly convex. L bounds the curvature of the data term, its only smooth term
    but ½‖y‖². The step is a contraction with factor L/(1 + L) for every weight of the data term, so
    the iteration converges to the unique minimizer. On maps larger than the data term's `side` this
    holds as long as the curvature is at most 2L.

    Args:
        data: Data term; ‖W‖ must be bounded by construction.
        prior: The linear term −⟨Up + b, y⟩.
    """

    def __init__(self, data: DataTerm, prior: Input) -> None:
        limit = data.limits.curvature
        if limit is None:
            raise ValueError("W needs a norm that is bounded by construction; set norm='bound'")
        if data.growth > 2:
            raise ValueError(
                f"side={data.side} is too small to bound the norm of W on larger maps; raise it"
            )
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
        """Return the restored image z = Wᵀy of a code y."""
        weights = context.parts["data_term"].weights("W")
        return self.data.W.adjoint(one_tensor(state, self.data), weights)


class MeasurementStem(nn.Module):
    """From a measurement ŷ and its operator A to the inputs of `DataTerm`: Aᵀŷ and the mask."""

    def __init__(self, in_channels: int, factor: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.factor = factor

    def forward(self, measured: Tensor, measurement: object | None = None) -> tuple[Tensor, Tensor]:
        check_images(measured, self.in_channels)
        factor = getattr(measurement, "scale", 1)
        if measurement is not None and factor != self.factor:
            raise ValueError(
                f"the model has factor={self.factor}, but the measurement reduces the resolution "
                f"by {factor}; build the model with factor={factor}"
            )
        if hasattr(measurement, "width"):
            raise ValueError(
                "the model cannot remove blur, only noise, masks and a reduced resolution"
            )
        height, width = (size * self.factor for size in measured.shape[2:])
        known = getattr(measurement, "known", None)
        mask = measured.new_ones(()) if known is None else known.to(measured)
        pulled = AveragePool(self.factor).adjoint(measured) * mask
        return pulled, mask.expand(len(measured), 1, height, width)


class EquilibriumRestorer(EquilibriumModel):
    """Restorer z = Wᵀy whose code y ≥ 0 minimizes ½‖y‖² − ⟨Up + b, y⟩ + (weight/2)‖Az − ŷ‖².

    ŷ is the measurement, A its operator and p = Aᵀŷ. The objective is strongly convex, so the
    restored image is unique.

    The model is called with ŷ and optionally A. The attribute `known` of A is the mask of measured
    pixels (by default all), and `scale` the factor of the resolution, which must be the model's.

    Args:
        cell: Cell of the layer.
        in_channels: Channels of the images.
        solving: How the layer solves.

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
        """Return the distance up to which restored pixels depend on other pixels.

        Changes beyond it have an effect of at most `accuracy` times their size. Two equilibria
        whose surroundings differ by e differ by S^½ M⁻¹ S^½ e with a diagonal 0 ≤ S ≤ 1 and
        M = I + S^½ H S^½. H is the Hessian of the data term, a band matrix of bandwidth r. The
        inverse of such a matrix decays (Demko, Moss, Smith, 1984):

            ‖M⁻¹ between sets more than kr apart‖ ≤ (1 + √κ)²/2κ · ρᵏ⁺¹,  ρ = (√κ − 1)/(√κ + 1)

        with κ = 1 + L the condition number of M.

        Args:
            accuracy: Largest relative effect of pixels outside the radius.

        Returns:
            The radius, in pixels of the restored image.
        """
        check_positive(accuracy=accuracy)
        cell = self.layer.cell
        assert isinstance(cell, RestoringCell)
        half = max(cell.data.W.kernel_size) // 2
        root = math.sqrt(1 + cell.limit * cell.data.growth)
        decay, constant = (root - 1) / (root + 1), (1 + root) ** 2 / (2 * root**2)
        steps = max(1, math.ceil(math.log(accuracy / constant) / math.log(decay)))
        # Changes outside enter up to r pixels deep; an image pixel depends on codes half a kernel
        # away.
        return half + steps * (2 * half + self.factor - 1) + 1


class _Prior(Input):
    """The linear term −⟨Up + b, y⟩, which does not depend on the mask."""

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
    """Build a restorer with a convolutional code, for images of any size.

    Args:
        in_channels: Channels of the images.
        channels: Channels of the code.
        kernel_size: Side of the kernels of W and U.
        weight: Weight of the data term relative to ½‖y‖²; larger for less noise.
        factor: Factor by which measurements reduce the resolution.
        image_size: Side of the training images. ‖W‖ is then bounded on maps of this side, and W is
            the same for images of all sizes. By default ‖W‖ is bounded separately for each size.
        solving: How the layer solves.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.tiles import answer
        >>> restorer = deq_restorer(channels=4, kernel_size=3)
        >>> noisy = eq.restoration.Denoising(0.1).corrupt(torch.rand(1, 1, 9, 7))
        >>> answer(restorer, noisy).shape
        torch.Size([1, 1, 9, 7])
    """
    W = Conv2d(in_channels, channels, kernel_size, norm="bound", zeta=1.0)
    prior = _Prior(Conv2d(in_channels, channels, kernel_size), bias=True)
    side = None if image_size is None else max(image_size, 3 * kernel_size, MIN_SIDE)
    cell = RestoringCell(DataTerm(W, weight, factor, side), prior)
    return EquilibriumRestorer(cell, in_channels, solving)
