"""Measurements of an image as operators: all of it, a lower resolution, some pixels, a blur.

Each says what restoration must know of it (`ImageMeasurement`). `AveragePool` is also the map
between the resolutions of a multi-scale model.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.context.state import at_least_float32
from equilibria.operators.base import LinearOperator, Shape, Weights, shape_error
from equilibria.operators.spectral import full_precision
from equilibria.registry import check_at_least_one, check_positive

WINDOW = 5
"""Side in pixels of the window over which `Identity.first_guess` smooths."""


class ImageMeasurement:
    """What restoration must know of a measurement A of images `(B, C, H, W)`.

    A base class for linear operators. The methods have defaults for a map whose measured values are
    an image of the same size; an operator overrides those that differ. `about` gives these methods
    for any map of images.

    Attributes:
        continues: Whether an image may be reflected beyond its edges before it is restored.
        hides: Whether A leaves out pixels and keeps the others, so that these can be put back.
        keeps_all: Whether A is the identity. The data term is then strongly convex.
        scale: How many times finer the image is than what was measured, in each direction.

    Examples:
        >>> isinstance(eq.operators.Blur(1.5), eq.operators.ImageMeasurement)
        True
    """

    continues: bool = True
    keeps_all: bool = False
    hides: bool = False
    scale: int = 1

    def check(self, measured: Tensor) -> None:
        """Raise a ValueError if an image cannot be restored from these measured values."""

    def part(self, rows: slice, columns: slice, size: tuple[int, int]) -> Any:
        """Return A for a part of the measured values, given as slices of their `size` (H, W)."""
        return self

    def reflected(self, margin: int, like: Tensor) -> Any:
        """Return A for measured values `like` that were reflected by `margin` pixels."""
        return self

    def counted(self, measured: Tensor) -> Tensor:
        """Return ones in the shape of `measured`, and zeros where nothing was measured."""
        return torch.ones_like(measured)

    def only_measured(self, values: Tensor) -> Tensor:
        """Return `values` with zeros where nothing is measured."""
        return values

    def first_picture(self, measured: Tensor) -> Tensor:
        """Return an image of full size that shows what was measured."""
        return measured

    def first_guess(self, measured: Tensor, noise: float) -> Tensor:
        """Return the image at which a solve starts; `noise` is that of the measured values."""
        return self.first_picture(measured)


class _Unknown(ImageMeasurement):
    """A map that is not an `ImageMeasurement`: its image ends at its edges."""

    continues = False

    def __init__(self, measurement: object) -> None:
        self.measurement = measurement

    def part(self, rows: slice, columns: slice, size: tuple[int, int]) -> Any:
        return self.measurement

    def reflected(self, margin: int, like: Tensor) -> Any:
        return self.measurement

    def counted(self, measured: Tensor) -> Tensor:
        known = getattr(self.measurement, "known", measured.new_ones(()))
        return known.to(measured).expand_as(measured)

    def first_picture(self, measured: Tensor) -> Tensor:
        picture = getattr(self.measurement, "picture", None)
        return measured if picture is None else picture(measured)


def about(measurement: object) -> ImageMeasurement:
    """Return what restoration must know of a measurement, with defaults for maps of the user.

    Examples:
        >>> from equilibria.operators.measurements import about
        >>> about(eq.operators.Identity()).keeps_all
        True
        >>> about(lambda images: images**2).keeps_all
        False
    """
    if isinstance(measurement, ImageMeasurement):
        return measurement
    return _Unknown(measurement)


class AveragePool(ImageMeasurement, LinearOperator):
    """P: the mean over s×s blocks; Pᵀ: nearest-neighbor upsampling divided by s².

    P Pᵀ = I/s², so that ‖P‖ = 1/s exactly. (The papers' upsampling is this Pᵀ: only then are the
    couplings between two resolutions the gradient of one energy.)

    directions: 2 for images (C, H, W); 1 for sequences (C, T), where s² is s and ‖P‖ = 1/√s.

    Examples:
        >>> pool = eq.AveragePool(2)
        >>> pool(torch.arange(4.0).reshape(1, 1, 2, 2))
        tensor([[[[1.5000]]]])
        >>> pool.norm_bound((1, 2, 2)).item()
        0.5
    """

    def __init__(self, scale: int, directions: int = 2) -> None:
        super().__init__()
        check_at_least_one(scale=scale)
        if directions not in (1, 2):
            raise ValueError(f"directions must be 1 or 2, not {directions}")
        self.scale = scale
        self.directions = directions

    def extra_repr(self) -> str:
        return f"{self.scale}" if self.directions == 2 else f"{self.scale}, directions=1"

    def output_shape(self, input_shape: Shape) -> Shape:
        channels, *sizes = input_shape or (0,)
        if len(sizes) != self.directions or any(n < 1 or n % self.scale for n in sizes):
            expected = f"{self._batch} with {' and '.join(self._axes)} divisible by {self.scale}"
            raise shape_error(self, "input", expected, input_shape)
        return (channels, *(n // self.scale for n in sizes))

    def input_shape(self, output_shape: Shape) -> Shape:
        channels, *sizes = output_shape or (0,)
        if len(sizes) != self.directions or min(sizes) < 1:
            raise shape_error(self, "output", self._batch, output_shape)
        return (channels, *(n * self.scale for n in sizes))

    @property
    def _axes(self) -> tuple[str, ...]:
        return ("T",) if self.directions == 1 else ("H", "W")

    @property
    def _batch(self) -> str:
        return f"(B, C, {', '.join(self._axes)})"

    @property
    def norm_limit(self) -> float:
        return float(self.scale ** (-self.directions / 2))

    def norm_bound(self, input_shape: Shape) -> Tensor:
        self.output_shape(input_shape)
        return self._constant(self.norm_limit)

    def picture(self, measured: Tensor) -> Tensor:
        """What was measured, as an image of the size of the original."""
        return F.interpolate(measured, scale_factor=self.scale, mode="nearest")

    def first_picture(self, measured: Tensor) -> Tensor:
        return self.picture(measured)

    def first_guess(self, measured: Tensor, noise: float) -> Tensor:
        """Return a smooth enlargement: blocks are a poor local minimum along level edges."""
        if self.scale == 1:
            return self.picture(measured)
        return F.interpolate(measured, scale_factor=self.scale, mode="bicubic")

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        pool = F.avg_pool1d if self.directions == 1 else F.avg_pool2d
        return pool(z, self.scale)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self.picture(y / self.scale**self.directions)


class _SameShape(ImageMeasurement, LinearOperator):
    """A map of samples to samples of the same shape, by default its own transpose."""

    def output_shape(self, input_shape: Shape) -> Shape:
        return tuple(input_shape)

    def input_shape(self, output_shape: Shape) -> Shape:
        return self.output_shape(output_shape)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self._map(y, weights)


class Identity(_SameShape):
    """z itself; norm 1.

    Examples:
        >>> eq.operators.Identity()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """

    norm_limit = 1.0
    keeps_all = True

    def norm_bound(self, input_shape: Shape) -> Tensor:
        return self._constant(1.0)

    def first_guess(self, measured: Tensor, noise: float) -> Tensor:
        """Return the image with less noise (Lee, 1980).

        With mean μ and variance v of the pixels around each pixel x, that is
        μ + (v − n)₊/max(v, n)·(x − μ), n being 1.5 times the variance of the noise.
        """
        wider = reflect(measured, WINDOW // 2)
        mean = F.avg_pool2d(wider, WINDOW, stride=1)
        variance = F.avg_pool2d(wider.square(), WINDOW, stride=1) - mean.square()
        floor = 1.5 * noise**2
        share = (variance - floor).clamp_min(0) / variance.clamp_min(floor)
        return mean + share * (measured - mean)

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return z


class Mask(_SameShape):
    """diag(known): pixels where `known` is 0 are hidden, and seen as 0.

    known: zeros and ones that fit the images, such as `(1, 1, height, width)`, or
        `(samples, 1, height, width)` for a batch whose samples have a mask each.

    Examples:
        >>> known = torch.tensor([[[[1.0, 0.0]]]])
        >>> eq.operators.Mask(known)(torch.tensor([[[[5.0, 7.0]]]]))
        tensor([[[[5., 0.]]]])
    """

    hides = True
    known: Tensor

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known)

    def output_shape(self, input_shape: Shape) -> Shape:
        shape, mask = tuple(input_shape), tuple(self.known.shape[1:])
        if len(shape) != len(mask) or any(
            m not in (1, s) for s, m in zip(shape, mask, strict=True)
        ):
            expected = f"({', '.join(['B', *map(str, mask)])}), or larger where that is 1"
            raise shape_error(self, "input", expected, shape)
        return shape

    def norm_bound(self, input_shape: Shape) -> Tensor:
        self.output_shape(input_shape)
        return at_least_float32(self.known).abs().amax()

    def fill(self, measured: Tensor, images: Tensor) -> Tensor:
        """What was seen, completed by `images` where nothing was."""
        known = self.known.to(images)
        return known * measured + (1 - known) * images

    def check(self, measured: Tensor) -> None:
        if not bool(self.known.any()):
            raise ValueError("the mask hides every pixel: nothing is left to restore from")

    def part(self, rows: slice, columns: slice, size: tuple[int, int]) -> Mask:
        return Mask(self.known.expand(-1, -1, *size)[..., rows, columns])

    def reflected(self, margin: int, like: Tensor) -> Mask:
        return Mask(reflect(self.known.to(like).expand(-1, -1, *like.shape[2:]), margin))

    def counted(self, measured: Tensor) -> Tensor:
        return self.known.to(measured).expand_as(measured)

    def only_measured(self, values: Tensor) -> Tensor:
        seen: Tensor = self(values)
        return seen

    def first_picture(self, measured: Tensor) -> Tensor:
        """Return what was measured, with holes filled by the mean of the pixels around them."""
        known = self.counted(measured)
        filled, seen, width = measured, known, 1
        while bool((seen == 0).any()) and width < max(measured.shape[2:]):
            width = 2 * width + 1
            kernel = {"kernel_size": width, "stride": 1, "padding": width // 2}
            total = F.avg_pool2d(measured * known, **kernel)  # type: ignore[arg-type]
            share = F.avg_pool2d(known, **kernel)  # type: ignore[arg-type]
            new = (seen == 0) & (share > 0)
            filled = torch.where(new, total / share.clamp_min(1e-12), filled)
            seen = torch.where(new, 1.0, seen)
        return filled

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return z * self.known.to(z)


class Blur(_SameShape):
    """A Gaussian blur of standard deviation `width` pixels; images are reflected at the edge.

    The kernel ends at three standard deviations. It is a product of one in each direction, so that
    A Z = B_h Z B_wᵀ with a small matrix for the rows and one for the columns, and
    ‖A‖ = ‖B_h‖·‖B_w‖.

    Examples:
        >>> eq.operators.Blur(1.5)(torch.ones(1, 1, 8, 8)).mean().round(decimals=3)
        tensor(1.)
    """

    def __init__(self, width: float) -> None:
        super().__init__()
        check_positive(width=width)
        self.width = width
        self.reach = max(1, ceil(3 * width))
        """Pixels from the center of the kernel to its end."""

    def extra_repr(self) -> str:
        return f"{self.width:g}"

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 3 or min(input_shape[1:]) <= self.reach:
            expected = f"(B, C, H, W) with sides of more than {self.reach} pixels"
            raise shape_error(self, "input", expected, input_shape)
        return tuple(input_shape)

    def check(self, measured: Tensor) -> None:
        self.output_shape(tuple(measured.shape[1:]))

    def norm_bound(self, input_shape: Shape) -> Tensor:
        _, height, width = self.output_shape(input_shape)
        norms: list[Tensor] = [
            torch.linalg.matrix_norm(self._matrix(side, self._constant(0.0)), 2)
            for side in (height, width)
        ]
        return norms[0] * norms[1]

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return self._matrix(z.shape[2], z) @ z @ self._matrix(z.shape[3], z).T

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self._matrix(y.shape[2], y).T @ y @ self._matrix(y.shape[3], y)

    def _matrix(self, size: int, like: Tensor) -> Tensor:
        """B: the weight of each of `size` pixels of a line in each blurred one."""
        precise = at_least_float32(like.new_empty(0))
        with full_precision(precise):
            steps = torch.arange(-self.reach, self.reach + 1, device=like.device)
            weights = torch.exp(-0.5 * (steps.to(precise) / self.width).square())
            seen = (torch.arange(size, device=like.device)[:, None] + steps).abs()
            reflected = size - 1 - (size - 1 - seen).abs()
            matrix = precise.new_zeros(size, size)
            matrix.scatter_add_(1, reflected, (weights / weights.sum()).expand(size, -1))
        return matrix.to(like)


def reflect(images: Tensor, margin: int) -> Tensor:
    """Continue images beyond each edge by `margin` mirrored pixels."""
    return F.pad(images, (margin, margin, margin, margin), mode="reflect")
