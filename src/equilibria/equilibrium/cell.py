"""The cell: the one contract that every model meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.equilibrium.bounds import StepBounds
from equilibria.equilibrium.capabilities import forget_inherited
from equilibria.equilibrium.objective import NoObjectiveError, Objective
from equilibria.gradients import Symmetry
from equilibria.gradients.base import Linearization
from equilibria.gradients.capabilities import linearize


class Cell(nn.Module):
    """A fixed-point map y = T(y; x), and what a solver and a gradient rule may know of it.

    `inject` runs once per solve and computes everything that is random, depends on the input, or
    depends on parameters only. `step` runs in every iteration and reads nothing but the state, the
    context and parameters.

    | implement | what it brings | without it |
    |---|---|---|
    | `inject(*inputs)` | the context of a solve | required |
    | `initial_state(*inputs, context)` | where a solve starts | required |
    | `step(state, context)` | the map | required |
    | `output(state, context)` | the feature for the head | the state, if it is one tensor |
    | `symmetry` | conjugate gradients in the backward pass | GMRES |
    | `couples_batch` | one problem for the batch | samples are independent |
    | `limits` | a contraction by construction | nothing is guaranteed |
    | `bounds(context, layout)` | certificates for these weights | no certificates |
    | `objective(context)` | the hidden objective | `NoObjectiveError` |
    | `remedy` | advice for a failed solve | general advice |

    More is optional (a first image, a renewed context, a faster linearization, the rounding error,
    export forms): `equilibria.equilibrium.capabilities` lists it.

    **A class that defines `step` inherits nothing that describes the step of its base**: symmetry,
    bounds, objective and the like are unknown again. To state that they still hold, repeat them:
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

    def step(self, state: State, context: Context) -> State:
        """T(y; x). Pure: the same arguments give the same result."""
        raise TypeError(f"{type(self).__name__} must define step(self, state, context)")

    def output(self, state: State, context: Context) -> Tensor:
        """The feature that the rest of the network sees."""
        if isinstance(state, Tensor):
            return state
        raise TypeError(
            f"{type(self).__name__} has a state of several tensors: define output(state, context)"
        )

    # All that follows is optional: what it brings is in the table above.

    symmetry: Symmetry = Symmetry.NONE
    couples_batch: bool = False
    remedy: str = ""

    @property
    def limits(self) -> StepBounds[float]:
        """Bounds that hold by construction, for every value of the parameters."""
        return StepBounds()

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        """Bounds for the present parameters and this context.

        Args:
            context: The result of `inject`.
            layout: Shapes of the tensors of the state, without the batch dimension.
        """
        return StepBounds()

    def objective(self, context: Context) -> Objective:
        """The hidden objective at the input that made `context`."""
        raise NoObjectiveError(f"{type(self).__name__} has no hidden objective")

    def forward(self, state: State, context: Context) -> Linearization:
        """Linearize the step. The backward pass calls a twin with the saved parameters."""
        return linearize(self, state, context)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forget_inherited(cls, Cell)
