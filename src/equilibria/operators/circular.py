"""Circular convolutions, which the Fourier transform turns into one small matrix per frequency.

The convolution y[n] = Σ_p K_p z[n + p − c], with the kernel's center c and indices modulo the grid,
is ŷ(ω) = K̂(ω) ẑ(ω) with the symbol K̂(ω) = Σ_p K_p e^{iω·(p−c)}. Transposes, products and inverses
of such maps are those of their symbols. Symbols have shape (frequencies, out, in) and contain the
half of the frequencies that real signals need; `as_real` converts them for a `Context`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.context.state import at_least_float32
from equilibria.operators import conv_symbol, spectral
from equilibria.operators.conv_symbol import Grid
from equilibria.operators.spectral import full_precision, graph_free


def symbol(kernel: Tensor, grid: Grid) -> Tensor:
    """Return the Fourier symbol of a circular convolution, at the frequencies of a real transform.

    Args:
        kernel: Kernel, shape (out, in, k, k) with odd k.
        grid: Height and width of the images.
    """
    taps = at_least_float32(kernel).flatten(2)
    omegas = conv_symbol.frequencies(grid, taps)
    axes = [
        torch.arange(k, device=taps.device, dtype=taps.dtype) - k // 2 for k in kernel.shape[2:]
    ]
    with full_precision(taps):
        angles = torch.cartesian_prod(*axes) @ omegas.T
        return torch.complex(taps @ angles.cos(), taps @ angles.sin()).permute(2, 0, 1)


def apply(symbol: Tensor, z: Tensor) -> Tensor:
    """Apply a circular convolution to a batch of images, on the grid of the images."""
    grid = (z.shape[2], z.shape[3])
    if not len(z):  # some FFT libraries do not support an empty batch
        return z.new_zeros(0, symbol.shape[1], *grid)
    spectrum = torch.fft.rfft2(at_least_float32(z))
    mixed = symbol @ spectrum.flatten(2).permute(2, 1, 0)
    folded = mixed.permute(2, 1, 0).reshape(len(z), -1, *spectrum.shape[2:])
    image: Tensor = torch.fft.irfft2(folded, s=grid)
    return image.to(z.dtype)


def subsampled_symbol(symbol: Tensor, grid: Grid, stride: int) -> Tensor:
    """Return the symbol of S G Sᵀ, G a circular map and S keeping every `stride`-th pixel.

    This map is circular too; its kernel is that of G at the multiples of the stride.
    """
    rows, columns = symbol.shape[1:]
    folded = symbol.permute(1, 2, 0).reshape(rows, columns, grid[0], grid[1] // 2 + 1)
    kernel = torch.fft.irfft2(folded, s=grid)
    coarse: Tensor = torch.fft.rfft2(kernel[..., ::stride, ::stride])
    return coarse.flatten(2).permute(2, 0, 1)


def as_real(symbol: Tensor) -> Tensor:
    """Return a symbol as a real tensor, with real and imaginary parts in the last dimension."""
    return torch.view_as_real(symbol.resolve_conj().contiguous())


def as_complex(stored: Tensor) -> Tensor:
    """Return the symbol from the result of `as_real`."""
    return torch.view_as_complex(stored.contiguous())


def transposed_kernel(kernel: Tensor) -> Tensor:
    """Return the kernel of the transposed convolution."""
    return kernel.transpose(0, 1).flip(2, 3)


def gram_kernel(kernel: Tensor) -> Tensor:
    """Return the kernel of KᵀK for a circular convolution K, shape (in, in, 2k−1, 2k−1).

    It is Σ_p K_pᵀ K_{p+d} at lag d.
    """
    maps = kernel.transpose(0, 1)
    height, width = kernel.shape[2:]
    return F.conv2d(maps, maps, padding=(height - 1, width - 1)).transpose(0, 1)


def norm(kernel: Tensor, grid: Grid, stride: int = 1) -> Tensor:
    """Return the exact norm of a circular convolution, with a stride that divides the grid.

    It is differentiable. If several frequencies attain the norm, the derivative is that of one of
    them; for the zero kernel it is zero.
    """
    precise = conv_symbol.polyphase(at_least_float32(kernel), stride)
    coarse = (grid[0] // stride, grid[1] // stride)
    with graph_free(precise):
        fixed = precise.detach()
        size = fixed.abs().amax()
        usable = bool((size > 0) & (size < torch.inf))
        if usable:
            frequency = conv_symbol.maximizing_frequency(fixed, coarse)
            top = spectral.top_singular(conv_symbol.symbol(fixed, frequency))
    with full_precision(precise):
        if not usable:
            return (precise * 0).sum()  # NaN if the kernel is not finite
        matrix = conv_symbol.symbol(precise, frequency)
        return spectral.singular_value(lambda v: matrix @ v, lambda u: matrix.mH @ u, top)
