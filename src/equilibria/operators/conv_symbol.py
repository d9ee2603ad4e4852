"""Bound on the norm of a zero-padded convolution by its symbol.

A convolution of a map (in one direction, T, or in two, H × W) is a part of the circular convolution
on a larger grid, which the Fourier transform block-diagonalizes into the (out × in) matrices
K̂(ω) = Σ_p K_p e^{−iω·p}. Hence

    ‖conv‖ ≤ max_ω σ₁(K̂(ω))        over the frequencies ω of the grid.

With a stride s, sorting the pixels by their position modulo s, which is a permutation, turns the
kernel into its s² polyphase components (s in one direction). They are stacked as input channels of
a stride-1 convolution of size ⌈k/s⌉ on a grid s times coarser. This gives the exact norm of the
strided circular convolution, σ₁([K̂(ω₁) … K̂(ω_{s²})])/s over the s² aliases of each frequency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.operators.spectral import seeded_vector

Grid = tuple[int, ...]
"""Number of points in each direction of a map."""

Convolve = Callable[..., Tensor]

CONVOLUTIONS: dict[int, tuple[Convolve, Convolve]] = {
    1: (F.conv1d, F.conv_transpose1d),
    2: (F.conv2d, F.conv_transpose2d),
}
"""PyTorch's convolution and its transpose, by the number of directions."""

CHUNK_ELEMENTS = 2**20
"""Elements of the Gram matrices that are computed at once: 8 MB in complex64."""

POWER_STEPS = 2
"""Number of power steps that rank the matrices of a chunk."""

FIRST_TRIES = 8
"""Number of highest-ranked matrices whose eigenvalues are computed first."""


def polyphase(kernel: Tensor, stride: int) -> Tensor:
    """Return the kernel of a strided convolution as one of stride 1 on sorted pixels.

    The shape (out, in, k, k) becomes (out, in·s², ⌈k/s⌉, ⌈k/s⌉) for stride s.
    """
    if stride == 1:
        return kernel
    out, channels, *sizes = kernel.shape
    missing = [zeros for k in reversed(sizes) for zeros in (0, -k % stride)]
    split = [count for k in sizes for count in (-(-k // stride), stride)]
    blocks = F.pad(kernel, missing).reshape(out, channels, *split)
    coarse, phases = range(2, blocks.dim(), 2), range(3, blocks.dim(), 2)
    return blocks.permute(0, 1, *phases, *coarse).flatten(1, 1 + len(sizes))


def frequency_grid(size: Grid, kernel_size: Grid, padding: Grid, stride: int) -> Grid:
    """Return the number of frequencies per direction that bound a convolution's norm.

    It is for kernels after `polyphase`. Before that, for size n, kernel size k and padding p, n +
    min(p, k−1) points suffice, and give a tighter bound on small maps than the n+k−1 points of the
    full convolution: output i reads the inputs i−p … i−p+k−1, and the last output is i = n+2p−k, so
    no output reads an input that wraps around.

    Kernels that do not overlap (k at most the stride, for example 1×1) have a constant symbol, so
    one frequency is enough.
    """
    return tuple(
        1 if k <= stride else math.ceil((n + min(p, k - 1)) / stride)
        for n, k, p in zip(size, kernel_size, padding, strict=True)
    )


def frequency_count(grid: Grid) -> int:
    """Return the number of rows of `frequencies`."""
    return math.prod(grid[:-1]) * (grid[-1] // 2 + 1)


def frequencies(grid: Grid, like: Tensor) -> Tensor:
    """Return half of the frequencies of a grid, one per row.

    The others add nothing: kernels K are real, so their symbols satisfy K̂(−ω) = conj K̂(ω).
    """
    steps = like.new_tensor([2 * math.pi / points for points in grid])
    return _positions((*grid[:-1], grid[-1] // 2 + 1), like) * steps


def symbol(kernel: Tensor, frequency: Tensor) -> Tensor:
    """Return the Fourier symbol K̂(ω) = Σ_p K_p e^{−iω·p} of a kernel K at one frequency ω.

    It has shape (out, in), is complex, and is differentiable in K.
    """
    angles = _positions(kernel.shape[2:], frequency) @ frequency
    taps = kernel.flatten(2)
    return torch.complex(taps @ angles.cos(), -(taps @ angles.sin()))


def power(kernel: Tensor, omegas: Tensor) -> Tensor:
    """Return Σ_j |K̂_ij(ω)|², K̂ the Fourier symbol of a kernel, for every frequency ω and row i.

    The shape is (frequencies, rows).
    """
    angles = omegas @ _positions(kernel.shape[2:], omegas).T
    taps = kernel.flatten(2).permute(2, 0, 1).flatten(1)
    squares = (angles.cos() @ taps).square() + (angles.sin() @ taps).square()
    return squares.view(len(omegas), *kernel.shape[:2]).sum(2)


def maximizing_frequency(kernel: Tensor, grid: Grid, near: Tensor | None = None) -> Tensor:
    """Return the frequency at which a kernel's Fourier symbol has the largest singular value.

    The search is exact.

    Args:
        kernel: Kernel after `polyphase`.
        grid: Number of frequencies per direction.
        near: Result for a similar kernel, which makes the search faster but does not change the
            result.
    """
    lags, table = _autocorrelation(kernel)
    omegas = frequencies(grid, kernel)
    traces = torch.cos(omegas @ lags.T) @ table.diagonal(dim1=-2, dim2=-1).sum(-1)
    winner = screened_search(
        traces,
        lambda indices: _grams(omegas[indices], lags, table),
        table.shape[-1] ** 2,
        closest(omegas, near),
    )
    return omegas[winner]


def closest(omegas: Tensor, near: Tensor | None) -> Tensor | None:
    """Return the index of the frequency closest to `near`, or None if that is None."""
    return None if near is None else (omegas - near).abs().sum(dim=1).argmin()


def screened_search(
    traces: Tensor,
    grams: Callable[[Tensor], Tensor],
    elements: int,
    hint: Tensor | None = None,
) -> Tensor:
    """Return the index of the positive semidefinite matrix G with the largest eigenvalue λ₁.

    With `best` the largest eigenvalue so far, a matrix is excluded if tr G < best, or if
    best·I − G has a Cholesky factor, which proves λ₁(G) < best and is cheaper than eigenvalues.
    `best` starts at the eigenvalue of `hint`; without a hint, a few power steps select the matrices
    to try first. Among matrices that tie up to rounding the first index is returned, so that the
    result does not depend on the hint.

    Args:
        traces: Traces of all matrices.
        grams: Returns the matrices at some indices.
        elements: Number of elements of a matrix, for the size of the chunks.
        hint: Index of a matrix with a large eigenvalue.
    """
    traces, order = traces.sort(descending=True)
    slack = 8 * math.sqrt(elements) * torch.finfo(traces.dtype).eps
    best = traces.new_zeros(()) if hint is None else _largest(grams(hint[None])).amax()
    indices, values = [order[:1]], [traces.new_zeros(1)]
    step = max(1, CHUNK_ELEMENTS // elements)
    for begin in range(0, len(order), step):
        count = int((traces[begin : begin + step] >= best * (1 - slack)).sum())
        if count == 0:
            break
        chunk = order[begin : begin + count]
        matrices = grams(chunk)
        tried = traces.new_zeros(0, dtype=torch.long)
        if hint is None:
            tried = _rayleigh(matrices).topk(min(FIRST_TRIES, count)).indices
            indices.append(chunk[tried])
            values.append(_largest(matrices[tried]))
            best = torch.maximum(best, values[-1].amax())
        is_open = _not_below(matrices, best * (1 - slack))
        is_open[tried] = False
        open_cases = is_open.nonzero().squeeze(1)
        if len(open_cases):
            indices.append(chunk[open_cases])
            values.append(_largest(matrices[open_cases]))
            best = torch.maximum(best, values[-1].amax())
    largest = torch.cat(values)
    return torch.cat(indices)[largest >= largest.amax() * (1 - slack)].amin()


def _largest(grams: Tensor) -> Tensor:
    """Return the largest eigenvalue of each matrix."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(grams)
    return eigenvalues[:, -1]


def _rayleigh(grams: Tensor) -> Tensor:
    """Return lower bounds on the largest eigenvalues, by power steps from a fixed vector."""
    vector = seeded_vector((grams.shape[-1], 1), grams.real).to(grams.dtype)
    vector = vector.expand(len(grams), -1, -1)
    for _ in range(POWER_STEPS):
        image = grams @ vector
        vector = image / torch.linalg.vector_norm(image, dim=1, keepdim=True).clamp_min(
            torch.finfo(grams.dtype).tiny
        )
    return (vector.mH @ (grams @ vector)).real.flatten()


def _not_below(grams: Tensor, level: Tensor) -> Tensor:
    """Return True where no Cholesky factor of level·I − G proves λ₁ < level."""
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    info: Tensor = torch.linalg.cholesky_ex(shifted).info
    return info != 0


def _autocorrelation(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return lags d and matrices R_d = Σ_p K_{p+d} K_pᵀ, so that K̂K̂ᴴ(ω) = Σ_d R_d e^{−iω·d}.

    The Gram matrix of each frequency then is a sum of (2k−1)² small matrices, without a product
    over the larger channel count. The smaller Gram matrix is used: K̂ᴴK̂ is, up to conjugation, the
    Gram matrix of the kernel with swapped channels and has the same nonzero eigenvalues.
    """
    if kernel.shape[0] > kernel.shape[1]:
        kernel = kernel.transpose(0, 1)
    sizes = kernel.shape[2:]
    reach = [k - 1 for k in sizes]
    # Correlate K with itself: the output channels are the batch on one side and the filters on the
    # other. Position (k−1) of the result is lag zero.
    convolve, _ = CONVOLUTIONS[len(sizes)]
    table = convolve(kernel, kernel, padding=reach).flatten(2).permute(2, 0, 1)
    lags = _positions([2 * k - 1 for k in sizes], kernel) - kernel.new_tensor(reach)
    return lags, table


def _grams(omegas: Tensor, lags: Tensor, table: Tensor) -> Tensor:
    """Return Σ_d R_d e^{−iω·d} for each ω, up to conjugation: (count, m, m), Hermitian."""
    angles = omegas @ lags.T
    flat = table.flatten(1)
    real, imaginary = angles.cos() @ flat, angles.sin() @ flat
    return torch.complex(real, imaginary).view(len(omegas), *table.shape[1:])


def _positions(size: Sequence[int], like: Tensor) -> Tensor:
    """Return the points of a grid, one per row."""
    axes = [torch.arange(n, device=like.device, dtype=like.dtype) for n in size]
    return torch.cartesian_prod(*axes).view(-1, len(axes))
