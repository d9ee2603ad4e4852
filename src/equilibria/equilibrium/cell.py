"""The cell: the one contract that every model meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.activations import Activation, IdentityActivation, ReLU, get_activation
from equilibria.context import Context, Entry, Layout, Packing, State, map_state
from equilibria.energies import Energy, Rounding
from equilibria.equilibrium.objective import EnergyObjective, NoObjectiveError, Objective
from equilibria.gradients import Linearization, Symmetry
from equilibria.registry import check_share
from equilibria.solvers import Potential


class Cell(nn.Module):
    """A fixed-point map y = T(y; x) and what a solver and a gradient rule must know of it.

    `inject` runs once a solve and computes everything that is random, depends on the input, or
    depends on parameters only (through `prepare`); `step` runs every iteration and reads nothing
    but the state, the context and parameters.

    Examples:
        >>> class Halving(eq.Cell):  # z = z/2 + x
        ...     def inject(self, x): return eq.Context(sample={"x": x})
        ...     def initial_state(self, x, context): return torch.zeros_like(x)
        ...     def step(self, z, context): return z / 2 + context["x"]
        >>> eq.EquilibriumLayer(cell=Halving())(torch.ones(1, 2)).round(decimals=2)
        tensor([[2., 2.]])
    """

    symmetry: Symmetry = Symmetry.NONE
    """What is known of the Jacobian of `step` in the state."""
    monotone: bool = False
    """Whether that Jacobian is symmetric (plainly or weighted) with no negative eigenvalue."""
    couples_batch: bool = False
    """Whether samples influence each other: the batch is then one problem."""
    refresh_until: int = 0
    """How many iterations renew the context by `refresh` before the map is fixed."""
    remedy: str = ""
    """What to do where a solve fails, if this cell has better advice than the general one."""

    @property
    def has_linear_output(self) -> bool:
        """Whether `output` is linear in the state."""
        return type(self).output is Cell.output

    @property
    def has_affine_output(self) -> bool:
        """Whether `output` is linear in the state but for what the input adds."""
        return self.has_linear_output

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        """Normalized weights and whatever else depends on parameters only.

        `layout` holds the state's shapes: the norm of a zero-padded convolution depends on them.
        """
        return {}

    def _inject_is_missing(self, *inputs: Tensor) -> Context:
        """All that `step` needs of the input and the parameters. Nothing in it is detached.

        Define inject(self, x), or inject(self, image, noise_level) for a layer that is called with
        a tuple of inputs.
        """
        raise TypeError(f"{type(self).__name__} must define inject(self, *inputs) -> Context")

    def _initial_state_is_missing(self, *inputs_and_context: Tensor | Context) -> State:
        """Where a solve starts: zeros of the state's shape. Called as (*inputs, context)."""
        raise TypeError(f"{type(self).__name__} must define initial_state(self, *inputs, context)")

    inject: Callable[..., Context] = _inject_is_missing
    initial_state: Callable[..., State] = _initial_state_is_missing

    def first_image(self, context: Context) -> State | None:
        """T(0) (unrelaxed) where it costs nothing, so that a solve can start one step ahead."""
        return None

    def step(self, state: State, context: Context) -> State:
        """T(y; x). Pure: the same arguments give the same result."""
        raise TypeError(f"{type(self).__name__} must define step(self, state, context)")

    def refresh(self, state: State, context: Context) -> Context:
        """The context renewed at a state, for cells that freeze signs or perturbations.

        Like `inject` it stays in the graph of the input and the parameters.
        """
        return context

    def simplify(self, context: Context) -> Context:
        """The context for approximate gradient rules: what matters little for them may be cut."""
        return context

    def output(self, state: State, context: Context) -> Tensor:
        """The feature that the rest of the network sees."""
        if isinstance(state, Tensor):
            return state
        raise TypeError(
            f"{type(self).__name__} has a state of several tensors: define output(state, context)"
        )

    def symmetry_weight(self, state: State, context: Context) -> State:
        """S = σ′(pre-activation) ≥ 0, for cells of `Symmetry.WEIGHTED`."""
        raise TypeError(
            f"{type(self).__name__} states Symmetry.WEIGHTED without a symmetry_weight method"
        )

    def linearize(self, state: State, context: Context) -> Linearization:
        """T(y; x), and S for `Symmetry.WEIGHTED`: what a backward solve starts from.

        Override it where both come out of one evaluation.
        """
        weighted = self.symmetry is Symmetry.WEIGHTED
        weight = self.symmetry_weight(state, context) if weighted else None
        return Linearization(self.step(state, context), weight)

    @property
    def formula(self) -> str | None:
        """The hidden objective as people write it, or None where there is none."""
        return None

    @property
    def guarantee(self) -> str | None:
        """What is proven of the equilibrium, in a few words, or None.

        By default a contraction factor q < 1, which makes it unique, unless the map itself depends
        on where a solve came from (`refresh`).
        """
        limit = self.contraction_limit
        if limit is None or limit >= 1:
            return None
        kept = self.refresh_until
        return f"q ≤ {limit:.3g} after {kept} iterations" if kept else f"unique, q ≤ {limit:.3g}"

    @property
    def contraction_limit(self) -> float | None:
        """A contraction factor that holds by construction, without computing anything, or None."""
        return None

    def contraction_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """A proven bound q of the Lipschitz constant of `step` in the state, or None.

        One number, or one for each sample where the bound depends on the input.
        """
        return None

    def input_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """A bound of the Lipschitz constant of `step` in the input, at any state, or None."""
        return None

    def rounding(
        self, exact: Cell, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """How far a computed `step` is from that of `exact`, the cell in float64, or None."""
        return None

    def energy_form(self, state: State, context: Context) -> EnergyForm | None:
        """The hidden objective in its own variables, and the image of a state there, or None."""
        return None

    @property
    def potential(self) -> Potential | None:
        """The hidden objective as `Descent` needs it, or None."""
        return None

    def objective(self, context: Context) -> Objective:
        """The hidden objective at the input that made `context`."""
        raise NoObjectiveError(f"{type(self).__name__} has no hidden objective")

    def forward(self, state: State, context: Context) -> Linearization:
        """`linearize`, for the backward pass to call on a twin with the saved parameters."""
        return self.linearize(state, context)


@dataclass(frozen=True)
class EnergyForm:
    """An equilibrium as the minimizer of G = 1ᵀf + ½‖·‖² + E: the fixed point of y ↦ σ(−∇E(y))."""

    cell: EnergyCell
    context: Context
    image: State
    """σ of some pre-activation, which the state that was asked about gave."""


class EnergyCell(Cell):
    """y = σ(−∇E(y; x)), the first-order condition of G = 1ᵀf + ½‖·‖² + E, σ = prox_f.

    With `alpha` < 1 the step is relaxed, y ← α σ(−∇E(y; x)) + (1 − α) y: the same equilibrium,
    the skip connection of OptEq's Table 1.

    With `damping` s < 1 it is the proximal gradient step y ← prox_{sf}((1−s) y − s∇E(y; x)), which
    for s ≤ 1/(1 + ‖∇²E‖) lowers G at every step, also where the plain step does not contract. It
    needs an f that s does not change: ReLU's or the identity's.

    Examples:
        >>> cell = eq.EnergyCell(eq.Input(torch.eye(2)), activation="tanh")
        >>> context = cell.inject(torch.ones(1, 2))
        >>> cell.step(torch.zeros(1, 2), context)
        tensor([[0.7616, 0.7616]], grad_fn=...)
    """

    symmetry = Symmetry.WEIGHTED

    def __init__(
        self,
        energy: Energy,
        activation: str | Activation = "relu",
        alpha: float = 1.0,
        damping: float = 1.0,
    ) -> None:
        super().__init__()
        check_share(alpha=alpha, damping=damping)
        self.energy = energy
        self.activation = get_activation(activation)
        if damping < 1 and not isinstance(self.activation, ReLU | IdentityActivation):
            raise ValueError(
                f"damping < 1 needs an activation whose penalty has no scale (relu, identity), "
                f"not {self.activation!r}; use alpha < 1, which relaxes any map"
            )
        self.alpha = alpha
        self.damping = damping
        self.couples_batch = energy.couples_batch
        self.monotone = energy.concave

    @property
    def refresh_until(self) -> int:  # type: ignore[override]
        return self.energy.refresh_until

    @property
    def formula(self) -> str | None:
        if not self.energy.has_gradient:
            return None
        return f"G(y) = 1ᵀf(y) + ½‖y‖² + {self.energy.formula}".replace("+ −", "− ")

    def inject(self, *inputs: Tensor) -> Context:
        context = self.energy.inject(*inputs)
        start = self.initial_state(*inputs, context)
        context = self.energy.complete(context, Packing.of(start).layout)
        if not self.energy.calibrates:
            return context
        first = self.first_image(context)
        if first is None:
            first = map_state(self.activation, self.energy.descent(start, context))
        return self.energy.calibrate(first, context)

    def refresh(self, state: State, context: Context) -> Context:
        return self.energy.refresh(state, context)

    def initial_state(self, x: Tensor, *others_and_context: Any) -> State:
        start = self.energy.initial_state(others_and_context[-1])
        return torch.zeros_like(x) if start is None else start

    def first_image(self, context: Context) -> State | None:
        """σ(Ux + b) for OptEq."""
        own = type(self)
        if own.step is not EnergyCell.step or own.initial_state is not EnergyCell.initial_state:
            return None
        descent = self.energy.first_descent(context)
        return None if descent is None else map_state(self.activation, descent)

    def step(self, state: State, context: Context) -> State:
        direction = self._direction(state, context)
        if self.alpha == 1 and self.energy.owns_descent and not torch.is_grad_enabled():
            return map_state(self.activation.overwrite, direction)
        return self._relax(state, direction)

    def symmetry_weight(self, state: State, context: Context) -> State:
        return map_state(self.activation.derivative, self._direction(state, context))

    def linearize(self, state: State, context: Context) -> Linearization:
        if self._has_own_step:
            # Whoever changed the step has changed its derivative.
            return super().linearize(state, context)
        direction = self._direction(state, context)
        with torch.no_grad():
            weight = map_state(self.activation.derivative, direction)
        return Linearization(self._relax(state, direction), weight, direction)

    @property
    def _has_own_step(self) -> bool:
        return type(self).step is not EnergyCell.step or "step" in self.__dict__

    def _direction(self, state: State, context: Context) -> State:
        """What the activation is applied to: (1−s) y − s∇E(y; x)."""
        descent = self.energy.descent(state, context)
        if self.damping == 1:
            return descent
        return map_state(lambda y, d: y + self.damping * (d - y), state, descent)

    def _relax(self, state: State, direction: State) -> State:
        image = map_state(self.activation, direction)
        if self.alpha == 1:
            return image
        return map_state(lambda y, mapped: y + self.alpha * (mapped - y), state, image)

    @property
    def contraction_limit(self) -> float | None:
        curvature = self.energy.curvature_limit
        if curvature is None:
            return None
        inner = 1 - self.damping + self.damping * curvature
        return 1 - self.alpha + self.alpha * self.activation.lipschitz * inner

    def contraction_bound(self, context: Context, layout: Layout) -> Tensor | None:
        curvature = self.energy.curvature_bound(context, layout)
        if curvature is None:
            return None
        inner = 1 - self.damping + self.damping * curvature
        return 1 - self.alpha + self.alpha * self.activation.lipschitz * inner

    def input_bound(self, context: Context, layout: Layout) -> Tensor | None:
        bound = self.energy.input_bound(context, layout)
        share = self.alpha * self.activation.lipschitz * self.damping
        return None if bound is None else bound * share

    def rounding(
        self, exact: Cell, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """That of ∇E; an activation that is not exact, and a relaxed step, round the image too."""
        assert isinstance(exact, EnergyCell)
        if self._has_own_step:
            return None
        found = self.energy.rounding(exact.energy, context, layout, unit)
        is_exact = isinstance(self.activation, ReLU | IdentityActivation)
        if found is None or (is_exact and self.alpha == self.damping == 1):
            return found
        curvature = exact.energy.curvature_bound(context, layout)
        if curvature is None or not self.energy.is_quadratic:
            return None
        steepness = max(1.0, self.activation.lipschitz)
        sizes = Rounding(state=2 + float(curvature.max()), injected=1.0)
        return found * steepness + sizes * (16 * unit * steepness)

    def energy_form(self, state: State, context: Context) -> EnergyForm | None:
        if self._has_own_step or not self.energy.has_gradient:
            return None
        image = map_state(self.activation, self.energy.descent(state, context))
        return EnergyForm(self, context, image)

    @property
    def potential(self) -> Potential | None:
        if self._has_own_step or not self.energy.has_gradient:
            return None
        return Potential(
            self.energy, self.activation, self.alpha, self.damping, is_convex=self._is_convex
        )

    @property
    def _is_convex(self) -> bool:
        """Whether G is known to be convex: ∇²(1ᵀf + ½‖y‖²) ≥ 1/L_σ, −∇²E ≤ `concavity_limit`."""
        concavity = self.energy.concavity_limit
        if concavity is None:
            limit = self.contraction_limit  # a subclass may know more than its energy
            return limit is not None and limit <= 1
        return concavity * self.activation.lipschitz <= 1

    def objective(self, context: Context) -> Objective:
        if not self.energy.has_gradient:
            raise NoObjectiveError(
                f"{type(self).__name__} minimizes nothing: a scale of its energy follows the state "
                "(gamma='paper'); gamma='running' has an objective"
            )
        return EnergyObjective(self.energy, self.activation, context, relaxed=self.alpha < 1)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, alpha={self.alpha}, damping={self.damping}"
