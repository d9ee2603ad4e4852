"""The norm of a zero-padded convolution, through its symbol.

A convolution of a map (in one direction, T, or in two, H × W) is a corner of the circular one on a
larger grid, which the Fourier transform block-diagonalizes into K̂(ω) = Σ_p K_p e^{−iω·p}
(out × in matrices). Hence

    ‖conv‖ ≤ max_ω σ₁(K̂(ω))        over the grid's frequencies ω.

A stride s is no special case: sorting the pixels by their position modulo s (a permutation) turns
the kernel into its s² polyphase components (s in one direction), stacked as input channels of a
stride-1 convolution of size ⌈k/s⌉ on a grid s times coarser. This is the exact norm of the strided
circular convolution, σ₁([K̂(ω₁) … K̂(ω_{s²})])/s over the s² aliases of each frequency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.operators.spectral import seeded_vector

Grid = tuple[int, ...]
"""Points in each direction of a map."""

Convolve = Callable[..., Tensor]

CONVOLUTIONS: dict[int, tuple[Convolve, Convolve]] = {
    1: (F.conv1d, F.conv_transpose1d),
    2: (F.conv2d, F.conv_transpose2d),
}
"""torch's convolution and its transpose, by the number of directions."""

CHUNK_ELEMENTS = 2**20
"""Gram matrices are built a chunk of frequencies at a time: 16 MB of complex64 a chunk."""

POWER_STEPS = 2
FIRST_TRIES = 8


def polyphase(kernel: Tensor, stride: int) -> Tensor:
    """(out, in, k, k) → (out, in·s², ⌈k/s⌉, ⌈k/s⌉): the stride-1 kernel on the sorted pixels."""
    if stride == 1:
        return kernel
    out, channels, *sizes = kernel.shape
    missing = [zeros for k in reversed(sizes) for zeros in (0, -k % stride)]
    split = [count for k in sizes for count in (-(-k // stride), stride)]
    blocks = F.pad(kernel, missing).reshape(out, channels, *split)
    coarse, phases = range(2, blocks.dim(), 2), range(3, blocks.dim(), 2)
    return blocks.permute(0, 1, *phases, *coarse).flatten(1, 1 + len(sizes))


def frequency_grid(size: Grid, kernel_size: Grid, padding: Grid, stride: int) -> Grid:
    """How many frequencies a side, after `polyphase`.

    Before it, n + min(p, k−1) points are enough (and give a tighter bound on small maps than the
    n+k−1 of the full convolution): output i reads inputs i−p … i−p+k−1, the outputs that exist
    end at i = n+2p−k, and so what wraps around meets none of them.

    Kernels that do not overlap (k ≤ s, the 1×1 kernel among them) have a constant symbol: one
    frequency says it all.
    """
    return tuple(
        1 if k <= stride else math.ceil((n + min(p, k - 1)) / stride)
        for n, k, p in zip(size, kernel_size, padding, strict=True)
    )


def frequency_count(grid: Grid) -> int:
    """How many frequencies `frequencies` gives."""
    return math.prod(grid[:-1]) * (grid[-1] // 2 + 1)


def frequencies(grid: Grid, like: Tensor) -> Tensor:
    """The grid's frequencies, a row each; half of them: K is real, so K̂(−ω) = conj K̂(ω)."""
    steps = like.new_tensor([2 * math.pi / points for points in grid])
    return _positions((*grid[:-1], grid[-1] // 2 + 1), like) * steps


def symbol(kernel: Tensor, frequency: Tensor) -> Tensor:
    """K̂(ω) = Σ_p K_p e^{−iω·p} at one frequency: (out, in), complex, differentiable in K."""
    angles = _positions(kernel.shape[2:], frequency) @ frequency
    taps = kernel.flatten(2)
    return torch.complex(taps @ angles.cos(), -(taps @ angles.sin()))


def power(kernel: Tensor, omegas: Tensor) -> Tensor:
    """Σ_j |K̂_ij(ω)|² for every row i of the symbol and every frequency: (count, rows)."""
    angles = omegas @ _positions(kernel.shape[2:], omegas).T
    taps = kernel.flatten(2).permute(2, 0, 1).flatten(1)
    squares = (angles.cos() @ taps).square() + (angles.sin() @ taps).square()
    return squares.view(len(omegas), *kernel.shape[:2]).sum(2)


def maximizing_frequency(kernel: Tensor, grid: Grid, near: Tensor | None = None) -> Tensor:
    """The frequency of the largest σ₁(K̂(ω)): the answer of the full search, for less.

    near: where it was before the kernel changed a little, which makes the search shorter, and its
        answer no other.
    """
    lags, table = _autocorrelation(kernel)
    omegas = frequencies(grid, kernel)
    traces = torch.cos(omegas @ lags.T) @ table.diagonal(dim1=-2, dim2=-1).sum(-1)
    winner = screened_search(
        traces,
        lambda some: _grams(omegas[some], lags, table),
        table.shape[-1] ** 2,
        closest(omegas, near),
    )
    return omegas[winner]


def closest(omegas: Tensor, near: Tensor | None) -> Tensor | None:
    """Which of the frequencies it is."""
    return None if near is None else (omegas - near).abs().sum(dim=1).argmin()


def screened_search(
    traces: Tensor,
    grams: Callable[[Tensor], Tensor],
    elements: int,
    hint: Tensor | None = None,
) -> Tensor:
    """The index of the positive semidefinite matrix G with the largest eigenvalue λ₁.

    `traces` are theirs, `grams(indices)` makes some of them, at the price of that many `elements`
    each. With `best` the largest eigenvalue found so far, a matrix is out as soon as tr G < best,
    or best·I − G has a Cholesky factor (which proves λ₁(G) < best at a fraction of the price of
    eigenvalues). `best` is good from the start: it begins at that of `hint`, or a few power steps
    say which ones to try first. Of those that tie up to rounding the first index is taken, so that
    the answer does not depend on where the search began.
    """
    traces, order = traces.sort(descending=True)
    slack = 8 * math.sqrt(elements) * torch.finfo(traces.dtype).eps
    best = traces.new_zeros(()) if hint is None else _largest(grams(hint[None])).amax()
    names, values = [order[:1]], [traces.new_zeros(1)]
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
            names.append(chunk[tried])
            values.append(_largest(matrices[tried]))
            best = torch.maximum(best, values[-1].amax())
        is_open = _not_below(matrices, best * (1 - slack))
        is_open[tried] = False
        open_cases = is_open.nonzero().squeeze(1)
        if len(open_cases):
            names.append(chunk[open_cases])
            values.append(_largest(matrices[open_cases]))
            best = torch.maximum(best, values[-1].amax())
    largest = torch.cat(values)
    return torch.cat(names)[largest >= largest.amax() * (1 - slack)].amin()


def _largest(grams: Tensor) -> Tensor:
    """The largest eigenvalue of each."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(grams)
    return eigenvalues[:, -1]


def _rayleigh(grams: Tensor) -> Tensor:
    """Lower bounds of the largest eigenvalues, by power steps from one fixed vector."""
    vector = seeded_vector((grams.shape[-1], 1), grams.real).to(grams.dtype)
    vector = vector.expand(len(grams), -1, -1)
    for _ in range(POWER_STEPS):
        image = grams @ vector
        vector = image / torch.linalg.vector_norm(image, dim=1, keepdim=True).clamp_min(
            torch.finfo(grams.dtype).tiny
        )
    return (vector.mH @ (grams @ vector)).real.flatten()


def _not_below(grams: Tensor, level: Tensor) -> Tensor:
    """True where λ₁ < level is *not* proved by a Cholesky factor of level·I − G."""
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    info: Tensor = torch.linalg.cholesky_ex(shifted).info
    return info != 0


def _autocorrelation(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Lags d and matrices R_d = Σ_p K_{p+d} K_pᵀ, so that K̂K̂ᴴ(ω) = Σ_d R_d e^{−iω·d}.

    The Gram matrix of every frequency then costs (2k−1)² multiples of small matrices and never a
    product over the larger channel count. The smaller Gram matrix is taken (K̂ᴴK̂ is the Gram
    matrix of the kernel with its channels swapped, up to conjugation, which changes no eigenvalue).
    """
    if kernel.shape[0] > kernel.shape[1]:
        kernel = kernel.transpose(0, 1)
    sizes = kernel.shape[2:]
    reach = [k - 1 for k in sizes]
    # Correlating K with itself: its output channels act as batch on one side, as filters on the
    # other. Position (k−1) of the result is lag zero.
    convolve, _ = CONVOLUTIONS[len(sizes)]
    table = convolve(kernel, kernel, padding=reach).flatten(2).permute(2, 0, 1)
    lags = _positions([2 * k - 1 for k in sizes], kernel) - kernel.new_tensor(reach)
    return lags, table


def _grams(omegas: Tensor, lags: Tensor, table: Tensor) -> Tensor:
    """Σ_d R_d e^{−iω·d} for each ω, up to conjugation: (count, m, m), Hermitian."""
    angles = omegas @ lags.T
    flat = table.flatten(1)
    real, imaginary = angles.cos() @ flat, angles.sin() @ flat
    return torch.complex(real, imaginary).view(len(omegas), *table.shape[1:])


def _positions(size: Sequence[int], like: Tensor) -> Tensor:
    """The points of a grid, a row each."""
    axes = [torch.arange(n, device=like.device, dtype=like.dtype) for n in size]
    return torch.cartesian_prod(*axes).view(-1, len(axes))
