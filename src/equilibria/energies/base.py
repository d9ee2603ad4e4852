"""Base class of energy terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, batch_size, state_tensors, unflatten_state
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts
from equilibria.energies.local_gradients import gradients_of

if TYPE_CHECKING:
    from equilibria.energies.compose import Scaled, Sum


class Energy(nn.Module):
    """A smooth term E(y; x) of a hidden objective G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x).

    A new term needs one method, `value`, written with ordinary torch operations. The fixed-point
    map is y = σ(−∇E(y; x)). Parameters of the term are trained like those of any module. Terms can
    be added to each other and multiplied by numbers.

    | implement | purpose | default |
    |---|---|---|
    | `value(state, context)` | the energy | required |
    | `inject(*inputs)` | quantities that depend on the input, once per solve | `context["x"]` |
    | `descent(state, context)` | −∇E by hand, often faster | automatic differentiation |
    | `initial_state(context)` | shape of the state | shape of the first input |
    | `prepare(layout)` | quantities that depend on parameters only, once per solve | none |
    | `complete(context, layout)` | a context that needs both | `inject`, then `prepare` |
    | `facts` | faster solves (see `Facts`) | nothing is known |
    | `limits` | a contraction by construction | no contraction is known |
    | `bounds(context, layout)` | certificates for the current weights | no certificates |
    | `name`, `formula` | display of the term | name of the class |

    `calibrate`, `refresh`, `first_descent` and `rounding` are optional too: see
    `equilibria.energies.capabilities`.

    Examples:
        >>> class Smoothness(eq.Energy):
        ...     def value(self, y, context):
        ...         return (y[:, 1:] - y[:, :-1]).square().sum(dim=1)
        >>> energy = eq.Input(torch.eye(3)) + Smoothness()
        >>> layer = eq.EquilibriumLayer(energy, activation="identity")
        >>> layer(torch.tensor([[0.0, 1.0, 0.0]])).round(decimals=2)
        tensor([[0.2900, 0.4300, 0.2900]], grad_fn=...)
    """

    def value(self, state: State, context: Context) -> Tensor:
        """Return the energy E(y; x) of each sample.

        Args:
            state: The state y.
            context: Tensors that the term reads besides the state: those that `inject` computes
                from the input, such as `context["x"]`, and those that `prepare` computes from
                parameters.

        Returns:
            Shape (B,), or a scalar for a term that couples the batch.
        """
        raise TypeError(
            f"{type(self).__name__} is an energy term without a `value` method: "
            "define value(self, state, context) and return one number per sample."
        )

    def _keep_inputs(self, *inputs: Tensor) -> Context:
        """Return the quantities that depend on the input; called once per solve.

        The default stores the input itself as `context["x"]`. A layer with several inputs, given as
        a tuple, passes all of them, and a term may take any number: `inject(self, image, graph)`.
        """
        return Context(sample={"x": inputs[0] if len(inputs) == 1 else inputs})

    inject: Callable[..., Context] = _keep_inputs

    def descent(self, state: State, context: Context) -> State:
        """Return −∇E(y; x), the negative gradient in the state y.

        By default it is computed by automatic differentiation of `value`.
        """

        def checked(tensors: tuple[Tensor, ...], context: Context) -> Tensor:
            value = self.value(unflatten_state(state, tensors), context)
            self._check(value, state)
            return value

        gradients = gradients_of(checked, state_tensors(state), context)
        return unflatten_state(state, (-gradient for gradient in gradients))

    def initial_state(self, context: Context) -> State | None:
        """Return the state y = 0, which defines the shape of the state; None leaves that open.

        A sum of terms uses the shape that one of its terms defines. If none does, the state has
        the shape of the input.

        Args:
            context: Result of `inject`.
        """
        return None

    # The rest is optional; the table above lists the defaults.

    facts = Facts()

    @property
    def limits(self) -> Bounds[float]:
        """Bounds on the derivatives that hold for every value of the parameters."""
        return Bounds()

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        """Return bounds on the derivatives for the current parameters and this context.

        Args:
            context: Tensors from `inject` and `prepare`, as in `value`.
            layout: Shapes of the tensors of the state, without the batch dimension.
        """
        return Bounds()

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        """Return tensors that depend on parameters only, by name; called once per solve.

        `value` and `descent` read them from the context, such as `context["W"]` for the name "W".

        Args:
            layout: Shapes of the tensors of the state, without the batch dimension.
        """
        return {}

    def complete(self, context: Context, layout: Layout) -> Context:
        """Add the tensors of `prepare` to those of `inject`; called once per solve.

        Args:
            context: Result of `inject`.
            layout: Shapes of the tensors of the state, without the batch dimension.
        """
        prepared = self.prepare(layout)
        return context.with_shared(prepared) if prepared else context

    @property
    def name(self) -> str:
        """Name of the term in a sum; by default the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def formula(self) -> str:
        """Mathematical formula of the term."""
        return f"{type(self).__name__}(y; x)"

    def _check(self, value: Tensor, state: State) -> None:
        couples = self.facts.couples_batch
        expected = () if couples else (batch_size(state),)
        if tuple(value.shape) != expected and not (couples and value.numel() == 1):
            if couples:
                remedy = "The term couples the batch: sum over all dimensions."
            else:
                remedy = (
                    "Return one number per sample: sum over all dimensions but the first, or set "
                    "facts = eq.energies.Facts(couples_batch=True)."
                )
            raise ValueError(
                f"{type(self).__name__}.value must have shape {expected}, got "
                f"{tuple(value.shape)}. {remedy}"
            )

    def __add__(self, other: Energy | Callable[..., Tensor]) -> Sum:
        from equilibria.energies.compose import Sum, as_energy

        return Sum(self, as_energy(other))

    def __radd__(self, other: Energy | Callable[..., Tensor] | int) -> Energy:
        from equilibria.energies.compose import Sum, as_energy

        # `sum(terms)` starts from 0.
        if isinstance(other, int) and other == 0:
            return self
        return Sum(as_energy(other), self)

    def __mul__(self, factor: float | Tensor) -> Scaled:
        from equilibria.energies.compose import Scaled

        return Scaled(self, factor)

    __rmul__ = __mul__

    def __neg__(self) -> Scaled:
        return self * -1.0

    def __sub__(self, other: Energy) -> Sum:
        from equilibria.energies.compose import as_energy

        return self + -as_energy(other)
