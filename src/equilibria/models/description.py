"""What there is to say of a named model without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from equilibria.equilibrium import EquilibriumLayer
from equilibria.models.registry import ModelCard, model_card, model_outline, parameter_count


@dataclass(frozen=True)
class Part:
    """A module with parameters of its own."""

    path: str
    kind: str
    details: str
    parameters: int


@dataclass(frozen=True)
class ModelDescription:
    card: ModelCard
    parameters: int
    is_equilibrium: bool
    objective: str | None
    """The hidden objective as a formula; None where there is none."""
    guarantee: str | None
    """What is proven of the equilibrium; None where nothing is."""
    parts: tuple[Part, ...]

    @property
    def objective_kind(self) -> str:
        """Whether the equilibrium minimizes something: "yes", "no", or it solves an inclusion."""
        if self.objective is None:
            return "no"
        return "inclusion" if "∈" in self.objective else "yes"


def describe_model(name: str, **overrides: Any) -> ModelDescription:
    """The size, the parts, the hidden objective and the guarantee of a named model."""
    model = model_outline(name, **overrides)
    layer = getattr(model, "layer", None)
    cell = layer.cell if isinstance(layer, EquilibriumLayer) else None
    return ModelDescription(
        card=model_card(name),
        parameters=parameter_count(model),
        is_equilibrium=cell is not None,
        objective=None if cell is None else cell.formula,
        guarantee=None if cell is None else cell.guarantee,
        parts=tuple(_parts(model)),
    )


def _parts(model: nn.Module) -> list[Part]:
    found = []
    for path, module in model.named_modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            found.append(Part(path, type(module).__name__, module.extra_repr(), own))
    return found
