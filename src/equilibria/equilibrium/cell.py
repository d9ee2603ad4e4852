"""Base class of cells: the contract between models, solvers and gradient rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.equilibrium.bounds import StepBounds
from equilibria.equilibrium.capabilities import reset_inherited
from equilibria.equilibrium.objective import NoObjectiveError, Objective
from equilibria.gradients import Symmetry
from equilibria.gradients.base import Linearization
from equilibria.gradients.capabilities import linearize


class Cell(nn.Module):
    """A fixed-point map y = T(y; x), with optional properties for solvers and gradient rules.

    `inject` runs once per solve and computes everything that is random, depends on the input, or
    depends on parameters only. `step` runs in every iteration and reads only the state, the context
    and parameters.

    | implement | purpose | default |
    |---|---|---|
    | `inject(*inputs)` | context of a solve | required |
    | `initial_state(*inputs, context)` | start of a solve | required |
    | `step(state, context)` | the map | required |
    | `output(state, context)` | feature for the head | the state, if it is one tensor |
    | `symmetry` | conjugate gradients in the backward pass | GMRES |
    | `couples_batch` | one problem for the batch | samples are independent |
    | `limits` | contraction by construction | nothing is guaranteed |
    | `bounds(context, layout)` | certificates for the current weights | no certificates |
    | `objective(context)` | the hidden objective | `NoObjectiveError` |
    | `remedy` | advice for a failed solve | general advice |

    `equilibria.equilibrium.capabilities` lists further options: a first image, an updated context,
    a faster linearization, the rounding error, and export forms.

    **A class that defines `step` does not inherit members that describe the step of its base**,
    such as symmetry, bounds and objective. To declare that they still hold, repeat them:
    `bounds = eq.EnergyCell.bounds`.

    Examples:
        >>> class Halving(eq.Cell):  # z = z/2 + x
        ...     def inject(self, x): return eq.Context(sample={"x": x})
        ...     def initial_state(self, x, context): return torch.zeros_like(x)
        ...     def step(self, z, context): return z / 2 + context["x"]
        >>> eq.EquilibriumLayer(cell=Halving())(torch.ones(1, 2)).round(decimals=2)
        tensor([[2., 2.]])
    """

    def _inject_is_missing(self, *inputs: Tensor) -> Context:
        """Return everything that `step` needs from the input and the parameters.

        Tensors must stay in the graph: do not detach them. Define inject(self, x), or for a layer
        with a tuple of inputs for example inject(self, image, noise_level).
        """
        raise TypeError(f"{type(self).__name__} must define inject(self, *inputs) -> Context")

    def _initial_state_is_missing(self, *inputs_and_context: Tensor | Context) -> State:
        """Return the start of a solve, usually zeros. Called as (*inputs, context)."""
        raise TypeError(f"{type(self).__name__} must define initial_state(self, *inputs, context)")

    inject: Callable[..., Context] = _inject_is_missing
    initial_state: Callable[..., State] = _initial_state_is_missing

    def step(self, state: State, context: Context) -> State:
        """Return T(y; x), one step of the map; must be pure, the same for equal arguments.

        Args:
            state: The state y.
            context: Result of `inject`, which contains everything that depends on the input x.
        """
        raise TypeError(f"{type(self).__name__} must define step(self, state, context)")

    def output(self, state: State, context: Context) -> Tensor:
        """Return the output of the layer at the equilibrium."""
        if isinstance(state, Tensor):
            return state
        raise TypeError(
            f"{type(self).__name__} has a state of several tensors; define "
            "output(self, state, context)"
        )

    # The rest is optional; the table above lists the defaults.

    symmetry: Symmetry = Symmetry.NONE
    couples_batch: bool = False
    remedy: str = ""

    @property
    def limits(self) -> StepBounds[float]:
        """Bounds on the Lipschitz constants of the step that hold for all parameters."""
        return StepBounds()

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        """Return bounds on the Lipschitz constants of the step for the current parameters.

        Args:
            context: Result of `inject`, which contains everything that depends on the input.
            layout: Shapes of the tensors of the state, without the batch dimension.
        """
        return StepBounds()

    def objective(self, context: Context) -> Objective:
        """Return the hidden objective, the function of the state that the equilibrium minimizes.

        Args:
            context: Result of `inject`, which contains everything that depends on the input.

        Raises:
            NoObjectiveError: If the cell has no hidden objective.
        """
        raise NoObjectiveError(f"{type(self).__name__} has no hidden objective")

    def forward(self, state: State, context: Context) -> Linearization:
        """Linearize the step; the backward pass calls this on a copy with the saved parameters."""
        return linearize(self, state, context)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_inherited(cls, Cell)
