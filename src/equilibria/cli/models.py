"""`equilibria models`: what can be made by name."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from equilibria.models import create_model, list_models, model_summary


def show_models() -> None:
    table = Table()
    table.add_column("Name", no_wrap=True)
    table.add_column("Parameters", justify="right")
    table.add_column("What it is")
    for name in list_models():
        model = create_model(name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        table.add_row(name, f"{parameters:,}", model_summary(name))
    Console(highlight=False).print(table)
