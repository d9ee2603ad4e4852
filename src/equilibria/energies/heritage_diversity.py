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
    """Heritage and diversity energy of several branches with features zᵢ = Wᵢᵀyᵢ (MOptEqs).

    It is ½ Σᵢ (λ D(zᵢ, zᵢ₊₁) − H(zᵢ, zᵢ₊₁)) over the loop of branches (Eqs. 3–5). The heritage H
    rewards similarity of corresponding channels of neighboring branches, and the diversity D
    penalizes similarity of all others.

    Args:
        W: Operators Wᵢ from features zᵢ to states yᵢ, one per branch.
        diversity: λ, about 1/C or less for C channels; 0 removes D.
        scales: Downsampling factor of each branch relative to the finest; 1 by default. It applies
            to time if W is a `Conv1d`, otherwise to height and width.
        heritage: See `BranchCoupling`.
        sign: See `BranchCoupling`.
        tau: See `BranchCoupling`.
        freeze_after: Number of iterations in which sign="freeze" updates the signs.

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
            raise ValueError("HeritageDiversity needs at least one operator in W, got none")
        check_at_least_one(freeze_after=freeze_after)
        scales = (1,) * len(W) if scales is None else tuple(scales)
        if len(scales) != len(W):
            raise ValueError(f"scales must have one entry per branch ({len(W)}), got {len(scales)}")
        self.W = nn.ModuleList(as_operator(operator) for operator in W)
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
        diversity = f"{coupling.diversity:g}·Σₖ≠ₗ ({size})" if coupling.diversity else ""
        joined = f"{diversity} − {inner}" if diversity else f"−{inner}"
        where = ", M = (Pzᵢ₊₁)zᵢᵀ" if diversity else ""
        return f"½Σᵢ [{joined}]   (zᵢ = Wᵢᵀyᵢ{where})"

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        pairs = enumerate(zip(self.operators(), layout, strict=True))
        return {f"W{i}": W.weights(W.input_shape(shape)) for i, (W, shape) in pairs}

    def inject(self, *inputs: Tensor) -> Context:
        return Context()

    def operators(self) -> list[LinearOperator]:
        """Return the operators Wᵢ of the branches, those that are linear operators."""
        return [W for W in self.W if isinstance(W, LinearOperator)]

    def features(self, state: State, context: Context) -> list[Tensor]:
        """Return the feature zᵢ = Wᵢᵀyᵢ of every branch with state yᵢ."""
        pairs = enumerate(zip(self.operators(), state_tensors(state), strict=True))
        return [W.adjoint(y, context.weights(f"W{i}")) for i, (W, y) in pairs]

    def lift(self, messages: Sequence[Tensor], context: Context) -> tuple[Tensor, ...]:
        """Apply Wᵢ to the message hᵢ of every branch, which gives the descent of its state.

        Args:
            messages: Minus the gradients in the features, from `BranchCoupling.messages`.
            context: Result of `inject` and `prepare`; it contains the weights of the Wᵢ.
        """
        pairs = enumerate(zip(self.operators(), messages, strict=True))
        return tuple(W(h, context.weights(f"W{i}")) for i, (W, h) in pairs)

    def calibrate(self, image: State, context: Context) -> Context:
        """Add the widths of the smooth sign, or the initial signs, to `context`.

        Args:
            image: T(0), the map at the zero state, from which they are computed.
            context: Tensors that the term reads besides the state.
        """
        return self.calibrate_features(self.features(image, context), context)

    def calibrate_features(self, features: Sequence[Tensor], context: Context) -> Context:
        """Add the widths of the smooth sign, or the initial signs, to `context`.

        Args:
            features: Features zᵢ of the branches at T(0), the map at the zero state.
            context: Tensors that the term reads besides the state.
        """
        if not self.facts.calibrates:
            return context
        if self.coupling.sign == "freeze":
            return context.with_sample(**self.coupling.signs(features))
        return context.with_sample(**self.coupling.scales(features))

    def refresh(self, state: State, context: Context) -> Context:
        """Recompute the frozen signs of the diversity term, if it freezes them.

        Args:
            state: Current iterate.
            context: Tensors that the term read until now.
        """
        if not self.facts.refresh_until:
            return context
        return context.with_sample(**self.coupling.signs(self.features(state, context)))

    def value(self, state: State, context: Context) -> Tensor:
        return self.coupling.value(self.features(state, context), context.sample)

    def descent(self, state: State, context: Context) -> State:
        """Return −∇E for every branch: Wᵢhᵢ, with the message hᵢ of MOptEqs' Proposition 1."""
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
        """Return bounds on the derivatives; the curvature is known for λ = 0 or frozen signs.

        λ is the weight of the diversity.

        The curvature is at most max‖Wᵢ‖² · maxᵢ ½(‖P_{i:i+1}‖ + ‖P_{i−1:i}‖)(1 + λ(C − 1)). Here
        P_{i:i+1} resamples branch i+1 to the resolution of branch i, and C is the number of
        channels. The bound in the input is known only for λ = 0, because smooth and frozen signs
        depend on it.
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
        """Bound the rounding error of the descent and of one addition; None with diversity.

        The descent of a branch is W applied to the resampled features Wᵀy of its neighbors.
        """
        assert isinstance(exact, HeritageDiversity)
        if self.coupling.diversity:
            return None
        norm = error = 0.0
        triples = zip(self.operators(), exact.operators(), layout, strict=True)
        for W, exact_W, shape in triples:
            input_shape = W.input_shape(shape)
            own_error = application_rounding(W, exact_W, input_shape, unit)
            if own_error is None:
                return None
            norm, error = max(norm, upper_norm(exact_W, input_shape)), max(error, own_error)
        pooled = max((getattr(P, "scale", 1) ** 2 for P in self.coupling.modules()), default=1)
        mixing = 2 * (1 + accumulated(pooled + 8, unit))
        return Rounding(
            state=mixing * error * (2 * norm + error)
            + accumulated(pooled + 8, unit) * 2 * (norm + error) ** 2
        )
