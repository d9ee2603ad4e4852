"""MOptEqs' energy term: heritage and diversity between the features Wᵢᵀyᵢ of branches.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models", Section 2.1, Eq. 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from equilibria.context import Context, Entry, Layout, State, state_tensors
from equilibria.energies.base import Energy
from equilibria.energies.branch_coupling import BranchCoupling, Sign
from equilibria.operators import LinearOperator, as_operator


class HeritageDiversity(Energy):
    """½ Σᵢ (λ D(zᵢ, zᵢ₊₁) − H(zᵢ, zᵢ₊₁)), zᵢ = Wᵢᵀyᵢ (Eqs. 3–5); see `BranchCoupling`.

    diversity: λ, around 1/C or below; 0 leaves D out.
    scales: how many times coarser than the finest branch each one is (all of one size by default).
    heritage, sign, tau: as in `BranchCoupling`. freeze_after: for how many iterations
        sign="freeze" renews the signs.
    """

    vanishes_at_zero = True

    def __init__(
        self,
        W: Sequence[LinearOperator | nn.Module | Tensor],
        *,
        diversity: float,
        scales: Sequence[int] | None = None,
        heritage: bool = True,
        sign: Sign = "smooth",
        tau: float = 0.1,
        freeze_after: int = 10,
    ) -> None:
        super().__init__()
        if not W:
            raise ValueError("HeritageDiversity needs the operator W of at least one branch")
        if freeze_after < 1:
            raise ValueError(f"freeze_after must be at least 1, not {freeze_after}")
        scales = (1,) * len(W) if scales is None else tuple(scales)
        if len(scales) != len(W):
            raise ValueError(f"{len(W)} branches need {len(W)} scales, not {len(scales)}")
        self.W = nn.ModuleList(as_operator(one) for one in W)
        self.coupling = BranchCoupling(
            scales, diversity=diversity, heritage=heritage, sign=sign, tau=tau
        )
        self.freeze_after = freeze_after
        self.concave = not heritage and not diversity
        self.calibrates = diversity > 0 and sign != "hard"
        self.refresh_until = freeze_after if diversity > 0 and sign == "freeze" else 0

    @property
    def formula(self) -> str:
        coupling = self.coupling
        inner = "zᵢᵀPzᵢ₊₁" if coupling.heritage else "‖zᵢ‖²"
        size = "√(M²ₖₗ + t²ₖₗ) − tₖₗ" if coupling.sign == "smooth" else "|Mₖₗ|"
        diverse = f"{coupling.diversity:g}·Σₖ≠ₗ ({size})" if coupling.diversity else ""
        joined = f"{diverse} − {inner}" if diverse else f"−{inner}"
        where = ", M = (Pzᵢ₊₁)zᵢᵀ" if diverse else ""
        return f"½Σᵢ [{joined}]   (zᵢ = Wᵢᵀyᵢ{where})"

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        pairs = enumerate(zip(self.operators(), layout, strict=True))
        return {f"W{i}": W.weights(W.input_shape(shape)) for i, (W, shape) in pairs}

    def inject(self, x: Tensor) -> Context:
        return Context()

    def operators(self) -> list[LinearOperator]:
        return [W for W in self.W if isinstance(W, LinearOperator)]

    def features(self, state: State, context: Context) -> list[Tensor]:
        """zᵢ = Wᵢᵀyᵢ of every branch."""
        pairs = enumerate(zip(self.operators(), state_tensors(state), strict=True))
        return [W.adjoint(y, context.weights(f"W{i}")) for i, (W, y) in pairs]

    def lift(self, messages: Sequence[Tensor], context: Context) -> tuple[Tensor, ...]:
        """Wᵢhᵢ of every branch."""
        pairs = enumerate(zip(self.operators(), messages, strict=True))
        return tuple(W(h, context.weights(f"W{i}")) for i, (W, h) in pairs)

    def calibrate(self, image: State, context: Context) -> Context:
        """The scales t, or the first signs, at the first image."""
        return self.calibrate_features(self.features(image, context), context)

    def calibrate_features(self, features: Sequence[Tensor], context: Context) -> Context:
        if not self.calibrates:
            return context
        if self.coupling.sign == "freeze":
            return context.with_sample(**self.coupling.signs(features))
        return context.with_sample(**self.coupling.scales(features))

    def refresh(self, state: State, context: Context) -> Context:
        """The signs at a state, to be kept from here on."""
        if not self.refresh_until:
            return context
        return context.with_sample(**self.coupling.signs(self.features(state, context)))

    def value(self, state: State, context: Context) -> Tensor:
        return self.coupling.value(self.features(state, context), context.sample)

    def descent(self, state: State, context: Context) -> State:
        """Wᵢhᵢ, with hᵢ of Proposition 1."""
        features = self.features(state, context)
        return self.lift(self.coupling.messages(features, context.sample), context)

    @property
    def curvature_limit(self) -> float | None:
        norms = [W.norm_limit for W in self.operators()]
        known = [norm for norm in norms if norm is not None]
        if len(known) < len(norms):
            return None
        channels = getattr(self.operators()[0], "in_channels", None)
        if self.coupling.diversity and not isinstance(channels, int):
            return None
        coupling = self.coupling.curvature(channels or 1)
        return None if coupling is None else max(known) ** 2 * coupling

    def curvature_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """max‖Wᵢ‖² · maxᵢ ½(‖P_{i:i+1}‖ + ‖P_{i−1:i}‖)(1 + λ(C − 1)); None where signs move."""
        shapes = [W.input_shape(shape) for W, shape in zip(self.operators(), layout, strict=True)]
        coupling = self.coupling.curvature(shapes[0][0])
        if coupling is None:
            return None
        norms = [W.norm_bound(shape) for W, shape in zip(self.operators(), shapes, strict=True)]
        return torch.stack(norms).max().square() * coupling
