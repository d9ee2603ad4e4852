"""Reflection networks: equilibria whose reflections compose to a 1-Lipschitz classifier.

The proximal operator of a convex potential, prox(u) = argmin_z ½‖z − u‖² + 1ᵀS(Wz + b), is firmly
nonexpansive, so that its reflection R(u) = 2 prox(u) − u is nonexpansive,

    ‖R(u) − R(v)‖ ≤ ‖u − v‖    for every W and b,

and, unlike an average or a ReLU, can keep distances: for one unit of norm ‖w‖ it mirrors the half
space w·u + b > 0 with the factor (1 − ‖w‖²)/(1 + ‖w‖²), which is −1 for large ‖w‖. Reflections of
several potentials one after the other, on an isometric embedding of the image, and a linear
classifier with rows of length 1 have margins w_k − w_j that are ‖h_k − h_j‖-Lipschitz in the image:
a margin divided by that is a radius within which no image has another class. Nothing has to be
kept small, in training or after it.

An explicit gradient step in place of the proximal operator is the convex potential layer of
Meunier et al. (ICML 2022), which has to be scaled by 1/‖W‖².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies import Input
from equilibria.energies.convex_potential import ConvexPotential
from equilibria.equilibrium import EnergyCell, EquilibriumLayer, Solving, StepBounds
from equilibria.models.base import EquilibriumClassifier
from equilibria.models.blocks import check_images
from equilibria.operators import Conv2d, Dense, Identity
from equilibria.operators.compose import OperatorLike
from equilibria.operators.norm_control import KernelOperator
from equilibria.operators.rounding import accumulated
from equilibria.registry import check_at_least_one, check_positive


class ReflectionCell(EnergyCell):
    """z = u − Wᵀσ(Wz + b), the proximal operator of a convex potential; its output is 2z − u.

    Solved by z ← z − s∇G(z), s = 2/(2 + ζ²) where ‖W‖ ≤ ζ: G is 1-strongly convex and its gradient
    (1 + ζ²)-Lipschitz, so that the map contracts by ζ²/(2 + ζ²).

    Examples:
        >>> layer = eq.EquilibriumLayer(cell=eq.models.ReflectionCell(eq.Dense(3, 3), zeta=1.0))
        >>> layer(torch.ones(1, 3)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self, W: OperatorLike, *, bias: bool | Tensor = True, zeta: float | None = None
    ) -> None:
        potential = ConvexPotential(W, bias, "relu")
        limit = zeta if zeta is not None else potential.W.norm_limit
        damping = 1.0 if limit is None else 2 / (2 + limit**2)
        energy = Input(Identity(), bias=False) + potential
        super().__init__(energy, "identity", damping=damping)

    output_form = "affine"

    def initial_state(self, x: Tensor, *others_and_context: Any) -> State:
        """u, which is where the potential vanishes."""
        return x

    def output(self, state: State, context: Context) -> Tensor:
        assert isinstance(state, Tensor)
        return 2 * state - context.parts["input"]["c"]

    @property
    def limits(self) -> StepBounds[float]:
        curvature = self.energy.limits.curvature
        return StepBounds(None if curvature is None else self._factor(curvature))

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        inherited, s = super().bounds(context, layout), self.damping

        def contraction() -> Tensor | None:
            curvature = self.energy.bounds(context, layout).curvature
            if curvature is None:
                return None
            return torch.maximum((s * (1 + curvature) - 1).abs(), curvature * 0 + abs(1 - s))

        return StepBounds(contraction, lambda: inherited.input)

    def _factor(self, curvature: float) -> float:
        s = self.damping
        return max(abs(1 - s), abs(s * (1 + curvature) - 1))

    @property
    def guarantee(self) -> str | None:
        """Guarantee of a unique, 1-Lipschitz equilibrium."""
        return "unique, 1-Lipschitz in the input"


class Isometry(nn.Module):
    """Images as maps of `channels` channels at 1/`downsample` of the resolution, or as vectors.

    Pixels of a square become channels, and channels of zeros fill up: distances stay as they are.
    `center` is taken off every pixel first: what all images have in common is far longer than what
    tells them apart, and a classifier would have to learn to overlook it. With `pool` the mean of
    each square of pixels, times its side, is all that is kept: distances are then no longer kept,
    but none grows.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int | None,
        downsample: int,
        flatten: bool,
        center: float = 0.0,
        pool: int = 1,
    ) -> None:
        super().__init__()
        check_at_least_one(downsample=downsample, pool=pool)
        own = in_channels * downsample**2
        if channels is not None and channels < own:
            raise ValueError(
                f"{in_channels} channels at 1/{downsample} of the resolution are {own}: give at "
                f"least so many channels, not {channels}"
            )
        self.in_channels = in_channels
        self.downsample = downsample
        self.added = 0 if channels is None else channels - own
        self.flatten = flatten
        self.center = center
        self.pool = pool

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        if any(side % (self.pool * self.downsample) for side in images.shape[2:]):
            raise ValueError(
                f"pool={self.pool} and downsample={self.downsample} need sides that they divide, "
                f"not {images.shape[2]}×{images.shape[3]}"
            )
        maps = images - self.center
        maps = self.pool * F.avg_pool2d(maps, self.pool) if self.pool > 1 else maps
        maps = F.pixel_unshuffle(maps, self.downsample)
        maps = F.pad(maps, (0, 0, 0, 0, 0, self.added)) if self.added else maps
        return maps.flatten(1) if self.flatten else maps

    def rounding(self, images: Tensor, unit: float) -> Tensor:
        """How far `forward` may be from what it is in exact arithmetic, of each image."""
        sizes: Tensor = torch.linalg.vector_norm(images.flatten(1), dim=1)
        sizes = sizes + abs(self.center) * math.sqrt(images[0].numel())
        return sizes * accumulated(self.pool**2 + 8, unit)


class UnitHead(nn.Module):
    """Logits ⟨h_k, z⟩ + b_k of the flattened feature, ‖h_k‖ = 1."""

    is_affine = True

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(num_classes, features) / math.sqrt(features))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    @property
    def rows(self) -> Tensor:
        return F.normalize(self.direction, dim=1)

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1)
        if flat.shape[1] != self.direction.shape[1]:
            raise ValueError(
                f"the classifier was made for {self.direction.shape[1]} features, not for "
                f"{flat.shape[1]}: give the model the side of its images as image_size"
            )
        return F.linear(flat, self.rows, self.bias)


class ReflectionNetwork(EquilibriumClassifier):
    """logits = head(R_L∘…∘R_1(embedding of the image)).

    Examples:
        >>> model = eq.load("digits-certified")
        >>> images = eq.data.load_digits().test.images[:1]
        >>> type(model).__name__, eq.certify(model, images).certified_class
        ('ReflectionNetwork', tensor([True]))
    """

    def reflections(self) -> list[EquilibriumLayer]:
        """In the order in which they are applied."""
        assert isinstance(self.stem, nn.Sequential)
        return [m for m in (*self.stem, self.layer) if isinstance(m, EquilibriumLayer)]

    def margin_slopes(self) -> Tensor:
        """How steep w_k − w_j can be in the pixels, (classes, classes); in the graph."""
        assert isinstance(self.head, UnitHead)
        rows = self.head.rows
        slopes: Tensor = torch.linalg.vector_norm(rows[:, None] - rows[None], dim=2)
        normalize = getattr(self, "normalize", None)
        return slopes if normalize is None else slopes / normalize.std.min()


def reflection_network(
    *,
    image_size: int = 28,
    filters: Sequence[int] = (),
    units: Sequence[int] = (512,),
    kernel_size: int = 3,
    channels: int | None = None,
    downsample: int = 1,
    center: float = 0.0,
    pool: int = 1,
    zeta: float = 4.0,
    norm: str = "estimate",
    num_classes: int = 10,
    in_channels: int = 3,
    solving: Solving | None = None,
) -> ReflectionNetwork:
    """A 1-Lipschitz classifier of reflections: convolutions first, then matrices.

    image_size: the side of the images, which matrices and the classifier depend on.
    filters, units: the rows of W of each convolution, and of each matrix.
    channels, downsample: of the maps that the convolutions see (`Isometry`).
    center: what is taken off every pixel, their mean. pool: of squares this wide the mean is kept.
    zeta: ‖W‖ at most. Large norms reflect almost fully, and take longer to solve.
    norm: how ‖W‖ is kept there: "estimate" or "bound". No certificate depends on it.

    Examples:
        >>> from equilibria.models.reflection.model import reflection_network
        >>> model = reflection_network(image_size=8, units=(16,), in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    check_positive(zeta=zeta)
    check_at_least_one(
        image_size=image_size, pool=pool, downsample=downsample, kernel_size=kernel_size
    )
    if not filters and not units:
        raise ValueError("a reflection network needs filters, units, or both")
    if image_size % (pool * downsample):
        raise ValueError(
            f"pool={pool} and downsample={downsample} do not divide image_size={image_size}"
        )
    width = channels or in_channels * downsample**2
    side = image_size // (pool * downsample)
    features = width * side**2
    embedding = Isometry(in_channels, channels, downsample, not filters, center, pool)
    layers: list[nn.Module] = [embedding]
    control = {"norm": norm, "zeta": zeta}
    for count in filters:
        padding = kernel_size // 2
        W = Conv2d(width, count, kernel_size, padding=padding, **control)  # type: ignore[arg-type]
        _scale_to(W, zeta, (width, side, side))
        layers.append(EquilibriumLayer(ReflectionCell(W, zeta=zeta), solving=solving))
    for place, count in enumerate(units):
        if filters and not place:
            layers.append(nn.Flatten())
        dense = Dense(features, count, **control)  # type: ignore[arg-type]
        _scale_to(dense, zeta, (features,))
        layers.append(EquilibriumLayer(ReflectionCell(dense, zeta=zeta), solving=solving))
    *first, last = layers
    assert isinstance(last, EquilibriumLayer)
    return ReflectionNetwork(nn.Sequential(*first), last, UnitHead(features, num_classes))


@torch.no_grad()
def _scale_to(W: KernelOperator, zeta: float, input_shape: tuple[int, ...]) -> None:
    """Begin at ‖W‖ = ζ: small weights reflect nothing."""
    if not W.kernels[0].is_meta:
        W.kernels[0].mul_(zeta / float(W._bound(input_shape)))
