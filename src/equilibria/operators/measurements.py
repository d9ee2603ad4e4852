"""Measurements of images as operators: identity, average pooling, masks and blurs.

They provide the methods that restoration needs (`ImageMeasurement`). `AveragePool` also connects
the resolutions of multi-scale models.
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
    """Interface for restoration of a measurement A of images, shape (B, C, H, W).

    A base class of linear operators. The defaults suit maps whose measured values are images of the
    same size. `about` returns this interface for any map of images.

    Attributes:
        continues: Whether an image may be reflected beyond its edges before it is restored.
        hides: Whether A removes some pixels and keeps the others unchanged.
        keeps_all: Whether A is the identity. The data term is then strongly convex.
        scale: Factor between the sides of the image and of the measured values.

    Examples:
        >>> isinstance(eq.operators.Blur(1.5), eq.operators.ImageMeasurement)
        True
    """

    continues: bool = True
    keeps_all: bool = False
    hides: bool = False
    scale: int = 1

    def check(self, measured: Tensor) -> None:
        """Check whether an image can be restored from measured values.

        Args:
            measured: Measured values, shape (B, C, h, w).

        Raises:
            ValueError: If it cannot.
        """

    def part(self, rows: slice, columns: slice, size: tuple[int, int]) -> Any:
        """Return the measurement operator for a rectangular part of the measured values.

        Args:
            rows: Rows of the part.
            columns: Columns of the part.
            size: Height and width of all measured values.
        """
        return self

    def reflected(self, margin: int, like: Tensor) -> Any:
        """Return the measurement operator for measured values reflected at their edges.

        Args:
            margin: Number of reflected pixels per edge.
            like: Measured values before the reflection.
        """
        return self

    def counted(self, measured: Tensor) -> Tensor:
        """Return ones where a value was measured and zeros elsewhere.

        Args:
            measured: Measured values, shape (B, C, h, w).
        """
        return torch.ones_like(measured)

    def only_measured(self, values: Tensor) -> Tensor:
        """Return values with zeros where nothing is measured.

        Args:
            values: Values in the shape of measured values.
        """
        return values

    def first_picture(self, measured: Tensor) -> Tensor:
        """Return an image of full size that shows the measured values.

        Args:
            measured: Measured values, shape (B, C, h, w).
        """
        return measured

    def first_guess(self, measured: Tensor, noise: float | Tensor) -> Tensor:
        """Return the image at which a solve starts.

        Args:
            measured: Measured values, shape (B, C, h, w).
            noise: Standard deviation of the noise in the measured values; a tensor broadcasts with
                them.
        """
        return self.first_picture(measured)


class _Unknown(ImageMeasurement):
    """Defaults for a map that is not an `ImageMeasurement`; images are not reflected."""

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
    """Return the interface for restoration of a measurement, with defaults for custom maps.

    Args:
        measurement: An `ImageMeasurement`, or any map of images.

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
    """Average pooling P: the mean over s×s blocks.

    Pᵀ is nearest-neighbor upsampling divided by s², and P Pᵀ = I/s², so ‖P‖ = 1/s exactly. The
    upsampling of the papers is this Pᵀ: only then are the couplings between two resolutions the
    gradient of one energy.

    Args:
        scale: Side s of the blocks.
        directions: 2 for images (C, H, W), 1 for sequences (C, T), where blocks have s entries and
            ‖P‖ = 1/√s.

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
            raise ValueError(f"directions must be 1 or 2, got {directions}")
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
        """Return the measured values enlarged to the size of the original image.

        Args:
            measured: Measured values, shape (B, C, h, w).
        """
        return F.interpolate(measured, scale_factor=self.scale, mode="nearest")

    def first_picture(self, measured: Tensor) -> Tensor:
        return self.picture(measured)

    def first_guess(self, measured: Tensor, noise: float | Tensor) -> Tensor:
        """Return a smooth enlargement; one by blocks is near a poor local minimum."""
        if self.scale == 1:
            return self.picture(measured)
        return F.interpolate(measured, scale_factor=self.scale, mode="bicubic")

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        pool = F.avg_pool1d if self.directions == 1 else F.avg_pool2d
        return pool(z, self.scale)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self.picture(y / self.scale**self.directions)


class _SameShape(ImageMeasurement, LinearOperator):
    """Base class of maps to samples of the same shape, symmetric by default."""

    def output_shape(self, input_shape: Shape) -> Shape:
        return tuple(input_shape)

    def input_shape(self, output_shape: Shape) -> Shape:
        return self.output_shape(output_shape)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self._map(y, weights)


class Identity(_SameShape):
    """The identity z ↦ z, with norm 1.

    Examples:
        >>> eq.operators.Identity()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """

    norm_limit = 1.0
    keeps_all = True

    def norm_bound(self, input_shape: Shape) -> Tensor:
        return self._constant(1.0)

    def first_guess(self, measured: Tensor, noise: float | Tensor) -> Tensor:
        """Return a denoised image (Lee, 1980).

        With mean μ and variance v of the pixels around each pixel x, the result is
        μ + (v − n)₊/max(v, n)·(x − μ), where n is 1.5 times the variance of the noise.
        """
        wider = reflect(measured, WINDOW // 2)
        mean = F.avg_pool2d(wider, WINDOW, stride=1)
        variance = F.avg_pool2d(wider.square(), WINDOW, stride=1) - mean.square()
        floor = 1.5 * torch.as_tensor(noise).to(measured).square()
        share = (variance - floor).clamp_min(0) / variance.maximum(floor)
        return mean + share * (measured - mean)

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return z


class Mask(_SameShape):
    """Mask diag(known): sets pixels to 0 where `known` is 0.

    Args:
        known: Zeros and ones, broadcastable to the images: shape (1, 1, H, W), or (B, 1, H, W) for
            one mask per sample.

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
        """Return the measured values, with `images` in the hidden pixels.

        Args:
            measured: Measured values, shape (B, C, H, W).
            images: Images of the same shape.
        """
        known = self.known.to(images)
        return known * measured + (1 - known) * images

    def check(self, measured: Tensor) -> None:
        if not bool(self.known.any()):
            raise ValueError("the mask hides every pixel: at least one must be known")

    def part(self, rows: slice, columns: slice, size: tuple[int, int]) -> Mask:
        return Mask(self.known.expand(-1, -1, *size)[..., rows, columns])

    def reflected(self, margin: int, like: Tensor) -> Mask:
        return Mask(reflect(self.known.to(like).expand(-1, -1, *like.shape[2:]), margin))

    def counted(self, measured: Tensor) -> Tensor:
        return self.known.to(measured).expand_as(measured)

    def only_measured(self, values: Tensor) -> Tensor:
        masked: Tensor = self(values)
        return masked

    def first_picture(self, measured: Tensor) -> Tensor:
        """Return the measured values, with hidden pixels filled by the mean of their neighbors."""
        known = self.counted(measured)
        filled, is_filled, width = measured, known, 1
        while bool((is_filled == 0).any()) and width < max(measured.shape[2:]):
            width = 2 * width + 1
            kernel = {"kernel_size": width, "stride": 1, "padding": width // 2}
            total = F.avg_pool2d(measured * known, **kernel)  # type: ignore[arg-type]
            share = F.avg_pool2d(known, **kernel)  # type: ignore[arg-type]
            new = (is_filled == 0) & (share > 0)
            filled = torch.where(new, total / share.clamp_min(1e-12), filled)
            is_filled = torch.where(new, 1.0, is_filled)
        return filled

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return z * self.known.to(z)


class Blur(_SameShape):
    """Gaussian blur; images are reflected at their edges.

    The kernel is truncated at three standard deviations and is separable: A Z = B_h Z B_wᵀ with one
    matrix for the rows and one for the columns, so ‖A‖ = ‖B_h‖·‖B_w‖.

    Args:
        width: Standard deviation in pixels.

    Examples:
        >>> eq.operators.Blur(1.5)(torch.ones(1, 1, 8, 8)).mean().round(decimals=3)
        tensor(1.)
    """

    def __init__(self, width: float) -> None:
        super().__init__()
        check_positive(width=width)
        self.width = width
        self.reach = max(1, ceil(3 * width))
        """Number of pixels from the center of the kernel to its end."""

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
        """Return B, the matrix that blurs a line of `size` pixels."""
        precise = at_least_float32(like.new_empty(0))
        with full_precision(precise):
            steps = torch.arange(-self.reach, self.reach + 1, device=like.device)
            weights = torch.exp(-0.5 * (steps.to(precise) / self.width).square())
            position = (torch.arange(size, device=like.device)[:, None] + steps).abs()
            reflected = size - 1 - (size - 1 - position).abs()
            matrix = precise.new_zeros(size, size)
            matrix.scatter_add_(1, reflected, (weights / weights.sum()).expand(size, -1))
        return matrix.to(like)


def reflect(images: Tensor, margin: int) -> Tensor:
    """Continue images beyond each edge by `margin` mirrored pixels."""
    return F.pad(images, (margin, margin, margin, margin), mode="reflect")
