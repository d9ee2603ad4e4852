"""Small classifiers with equilibrium layers."""

from __future__ import annotations

from typing import Any

import torch

import equilibria as eq

MODELS: dict[str, dict[str, Any]] = {
    "opteq-small": {"width": 8},
    "geq-small": {"widths": (8, 8)},
    "mopteq-small": {"widths": (4, 6), "scales": (1, 2)},
    "deep-opteq-small": {"widths": (4, 4)},
    "mdeq-small": {"channels": (4, 4)},
}


def small_classifier(name: str = "opteq-small") -> Any:
    """Return an untrained classifier of one channel and four classes in evaluation mode."""
    torch.manual_seed(0)
    options = {"channels": 8, **MODELS[name]}
    return eq.create_model(name, in_channels=1, num_classes=4, **options).eval()
