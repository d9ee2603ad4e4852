"""Learned image prior: a sum of ridge functions of filter responses.

After Goujon, Neumayer, Unser, "A neural-network-based convex regularizer for inverse problems"
(2022) and "Learning weakly convex regularizers for convergent image-reconstruction algorithms"
(2023), whose regularizers have this form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts
from equilibria.energies.terms import one_tensor
from equilibria.registry import check_at_least_one, check_not_negative, check_positive

LEVELS = (5 / 255, 10 / 255, 20 / 255, 35 / 255, 60 / 255)
"""Noise levels at which the scales of a prior are learned; others are interpolated."""
INITIAL_RESPONSE = 8.0
"""Initial standard deviation of scaled responses to noise; the first knot of the profile is 1."""
RATE_FACTOR = 5.0
"""Scales are stored divided by this factor, so that they learn faster than filters."""
BLOCK = 4
"""Side of the squares of pixels that are channels in differentiable convolutions."""
GRID_SIZE = 128
"""Frequencies per direction at which the norm of the filters is evaluated."""
RESPONSES_PER_PIECE = 2**18
"""Responses computed together without gradients; limits memory and fits a processor's cache."""
MAX_PIECE_WIDTH = 128
"""Upper limit of the width of a piece, in columns of responses."""


@dataclass(frozen=True)
class _Piece:
    """Responses on a rectangle of one channel of an image."""

    sample: int
    channel: int
    rows: slice
    columns: slice
    scales: Tensor
    """α of each filter, shape (filters,), or of each response."""
    responses: Tensor
    """α (W y), shape (rows, filters, columns)."""


class RidgePrior(Energy):
    """Learned image prior R(y; σ) = Σ_c Σ_pixels α_c(σ)⁻² ψ(α_c(σ) (W y)_c).

    It acts on each image channel separately. W is a zero-mean convolution without padding, with
    norm at most 1. ψ is even, and ψ′ has the slope S = `steepness` up to 1, then −ρ =
    −`concavity` until it is zero again at τ = 1 + S/ρ, and is zero from there on:

        ψ′(t) = (S + ρ) clamp(t, −1, 1) − ρ clamp(t, −τ, τ).

    Small responses, which are noise, are penalized; a response beyond τ costs no more if it grows.
    Scaling does not change slopes, so −ρ ≤ ∇²R ≤ S at every noise level. ½‖y − x‖² + R is strongly
    convex if ρ < 1, and R is convex if ρ = 0.

    Args:
        channels: Number of filters. They are initialized with cosines, without the constant one.
        kernel_size: Side length of the filters, in pixels.
        concavity: ρ, an upper bound on the eigenvalues of −∇²R.
        steepness: S, an upper bound on the eigenvalues of ∇²R.
        noise: Noise level σ; None takes the last input of the layer, one number per sample.
    """

    facts = Facts(vanishes_at_zero=True)
    levels: Tensor

    def __init__(
        self,
        channels: int = 48,
        kernel_size: int = 9,
        *,
        concavity: float = 0.9,
        steepness: float = 30.0,
        noise: float | None = None,
    ) -> None:
        super().__init__()
        check_not_negative(concavity=concavity)
        check_positive(steepness=steepness)
        check_at_least_one(channels=channels)
        if noise is not None:
            check_positive(noise=noise)
        if kernel_size < 2:
            raise ValueError(
                f"zero-mean filters need more than one pixel, got kernel_size={kernel_size}; "
                "use at least 2"
            )
        self.concavity = concavity
        self.steepness = steepness
        self.noise = noise
        self.size = kernel_size
        """Side length of the filters, in pixels."""
        self.kernel = nn.Parameter(_cosines(channels, kernel_size))
        # A cosine has norm 1/√channels in W.
        initial = math.log(INITIAL_RESPONSE * math.sqrt(channels + 1))
        log_scales = torch.full((channels, len(LEVELS)), initial / RATE_FACTOR)
        self.log_scales = nn.Parameter(log_scales)
        self.register_buffer("levels", torch.tensor(LEVELS).log(), persistent=False)

    @property
    def formula(self) -> str:
        return "Σ α⁻²ψ(αWy)"

    def extra_repr(self) -> str:
        return f"concavity={self.concavity:g}, steepness={self.steepness:g}"

    def inject(self, *inputs: Tensor) -> Context:
        """Compute the scale α_c(σ) of each sample and filter at the noise level σ."""
        if self.noise is not None:
            inputs = (*inputs, inputs[0].new_full((1,), self.noise))
        return Context(sample={"scales": self.scales(noise_level(*inputs), inputs[0])})

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        _, *sides = layout[0]
        if len(sides) != 2 or min(sides) < self.size:
            raise ValueError(
                f"a prior with {self.size}×{self.size} filters needs images (C, H, W) with H and W "
                f"of at least {self.size}, got {tuple(layout[0])}"
            )
        return {"W": self.filters()}

    def filters(self) -> Tensor:
        """Return W, zero-mean filters of norm at most 1, shape (filters, 1, size, size)."""
        filters = self.kernel - self.kernel.mean(dim=(2, 3), keepdim=True)
        return filters / norm_of_filters(filters)

    @property
    def _clamps(self) -> list[tuple[float, float]]:
        """Knots τ_k and factors s_k of ψ′(t) = Σ s_k clamp(t, −τ_k, τ_k), the largest knot last."""
        S, rho = self.steepness, self.concavity
        return [(1.0, S + rho), (1 + S / rho, -rho)] if rho else [(1.0, S)]

    def value(self, state: State, context: Context) -> Tensor:
        y = one_tensor(state, self)
        if self._is_differentiated(y, context):
            responses, alphas, counted = self._in_blocks(y, context)
            profile = self._profile(responses * alphas) * counted / alphas.square()
            return sum_per_sample(profile.reshape(len(y), -1))
        totals = y.new_zeros(len(y))
        for piece in self._pieces(y, context):
            scales = piece.scales[:, None] if piece.scales.dim() == 1 else piece.scales
            totals[piece.sample] += (self._profile(piece.responses) / scales.square()).sum()
        return totals

    def descent(self, state: State, context: Context) -> State:
        y = one_tensor(state, self)
        if self._is_differentiated(y, context):
            responses, alphas, counted = self._in_blocks(y, context)
            slopes = self._differentiable_slope(responses, alphas, counted)
            blocks = F.conv_transpose2d(slopes, _in_block_channels(context["W"]))
            pixels = F.pixel_shuffle(blocks, BLOCK)[..., : y.shape[2], : y.shape[3]]
            return -pixels.reshape(y.shape)
        descent = torch.zeros_like(y, memory_format=torch.contiguous_format)
        buffer: Tensor | None = None
        for piece in self._pieces(y, context):
            slopes, adjoint = self._slope_in_place(piece.responses), context["W"][:, 0].flip(1)
            if piece.scales.dim() == 1:
                adjoint = adjoint / piece.scales[:, None, None]
            else:
                slopes.div_(piece.scales)
            buffer = _contributions(adjoint.flatten(1).T, slopes, buffer)
            # Sum, for each image row, over the response rows whose filters cover it.
            rows = buffer.reshape(len(buffer), self.size, self.size, -1).unfold(0, self.size, 1)
            row_sums = rows.diagonal(dim1=1, dim2=4).sum(dim=-1)
            target = descent[piece.sample, piece.channel, piece.rows, piece.columns]
            for shift in range(self.size):
                target[:, shift : shift + slopes.shape[2]] -= row_sums[:, shift]
        return descent

    @property
    def limits(self) -> Bounds[float]:
        return Bounds(max(self.steepness, self.concavity), self.concavity)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        limits = self.limits
        return Bounds(torch.tensor(limits.curvature), torch.tensor(limits.concavity))

    def scales(self, noise: Tensor, image: Tensor | None, unit: float = 1.0) -> Tensor:
        """Return the filters' scales α = exp(learned scale at σ) / σ, shape (B, filters).

        The learned scale is interpolated in the logarithm of the noise level σ.

        Args:
            noise: Noise level σ of each sample, shape (B,).
            image: Noisy image, on which the scales of a subclass may depend.
            unit: Size of the image values relative to a grayscale image: the learned scales are
                read at `noise * unit`. `OpponentPrior` uses 1/√3 for the luminance of RGB images.
        """
        log_noise = (noise * unit).log().to(self.log_scales)
        right = torch.bucketize(log_noise.contiguous(), self.levels[1:-1].contiguous()) + 1
        below, above = self.levels[right - 1], self.levels[right]
        share = ((log_noise - below) / (above - below)).clamp(0, 1)
        log_scales = RATE_FACTOR * self.log_scales.T
        learned = torch.lerp(log_scales[right - 1], log_scales[right], share[:, None])
        return learned.exp() / noise[:, None].to(learned)

    def _in_blocks(self, y: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return W y in the graph, its scales, and which of its entries are inside the image.

        Squares of pixels are channels, which makes convolutions of single-channel images several
        times faster. The shape is (samples · image channels, filters · square, rows, columns).
        """
        height, width = (size - self.size + 1 for size in y.shape[2:])
        rows, columns = (-(-size // BLOCK) for size in (height, width))
        margin = _blocks_of_kernel(self.size) - 1
        bottom = (rows + margin) * BLOCK - y.shape[2]
        right = (columns + margin) * BLOCK - y.shape[3]
        padded = F.pad(y.reshape(-1, 1, *y.shape[2:]), (0, right, 0, bottom))
        blocks = F.pixel_unshuffle(padded, BLOCK).contiguous(memory_format=torch.channels_last)
        responses = F.conv2d(blocks, _in_block_channels(context["W"]))
        scales = context["scales"].repeat_interleave(y.shape[1], dim=0)
        whole = (0, columns * BLOCK - width, 0, rows * BLOCK - height)
        if scales.dim() == 2:
            alphas = scales.repeat_interleave(BLOCK**2, dim=1)[:, :, None, None]
        else:
            alphas = F.pixel_unshuffle(F.pad(scales, whole, value=1.0), BLOCK)
            alphas = alphas.contiguous(memory_format=torch.channels_last)
        inside = F.pad(y.new_ones(1, 1, height, width), whole)
        counted = F.pixel_unshuffle(inside, BLOCK).repeat(1, scales.shape[1], 1, 1)
        return responses, alphas, counted

    def _is_differentiated(self, y: Tensor, context: Context) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (y, *context.tensors()))

    @torch.no_grad()
    def _pieces(self, y: Tensor, context: Context) -> Iterator[_Piece]:
        """Yield the filter responses piece by piece, to limit memory.

        Each piece of the image is copied once per filter column, with shape (rows, filter columns,
        columns). The pixels that contribute to one row of responses are then a contiguous matrix
        with as many rows as the filter has pixels, and consecutive rows of responses use
        overlapping matrices.
        """
        W, margin = context["W"], self.size - 1
        height, width = (size - margin for size in y.shape[2:])
        max_columns = math.ceil(width / math.ceil(width / MAX_PIECE_WIDTH))
        max_rows = math.ceil(
            height / math.ceil(len(W) * height * max_columns / RESPONSES_PER_PIECE)
        )
        for sample, scales in enumerate(context["scales"]):
            is_local = scales.dim() == 3
            filters = (W if is_local else W * scales[:, None, None, None]).flatten(1)
            for channel, top, left in product(
                range(y.shape[1]), range(0, height, max_rows), range(0, width, max_columns)
            ):
                rows, columns = min(max_rows, height - top), min(max_columns, width - left)
                area = slice(top, top + rows + margin), slice(left, left + columns + margin)
                copies = y[sample, channel][area].unfold(1, columns, 1).contiguous().flatten(0, 1)
                windows = copies.unfold(0, self.size**2, self.size).transpose(1, 2)
                responses = torch.bmm(filters.expand(rows, -1, -1), windows)
                part = scales
                if is_local:
                    part = scales[:, top : top + rows, left : left + columns].transpose(0, 1)
                    responses.mul_(part)
                yield _Piece(sample, channel, *area, part, responses)

    def _differentiable_slope(self, responses: Tensor, alphas: Tensor, counted: Tensor) -> Tensor:
        """Return ψ′(αr)/α in the graph, with all derivatives of a linear spline.

        Where ψ′(t) = a + bt, it is a/α + br. Each product of a backward solve only multiplies by b.
        """
        with torch.no_grad():
            t = responses * alphas
            size, knots = t.abs(), [knot for knot, _ in self._clamps]
            is_steep = (size <= knots[0]) * counted
            is_outside = (size > knots[0]) * counted
            if self.concavity:
                is_outside *= size <= knots[-1]
            slope = is_steep * self.steepness - is_outside * self.concavity
            intercept = t.sign() * is_outside * (self.steepness + self.concavity)
        return intercept / alphas + slope * responses

    def _slope_in_place(self, t: Tensor) -> Tensor:
        """Return ψ′(t), overwriting t.

        Clamping at the smaller knot reuses the values clamped at the larger one.
        """
        total: Tensor | None = None
        for knot, factor in reversed(self._clamps):
            t.clamp_(-knot, knot)
            total = t * factor if total is None else total.add_(t, alpha=factor)
        assert total is not None
        return total

    def _profile(self, t: Tensor) -> Tensor:
        """Return ψ(t)."""
        size = t.abs()
        total = torch.zeros_like(t)
        for knot, factor in self._clamps:
            near = size.clamp_max(knot)
            total = total + factor * near * (size - 0.5 * near)
        return total


def noise_level(image: Tensor, *others: Tensor) -> Tensor:
    """Return the noise level of each sample, the last input of a layer."""
    if not others:
        raise ValueError("RidgePrior needs a noise level; call the layer with (image, noise)")
    noise = others[-1].reshape(-1).to(image)
    if not bool((noise > 0).all()):
        raise ValueError(f"noise levels must be positive, got {float(noise.min()):g}")
    return noise.expand(len(image))


def norm_of_filters(filters: Tensor) -> Tensor:
    """Return an upper bound on the norm of a one-channel convolution with `filters` (c, 1, k, k).

    ‖W‖² is the maximum of P = Σ_c |ŵ_c|², a nonnegative trigonometric polynomial of degree
    d = k − 1. If P ≤ g on a grid of N×N points, then |P − g/2| ≤ g/2 on the grid and at most
    (g/2)/cos²(πd/N) between its points (Ehlich and Zeller, 1964).
    """
    degree = filters.shape[2] - 1
    points = max(GRID_SIZE, 8 * degree)
    symbol = torch.fft.rfft2(filters[:, 0], s=(points, points))
    power = (symbol.real.square() + symbol.imag.square()).sum(dim=0).amax()
    between = (1 + math.cos(math.pi * degree / points) ** -2) / 2
    norm: Tensor = (power * between).sqrt()
    return norm


def _blocks_of_kernel(size: int) -> int:
    """Return the side of a kernel in blocks, for all positions of its corner in a block."""
    return -(-(size + BLOCK - 1) // BLOCK)


def _in_block_channels(W: Tensor) -> Tensor:
    """Return the convolution W of images as one of images whose channels are squares of pixels."""
    room = _blocks_of_kernel(W.shape[2]) * BLOCK - W.shape[2]
    placed = [
        F.pad(W, (left, room - left, top, room - top))
        for top, left in product(range(BLOCK), repeat=2)
    ]
    return F.pixel_unshuffle(torch.stack(placed, dim=1).flatten(0, 1), BLOCK)


def _cosines(count: int, size: int) -> Tensor:
    """Return the first `count` nonconstant 2-D cosines by frequency, in size×size pixels.

    They are the cosines of the smallest square that has that many, centered in the kernel. Kernels
    beyond the number of pixels are random.
    """
    side = min(size, math.isqrt(count) + 1)
    index = torch.arange(side, dtype=torch.float64)
    waves = torch.cos(math.pi / side * index[:, None] * (index[None, :] + 0.5))
    waves = waves / waves.norm(dim=1, keepdim=True)
    planes = torch.einsum("ai,bj->abij", waves, waves).reshape(-1, 1, side, side)
    order = (index[:, None] + index[None, :]).flatten().argsort(stable=True)[1:]
    before = (size - side) // 2
    after = size - side - before
    kernels = F.pad(planes[order[:count]].float(), (before, after, before, after))
    random = torch.randn(max(0, count - len(kernels)), 1, size, size) / size
    return torch.cat([kernels, random])


def _contributions(adjoint: Tensor, slopes: Tensor, buffer: Tensor | None) -> Tensor:
    """Return the contribution of each response to the pixels under its filter.

    Args:
        adjoint: W with the rows of its filters reversed, shape (size², filters).
        slopes: Derivatives of the responses, shape (rows, filters, columns).
        buffer: Previous result, which is overwritten if the shape fits.

    Returns:
        Shape (rows + 2 (size − 1), size², columns), with size − 1 zero rows at either end.
    """
    rows, _, columns = slopes.shape
    margin = math.isqrt(len(adjoint)) - 1
    shape = (rows + 2 * margin, len(adjoint), columns)
    if buffer is None or buffer.shape != shape:
        buffer = slopes.new_empty(shape)
        buffer[:margin] = 0
        buffer[margin + rows :] = 0
    torch.bmm(adjoint.expand(rows, -1, -1), slopes, out=buffer[margin : margin + rows])
    return buffer
