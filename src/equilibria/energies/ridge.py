"""A learned prior of pictures: a sum of ridge functions of what filters see of them.

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
"""Noise levels at which the scales of a prior are learned; between them they are interpolated."""
KNOTS = (0.25, 0.5, 2.0, 5.0, 9.0)
"""Where a profile bends, on the scale of a filter's own noise. Few, for each costs a pass over all
responses."""
PACE = 5.0
"""How much faster than filters scales and slopes are learned: a fifth of them is trained."""
GRID = 128
"""Frequencies a side on which the norm of filters is bounded."""
AT_ONCE = 2**18
"""Responses that are computed together where nothing is differentiated: a large picture has too
many to keep, and few stay in a processor's cache."""
ACROSS = 128
"""Columns of them, at the most."""


@dataclass(frozen=True)
class _Piece:
    """Some pixels of a channel of a picture."""

    sample: int
    channel: int
    rows: slice
    columns: slice
    scales: Tensor
    seen: Tensor
    """α (W y) there, (rows, filters, columns)."""


class RidgePrior(Energy):
    """R(y; σ) = Σ_c Σ_pixels α_c(σ)⁻² ψ(α_c(σ) (W y)_c), of each channel of an image on its own.

    W is a composition of convolutions, zero-mean and without padding, of norm 1. ψ is even, and ψ′
    a linear spline, of slopes between −`concavity` and `steepness`, which is constant beyond its
    last knot:

        ψ = Σ_k (s_k − s_{k+1}) h_k,  h_k(t) = ½ min(|t|, τ_k)² + τ_k max(|t| − τ_k, 0),

    with s_k the slope before the knot τ_k. Scaling leaves slopes as they are, so that −concavity ≤
    ∇²R ≤ steepness holds at every noise level: with ½‖y − x‖² the whole is strongly convex where
    concavity < 1, and R itself is convex where it is 0.

    noise: the level σ; if None, the last input of the layer, a number a sample.
    knots: the τ_k, growing.
    channels, kernel_sizes: of the convolutions, one after the other. One convolution starts as
        cosines without the constant.
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
            raise ValueError(f"knots must be positive and grow, not {list(knots)}")
        if not channels or len(channels) != len(kernel_sizes):
            raise ValueError(
                f"give as many kernel sizes as channels, not {len(kernel_sizes)} for "
                f"{len(channels)} convolutions"
            )
        for count, size in zip(channels, kernel_sizes, strict=True):
            check_at_least_one(channels=count, kernel_size=size)
        self.concavity = concavity
        self.steepness = steepness
        self.knots = tuple(float(knot) for knot in knots)
        self.noise = noise
        self.size = 1 + sum(size - 1 for size in kernel_sizes)
        """Pixels a side that a response sees."""
        if self.size < 2:
            raise ValueError("a zero-mean filter has more than one pixel: raise the kernel size")
        self.kernels = nn.ParameterList(_first_kernels(channels, kernel_sizes))
        # A cosine has the norm 1/√channels in W: noise is then about 2 on the scale of the knots.
        first = math.log(2.0 * math.sqrt(channels[-1] + 1))
        self.log_scales = nn.Parameter(torch.full((channels[-1], len(LEVELS)), first / PACE))
        self.slopes = nn.Parameter(self._first_slopes() / PACE)
        self.register_buffer("levels", torch.tensor(LEVELS).log(), persistent=False)

    @property
    def formula(self) -> str:
        return "Σ α⁻²ψ(αWy)"

    def extra_repr(self) -> str:
        return f"concavity={self.concavity:g}, steepness={self.steepness:g}"

    def inject(self, *inputs: Tensor) -> Context:
        """α of each sample and filter."""
        if self.noise is not None:
            inputs = (*inputs, inputs[0].new_full((1,), self.noise))
        return Context(sample={"scales": self.scales(noise_level(*inputs))})

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        _, *sides = layout[0]
        if len(sides) != 2 or min(sides) < self.size:
            raise ValueError(
                f"a prior of {self.size}×{self.size} filters takes images (B, C, H, W) at least as "
                f"large, not {tuple(layout[0])}"
            )
        slopes = self.slope_values()
        return {"W": self.filters(), "steps": slopes - F.pad(slopes[1:], (0, 1))}

    def filters(self) -> Tensor:
        """W as one convolution, (filters, 1, size, size), of zero mean and norm 1 at the most."""
        whole = cast(Tensor, self.kernels[0])
        for kernel in list(self.kernels)[1:]:
            reach = kernel.shape[2] - 1
            padded = F.pad(whole.transpose(0, 1), (reach, reach, reach, reach))
            whole = F.conv2d(padded, kernel.flip(2, 3)).transpose(0, 1)
        whole = whole - whole.mean(dim=(2, 3), keepdim=True)
        return whole / norm_of_filters(whole)

    def slope_values(self) -> Tensor:
        """The slopes of ψ′ between its knots, from the middle outwards."""
        share = (PACE * self.slopes).sigmoid()
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
            profile = _profile(piece.seen, context["steps"], self.knots).sum(dim=(0, 2))
            totals[piece.sample] += (profile / piece.scales.square()).sum()
        return totals

    def descent(self, state: State, context: Context) -> State:
        y = one_tensor(state, self)
        if self._is_differentiated(y, context):
            scales, W, steps = context["scales"], context["W"], context["steps"]
            alphas = scales[:, None, :, None]
            pulled = (
                _differentiable_slope(self._responses(y, W) * alphas, steps, self.knots) / alphas
            )
            columns = W.flatten(1).T @ pulled
            folded = F.fold(columns.flatten(0, 1), y.shape[2:], self.size)
            return -folded.reshape(y.shape)
        known = context["steps"].tolist()
        descent = torch.zeros_like(y, memory_format=torch.contiguous_format)
        memory: Tensor | None = None
        for piece in self._pieces(y, context):
            pulled = _slope_of(piece.seen, known, self.knots)
            back = (context["W"][:, 0].flip(1) / piece.scales[:, None, None]).flatten(1).T
            memory = _pulled_back(back, pulled, memory)
            # Of each row of the picture the sum over the rows of responses that see it.
            rows = memory.reshape(len(memory), self.size, self.size, -1).unfold(0, self.size, 1)
            added = rows.diagonal(dim1=1, dim2=4).sum(dim=-1)
            target = descent[piece.sample, piece.channel, piece.rows, piece.columns]
            for shift in range(self.size):
                target[:, shift : shift + pulled.shape[2]] -= added[:, shift]
        return descent

    @property
    def limits(self) -> Bounds[float]:
        return Bounds(max(self.steepness, self.concavity), self.concavity)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        slopes = self.slope_values()
        return Bounds(slopes.abs().amax(), (-slopes).amax().clamp_min(0))

    def scales(self, noise: Tensor, unit: float = 1.0) -> Tensor:
        """α: exp of what is learned at the levels, interpolated in log σ, over σ.

        unit: 1/√3 for a luminance that is √3 times as bright as a gray picture of noise σ/√3.
        """
        place = (noise * unit).log().to(self.log_scales)
        right = torch.bucketize(place.contiguous(), self.levels[1:-1].contiguous()) + 1
        below, above = self.levels[right - 1], self.levels[right]
        share = ((place - below) / (above - below)).clamp(0, 1)
        log_scales = PACE * self.log_scales.T
        learned = torch.lerp(log_scales[right - 1], log_scales[right], share[:, None])
        return learned.exp() / noise[:, None].to(learned)

    def _responses(self, y: Tensor, W: Tensor) -> Tensor:
        """(Wy)_c as (samples, image channels, filters, pixels)."""
        columns = F.unfold(y.reshape(-1, 1, *y.shape[2:]), self.size)
        responses: Tensor = W.flatten(1) @ columns
        return responses.reshape(*y.shape[:2], len(W), -1)

    def _is_differentiated(self, y: Tensor, context: Context) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (y, *context.tensors()))

    @torch.no_grad()
    def _pieces(self, y: Tensor, context: Context) -> Iterator[_Piece]:
        """What the filters see, some pixels at a time: nothing of it is kept.

        A piece of a picture is copied once for each column of a filter, as (rows, columns of a
        filter, columns). What one row of responses sees of it is then a matrix in one piece, of as
        many of these rows as a filter has, and rows of responses are products with matrices that
        overlap.
        """
        W, reach = context["W"], self.size - 1
        height, width = (size - reach for size in y.shape[2:])
        across = math.ceil(width / math.ceil(width / ACROSS))
        rows = math.ceil(height / math.ceil(len(W) * height * across / AT_ONCE))
        for sample, scales in enumerate(context["scales"]):
            into = (W * scales[:, None, None, None]).flatten(1)
            for channel, top, left in product(
                range(y.shape[1]), range(0, height, rows), range(0, width, across)
            ):
                high, wide = min(rows, height - top), min(across, width - left)
                seen = slice(top, top + high + reach), slice(left, left + wide + reach)
                copies = y[sample, channel][seen].unfold(1, wide, 1).contiguous().flatten(0, 1)
                below = copies.unfold(0, self.size**2, self.size).transpose(1, 2)
                responses = torch.bmm(into.expand(high, -1, -1), below)
                yield _Piece(sample, channel, *seen, scales, responses)

    def _first_slopes(self) -> Tensor:
        """Set ψ′ to rise to the first knot and fall to zero, as steeply as is allowed.

        Small responses are noise; large ones are left alone.
        """
        knots = torch.tensor((0.0, *self.knots), dtype=torch.float64)
        top = self.steepness * self.knots[0]
        falling = (top - self.concavity * (knots - self.knots[0])).clamp_min(0)
        slopes = torch.minimum(self.steepness * knots, falling).diff() / knots.diff()
        share = (slopes + self.concavity) / (self.steepness + self.concavity)
        return share.clamp(0.004, 0.99).logit().float()


def noise_level(image: Tensor, *others: Tensor) -> Tensor:
    """σ of each sample, the last input of a layer."""
    if not others:
        raise ValueError("a RidgePrior needs a noise level: call the layer with (image, noise)")
    noise = others[-1].reshape(-1).to(image)
    if not bool((noise > 0).all()):
        raise ValueError("a noise level must be positive: without noise there is nothing to do")
    return noise.expand(len(image))


def norm_of_filters(filters: Tensor) -> Tensor:
    """An upper bound of the norm of a convolution of one channel with `filters` (c, 1, k, k).

    ‖W‖² is the largest value of P = Σ_c |ŵ_c|², a trigonometric polynomial of degree d = k − 1 that
    is not negative. On N points a side let it be at most g: then |P − g/2| ≤ g/2 there, and at most
    (g/2)/cos²(πd/N) between them (Ehlich and Zeller, 1964).
    """
    degree = filters.shape[2] - 1
    points = max(GRID, 8 * degree)
    symbol = torch.fft.rfft2(filters[:, 0], s=(points, points))
    power = (symbol.real.square() + symbol.imag.square()).sum(dim=0).amax()
    between = (1 + math.cos(math.pi * degree / points) ** -2) / 2
    norm: Tensor = (power * between).sqrt()
    return norm


def _first_kernels(channels: Sequence[int], sizes: Sequence[int]) -> list[nn.Parameter]:
    seen = [1, *channels[:-1]]
    if len(channels) == 1:
        return [nn.Parameter(_cosines(channels[0], sizes[0]))]
    return [
        nn.Parameter(torch.randn(count, before, size, size) / (size * math.sqrt(before)))
        for count, before, size in zip(channels, seen, sizes, strict=True)
    ]


def _cosines(count: int, size: int) -> Tensor:
    """The first `count` cosines after the constant, of rising frequency, in size×size pixels.

    They are those of the smallest square that has so many, in the middle, and beyond the number of
    pixels random.
    """
    side = min(size, math.isqrt(count) + 1)
    place = torch.arange(side, dtype=torch.float64)
    waves = torch.cos(math.pi / side * place[:, None] * (place[None, :] + 0.5))
    waves = waves / waves.norm(dim=1, keepdim=True)
    planes = torch.einsum("ai,bj->abij", waves, waves).reshape(-1, 1, side, side)
    order = (place[:, None] + place[None, :]).flatten().argsort(stable=True)[1:]
    before = (size - side) // 2
    after = size - side - before
    kernels = F.pad(planes[order[:count]].float(), (before, after, before, after))
    more = torch.randn(max(0, count - len(kernels)), 1, size, size) / size
    return torch.cat([kernels, more])


def _differentiable_slope(t: Tensor, steps: Tensor, knots: Sequence[float]) -> Tensor:
    """ψ′(t) in the graph, with the derivatives of every order that a linear spline has.

    Those in t come from a summand that is zero, so that a backward solve, which asks for them in
    every iteration, multiplies by ψ″ and does nothing else.
    """
    fixed = t.detach()
    clamped = torch.stack([fixed.clamp(-knot, knot).flatten() for knot in knots])
    slope = (steps.to(t) @ clamped).reshape(t.shape)
    return slope + (t - fixed) * _curvature_of(fixed, steps, knots)


def _slope_of(t: Tensor, steps: Sequence[float], knots: Sequence[float]) -> Tensor:
    """ψ′(t) = Σ_k (s_k − s_{k+1}) clamp(t, −τ_k, τ_k); t itself is spent on it.

    From the last knot to the first, for what is cut off at one knot may be cut off at the next.
    """
    total: Tensor | None = None
    for knot, step in zip(reversed(knots), reversed(steps), strict=True):
        t.clamp_(-knot, knot)
        total = t * step if total is None else total.add_(t, alpha=step)
    assert total is not None
    return total


def _pulled_back(back: Tensor, pulled: Tensor, memory: Tensor | None) -> Tensor:
    """Return what each response adds to the pixels of its patch, (rows, size², columns).

    The rows before and after, as many as a filter reaches, are zero.

    back: W with its rows upside down, (size², filters). pulled: (rows, filters, columns). memory:
    what this gave last, to be written to if it fits.
    """
    high, _, wide = pulled.shape
    reach = math.isqrt(len(back)) - 1
    shape = (high + 2 * reach, len(back), wide)
    if memory is None or memory.shape != shape:
        memory = pulled.new_empty(shape)
        memory[:reach] = 0
        memory[reach + high :] = 0
    torch.bmm(back.expand(high, -1, -1), pulled, out=memory[reach : reach + high])
    return memory


def _curvature_of(t: Tensor, steps: Tensor, knots: Sequence[float]) -> Tensor:
    """ψ″(t) between the knots: the slope before the first knot that |t| does not pass."""
    slopes = F.pad(steps.flip(0).cumsum(0).flip(0), (0, 1))
    place = torch.bucketize(t.abs(), torch.tensor(knots, dtype=t.dtype, device=t.device))
    return slopes.index_select(0, place.flatten()).reshape(t.shape).to(t)


def _profile(t: Tensor, steps: Tensor, knots: Sequence[float]) -> Tensor:
    """ψ(t)."""
    size = t.abs()
    total = torch.zeros_like(t)
    for knot, step in zip(knots, steps.unbind(), strict=True):
        near = size.clamp_max(knot)
        total = total + step * near * (size - 0.5 * near)
    return total
