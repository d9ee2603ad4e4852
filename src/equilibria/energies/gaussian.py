"""The energy of GEQ: a Gaussian kernel between the patches of the input and of the state.

"GEQ: Gaussian Kernel Inspired Equilibrium Models", Sections 3.1, 3.5 and 4.1, Appendix A.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import (
    Layout,
    at_least_float32,
    in_format_of,
    is_channels_last,
    sum_per_sample,
)
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts
from equilibria.energies.kernel_scale import KernelScale, kernel_scale
from equilibria.energies.rounding import Rounding, injected_size
from equilibria.energies.terms import Input, one_tensor
from equilibria.operators import Dense, as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.operators.rounding import (
    accumulated,
    application_rounding,
    relative_difference,
    upper_norm,
)
from equilibria.operators.spectral import full_precision
from equilibria.registry import check_at_least_one

STEEPEST = 2 * math.exp(-1.5)
"""Magnitude of the most negative eigenvalue of the kernel's Hessian in q, for any γ."""
MAX_EXPONENT = 1e4
"""Upper limit of γ‖q‖²; e^{−10⁴} is zero in every floating-point type."""


@dataclass(frozen=True)
class Patches:
    """Patches of a feature map: `channels` channels by `size` × `size` pixels.

    For sequences they have `size` time steps. Maps whose size is not a multiple of the patch size
    are padded with zeros, which change neither energies nor norms.
    """

    channels: int
    size: int

    def numbers(self, directions: int) -> int:
        """Return the number of entries of a patch: channels · size ** directions."""
        return int(self.channels * self.size**directions)

    def split(self, r: Tensor) -> Tensor:
        """Split a feature map into patches, shape (B, rows, columns, groups, size, size, channels).

        The result is a view unless padding is needed. For channels_last tensors this order keeps
        the channels of a pixel contiguous. A sequence (B, C, t) has one direction instead of two.

        Args:
            r: Feature map, shape (B, C, h, w), whose C channels form C/channels groups.
        """
        if r.dim() not in (3, 4):
            raise ValueError(
                "patches need maps (batch, channels, height, width) or sequences (batch, channels, "
                f"time), got {tuple(r.shape)}; use patch=None to treat the state as one patch"
            )
        sizes = [self.channels, *[self.size] * (r.dim() - 2)]
        missing = [-n % size for n, size in zip(r.shape[1:], sizes, strict=True)]
        if any(missing):
            r = F.pad(r, [zeros for count in reversed(missing) for zeros in (0, count)])
        counts = zip(r.shape[1:], sizes, strict=True)
        blocks = r.reshape(r.shape[0], *(k for n, size in counts for k in (n // size, size)))
        positions, inside = range(3, blocks.dim(), 2), range(4, blocks.dim(), 2)
        return blocks.permute(0, *positions, 1, *inside, 2)

    def merge(self, patches: Tensor, like: Tensor) -> Tensor:
        """Join patches into a map with the shape and memory format of `like`."""
        directions = like.dim() - 2
        pairs = [k for i in range(1, directions + 1) for k in (i, directions + 1 + i)]
        groups, last = directions + 1, patches.dim() - 1
        sizes = [patches.shape[i] * self.size for i in range(1, directions + 1)]
        mid = patches.shape[groups] * self.channels
        if is_channels_last(like):
            merged = patches.permute(0, *pairs, groups, last).reshape(like.shape[0], *sizes, mid)
            merged = merged.movedim(-1, 1)
        else:
            merged = patches.permute(0, groups, last, *pairs).reshape(like.shape[0], mid, *sizes)
        if merged.shape == like.shape:
            return merged
        return merged[tuple(slice(n) for n in like.shape)]

    def as_map(self, values: Tensor) -> Tensor:
        """Reshape one number per patch, in the order of `split`, to (B, groups, rows, columns)."""
        return values.reshape(values.shape[: grid_dimensions(values)]).movedim(-1, 1)


def grid_dimensions(patches: Tensor) -> int:
    """Return the number of leading dimensions of split patches that index the patch.

    These are (B, rows, columns, groups) for images, (B, positions, groups) for sequences, and
    (B, 1) for a whole state.
    """
    return (patches.dim() + 1) // 2


class WholeMap:
    """The whole state as one patch (GEQ, Eq. 5)."""

    def split(self, r: Tensor) -> Tensor:
        """Reshape a state to one patch per sample, shape (B, 1, numbers)."""
        return r.flatten(1)[:, None]

    def merge(self, patches: Tensor, like: Tensor) -> Tensor:
        """Return a state that was split into one patch, its only one, in its original shape.

        Args:
            patches: The patch, shape (B, 1, numbers).
            like: Tensor whose shape and memory format the result gets.
        """
        return in_format_of(like, patches.reshape(like.shape))

    def as_map(self, values: Tensor) -> Tensor:
        """Reshape one number per sample to (B, 1, 1, 1)."""
        return values.reshape(-1, 1, 1, 1)


class GaussianKernel(Energy):
    """Gaussian kernel energy −(1/2γ) Σ_p exp(−γ‖(Ux + b − Wy)_p W_h‖²) over patches p (GEQ Eq. 16).

    With q_p = (Ux + b − Wy)_p W_h and the attention weights β_p = e^{−γ‖q_p‖²} of the patches,
    −∇E = Wᵀm with m_p = β_p q_p W_hᵀ. The feature is y itself.

    The Hessian in q_p is β_p(I − 2γ q_p q_pᵀ), with eigenvalues in [−2e^{−3/2}, 1] for any fixed γ.
    So ‖∇²E‖ ≤ (‖W‖‖W_h‖)², the layer's hidden objective G is strongly convex for ‖W‖‖W_h‖ < 1.497,
    and the damped step with s = 1/(1 + (‖W‖‖W_h‖)²) decreases G for any norms.

    Args:
        U: Operator from the input to the middle width.
        W: Operator from y to the middle width.
        W_h: Dense(c_s p², hidden), or None for the identity. The entries of a patch are ordered by
            pixel, with the channels of a pixel adjacent.
        bias: b, see `Input`.
        channel_split: c_s, the number of channels per patch.
        patch: p, the side length of a patch in pixels (or time steps); maps are padded with zeros
            to whole patches. None makes the whole state one patch (Eq. 5), whatever its shape.
        gamma: "running" (`RunningScale`), "per-sample" (`PerSampleScale`), "paper" (`StepScale`),
            a number, or a `KernelScale`.

    Examples:
        >>> W = eq.Dense(4, 6, norm="bound", zeta=0.8)
        >>> kernel = eq.GaussianKernel(eq.Dense(3, 6), W, patch=None, gamma=0.1)
        >>> eq.EquilibriumLayer(kernel)(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        U: OperatorLike,
        W: OperatorLike,
        W_h: Dense | Tensor | None = None,
        *,
        bias: bool | Tensor | None = None,
        channel_split: int = 8,
        patch: int | None = 2,
        gamma: str | float | KernelScale = "running",
    ) -> None:
        super().__init__()
        self.input = Input(U, bias)
        self.W = as_operator(W)
        self.W_h = _projection(W_h)
        check_at_least_one(channel_split=channel_split, patch=patch)
        self.patches = WholeMap() if patch is None else Patches(channel_split, patch)
        if self.W_h is not None and self.W_h.in_features != channel_split * (patch or 1):
            self._check_projection(directions=2)  # It does not fit a sequence either.
        self.scale = kernel_scale(gamma)
        self.facts = Facts(
            couples_batch=self.scale.couples_batch, has_gradient=not self.scale.follows_state
        )

    @property
    def formula(self) -> str:
        injected = "Ux" if self.input.bias is None else "Ux + b"
        total, index = ("Σₚ ", "ₚ") if isinstance(self.patches, Patches) else ("", "")
        hidden = "" if self.W_h is None else " Wₕ"
        return f"−(1/2γ) {total}exp(−γ‖({injected} − Wy){index}{hidden}‖²)"

    def inject(self, *inputs: Tensor) -> Context:
        return self.input.inject(*inputs)

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        entries: dict[str, Entry] = {"W": self.W.weights(layout[0])}
        if self.W_h is not None:
            (weight,) = self.W_h.weights()
            entries["W_h"] = weight
            if self._has_cheaper_product:
                with full_precision(weight):
                    entries["W_h W_hᵀ"] = weight.mT @ weight
        return entries

    def complete(self, context: Context, layout: Layout) -> Context:
        context = super().complete(context, layout)
        _, energies = self._pull(context["c"], context)
        gamma = self.scale.at_start(energies.flatten(1))
        if gamma.dim() == 0:
            return context.with_shared({"gamma": gamma})
        return context.with_sample(gamma=gamma)

    def initial_state(self, context: Context) -> State:
        c = context["c"]
        return in_format_of(c, c.new_zeros(c.shape[0], *self.W.input_shape(tuple(c.shape[1:]))))

    def value(self, state: State, context: Context) -> Tensor:
        _, energies = self._pull(self._difference(state, context), context)
        beta, gamma = self._attention(energies, context)
        values = -sum_per_sample(beta / (2 * gamma))
        return values.sum() if self.facts.couples_batch else values

    def descent(self, state: State, context: Context) -> State:
        r = self._difference(state, context)
        pulled, energies = self._pull(r, context)
        beta, _ = self._attention(energies, context)
        m = self.patches.merge(beta.to(pulled.dtype) * pulled, r)
        return self.W.adjoint(m, context.weights("W"))

    def attention(self, state: State, context: Context) -> Tensor:
        """Return the attention weight β_p = e^{−γ‖q_p‖²} of every patch p.

        The shape is (B, channel groups, rows, columns) for images.
        """
        _, energies = self._pull(self._difference(state, context), context)
        beta, _ = self._attention(energies, context)
        return self.patches.as_map(beta)

    @property
    def limits(self) -> Bounds[float]:
        """Bounds that hold for all parameters; the curvature is unknown if γ follows the state.

        It is otherwise (‖W‖‖W_h‖)², with the norms that norm control guarantees.
        """
        W = self.W.norm_limit
        W_h = 1.0 if self.W_h is None else self.W_h.norm_limit
        if self.scale.follows_state or W is None or W_h is None:
            return Bounds()
        return Bounds((W * W_h) ** 2, STEEPEST * (W * W_h) ** 2)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        """Return bounds on the derivatives; the curvature is unknown if γ follows the state.

        It is otherwise (‖W‖‖W_h‖)².
        """

        def curvature() -> Tensor | None:
            return None if self.scale.follows_state else self._curvature(layout)

        def concavity() -> Tensor | None:
            return None if self.scale.follows_state else STEEPEST * self._curvature(layout)

        return Bounds(curvature, concavity, lambda: self._steepness(context, layout))

    def _curvature(self, layout: Layout) -> Tensor:
        bound = self.W.norm_bound(layout[0])
        if self.W_h is not None:
            bound = bound * self.W_h.norm_bound((self.W_h.in_features,))
        return bound.square()

    def _steepness(self, context: Context, layout: Layout) -> Tensor | None:
        """Return ‖W‖‖W_h‖²‖U‖ if γ does not depend on the input."""
        injected = None if self.scale.follows_input else self.input.bounds(context, layout).input
        if injected is None:
            return None
        hidden = 1.0 if self.W_h is None else self.W_h.norm_bound((self.W_h.in_features,)).square()
        return self.W.norm_bound(layout[0]) * hidden * injected

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Bound the rounding error of the gradient Wᵀk(c − Wy), c = Ux + b, step by step.

        The steps are r = c − Wy, k(r)_p = β_p r_p W_h W_hᵀ for every patch p, and Wᵀ. The error of
        r_p W_h W_hᵀ is at most η‖r_p‖, η = γ_N‖W_h‖_F² with γ_N the relative error of a sum of N
        products. That of ‖r_p W_h‖² = ⟨r_p, r_p W_h W_hᵀ⟩ is at most η′‖r_p‖², η′ = η + γ_N‖W_h‖².
        The relative error of β_p is therefore at most γη′‖r_p‖², with ‖r_p‖ ≤ max‖c_p‖ + ‖W‖‖y‖. k
        has the Lipschitz constant ‖W_h‖².
        """
        assert isinstance(exact, GaussianKernel)
        injected = self.input.rounding(exact.input, context, layout, unit)
        error = application_rounding(self.W, exact.W, layout[0], unit)
        if injected is None or error is None:
            return None
        norm = upper_norm(exact.W, layout[0]) + error
        numbers, hidden, eta = math.prod(self.W.output_shape(layout[0])), 1.0, 8 * unit
        if self.W_h is not None and exact.W_h is not None:
            numbers = self.W_h.in_features
            hidden = upper_norm(exact.W_h, (numbers,)) ** 2
            terms = accumulated(numbers + self.W_h.out_features + 16, unit)
            share = 3 * relative_difference(self.W_h.weight, exact.W_h.weight)
            eta = (terms + share) * float(exact.W_h.weight.square().sum())
        r_error = Rounding(state=error + 2 * unit * norm, injected=2 * unit) + injected
        k_error = Rounding(state=eta * norm, injected=eta)
        energy_error = eta + accumulated(numbers + 8, unit) * hidden
        m_error = Rounding(state=error * hidden * norm, injected=error * hidden)

        def beta_error(context: Context, y: Tensor) -> Tensor:
            patches = self.patches.split(context["c"])
            grid = grid_dimensions(patches)
            energies = self._energy(patches, patches, grid).double().flatten(1)
            mapped = norm * y
            peak = energies.amax(dim=1).sqrt() * (1 + 1e-3) + mapped
            gamma = context["gamma"].double().flatten()
            size = injected_size(context) + mapped
            return gamma * energy_error * peak.square() * (hidden + eta) * size

        return (r_error * hidden + k_error + Rounding(extra=beta_error)) * norm + m_error

    def extra_repr(self) -> str:
        return f"{self.patches}" if isinstance(self.patches, Patches) else "patch=None"

    def _difference(self, state: State, context: Context) -> Tensor:
        """Return r = Ux + b − Wy."""
        mapped: Tensor = self.W(one_tensor(state, self), context.weights("W"))
        return context["c"] - mapped

    def _pull(self, r: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return r_p W_h W_hᵀ and ‖r_p W_h‖² of every patch, in shapes that broadcast."""
        patches = self.patches.split(r)
        self._check_projection(r.dim() - 2)
        grid = patches.shape[: grid_dimensions(patches)]
        if self.W_h is None:
            return patches, self._energy(patches, patches, len(grid))
        rows = patches.reshape(*grid, self.W_h.in_features)
        if self._has_cheaper_product:
            pulled = (rows @ context["W_h W_hᵀ"]).view(patches.shape)
            return pulled, self._energy(rows.view(patches.shape), pulled, len(grid))
        q = F.linear(rows, context["W_h"])
        pulled = F.linear(q, context["W_h"].transpose(0, 1)).view(patches.shape)
        energies = self._energy(q, q, len(grid))
        return pulled, energies.view(*grid, *[1] * (patches.dim() - len(grid)))

    def _energy(self, a: Tensor, b: Tensor, grid: int) -> Tensor:
        """Return ⟨a_p, b_p⟩ of every patch, indexed by the first `grid` dimensions.

        The result is clamped: rounding may make it negative, and ∞ would give 0·∞ in derivatives.
        """
        inside = tuple(range(grid, a.dim()))
        products = at_least_float32(a) * at_least_float32(b)
        energies = products.sum(dim=inside, keepdim=True)
        return energies.clamp(0.0, torch.finfo(energies.dtype).max)

    def _attention(self, energies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return β_p = e^{−γ‖q_p‖²}, and γ in a shape that broadcasts with it."""
        gamma = self.scale.at_state(context["gamma"], energies.flatten(1))
        if gamma.dim() > 0:
            gamma = gamma.reshape(-1, *[1] * (energies.dim() - 1))
        return torch.exp(-(gamma * energies).clamp(max=MAX_EXPONENT)), gamma

    def _check_projection(self, directions: int) -> None:
        """Check that W_h takes as many numbers as a patch has."""
        if not isinstance(self.patches, Patches) or self.W_h is None:
            return
        expected, size = self.patches.numbers(directions), self.patches.size
        if self.W_h.in_features != expected:
            pixels = f"{size}×{size} pixels" if directions == 2 else f"{size} time steps"
            raise ValueError(
                f"a patch of {self.patches.channels} channels by {pixels} has {expected} numbers, "
                f"but W_h takes {self.W_h.in_features}; use Dense({expected}, hidden)"
            )

    @property
    def _has_cheaper_product(self) -> bool:
        """Whether a step with W_h W_hᵀ, computed once per solve, is cheaper than W_h and W_hᵀ."""
        return self.W_h is not None and 2 * self.W_h.out_features >= self.W_h.in_features


def _projection(W_h: Dense | Tensor | None) -> Dense | None:
    if W_h is None:
        return None
    operator = as_operator(W_h)
    if isinstance(operator, Dense):
        return operator
    raise TypeError(f"W_h must be a Dense operator on the numbers of a patch, got {operator}")
