"""Formulas of a model for its report; the texts are in `formulas.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from equilibria.equilibrium import capabilities
from equilibria.models import DeepOptEqCell, EquilibriumClassifier, OptEqCell

FORMULAS = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Formula:
    """Objective and equilibrium of a model, and an explanation of the symbols."""

    objective: str
    equilibrium: str
    reading: str


def model_formula(model: EquilibriumClassifier) -> Formula:
    """Return the formulas of the model's cell from `formulas.yaml`.

    Examples:
        >>> from equilibria.analysis.formulas import model_formula
        >>> model_formula(eq.load("digits-opteq")).equilibrium
        'y* = argmin G(y; x)   ⇔   y* = σ(WWᵀy* + Ux + b)'
    """
    import yaml

    cell = model.layer.cell
    layers = len(cell.units()) if isinstance(cell, DeepOptEqCell) else 0
    if isinstance(cell, OptEqCell):
        kind = "opteq" if cell.mu == 1 else "opteq with mu"
    elif layers:
        kind = {1: "one layer", 2: "two layers"}.get(layers, "more layers")
    else:
        kind = "map" if capabilities.formula(cell) is None else "energy"
    texts = yaml.safe_load(FORMULAS.read_text(encoding="utf-8"))[kind]
    facts = {"layers": layers, "objective": capabilities.formula(cell)}
    return Formula(**{name: text.format(**facts) for name, text in texts.items()})
