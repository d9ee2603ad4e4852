"""`equilibria models`: what can be made by name."""

from __future__ import annotations

import inspect

from rich.console import Console
from rich.table import Table
from torch import nn

from equilibria.models import EquilibriumClassifier, create_model, list_models


def show_models() -> None:
    table = Table()
    table.add_column("Name", no_wrap=True)
    table.add_column("Parameters", justify="right")
    table.add_column("What it is")
    for name in list_models():
        model = create_model(name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        table.add_row(name, f"{parameters:,}", describe(model))
    Console(highlight=False).print(table)


def describe(model: nn.Module) -> str:
    """The first sentence of what the documentation says of the model, or of its equilibrium."""
    subject = model.layer.cell if isinstance(model, EquilibriumClassifier) else model
    first_line = (inspect.getdoc(type(subject)) or "").partition("\n")[0]
    return first_line.partition(". ")[0].rstrip(".")
