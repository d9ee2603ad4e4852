"""monDEQ: the equilibrium z = σ(Wz + Ux + b) with I − W strongly monotone.

Winston, Kolter, "Monotone operator equilibrium networks", NeurIPS 2020; details that the paper
leaves open follow the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.activations import (
    Activation,
    IdentityActivation,
    LeakyReLU,
    ReLU,
    SoftThreshold,
    get_activation,
)
from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, Packing, state_tensors, unflatten_state
from equilibria.equilibrium import Cell, StepBounds
from equilibria.models.base import EquilibriumClassifier, image_classifier
from equilibria.models.blocks import channels_of, check_halvings, check_odd
from equilibria.models.registry import take_options, with_options_of
from equilibria.operators import circular
from equilibria.operators.spectral import full_precision
from equilibria.registry import check_choice, check_positive

Splitting = Literal["forward-backward", "peaceman-rachford"]


class UnitKernel(nn.Module):
    """A convolution kernel scale · K/‖K‖_F with a trainable tensor K and scale (initially 1)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(
            torch.empty(out_channels, in_channels, kernel_size, kernel_size)
        )
        nn.init.kaiming_uniform_(self.direction, a=math.sqrt(5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self.direction)
        return self.direction * (self.scale / norm.clamp_min(torch.finfo(norm.dtype).tiny))


class MonDEQCell(Cell):
    """monDEQ's cell z = σ(Wz + Ux + b) with I − W ⪰ mI: W = (1−m)I − AᵀA + B − Bᵀ (Proposition 1).

    With several tiers (Section 4), A is block bidiagonal: A_i acts within tier i, and the strided
    N_i leads to tier i + 1, which has half the resolution. The blocks of B are B_i and
    −A_{i+1}ᵀN_i. The non-zero blocks of W are therefore

        W_ii = (1−m)I − A_iᵀA_i − N_iᵀN_i + B_i − B_iᵀ,    W_{i+1,i} = −2A_{i+1}ᵀN_i.

    The input enters the first tier; the feature is z of the last.

    Convolutions are circular on a grid with a margin of half a kernel. σ sets the margin to zero,
    so nothing wraps around.

    The two splittings have the same z*, where V = (I + a(I − W))⁻¹ is exact:

        "forward-backward":   z ← prox_{af}((1−a)z + a(Wz + Ux + b)), with state z
        "peaceman-rachford":  u ← 2V(2z − u + a(Ux + b)) − (2z − u), z = prox_{af}(u), with state u

    Args:
        in_channels: Channels of x.
        channels: Channels of each tier, the finest first; an int stands for a single tier.
        kernel_size: Side of the kernels, odd.
        activation: σ = prox_f with a known prox_{af}: "relu", "leaky_relu", "soft_threshold" or
            "identity".
        m: Strong monotonicity of I − W, positive.
        bias: Whether there is a bias b.
        splitting: "peaceman-rachford" or "forward-backward".
        step_size: Step size a. By default the one with the smallest guaranteed contraction factor:
            1/L (Peaceman-Rachford) or m/L² (forward-backward), L ≥ ‖I − W‖.

    Examples:
        >>> layer = eq.EquilibriumLayer(cell=eq.models.MonDEQCell(2, 4, m=1.0))
        >>> layer(torch.rand(1, 2, 8, 8)).shape
        torch.Size([1, 4, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        channels: int | Sequence[int],
        *,
        kernel_size: int = 3,
        activation: str | Activation = "relu",
        m: float = 1.0,
        bias: bool = True,
        splitting: Splitting = "peaceman-rachford",
        step_size: float | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels_of(channels, "tier")
        if not m > 0:
            raise ValueError(f"m must be positive (otherwise I − W is not monotone), got {m}")
        check_positive(step_size=step_size)
        check_choice(get_args(Splitting), splitting=splitting)
        check_odd(kernel_size=kernel_size)
        self.activation = get_activation(activation)
        _scaled_prox(self.activation, torch.zeros(()), torch.ones(()))  # raises if not supported
        self.m = m
        self.splitting = splitting
        self.step_size = step_size
        self.frame = kernel_size // 2
        self.U = nn.Conv2d(
            in_channels, self.channels[0], kernel_size, padding=self.frame, bias=bias
        )
        self.A = nn.ModuleList(UnitKernel(c, c, kernel_size) for c in self.channels)
        self.B = nn.ModuleList(UnitKernel(c, c, kernel_size) for c in self.channels)
        self.N = nn.ModuleList(
            UnitKernel(finer, coarser, kernel_size)
            for finer, coarser in zip(self.channels[:-1], self.channels[1:], strict=True)
        )

    def inject(self, x: Tensor) -> Context:
        check_halvings(x, self.U.in_channels, len(self.channels), "tier")
        context = Context({"c": F.pad(self.U(x), (self.frame,) * 4)})
        layout = Packing.of(self.initial_state(x, context)).layout
        return context.with_shared(self.prepare(layout))

    def initial_state(self, x: Tensor, context: Context) -> State:
        c = context["c"]
        states = []
        for tier, channels in enumerate(self.channels):
            sides = ((n - 2 * self.frame) // 2**tier + 2 * self.frame for n in c.shape[2:])
            states.append(c.new_zeros(len(c), channels, *sides))
        return states[0] if len(states) == 1 else tuple(states)

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        """Return the Fourier symbols of the blocks of W, the linear map of the cell.

        For Peaceman-Rachford they are those of its resolvent V.
        """
        A, B, N = self._kernels()
        grids = [(shape[1], shape[2]) for shape in layout]
        with full_precision(A[0]):
            a = self._step_size(layout)
            kernels = [self._within(*pair) for pair in zip(A, B, strict=True)]
            within = [circular.symbol(k, grid) for k, grid in zip(kernels, grids, strict=True)]
            across = [circular.symbol(k, grid) for k, grid in zip(N, grids[:-1], strict=True)]
            after = [circular.symbol(k, g) for k, g in zip(A[1:], grids[1:], strict=True)]
            entries: dict[str, list[Tensor]] = {"N": across, "A": after}
            if self.splitting == "forward-backward":
                entries["F"] = within
            else:
                eye = [torch.eye(len(k), device=k.device, dtype=k.dtype) for k in kernels]
                D = [
                    torch.linalg.inv(identity + a * symbol)
                    for identity, symbol in zip(eye, within, strict=True)
                ]
                H = [
                    torch.linalg.inv(
                        next_eye + a * circular.subsampled_symbol(n @ d @ n.mH, grid, 2)
                    )
                    for next_eye, n, d, grid in zip(eye[1:], across, D, grids, strict=False)
                ]
                entries |= {"D": D, "H": H}
        stored = {name: tuple(map(circular.as_real, symbols)) for name, symbols in entries.items()}
        return {**stored, "a": a}

    def step(self, state: State, context: Context) -> State:
        tiers, c, a = state_tensors(state), context["c"], context["a"].to(context["c"].dtype)
        if self.splitting == "forward-backward":
            moved = [z - a * f for z, f in zip(tiers, self._monotone(tiers, context), strict=True)]
            moved[0] = moved[0] + a * c
            return unflatten_state(state, (self._prox(t, a) for t in moved))
        reflected = [2 * self._prox(u, a) - u for u in tiers]
        solved = self._resolvent([reflected[0] + a * c, *reflected[1:]], context)
        return unflatten_state(state, (2 * v - r for v, r in zip(solved, reflected, strict=True)))

    def tiers(self, state: State, context: Context) -> tuple[Tensor, ...]:
        """Return the state z of every tier, without the margin."""
        a = context["a"]
        return tuple(
            self._inside(
                z if self.splitting == "forward-backward" else self._prox(z, a.to(z.dtype))
            )
            for z in state_tensors(state)
        )

    def output(self, state: State, context: Context) -> Tensor:
        """Return the feature: the state z of the last tier."""
        return self.tiers(state, context)[-1]

    def lipschitz_bound(self, layout: Layout) -> Tensor:
        """Return an upper bound L on ‖I − W‖, W the linear map of the cell.

        It is exact for one tier, and follows from the norms of the blocks for several.

        Args:
            layout: Shapes of the tiers, including the margin.
        """
        A, B, N = self._kernels()
        grids = [(shape[1], shape[2]) for shape in layout]
        with full_precision(A[0]):
            pairs = zip(A, B, grids, strict=True)
            diagonal = [circular.norm(self._within(k, b), grid) for k, b, grid in pairs]
            if not N:
                return diagonal[0]
            strided = [circular.norm(n, grid, 2) for n, grid in zip(N, grids[:-1], strict=True)]
            after = [circular.norm(k, grid) for k, grid in zip(A[1:], grids[1:], strict=True)]
            for tier, norm in enumerate(strided):
                diagonal[tier] = diagonal[tier] + norm.square()
            below = [2 * k * n for k, n in zip(after, strided, strict=True)]
            # ‖M‖² ≤ ‖M‖₁‖M‖_∞ for the matrix M of the norms of the blocks.
            zero = torch.zeros_like(diagonal[0])
            rows = torch.stack(diagonal) + torch.stack([zero, *below])
            columns = torch.stack(diagonal) + torch.stack([*below, zero])
            return (rows.max() * columns.max()).sqrt()

    @property
    def guarantee(self) -> str:
        """Guarantee of a unique equilibrium as text, with the strong monotonicity m of I − W."""
        return f"unique, m = {self.m:g}"

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        """Return bounds on the step; the contraction factor depends on the splitting.

        With step size a and m ≤ I − W, ‖I − W‖ ≤ L, it is √(1 − 2am + a²L²) for forward-backward.
        For Peaceman-Rachford it is √(1 − 4am/(1 + 2am + a²L²)), the Lipschitz constant of the
        reflected resolvent of an m-strongly monotone and L-Lipschitz map. Proximal operators and
        their reflections are nonexpansive.
        """
        return StepBounds(lambda: self._contraction(context["a"], layout))

    def _contraction(self, a: Tensor, layout: Layout) -> Tensor:
        m, square = self.m, (a * self.lipschitz_bound(layout)).square()
        if self.splitting == "forward-backward":
            return (1 - 2 * a * m + square).clamp_min(0).sqrt()
        return (1 - 4 * a * m / (1 + 2 * a * m + square)).clamp_min(0).sqrt()

    def _kernels(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        A, B, N = ([kernel() for kernel in kernels] for kernels in (self.A, self.B, self.N))
        return A, B, N

    def _within(self, A: Tensor, B: Tensor) -> Tensor:
        """Return the kernel of mI + AᵀA − B + Bᵀ, which is I − W_ii − N_iᵀN_i."""
        gram = circular.gram_kernel(A)
        skew = F.pad(B - circular.transposed_kernel(B), (self.frame,) * 4)
        identity = torch.zeros_like(gram)
        identity[:, :, 2 * self.frame, 2 * self.frame] = torch.eye(
            len(gram), device=gram.device, dtype=gram.dtype
        )
        return self.m * identity + gram - skew

    def _step_size(self, layout: Layout) -> Tensor:
        if self.step_size is not None:
            weight = self.U.weight
            dtype = torch.promote_types(weight.dtype, torch.float32)
            return torch.full((), self.step_size, device=weight.device, dtype=dtype)
        L = self.lipschitz_bound(layout)
        return self.m / L.square() if self.splitting == "forward-backward" else 1 / L

    def _monotone(self, tiers: Sequence[Tensor], context: Context) -> list[Tensor]:
        """Return (I − W)z."""
        within = context.weights("F")
        result = [
            circular.apply(circular.as_complex(f), z) for f, z in zip(within, tiers, strict=True)
        ]
        for tier in range(len(tiers) - 1):
            strided = self._strided(tier, tiers[tier], context)
            result[tier] = result[tier] + self._strided_transposed(tier, strided, context)
            result[tier + 1] = result[tier + 1] + 2 * self._coupling(tier, strided, context)
        return result

    def _resolvent(self, tiers: Sequence[Tensor], context: Context) -> list[Tensor]:
        """Return V r by forward substitution: I + a(I − W) is block triangular.

        Its diagonal blocks P + aNᵀN are inverted with the Woodbury identity,
        D − aDNᵀ(I + aNDNᵀ)⁻¹ND with D = P⁻¹.
        """
        D, H = context.weights("D"), context.weights("H")
        result: list[Tensor] = []
        coupling: Tensor | float = 0.0
        for tier, r in enumerate(tiers):
            a = context["a"].to(r.dtype)
            inverse = circular.as_complex(D[tier])
            v = circular.apply(inverse, r - a * coupling)
            if tier < len(self.N):
                small = circular.apply(
                    circular.as_complex(H[tier]), self._strided(tier, v, context)
                )
                spread = self._strided_transposed(tier, small, context)
                v = v - a * circular.apply(inverse, spread)
                coupling = 2 * self._coupling(tier, self._strided(tier, v, context), context)
            result.append(v)
        return result

    def _strided(self, tier: int, z: Tensor, context: Context) -> Tensor:
        """Return N_i z."""
        return circular.apply(circular.as_complex(context.weights("N")[tier]), z)[..., ::2, ::2]

    def _strided_transposed(self, tier: int, y: Tensor, context: Context) -> Tensor:
        """Return N_iᵀ y."""
        batch, channels, height, width = y.shape
        spread = F.pad(y[..., None, :, None], (0, 1, 0, 0, 0, 1))
        spread = spread.reshape(batch, channels, 2 * height, 2 * width)
        return circular.apply(circular.as_complex(context.weights("N")[tier]).mH, spread)

    def _coupling(self, tier: int, y: Tensor, context: Context) -> Tensor:
        """Return A_{i+1}ᵀ y, with y padded to the grid of tier i + 1."""
        padded = F.pad(y, (0, self.frame, 0, self.frame))
        return circular.apply(circular.as_complex(context.weights("A")[tier]).mH, padded)

    def _prox(self, u: Tensor, a: Tensor) -> Tensor:
        return F.pad(_scaled_prox(self.activation, self._inside(u), a), (self.frame,) * 4)

    def _inside(self, z: Tensor) -> Tensor:
        height, width = z.shape[2:]
        return z[..., self.frame : height - self.frame, self.frame : width - self.frame]

    def extra_repr(self) -> str:
        return (
            f"channels={self.channels}, m={self.m}, splitting={self.splitting!r}, "
            f"step_size={self.step_size}, activation={self.activation!r}"
        )


@with_options_of(MonDEQCell, image_classifier)
def mondeq(
    *,
    in_channels: int = 3,
    channels: int | Sequence[int] = 32,
    stem_depth: int = 1,
    pool: int = 4,
    **options: Any,
) -> EquilibriumClassifier:
    """Build a monDEQ classifier, with a single convolution or several tiers.

    Args:
        in_channels: Channels of the images.
        channels: Channels of each tier, the finest first; an int stands for a single tier.
        stem_depth: Convolutions of the stem; with 0 the images enter the cell, as published.
        pool: Side of the map that the head pools the feature to.
        options: Options of `MonDEQCell` and `image_classifier`.

    Examples:
        >>> from equilibria.models.mondeq.model import mondeq
        >>> mondeq(channels=8, in_channels=1)(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    inputs = in_channels if stem_depth == 0 else channels_of(channels, "tier")[0]
    cell = MonDEQCell(inputs, channels, **take_options(options, MonDEQCell))
    options |= {"in_channels": in_channels, "stem_depth": stem_depth, "pool": pool}
    return image_classifier(cell, inputs, feature_channels=cell.channels[-1], **options)


def _scaled_prox(activation: Activation, u: Tensor, a: Tensor) -> Tensor:
    """Return prox_{af}(u) for σ = prox_f."""
    if isinstance(activation, ReLU | IdentityActivation):
        return activation(u)
    if isinstance(activation, LeakyReLU):
        # f = ½(1/s − 1) min(y, 0)².
        return torch.where(u > 0, u, u / (1 + a * (1 / activation.slope - 1)))
    if isinstance(activation, SoftThreshold):
        return u.sign() * torch.relu(u.abs() - a * activation.threshold)
    raise ValueError(
        f"monDEQ needs an activation prox_f with a known prox_af (relu, leaky_relu, "
        f"soft_threshold or identity), got {activation.name}"
    )
