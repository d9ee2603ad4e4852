"""Zero-padded convolutions of sequences and images."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from equilibria.operators import conv_symbol, spectral
from equilibria.operators.base import Shape, Weights, shape_error
from equilibria.operators.norm_control import (
    KernelOperator,
    as_kernel,
    is_wrapped,
    random_kernel,
)

Size = int | tuple[int, ...]
"""One number for all directions, or one per direction."""

DENSE_LIMIT_WIDE_KERNEL = 1024
"""Limit instead of `spectral.DENSE_LIMIT` for kernels that are wider than half of the map, for
which the symbol gives a loose bound."""


class _Maximum(NamedTuple):
    """Point that attains the bound: a frequency, or None for the matrix of the whole map."""

    frequency: Tensor | None
    top: spectral.TopSingular


class Convolution(KernelOperator):
    """Base class of zero-padded convolutions: geometry and norm bound.

    A subclass defines the directions, the kernels, the channels, the symbol, and the frequency at
    which the symbol is largest. Sizes must be multiples of the stride, so that the transpose knows
    the size of its output.

    Args:
        in_channels, out_channels: Number of channels.
        kernel_size: Size of the kernel, for all directions or for each.
        stride: Stride; the sizes of inputs must be divisible by it.
        padding: Zero padding; by default (k − 1)//2 ("same").
        norm: "bound", "estimate" or None, see `KernelOperator`.
        zeta: Limit ζ on the norm.
    """

    axes: str
    """Names of the directions for messages, such as "HW"."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        *,
        stride: int = 1,
        padding: Size | None = None,
        norm: str | None = None,
        zeta: float = 0.95,
    ) -> None:
        size = self._each(kernel_size)
        if min(in_channels, out_channels, *size) < 1:
            raise ValueError(
                "channels and kernel size must be positive, "
                f"got {in_channels} -> {out_channels}, {kernel_size}"
            )
        kernels = self._random_kernels(in_channels, out_channels, size)
        super().__init__(*kernels, norm=norm, zeta=zeta)
        self._set_geometry(stride, padding)

    @abstractmethod
    def _random_kernels(
        self, in_channels: int, out_channels: int, size: Shape
    ) -> tuple[nn.Parameter, ...]: ...

    @property
    @abstractmethod
    def in_channels(self) -> int: ...

    @property
    @abstractmethod
    def out_channels(self) -> int: ...

    @property
    @abstractmethod
    def kernel_size(self) -> Shape: ...

    @abstractmethod
    def _symbol(self, kernels: Weights, frequency: Tensor) -> Tensor:
        """Return a differentiable matrix of out_channels rows with the symbol's singular values."""

    @abstractmethod
    def _maximizing_frequency(
        self, kernels: Weights, grid: conv_symbol.Grid, near: Tensor | None = None
    ) -> Tensor:
        """Return the frequency with the largest singular value of the symbol.

        Args:
            kernels: Kernels, scaled to unit size.
            grid: Number of frequencies per direction.
            near: Result of the last search on this grid.
        """

    def _set_geometry(self, stride: int, padding: Size | None) -> None:
        if not isinstance(stride, int) or stride < 1:
            raise ValueError(f"stride must be a positive integer, got {stride}")
        self.stride = stride
        self._last_maximum: dict[conv_symbol.Grid, Tensor] = {}
        same = tuple((k - 1) // 2 for k in self.kernel_size)
        self.padding = same if padding is None else self._each(padding)
        if min(self.padding) < 0:
            raise ValueError(f"padding must not be negative, got {padding}")

    def _each(self, size: Size) -> Shape:
        """Return the size in each direction."""
        sizes = (size,) * len(self.axes) if isinstance(size, int) else tuple(size)
        if len(sizes) != len(self.axes):
            raise ValueError(
                f"{type(self).__name__} needs one size, or one for each of {', '.join(self.axes)}, "
                f"got {size}"
            )
        return sizes

    @property
    def bias_shape(self) -> Shape:
        return (self.out_channels, *[1] * len(self.axes))

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}{self._control_repr()}"
        )

    def output_shape(self, input_shape: Shape) -> Shape:
        fits = len(input_shape) == 1 + len(self.axes)
        sizes = self._output_sizes(input_shape[1:]) if fits else None
        if sizes is None or input_shape[0] != self.in_channels:
            raise shape_error(self, "input", self._expected(self.in_channels), input_shape)
        return (self.out_channels, *sizes)

    def input_shape(self, output_shape: Shape) -> Shape:
        fits = len(output_shape) == 1 + len(self.axes)
        sizes = self._input_sizes(output_shape[1:]) if fits else None
        if sizes is None or output_shape[0] != self.out_channels:
            expected = f"{self._batch(self.out_channels)}, the shape of an output"
            raise shape_error(self, "output", expected, output_shape)
        return (self.in_channels, *sizes)

    def _batch(self, channels: int) -> str:
        return f"({', '.join(['B', str(channels), *self.axes])})"

    def _expected(self, channels: int) -> str:
        expected = self._batch(channels)
        smallest = [k - 2 * p for k, p in zip(self.kernel_size, self.padding, strict=True)]
        if max(smallest) > 1:
            expected += f" with {', '.join(self.axes)} at least {', '.join(map(str, smallest))}"
        if self.stride > 1:
            expected += f" with {' and '.join(self.axes)} divisible by the stride {self.stride}"
        return expected

    def _output_sizes(self, sizes: Shape) -> Shape | None:
        result = []
        for n, k, p in zip(sizes, self.kernel_size, self.padding, strict=True):
            if n < 1 or n % self.stride or n + 2 * p < k:
                return None
            result.append((n + 2 * p - k) // self.stride + 1)
        return tuple(result)

    def _input_sizes(self, sizes: Shape) -> Shape | None:
        """Return the multiple of the stride among the s input sizes with this output size."""
        result = []
        for m, k, p in zip(sizes, self.kernel_size, self.padding, strict=True):
            n = -(-((m - 1) * self.stride - 2 * p + k) // self.stride) * self.stride
            if m < 1 or n < 1:
                return None
            result.append(n)
        return tuple(result)

    def _convolve(self, z: Tensor, kernel: Tensor, groups: int = 1) -> Tensor:
        convolve, _ = conv_symbol.CONVOLUTIONS[len(self.axes)]
        return convolve(z, kernel, stride=self.stride, padding=self.padding, groups=groups)

    def _convolve_adjoint(self, y: Tensor, kernel: Tensor, groups: int = 1) -> Tensor:
        sizes = self._input_sizes(tuple(y.shape[2:]))
        assert sizes is not None  # checked by `adjoint`
        extra = [
            n - ((m - 1) * self.stride - 2 * p + k)
            for n, m, k, p in zip(sizes, y.shape[2:], self.kernel_size, self.padding, strict=True)
        ]
        _, transposed = conv_symbol.CONVOLUTIONS[len(self.axes)]
        return transposed(
            y,
            kernel,
            stride=self.stride,
            padding=self.padding,
            output_padding=extra,
            groups=groups,
        )

    def _search(self, kernels: Weights, input_shape: Shape) -> _Maximum | None:
        grid = conv_symbol.frequency_grid(
            input_shape[1:], self.kernel_size, self.padding, self.stride
        )
        if self._prefers_matrix(input_shape, grid):
            return _Maximum(None, spectral.top_singular(self._matrix(kernels, input_shape)))
        wrapped = is_wrapped(*kernels)
        near = None if wrapped else self._last_maximum.get(grid)
        if near is not None:
            near = near.to(kernels[0])
        frequency = self._maximizing_frequency(kernels, grid, near)
        if not wrapped:
            self._last_maximum[grid] = frequency
        return _Maximum(frequency, spectral.top_singular(self._symbol(kernels, frequency)))

    def _bound_at(self, kernels: Weights, input_shape: Shape, data: Any) -> Tensor:
        frequency, top = data
        if frequency is None:
            shape = self.output_shape(input_shape)
            return spectral.singular_value(
                lambda v: self._map(v.view(1, *input_shape), kernels).flatten(),
                lambda u: self._map_adjoint(u.view(1, *shape), kernels).flatten(),
                top,
            )
        matrix = self._symbol(kernels, frequency)
        return spectral.singular_value(lambda v: matrix @ v, lambda u: matrix.mH @ u, top)

    def _prefers_matrix(self, input_shape: Shape, grid: conv_symbol.Grid) -> bool:
        """Return whether to use the matrix: the map is small, or the symbol is more expensive."""
        small, large = sorted((math.prod(input_shape), math.prod(self.output_shape(input_shape))))
        phases = self.stride ** len(self.axes)
        inner, outer = sorted((self.out_channels, self.in_channels * phases))
        cheaper = small**2 * large <= conv_symbol.frequency_count(grid) * inner**2 * outer
        reach = max(k - 1 for k in self.kernel_size) / min(input_shape[1:])
        limit = DENSE_LIMIT_WIDE_KERNEL if reach > 0.5 else spectral.DENSE_LIMIT
        return large <= limit or cheaper

    def _matrix(self, kernels: Weights, input_shape: Shape) -> Tensor:
        """Return the matrix of the whole map."""
        size, like = math.prod(input_shape), kernels[0]
        basis = torch.eye(size, device=like.device, dtype=like.dtype).view(size, *input_shape)
        return self._map(basis, kernels).flatten(1).mT


C = TypeVar("C", bound="PlainConvolution")


class PlainConvolution(Convolution):
    """Base class of convolutions W ∗ z with one kernel of shape (out, in, k, …)."""

    kernel: nn.Parameter

    def _random_kernels(
        self, in_channels: int, out_channels: int, size: Shape
    ) -> tuple[nn.Parameter, ...]:
        return (random_kernel(out_channels, in_channels, *size),)

    @classmethod
    def from_tensor(
        cls: type[C],
        kernel: Tensor,
        stride: int = 1,
        padding: Size | None = None,
        norm: str | None = None,
        zeta: float = 0.95,
    ) -> C:
        """Create the operator of a kernel.

        Args:
            kernel: W, shape (out, in, k, …). An nn.Parameter is shared and remains trainable; any
                other tensor is a constant.
            stride: Stride; the sizes of inputs must be divisible by it.
            padding: Zero padding; by default (k − 1)//2 ("same").
            norm: Norm control, see the class.
            zeta: Limit ζ on the norm.
        """
        operator = cls.__new__(cls)
        parameter = as_kernel(kernel, 2 + len(cls.axes))
        KernelOperator.__init__(operator, parameter, norm=norm, zeta=zeta)
        operator._set_geometry(stride, padding)
        return operator

    @property
    def in_channels(self) -> int:
        return self.kernel.shape[1]

    @property
    def out_channels(self) -> int:
        return self.kernel.shape[0]

    @property
    def kernel_size(self) -> Shape:
        return tuple(self.kernel.shape[2:])

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return self._convolve(z, weights[0])

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return self._convolve_adjoint(y, weights[0])

    def row_norms(self, input_shape: Shape) -> Tensor:
        """Return the norm of the kernel of each output channel; rows near the edge use a part."""
        (kernel,) = self.weights(input_shape)
        norms: Tensor = torch.linalg.vector_norm(kernel.flatten(1), dim=1)
        return norms.view(self.bias_shape)

    def _symbol(self, kernels: Weights, frequency: Tensor) -> Tensor:
        return conv_symbol.symbol(conv_symbol.polyphase(kernels[0], self.stride), frequency)

    def _maximizing_frequency(
        self, kernels: Weights, grid: conv_symbol.Grid, near: Tensor | None = None
    ) -> Tensor:
        kernel = conv_symbol.polyphase(kernels[0], self.stride)
        return conv_symbol.maximizing_frequency(kernel, grid, near)


class Conv1d(PlainConvolution):
    """Zero-padded convolution z ↦ W ∗ z on (C, T) samples; kernel (out, in, k), without bias.

    The norm bound is that of `Conv2d` in one direction.

    Args:
        in_channels, out_channels: Number of channels.
        kernel_size: Length k of the kernel.
        stride: Stride; the length of inputs must be divisible by it.
        padding: Zero padding; by default (k − 1)//2 ("same").
        norm: Norm control: "bound" guarantees ‖W‖ ≤ ζ, "estimate" approximates it by power
            iteration, None disables it.
        zeta: Limit ζ on the norm.

    Examples:
        >>> eq.Conv1d(2, 3, 5)(torch.zeros(1, 2, 20)).shape
        torch.Size([1, 3, 20])
    """

    axes = "T"


class Conv2d(PlainConvolution):
    """Zero-padded convolution z ↦ W ∗ z on (C, H, W) samples; kernel (out, in, k, k), without bias.

    The norm bound is the largest singular value of the symbol (see `conv_symbol`). It exceeds the
    norm by at most 20 % for maps of side n ≥ 4 (k = 3) or n ≥ 8 (k = 5), and by 2 to 7 % for
    n ≥ 12. For small maps it is computed from the matrix and exact.

    Args:
        in_channels, out_channels: Number of channels.
        kernel_size: Side k of the kernel, or height and width.
        stride: Stride; the height and width of inputs must be divisible by it.
        padding: Zero padding; by default (k − 1)//2 ("same").
        norm: Norm control: "bound" guarantees ‖W‖ ≤ ζ, "estimate" approximates it by power
            iteration, None disables it.
        zeta: Limit ζ on the norm.

    Examples:
        >>> W = eq.Conv2d(3, 8, 3, norm="bound", zeta=0.9)
        >>> W(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
        >>> bool(W.norm_bound((3, 16, 16)) <= 0.9001)
        True
    """

    axes = "HW"
