"""Optional capabilities of a cell beyond `Cell`, and one function that reads each of them.

| a cell may define | read it by, and the default |
|---|---|
| `refresh_until`, `refresh(state, context)` | `refresh_until`: 0; `refresh`: the context as it is |
| `first_image(context)` | `first_image`: None, a solve starts at `initial_state` |
| `monotone` | `is_monotone`: False |
| `output_form` | `output_form`: "linear"; "other" where `output` is redefined |
| `linearize(state, context)` | `gradients.capabilities.linearize`: from `step` alone |
| `symmetry_weight(state, context)` | `gradients.capabilities.symmetry_weight`: an error |
| `simplify(context)` | `gradients.capabilities.simplify`: as it is |
| `potential` | `potential`: None, no descent on the objective |
| `energy_form(state, context)` | `energy_form`: None |
| `rounding(exact, context, layout, unit)` | `rounding`: None, no class is certified |
| `formula`, `guarantee` | `formula`: None; `guarantee`: from `limits` |

`monotone`: the Jacobian of `step` is symmetric (plainly or weighted) with no negative eigenvalue.
`output_form`: whether `output` is "linear" in the state, "affine" (linear but for what the input
adds), or neither ("other").
"""

from __future__ import annotations

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

DESCRIBED = {
    "step": (
        "symmetry",
        "limits",
        "bounds",
        "objective",
        "monotone",
        "first_image",
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
"""Which members describe which method: they are forgotten where a subclass redefines the method."""


def forget_inherited(cls: type, root: type) -> None:
    """Reset what a new class inherits about methods that it redefines.

    Args:
        cls: The new class.
        root: The class whose members are the defaults, `Cell`. Members that it lacks become None.
    """
    for method, members in DESCRIBED.items():
        owner = _place(cls, method)
        if owner == cls.__mro__.index(root):
            continue
        for member in members:
            if _place(cls, member) > owner:
                setattr(cls, member, vars(root).get(member))


def _place(cls: type, name: str) -> int:
    """The position, in the resolution order of `cls`, of the class that defines a name."""
    bases = cls.__mro__
    return next((place for place, base in enumerate(bases) if name in vars(base)), len(bases))


@dataclass(frozen=True)
class EnergyForm:
    """An equilibrium as the minimizer of G = 1ᵀf + ½‖·‖² + E: the fixed point of y ↦ σ(−∇E(y))."""

    cell: EnergyCell
    context: Context
    image: State
    """σ of some pre-activation, computed from the state in question."""


def refresh_until(cell: Cell) -> int:
    """Return how many iterations renew the context by `refresh` before the map is fixed."""
    count: int = getattr(cell, "refresh_until", 0)
    return count


def refresh(cell: Cell, state: State, context: Context) -> Context:
    """Renew the context at a state, for cells that freeze signs or perturbations.

    Like `inject`, the result stays in the graph of the input and the parameters.
    """
    own = getattr(cell, "refresh", None)
    return context if own is None else own(state, context)


def first_image(cell: Cell, context: Context) -> State | None:
    """Return T(0), unrelaxed, where it costs nothing, so that a solve starts one step ahead."""
    own = described(cell, "first_image")
    return None if own is None else own(context)


def is_monotone(cell: Cell) -> bool:
    """Return whether the Jacobian is known to be symmetric with no negative eigenvalue."""
    return bool(getattr(cell, "monotone", False))


def output_form(cell: Cell) -> OutputForm:
    """Return how `output` depends on the state."""
    form: OutputForm | None = getattr(cell, "output_form", "linear")
    return "other" if form is None else form


def potential(cell: Cell) -> Potential | None:
    """Return the hidden objective as `Descent` needs it, or None."""
    found: Potential | None = described(cell, "potential")
    return found


def energy_form(cell: Cell, state: State, context: Context) -> EnergyForm | None:
    """Return the hidden objective in its own variables, and the image of a state there, or None."""
    own = described(cell, "energy_form")
    return None if own is None else own(state, context)


def rounding(
    cell: Cell, exact: Cell, context: Context, layout: Layout, unit: float
) -> Rounding | None:
    """Bound how far a computed `step` is from the exact one, or return None.

    Args:
        cell: The cell as it computes.
        exact: The same cell in float64.
        context: The context of `exact`.
        layout: Shapes of the state.
        unit: Unit roundoff of the type that `cell` computes in.
    """
    own = described(cell, "rounding")
    return None if own is None else own(exact, context, layout, unit)


def formula(cell: Cell) -> str | None:
    """Return the hidden objective as people write it, or None where there is none."""
    found: str | None = getattr(cell, "formula", None)
    return found


def guarantee(cell: Cell) -> str | None:
    """Return what is proven of the equilibrium, in a few words, or None.

    By default a contraction factor q < 1. It makes the equilibrium unique, unless the map itself
    depends on where a solve came from (`refresh`).
    """
    own: str | None = getattr(cell, "guarantee", None)
    if own is not None:
        return own
    limit = cell.limits.contraction
    if limit is None or limit >= 1:
        return None
    kept = refresh_until(cell)
    return f"q ≤ {limit:.3g} after {kept} iterations" if kept else f"unique, q ≤ {limit:.3g}"
