"""Learned image prior: a sum of ridge functions of filter responses.

After Goujon, Neumayer, Unser, "A neural-network-based convex regularizer for inverse problems"
(2022) and "Learning weakly convex regularizers for convergent image-reconstruction algorithms"
(2023), whose regularizers have this form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import cast

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

LEVELS = (2 / 255, 5 / 255, 10 / 255, 20 / 255, 35 / 255, 60 / 255)
"""Noise levels at which the scales of a prior are learned; others are interpolated."""
KNOTS = (0.25, 0.5, 2.0, 5.0, 9.0)
"""Knots of the profile, in units of the noise in a filter response.

Each knot costs one pass over all responses.
"""
RATE_FACTOR = 5.0
"""Scales and slopes are stored divided by this factor, so that they learn faster than filters."""
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
    responses: Tensor
    """α (W y), shape (rows, filters, columns)."""


class RidgePrior(Energy):
    """Learned image prior R(y; σ) = Σ_c Σ_pixels α_c(σ)⁻² ψ(α_c(σ) (W y)_c).

    It acts on each image channel separately. W is a composition of zero-mean convolutions without
    padding, with norm at most 1. ψ is even, and ψ′ is a linear spline that is constant beyond its
    last knot, with slopes between −`concavity` and `steepness`:

        ψ = Σ_k (s_k − s_{k+1}) h_k,  h_k(t) = ½ min(|t|, τ_k)² + τ_k max(|t| − τ_k, 0),

    where s_k is the slope before the knot τ_k. Scaling does not change slopes, so −concavity ≤ ∇²R
    ≤ steepness at every noise level. ½‖y − x‖² + R is strongly convex if concavity < 1, and R is
    convex if concavity = 0.

    Args:
        channels: Output channels of the convolutions. A single convolution is initialized with
            cosines, without the constant one.
        kernel_sizes: Kernel sizes of the convolutions, in pixels.
        concavity: Upper bound on the eigenvalues of −∇²R.
        steepness: Upper bound on the eigenvalues of ∇²R.
        knots: The knots τ_k, positive and increasing.
        noise: Noise level σ; None takes the last input of the layer, one number per sample.
    """

    facts = Facts(vanishes_at_zero=True)
    levels: Tensor

    def __init__(
        self,
        channels: Sequence[int] = (48,),
        kernel_sizes: Sequence[int] = (9,),
        *,
        concavity: float = 0.9,
        steepness: float = 30.0,
        knots: Sequence[float] = KNOTS,
        noise: float | None = None,
    ) -> None:
        super().__init__()
        check_not_negative(concavity=concavity)
        check_positive(steepness=steepness)
        if noise is not None:
            check_positive(noise=noise)
        if not knots or any(a >= b for a, b in pairwise((0.0, *knots))):
            raise ValueError(f"knots must be positive and increasing, got {list(knots)}")
        if not channels or len(channels) != len(kernel_sizes):
            raise ValueError(
                "channels and kernel_sizes must have the same positive length, got "
                f"{len(channels)} and {len(kernel_sizes)}"
            )
        for count, size in zip(channels, kernel_sizes, strict=True):
            check_at_least_one(channels=count, kernel_size=size)
        self.concavity = concavity
        self.steepness = steepness
        self.knots = tuple(float(knot) for knot in knots)
        self.noise = noise
        self.size = 1 + sum(size - 1 for size in kernel_sizes)
        """Side length of the composed filters, in pixels."""
        if self.size < 2:
            raise ValueError(
                f"zero-mean filters need more than one pixel, got kernel_sizes={[*kernel_sizes]}; "
                "use at least one kernel size above 1"
            )
        self.kernels = nn.ParameterList(_initial_kernels(channels, kernel_sizes))
        # A cosine has norm 1/√channels in W, so that noise is about 2 in units of the knots.
        initial = math.log(2.0 * math.sqrt(channels[-1] + 1))
        log_scales = torch.full((channels[-1], len(LEVELS)), initial / RATE_FACTOR)
        self.log_scales = nn.Parameter(log_scales)
        self.slopes = nn.Parameter(self._initial_slopes() / RATE_FACTOR)
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
        return Context(sample={"scales": self.scales(noise_level(*inputs))})

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        _, *sides = layout[0]
        if len(sides) != 2 or min(sides) < self.size:
            raise ValueError(
                f"a prior with {self.size}×{self.size} filters needs images (C, H, W) with H and W "
                f"of at least {self.size}, got {tuple(layout[0])}"
            )
        slopes = self.slope_values()
        return {"W": self.filters(), "steps": slopes - F.pad(slopes[1:], (0, 1))}

    def filters(self) -> Tensor:
        """Return the composed convolutions W as one, shape (filters, 1, size, size).

        It has zero mean and norm at most 1.
        """
        composed = cast(Tensor, self.kernels[0])
        for kernel in list(self.kernels)[1:]:
            margin = kernel.shape[2] - 1
            padded = F.pad(composed.transpose(0, 1), (margin, margin, margin, margin))
            composed = F.conv2d(padded, kernel.flip(2, 3)).transpose(0, 1)
        composed = composed - composed.mean(dim=(2, 3), keepdim=True)
        return composed / norm_of_filters(composed)

    def slope_values(self) -> Tensor:
        """Return the slopes of the spline ψ′, the filters' nonlinearity, between its knots.

        They are listed from zero outwards.
        """
        share = (RATE_FACTOR * self.slopes).sigmoid()
        return share * (self.steepness + self.concavity) - self.concavity

    def value(self, state: State, context: Context) -> Tensor:
        y = one_tensor(state, self)
        if self._is_differentiated(y, context):
            scales, W, steps = context["scales"], context["W"], context["steps"]
            alphas = scales[:, None, :, None]
            return sum_per_sample(
                _profile(self._responses(y, W) * alphas, steps, self.knots) / alphas.square()
            )
        totals = y.new_zeros(len(y))
        for piece in self._pieces(y, context):
            profile = _profile(piece.responses, context["steps"], self.knots).sum(dim=(0, 2))
            totals[piece.sample] += (profile / piece.scales.square()).sum()
        return totals

    def descent(self, state: State, context: Context) -> State:
        y = one_tensor(state, self)
        if self._is_differentiated(y, context):
            scales, W, steps = context["scales"], context["W"], context["steps"]
            alphas = scales[:, None, :, None]
            slopes = (
                _differentiable_slope(self._responses(y, W) * alphas, steps, self.knots) / alphas
            )
            columns = W.flatten(1).T @ slopes
            folded = F.fold(columns.flatten(0, 1), y.shape[2:], self.size)
            return -folded.reshape(y.shape)
        step_values = context["steps"].tolist()
        descent = torch.zeros_like(y, memory_format=torch.contiguous_format)
        buffer: Tensor | None = None
        for piece in self._pieces(y, context):
            slopes = _slope_in_place(piece.responses, step_values, self.knots)
            adjoint = (context["W"][:, 0].flip(1) / piece.scales[:, None, None]).flatten(1).T
            buffer = _contributions(adjoint, slopes, buffer)
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
        slopes = self.slope_values()
        return Bounds(slopes.abs().amax(), (-slopes).amax().clamp_min(0))

    def scales(self, noise: Tensor, unit: float = 1.0) -> Tensor:
        """Return the filters' scales α = exp(learned scale at σ) / σ, shape (B, filters).

        The learned scale is interpolated in the logarithm of the noise level σ.

        Args:
            noise: Noise level σ of each sample, shape (B,).
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

    def _responses(self, y: Tensor, W: Tensor) -> Tensor:
        """Return (Wy)_c with shape (samples, image channels, filters, pixels)."""
        columns = F.unfold(y.reshape(-1, 1, *y.shape[2:]), self.size)
        responses: Tensor = W.flatten(1) @ columns
        return responses.reshape(*y.shape[:2], len(W), -1)

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
            scaled = (W * scales[:, None, None, None]).flatten(1)
            for channel, top, left in product(
                range(y.shape[1]), range(0, height, max_rows), range(0, width, max_columns)
            ):
                rows, columns = min(max_rows, height - top), min(max_columns, width - left)
                area = slice(top, top + rows + margin), slice(left, left + columns + margin)
                copies = y[sample, channel][area].unfold(1, columns, 1).contiguous().flatten(0, 1)
                windows = copies.unfold(0, self.size**2, self.size).transpose(1, 2)
                responses = torch.bmm(scaled.expand(rows, -1, -1), windows)
                yield _Piece(sample, channel, *area, scales, responses)

    def _initial_slopes(self) -> Tensor:
        """Return slopes of a ψ′ that rises as fast as allowed up to the first knot, then falls.

        Small responses, which are noise, are penalized; large ones are not.
        """
        knots = torch.tensor((0.0, *self.knots), dtype=torch.float64)
        top = self.steepness * self.knots[0]
        falling = (top - self.concavity * (knots - self.knots[0])).clamp_min(0)
        slopes = torch.minimum(self.steepness * knots, falling).diff() / knots.diff()
        share = (slopes + self.concavity) / (self.steepness + self.concavity)
        return share.clamp(0.004, 0.99).logit().float()


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


def _initial_kernels(channels: Sequence[int], sizes: Sequence[int]) -> list[nn.Parameter]:
    in_channels = [1, *channels[:-1]]
    if len(channels) == 1:
        return [nn.Parameter(_cosines(channels[0], sizes[0]))]
    return [
        nn.Parameter(torch.randn(count, inputs, size, size) / (size * math.sqrt(inputs)))
        for count, inputs, size in zip(channels, in_channels, sizes, strict=True)
    ]


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


def _differentiable_slope(t: Tensor, steps: Tensor, knots: Sequence[float]) -> Tensor:
    """Return ψ′(t) in the graph, with all derivatives of a linear spline.

    The derivative in t comes from a summand of value zero, so that each product of a backward solve
    only multiplies by ψ″.
    """
    fixed = t.detach()
    clamped = torch.stack([fixed.clamp(-knot, knot).flatten() for knot in knots])
    slope = (steps.to(t) @ clamped).reshape(t.shape)
    return slope + (t - fixed) * _second_derivative(fixed, steps, knots)


def _slope_in_place(t: Tensor, steps: Sequence[float], knots: Sequence[float]) -> Tensor:
    """Return ψ′(t) = Σ_k (s_k − s_{k+1}) clamp(t, −τ_k, τ_k), overwriting t.

    Knots are processed from the last to the first, because clamping at a smaller knot can reuse
    the values clamped at a larger one.
    """
    total: Tensor | None = None
    for knot, step in zip(reversed(knots), reversed(steps), strict=True):
        t.clamp_(-knot, knot)
        total = t * step if total is None else total.add_(t, alpha=step)
    assert total is not None
    return total


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


def _second_derivative(t: Tensor, steps: Tensor, knots: Sequence[float]) -> Tensor:
    """Return ψ″(t): the slope before the first knot that is at least |t|."""
    slopes = F.pad(steps.flip(0).cumsum(0).flip(0), (0, 1))
    index = torch.bucketize(t.abs(), torch.tensor(knots, dtype=t.dtype, device=t.device))
    return slopes.index_select(0, index.flatten()).reshape(t.shape).to(t)


def _profile(t: Tensor, steps: Tensor, knots: Sequence[float]) -> Tensor:
    """Return ψ(t)."""
    size = t.abs()
    total = torch.zeros_like(t)
    for knot, step in zip(knots, steps.unbind(), strict=True):
        near = size.clamp_max(knot)
        total = total + step * near * (size - 0.5 * near)
    return total
