"""Models that studies compare, by the names that their commands accept."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import equilibria as eq

HEAD_POOL = 4
"""Number of pooled positions per side. The images are small: heads average over 2×2 pixels."""


@dataclass(frozen=True)
class Contestant:
    """A registered model with options, a separate name and a title."""

    name: str
    title: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        """Reason why the model is not available, or None."""
        if self.model not in eq.list_models():
            return "not registered"
        if "node" in self.model and importlib.util.find_spec("torchdiffeq") is None:
            return "needs torchdiffeq: pip install 'equilibria[ode]'"
        return None

    def build(self, *, in_channels: int, num_classes: int) -> nn.Module:
        options = dict(self.options)
        if "pool" in eq.models.model_options(self.model) and "node" not in self.model:
            options.setdefault("pool", HEAD_POOL)
        return eq.create_model(
            self.model, in_channels=in_channels, num_classes=num_classes, **options
        )


FAMILY = (
    Contestant("opteq-small", "OptEq", "opteq-small"),
    Contestant("deep-opteq-small", "Deep OptEq", "deep-opteq-small"),
    Contestant("popteq-small", "POptEqs", "popteq-small"),
    Contestant("mopteq-small", "MOptEqs", "mopteq-small"),
    Contestant("mopteq-small+pe", "MOptEqs + PE", "mopteq-small", {"pe": "train"}),
    Contestant("geq-small", "GEQ", "geq-small"),
    Contestant("mdeq-small", "MDEQ", "mdeq-small"),
    Contestant("mondeq-small", "monDEQ", "mondeq-small"),
    Contestant("resnet-small", "ResNet", "resnet-small"),
    Contestant("dnn-small", "Plain network", "dnn-small"),
    Contestant("node-small", "Neural ODE", "node-small", {"adjoint": False}),
    Contestant("anode-small", "Augmented Neural ODE", "anode-small", {"adjoint": False}),
)


def contestants(names: Sequence[str] | None = None) -> list[Contestant]:
    """Return the contestants with given names; by default the available ones of the family.

    Args:
        names: Names of the family or of registered models.

    Raises:
        ValueError: If a name is unknown.
    """
    if names is None:
        return [contestant for contestant in FAMILY if contestant.missing is None]
    known = {contestant.name: contestant for contestant in FAMILY}
    chosen = []
    for name in names:
        eq.models.registry.model_card(known[name].model if name in known else name)
        chosen.append(known.get(name) or Contestant(name, name, name))
    return chosen


def unavailable() -> list[str]:
    """Return the models of the family that are not available, with reasons."""
    return [f"{c.name} ({c.missing})" for c in FAMILY if c.missing is not None]
