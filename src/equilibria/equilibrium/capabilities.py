"""Optional capabilities of cells beyond `Cell`, each with a function that reads it.

| a cell may define | function that reads it, and the default |
|---|---|
| `refresh_until`, `refresh(state, context)` | `refresh_until`: 0; `refresh`: context unchanged |
| `first_image(context)` | `first_image`: None, solves start at `initial_state` |
| `closed_form(context)` | `closed_form`: None, equilibria are iterated |
| `monotone` | `is_monotone`: False |
| `output_form` | `output_form`: "linear"; "other" if `output` is redefined |
| `linearize(state, context)` | `gradients.capabilities.linearize`: from `step` alone |
| `symmetry_weight(state, context)` | `gradients.capabilities.symmetry_weight`: an error |
| `simplify(context)` | `gradients.capabilities.simplify`: context unchanged |
| `potential` | `potential`: None, no descent on the objective |
| `energy_form(state, context)` | `energy_form`: None |
| `rounding(exact, context, layout, unit)` | `rounding`: None, no class is certified |
| `formula`, `guarantee` | `formula`: None; `guarantee`: from `limits` |

`monotone`: whether the Jacobian of `step` is symmetric (plainly or weighted) without negative
eigenvalues. `output_form`: whether `output` is "linear" in the state, "affine" (linear plus a part
that depends on the input), or neither ("other").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies.rounding import Rounding
from equilibria.gradients.capabilities import described
from equilibria.solvers.problem import Potential

if TYPE_CHECKING:
    from equilibria.equilibrium.cell import Cell
    from equilibria.equilibrium.energy_cell import EnergyCell

OutputForm: TypeAlias = Literal["linear", "affine", "other"]

DEPENDENT_MEMBERS = {
    "step": (
        "symmetry",
        "limits",
        "bounds",
        "objective",
        "monotone",
        "first_image",
        "closed_form",
        "linearize",
        "symmetry_weight",
        "simplify",
        "potential",
        "energy_form",
        "rounding",
        "formula",
        "guarantee",
    ),
    "initial_state": ("first_image",),
    "output": ("output_form",),
}
"""Members that describe a method; they are reset in subclasses that redefine the method."""


def reset_inherited(cls: type, root: type) -> None:
    """Reset inherited members that describe methods which a new class redefines.

    Args:
        cls: The new class.
        root: Class with the default members, `Cell`. Members that it lacks become None.
    """
    for method, members in DEPENDENT_MEMBERS.items():
        owner = _mro_index(cls, method)
        if owner == cls.__mro__.index(root):
            continue
        for member in members:
            if _mro_index(cls, member) > owner:
                setattr(cls, member, vars(root).get(member))


def _mro_index(cls: type, name: str) -> int:
    """Return the index in the MRO of `cls` of the class that defines a name."""
    bases = cls.__mro__
    return next((index for index, base in enumerate(bases) if name in vars(base)), len(bases))


@dataclass(frozen=True)
class EnergyForm:
    """An equilibrium as the minimizer of a hidden objective, in the variables of its energy.

    The energy E and the activation σ = prox_f define the fixed point of y ↦ σ(−∇E(y; x)) and the
    objective G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x).

    Args:
        cell: Cell of the energy.
        context: Tensors that the energy reads besides the state; they depend on the input x.
        image: σ of a pre-activation computed from a given state.
    """

    cell: EnergyCell
    context: Context
    image: State


def refresh_until(cell: Cell) -> int:
    """Return the number of first iterations of a solve in which the map of a cell still changes.

    In them `refresh` recomputes what depends on the iterates, such as frozen signs.
    """
    count: int = getattr(cell, "refresh_until", 0)
    return count


def refresh(cell: Cell, state: State, context: Context) -> Context:
    """Recompute what a map reads besides the state, for cells in which it depends on the iterates.

    Examples are signs or perturbations that are frozen after some iterations. By default the
    context is returned unchanged.

    Args:
        cell: The cell.
        state: Current iterate.
        context: Tensors that the map read until now.

    Returns:
        The tensors for the next steps, in the graph of the input and the parameters.
    """
    method = getattr(cell, "refresh", None)
    return context if method is None else method(state, context)


def first_image(cell: Cell, context: Context) -> State | None:
    """Return T(0), the map at the zero state, if it costs nothing, otherwise None.

    A solve then starts one step ahead. T is the map without relaxation.
    """
    method = described(cell, "first_image")
    return None if method is None else method(context)


def closed_form(cell: Cell) -> Callable[[Context], State] | None:
    """Return the formula of the equilibrium, a differentiable function of the context, or None."""
    formula: Callable[[Context], State] | None = described(cell, "closed_form")
    return formula


def is_monotone(cell: Cell) -> bool:
    """Return whether the map's Jacobian is known to be symmetric without negative eigenvalues."""
    return bool(getattr(cell, "monotone", False))


def output_form(cell: Cell) -> OutputForm:
    """Return how `output` depends on the state."""
    form: OutputForm | None = getattr(cell, "output_form", "linear")
    return "other" if form is None else form


def potential(cell: Cell) -> Potential | None:
    """Return the hidden objective in the form that `Descent` needs, or None."""
    result: Potential | None = described(cell, "potential")
    return result


def energy_form(cell: Cell, state: State, context: Context) -> EnergyForm | None:
    """Return the hidden objective in the variables y of its energy E, or None if there is none.

    Args:
        cell: The cell, whose state may consist of other variables.
        state: State of the cell, from which σ(−∇E(y)) is computed as well.
        context: Tensors that the cell reads besides the state.
    """
    method = described(cell, "energy_form")
    return None if method is None else method(state, context)


def rounding(
    cell: Cell, exact: Cell, context: Context, layout: Layout, unit: float
) -> Rounding | None:
    """Return a bound on the rounding error of a computed `step`; by default None (not known).

    Args:
        cell: The cell in its working precision.
        exact: The same cell in float64.
        context: Tensors that `exact` reads besides the state, in float64.
        layout: Shapes of the tensors of the state, without the batch dimension.
        unit: Unit roundoff of the working precision.
    """
    method = described(cell, "rounding")
    return None if method is None else method(exact, context, layout, unit)


def formula(cell: Cell) -> str | None:
    """Return the formula of the hidden objective, or None if there is none."""
    result: str | None = getattr(cell, "formula", None)
    return result


def guarantee(cell: Cell) -> str | None:
    """Return a short description of what is proven about the equilibrium, or None.

    By default it states a contraction factor q < 1. The equilibrium is then unique, unless the map
    depends on the iterates of the solve (`refresh`).
    """
    text: str | None = getattr(cell, "guarantee", None)
    if text is not None:
        return text
    limit = cell.limits.contraction
    if limit is None or limit >= 1:
        return None
    count = refresh_until(cell)
    return f"q ≤ {limit:.3g} after {count} iterations" if count else f"unique, q ≤ {limit:.3g}"
