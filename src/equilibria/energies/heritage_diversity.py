"""Hierarchical Heritage and Diversity (HH&D) between the features Wᵢᵀyᵢ of neighboring branches.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models", Section 2.1, Eqs. 3 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, state_tensors
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds, all_known
from equilibria.energies.branch_coupling import BranchCoupling, Sign
from equilibria.energies.facts import Facts
from equilibria.energies.rounding import Rounding
from equilibria.operators import LinearOperator, as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.operators.rounding import accumulated, application_rounding, upper_norm
from equilibria.registry import check_at_least_one


class HeritageDiversity(Energy):
    """½ Σᵢ (λ D(zᵢ, zᵢ₊₁) − H(zᵢ, zᵢ₊₁)), zᵢ = Wᵢᵀyᵢ (Eqs. 3–5); see `BranchCoupling`.

    diversity: λ, around 1/C or below; 0 leaves D out.
    scales: how many times coarser than the finest branch each one is (all of one size by default);
        with W of `Conv1d` in time, else in both directions of an image.
    heritage, sign, tau: as in `BranchCoupling`. freeze_after: for how many iterations
        sign="freeze" renews the signs.

    Examples:
        >>> coupling = eq.energies.HeritageDiversity([torch.eye(2), torch.eye(2)], diversity=0.1)
        >>> print(coupling.formula)
        ½Σᵢ [0.1·Σₖ≠ₗ (√(M²ₖₗ + t²ₖₗ) − tₖₗ) − zᵢᵀPzᵢ₊₁]   (zᵢ = Wᵢᵀyᵢ, M = (Pzᵢ₊₁)zᵢᵀ)
    """

    def __init__(
        self,
        W: Sequence[OperatorLike],
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
        check_at_least_one(freeze_after=freeze_after)
        scales = (1,) * len(W) if scales is None else tuple(scales)
        if len(scales) != len(W):
            raise ValueError(f"{len(W)} branches need {len(W)} scales, not {len(scales)}")
        self.W = nn.ModuleList(as_operator(one) for one in W)
        self.coupling = BranchCoupling(
            scales,
            diversity=diversity,
            heritage=heritage,
            sign=sign,
            tau=tau,
            directions=len(getattr(self.W[0], "axes", "HW")),
        )
        self.freeze_after = freeze_after
        self.facts = Facts(
            is_concave=not heritage and not diversity,
            is_quadratic=not diversity,
            vanishes_at_zero=True,
            calibrates=diversity > 0 and sign != "hard",
            refresh_until=freeze_after if diversity > 0 and sign == "freeze" else 0,
        )

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

    def inject(self, *inputs: Tensor) -> Context:
        return Context()

    def operators(self) -> list[LinearOperator]:
        """Return the linear operators among the W of the branches."""
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
        """Return the context with signs or scales computed from features."""
        if not self.facts.calibrates:
            return context
        if self.coupling.sign == "freeze":
            return context.with_sample(**self.coupling.signs(features))
        return context.with_sample(**self.coupling.scales(features))

    def refresh(self, state: State, context: Context) -> Context:
        """The signs at a state, to be kept from here on."""
        if not self.facts.refresh_until:
            return context
        return context.with_sample(**self.coupling.signs(self.features(state, context)))

    def value(self, state: State, context: Context) -> Tensor:
        return self.coupling.value(self.features(state, context), context.sample)

    def descent(self, state: State, context: Context) -> State:
        """Wᵢhᵢ, with hᵢ of Proposition 1."""
        features = self.features(state, context)
        return self.lift(self.coupling.messages(features, context.sample), context)

    @property
    def limits(self) -> Bounds[float]:
        norms = all_known(W.norm_limit for W in self.operators())
        channels = getattr(self.operators()[0], "in_channels", None)
        if norms is None or (self.coupling.diversity and not isinstance(channels, int)):
            return Bounds()
        coupling = self.coupling.curvature(channels or 1)
        return Bounds(None if coupling is None else max(norms) ** 2 * coupling)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        """Bounds where signs do not move.

        The curvature is at most max‖Wᵢ‖² · maxᵢ ½(‖P_{i:i+1}‖ + ‖P_{i−1:i}‖)(1 + λ(C − 1)). With
        λ > 0, t or the signs are taken at a point that the input decides.
        """
        shapes = [W.input_shape(shape) for W, shape in zip(self.operators(), layout, strict=True)]

        def curvature() -> Tensor | None:
            coupling = self.coupling.curvature(shapes[0][0])
            if coupling is None:
                return None
            pairs = zip(self.operators(), shapes, strict=True)
            return torch.stack([W.norm_bound(s) for W, s in pairs]).max().square() * coupling

        def steepness() -> Tensor | None:
            if self.coupling.diversity:
                return None
            return self.operators()[0].norm_bound(shapes[0]) * 0

        return Bounds(curvature, input=steepness)

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """For λ = 0: fl(W fl(P fl(Wᵀy))), with a sum of two messages."""
        assert isinstance(exact, HeritageDiversity)
        if self.coupling.diversity:
            return None
        norm = error = 0.0
        triples = zip(self.operators(), exact.operators(), layout, strict=True)
        for W, meant, shape in triples:
            own = application_rounding(W, meant, W.input_shape(shape), unit)
            if own is None:
                return None
            norm, error = max(norm, upper_norm(meant, W.input_shape(shape))), max(error, own)
        pooled = max((getattr(P, "scale", 1) ** 2 for P in self.coupling.modules()), default=1)
        mixing = 2 * (1 + accumulated(pooled + 8, unit))
        return Rounding(
            state=mixing * error * (2 * norm + error)
            + accumulated(pooled + 8, unit) * 2 * (norm + error) ** 2
        )
