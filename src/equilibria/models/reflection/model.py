"""Reflection networks: 1-Lipschitz classifiers composed of reflections of equilibria.

The proximal operator of a convex potential, prox(u) = argmin_z ½‖z − u‖² + 1ᵀS(Wz + b), is firmly
nonexpansive. Its reflection R(u) = 2 prox(u) − u is therefore nonexpansive:

    ‖R(u) − R(v)‖ ≤ ‖u − v‖    for every W and b.

Unlike an average or a ReLU, a reflection can preserve distances: a unit of norm ‖w‖ mirrors the
half space w·u + b > 0 with the factor (1 − ‖w‖²)/(1 + ‖w‖²), which tends to −1 for large ‖w‖.

The network composes an isometric embedding of the image, reflections of several potentials, and a
linear classifier whose rows h_k have norm 1. Its margins w_k − w_j are ‖h_k − h_j‖-Lipschitz in the
image. A margin divided by this constant is a radius within which the prediction cannot change. The
norms of the weights need no constraint, in training or afterwards.

With an explicit gradient step instead of the proximal operator this is the convex potential layer
of Meunier et al. (ICML 2022), which must be scaled by 1/‖W‖².
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.equilibrium import EquilibriumLayer, Solving
from equilibria.models.base import EquilibriumClassifier
from equilibria.models.blocks import check_images
from equilibria.models.reflection.cell import ReflectionCell
from equilibria.models.reflection.dual import DualReflectionCell
from equilibria.operators import Conv2d, Dense
from equilibria.operators.norm_control import KernelOperator
from equilibria.operators.rounding import accumulated
from equilibria.registry import check_at_least_one, check_positive


class Isometry(nn.Module):
    """Isometric embedding of images as maps with more channels, or as vectors.

    The pixels of a square become channels, and channels of zeros are added.

    Args:
        in_channels: Channels of the images.
        channels: Channels of the maps; by default in_channels · downsample².
        downsample: Side of the squares.
        flatten: Whether to return vectors.
        center: Number subtracted from every pixel first. The common part of all images is much
            larger than their differences, and a classifier would have to learn to ignore it.
        pool: Side of squares of pixels of which only the mean (times the side) is kept. With
            pool > 1 the map is nonexpansive instead of isometric.
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
        required = in_channels * downsample**2
        if channels is not None and channels < required:
            raise ValueError(
                f"channels must be at least {required} (in_channels={in_channels}, "
                f"downsample={downsample}), got {channels}"
            )
        self.in_channels = in_channels
        self.downsample = downsample
        self.added = 0 if channels is None else channels - required
        self.flatten = flatten
        self.center = center
        self.pool = pool

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        if any(side % (self.pool * self.downsample) for side in images.shape[2:]):
            raise ValueError(
                f"the sides of images must be divisible by {self.pool * self.downsample} "
                f"(pool={self.pool}, downsample={self.downsample}), got "
                f"{images.shape[2]}×{images.shape[3]}"
            )
        maps = images - self.center
        maps = self.pool * F.avg_pool2d(maps, self.pool) if self.pool > 1 else maps
        maps = F.pixel_unshuffle(maps, self.downsample)
        maps = F.pad(maps, (0, 0, 0, 0, 0, self.added)) if self.added else maps
        return maps.flatten(1) if self.flatten else maps

    def rounding(self, images: Tensor, unit: float) -> Tensor:
        """Return an upper bound on the rounding error of `forward` per image.

        Args:
            images: Images, shape (B, C, H, W).
            unit: Unit roundoff of the arithmetic.

        Returns:
            Bounds in the L2 norm, shape (B,).
        """
        sizes: Tensor = torch.linalg.vector_norm(images.flatten(1), dim=1)
        sizes = sizes + abs(self.center) * math.sqrt(images[0].numel())
        return sizes * accumulated(self.pool**2 + 8, unit)


class UnitHead(nn.Module):
    """Linear classifier ⟨h_k, z⟩ + b_k of the flattened feature with ‖h_k‖ = 1.

    Args:
        features: Length of the flattened feature.
        num_classes: Number of classes.
    """

    is_affine = True

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(num_classes, features) / math.sqrt(features))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    @property
    def rows(self) -> Tensor:
        """The rows h_k, shape (classes, features)."""
        return F.normalize(self.direction, dim=1)

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1)
        if flat.shape[1] != self.direction.shape[1]:
            raise ValueError(
                f"expected {self.direction.shape[1]} features, got {flat.shape[1]}; set "
                "image_size to the side of the images"
            )
        return F.linear(flat, self.rows, self.bias)


class ReflectionNetwork(EquilibriumClassifier):
    """1-Lipschitz classifier logits = head(R_L∘…∘R_1(embedding of the image)) of reflections R_l.

    Args:
        stem: An `Isometry`, followed by all reflections but the last.
        layer: The last reflection.
        head: A `UnitHead`.

    Examples:
        >>> model = eq.load("digits-certified")
        >>> images = eq.data.load_digits().test.images[:1]
        >>> type(model).__name__, eq.certify(model, images).certified_class
        ('ReflectionNetwork', tensor([True]))
    """

    def reflections(self) -> list[EquilibriumLayer]:
        """Return the reflections R_1, …, R_L."""
        assert isinstance(self.stem, nn.Sequential)
        return [m for m in (*self.stem, self.layer) if isinstance(m, EquilibriumLayer)]

    def margin_slopes(self) -> Tensor:
        """Return the Lipschitz constants of the margins in the pixels.

        A margin is the difference of the logits of two classes k and j.

        Returns:
            Shape (classes, classes), differentiable.
        """
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
    dual: bool = False,
    num_classes: int = 10,
    in_channels: int = 3,
    solving: Solving | None = None,
) -> ReflectionNetwork:
    """Build a 1-Lipschitz classifier of convolutional reflections, followed by dense ones.

    Args:
        image_size: Side of the images.
        filters: Output channels of W, one number per convolutional reflection.
        units: Rows of W, one number per dense reflection.
        kernel_size: Side of the convolution kernels.
        channels: Channels of the maps (see `Isometry`).
        downsample: Side of the squares of pixels that become channels (see `Isometry`).
        center: Number subtracted from every pixel, such as the mean of all pixels.
        pool: Side of the squares of pixels that are averaged (see `Isometry`).
        zeta: Upper bound on ‖W‖. Larger norms reflect more completely and take longer to solve.
        norm: How ‖W‖ is controlled: "estimate" or "bound". Certificates do not depend on it.
        dual: Whether dense reflections are solved in the dual (see `DualReflectionCell`), which is
            faster for W with fewer rows than columns.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        solving: How the layers solve.

    Raises:
        ValueError: If sizes do not fit each other, or there is no reflection.

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
        raise ValueError("filters and units are both empty; a reflection network needs one of them")
    if image_size % (pool * downsample):
        raise ValueError(
            f"image_size must be divisible by {pool * downsample} (pool={pool}, "
            f"downsample={downsample}), got {image_size}"
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
    for index, count in enumerate(units):
        if filters and index == 0:
            layers.append(nn.Flatten())
        dense = Dense(features, count, **control)  # type: ignore[arg-type]
        _scale_to(dense, zeta, (features,))
        cell = DualReflectionCell(dense, zeta=zeta) if dual else ReflectionCell(dense, zeta=zeta)
        layers.append(EquilibriumLayer(cell, solving=solving))
    *first, last = layers
    assert isinstance(last, EquilibriumLayer)
    return ReflectionNetwork(nn.Sequential(*first), last, UnitHead(features, num_classes))


@torch.no_grad()
def _scale_to(W: KernelOperator, zeta: float, input_shape: tuple[int, ...]) -> None:
    """Scale W to norm ζ, because with small weights a reflection is almost the identity."""
    if not W.kernels[0].is_meta:
        W.kernels[0].mul_(zeta / float(W._bound(input_shape)))
