"""Energy terms defined by ordinary functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

from torch import Tensor

from equilibria.context import Context, State
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts


class FunctionEnergy(Energy):
    """Energy term E(y; x) = function(y, x).

    Args:
        function: Returns one number per sample. In a layer with several inputs it takes all of
            them: function(y, image, graph).
        couples_batch: Whether samples depend on each other; the function then returns a scalar.
        convex: Whether the function is convex in y. A solve then skips the test for a minimum.

    Examples:
        >>> from equilibria.energies.function import FunctionEnergy
        >>> term = FunctionEnergy(lambda y, x: 0.5 * (y - x).square().sum(dim=1))
        >>> eq.EquilibriumLayer(term, activation="identity")(torch.ones(1, 2)).round(decimals=2)
        tensor([[0.5000, 0.5000]])
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        couples_batch: bool = False,
        convex: bool = False,
    ) -> None:
        super().__init__()
        self.function = function
        self.convex = convex
        self.facts = Facts(couples_batch=couples_batch)

    @property
    def limits(self) -> Bounds[float]:
        return Bounds(concavity=0.0) if self.convex else Bounds()

    @property
    def name(self) -> str:
        name = getattr(self.function, "__name__", "function")
        return name if name.isidentifier() else "function"  # e.g. "<lambda>"

    @property
    def formula(self) -> str:
        return f"{getattr(self.function, '__name__', 'function')}(y, x)"

    def value(self, state: State, context: Context) -> Tensor:
        return self.function(state, *context.several("x"))

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


@overload
def energy_term(
    function: Callable[..., Tensor], *, couples_batch: bool = False, convex: bool = False
) -> FunctionEnergy: ...


@overload
def energy_term(
    function: None = None, *, couples_batch: bool = False, convex: bool = False
) -> Callable[[Callable[..., Tensor]], FunctionEnergy]: ...


def energy_term(
    function: Callable[..., Tensor] | None = None,
    *,
    couples_batch: bool = False,
    convex: bool = False,
) -> FunctionEnergy | Callable[[Callable[..., Tensor]], FunctionEnergy]:
    """Turn a function of (state, input) into an energy term, also as a decorator.

    Args:
        function: Returns one number per sample, E(y; x).
        couples_batch: Whether samples depend on each other; the function then returns a scalar.
        convex: Whether the function is convex in y. A solve then skips the test for a minimum,
            which costs a few products with the Hessian.

    Returns:
        The energy term, or a decorator if `function` is None.

    Examples:
        >>> @eq.energy_term
        ... def pull(y, x):
        ...     return 0.5 * (y - 1).square().sum(dim=1)
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)) + 0.5 * pull)
        >>> layer(torch.ones(1, 2)).round(decimals=2)
        tensor([[1., 1.]], grad_fn=...)
    """
    if function is None:
        return lambda wrapped: energy_term(wrapped, couples_batch=couples_batch, convex=convex)
    return FunctionEnergy(function, couples_batch=couples_batch, convex=convex)
