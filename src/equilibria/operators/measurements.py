"""What is measured of an image, as operators: all of it, a lower resolution, some pixels, a blur.

`AveragePool` is also the map between the resolutions of a multi-scale model.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.context import at_least_float32
from equilibria.operators.base import LinearOperator, Shape, Weights, shape_error
from equilibria.operators.spectral import full_precision
from equilibria.registry import check_at_least_one, check_positive


class AveragePool(LinearOperator):
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

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        pool = F.avg_pool1d if self.directions == 1 else F.avg_pool2d
        return pool(z, self.scale)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self.picture(y / self.scale**self.directions)


class _SameShape(LinearOperator):
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

    def norm_bound(self, input_shape: Shape) -> Tensor:
        return self._constant(1.0)

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
