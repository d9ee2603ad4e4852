"""Depthwise-separable convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.operators import conv_symbol
from equilibria.operators.base import Shape, Weights
from equilibria.operators.conv import Convolution
from equilibria.operators.norm_control import random_kernel


class SeparableConv2d(Convolution):
    """Depthwise-separable convolution z ↦ P (D ∗ z) on (C, H, W) samples, without bias.

    `depthwise` D, shape (in, 1, k, k), filters each channel; `pointwise` P, shape (out, in, 1, 1),
    mixes the channels. They have k²·in + in·out parameters, where Conv2d has k²·in·out. `weights`
    returns (P, D); norm control scales P.

    The norm bound is that of `Conv2d` for the kernel P·D, which is never formed: its symbol is
    P diag(d̂(ω)). It is as tight as that of `Conv2d`. The product of the norms of P and D would
    exceed the norm by 20 to 100 % for 8 channels and more.

    Args:
        in_channels, out_channels: Number of channels.
        kernel_size: Side of D, or height and width.
        stride: Stride of D; the height and width of inputs must be divisible by it.
        padding: Zero padding of D; by default (k − 1)//2 ("same").
        norm: Norm control: "bound" guarantees ‖W‖ ≤ ζ, "estimate" approximates it by power
            iteration, None disables it.
        zeta: Limit ζ on the norm.

    Examples:
        >>> separable = eq.operators.SeparableConv2d(8, 16, 3)
        >>> sum(p.numel() for p in separable.parameters())  # Conv2d has 1152
        200
    """

    axes = "HW"
    kernel_names = ("pointwise", "depthwise")
    pointwise: nn.Parameter
    depthwise: nn.Parameter

    def _random_kernels(
        self, in_channels: int, out_channels: int, size: Shape
    ) -> tuple[nn.Parameter, ...]:
        depthwise = random_kernel(in_channels, 1, *size)
        return random_kernel(out_channels, in_channels, 1, 1), depthwise

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        return self.depthwise.shape[0]

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.pointwise.shape[0]

    @property
    def kernel_size(self) -> Shape:
        """Height and width of the depthwise kernel."""
        return tuple(self.depthwise.shape[2:])

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        pointwise, depthwise = weights
        return F.conv2d(self._convolve(z, depthwise, groups=self.in_channels), pointwise)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        pointwise, depthwise = weights
        mixed = F.conv2d(y, pointwise.transpose(0, 1))
        return self._convolve_adjoint(mixed, depthwise, groups=self.in_channels)

    def _search(self, kernels: Weights, input_shape: Shape) -> Any:
        pointwise, depthwise = kernels
        nonzero = pointwise.flatten(1).any(0) & depthwise.flatten(1).any(1)
        # The product of two nonzero kernels can be zero.
        return super()._search(kernels, input_shape) if bool(nonzero.any()) else None

    def _symbol(self, kernels: Weights, frequency: Tensor) -> Tensor:
        """Return P times the real and imaginary parts of every phase of d̂(ω), (out, in·2s²).

        Times its transpose this is P diag(Σ|d̂(ω)|²) Pᵀ, as for the symbol P diag(d̂(ω)). Unlike
        P diag(|d̂(ω)|), it is smooth where d̂(ω) = 0.
        """
        pointwise, depthwise = kernels
        phases = conv_symbol.symbol(conv_symbol.polyphase(depthwise, self.stride), frequency)
        parts = torch.view_as_real(phases).flatten(1)
        return (pointwise.flatten(1)[:, :, None] * parts).flatten(1)

    def _maximizing_frequency(
        self, kernels: Weights, grid: conv_symbol.Grid, near: Tensor | None = None
    ) -> Tensor:
        pointwise, depthwise = kernels
        filters = conv_symbol.polyphase(depthwise, self.stride)
        return maximizing_frequency(pointwise.flatten(1), filters, grid, near)


def maximizing_frequency(
    matrix: Tensor, filters: Tensor, grid: conv_symbol.Grid, near: Tensor | None = None
) -> Tensor:
    """Return the frequency at which P diag(d̂(ω)) has the largest singular value.

    This is the Fourier symbol of the separable convolution with pointwise matrix P and depthwise
    filters d. The singular value depends only on g(ω) = Σ|d̂(ω)|², a sum over the s² phases of a
    stride s, so all matrices are real: the Gram matrix is P diag(g) Pᵀ for wide P, else diag(√g)
    PᵀP diag(√g), which is elementwise.

    Args:
        matrix: P, shape (out, in).
        filters: Polyphase filters, shape (in, s², k, k).
        grid: Number of frequencies per direction.
        near: Result of a previous search for a similar kernel, which makes the search faster.
    """
    omegas = conv_symbol.frequencies(grid, filters)
    power = conv_symbol.power(filters, omegas)
    rows, columns = matrix.shape
    inner = matrix.mT @ matrix

    def grams(indices: Tensor) -> Tensor:
        if rows < columns:
            return (matrix * power[indices][:, None, :]) @ matrix.mT
        root = power[indices].sqrt()
        return root[:, :, None] * inner * root[:, None, :]

    traces = power @ inner.diagonal()
    elements = min(rows, columns) * columns
    hint = conv_symbol.closest(omegas, near)
    return omegas[conv_symbol.screened_search(traces, grams, elements, hint)]
