"""Every kind of equilibrium model, shrunk so that all of them can be tested exhaustively.

Sizes are found by the names of the options; a later model with an option of another name adds a
line to `SHRUNK`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

import equilibria as eq
from equilibria.context.state import state_tensors
from equilibria.equilibrium.capabilities import formula
from equilibria.models import EquilibriumClassifier
from equilibria.models.registry import model_outline

SHRUNK: dict[str, Callable[[Any], Any]] = {
    "channels": lambda channels: 4 if isinstance(channels, int) else (4,) * len(channels),
    "width": lambda _: 5,
    "widths": lambda widths: tuple(2 + i % 3 for i, _ in enumerate(widths)),
    "channel_split": lambda _: 1,
    "hidden": lambda _: 5,
    # Batch norms over two small images put kinks of ReLU within every difference quotient's reach.
    "outer_norm": lambda _: "group",
}


def equilibrium_models() -> list[str]:
    """One name a kind: the presets of other sizes are made by the same functions."""
    small = [n for n in eq.list_models() if n.endswith("-small") and "imagenet" not in n]
    kinds = [n for n in small if isinstance(model_outline(n), EquilibriumClassifier)]
    return [*kinds, "deep-opteq-199k"]


def small_model(name: str, **overrides: Any) -> EquilibriumClassifier:
    """A small version of a registered model with tight tolerances, on 3 classes."""
    options = eq.models.model_options(name)
    shrunk = {key: SHRUNK[key](value) for key, value in options.items() if key in SHRUNK}
    defaults = {"num_classes": 3, "in_channels": 2, "tolerance": 1e-12, "max_iterations": 2000}
    if "init_scale" in options:
        defaults["init_scale"] = 1.5  # large enough for norm control to be active
    if "gradient" in options:
        defaults["gradient"] = eq.Implicit(tolerance=1e-12)
    torch.manual_seed(0)
    model = eq.create_model(name, **{**shrunk, **defaults, **overrides})
    assert isinstance(model, EquilibriumClassifier)
    return model.double()


def with_solving(options: dict[str, Any]) -> dict[str, Any]:
    """Options for a factory: those of how to solve as one `Solving`."""
    single = {f.name for f in fields(eq.Solving)} & options.keys()
    others = {name: value for name, value in options.items() if name not in single}
    return {**others, "solving": eq.Solving(**{name: options[name] for name in single})}


def images(batch: int = 3, size: int = 6, channels: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64)


def settled(model: EquilibriumClassifier) -> EquilibriumClassifier:
    """The model in evaluation mode, its running statistics those of some images."""
    model.train()
    with torch.no_grad():
        for _ in range(50):
            model.stem(images(16))
        model(images(16))
    return model.eval()


def has_objective(model: EquilibriumClassifier) -> bool:
    return formula(model.layer.cell) is not None


def always_contracts(model: EquilibriumClassifier) -> bool:
    """Whether a bound q < 1 is promised for every input."""
    limit = model.layer.cell.limits.contraction
    return limit is not None and limit < 1


def state_is_finite(state: eq.State) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state_tensors(state))
