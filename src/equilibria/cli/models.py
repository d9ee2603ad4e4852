"""`equilibria models`: what can be made by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from equilibria.cli.app import command
from equilibria.cli.console import one_line_errors, output_console
from equilibria.models import describe_model, list_models, model_options


@command("models", "equilibria models", "equilibria models mopteq-small")
def models(
    name: Annotated[
        str | None, typer.Argument(help="A model, to see its parts and its hidden objective.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="The list as a Markdown table.")] = False,
) -> None:
    """List the models that can be made by name, or show one of them."""
    if name is None or markdown:
        _show_models(markdown)
    else:
        with one_line_errors():
            _show_model(name)


def _show_models(markdown: bool) -> None:
    """A table for the terminal, or as docs/models.md holds it."""
    table = Table(box=box.SIMPLE)
    table.add_column("Name", no_wrap=True)
    table.add_column("Paper")
    table.add_column("Parameters", justify="right", no_wrap=True)
    table.add_column("reported", justify="right", no_wrap=True)
    table.add_column("Objective")
    table.add_column("Guarantee", no_wrap=True)
    lines = ["| name | what it is | paper | parameters | reported | objective | guarantee |"]
    lines.append("|---|---|---|---:|---:|---|---|")
    for name in list_models():
        found = describe_model(name)
        kind = found.objective_kind if found.is_equilibrium else ""
        cells = [found.card.paper, f"{found.parameters:,}", found.card.reported, kind]
        cells.append(found.guarantee or "")
        table.add_row(name, *cells)
        lines.append(f"| {' | '.join([f'`{name}`', found.card.summary, *cells])} |")
    if markdown:
        print("\n".join(lines))
        return
    console = output_console()
    console.print(table)
    console.print(
        "Objective: whether the output minimizes a known function (empty: no equilibrium). "
        "Guarantee: what is proven for every input; q is the contraction factor of the map.\n"
        "More on one of them: equilibria models NAME"
    )


def _show_model(name: str) -> None:
    """The parts of a model, its hidden objective and its options."""
    console = output_console()
    found = describe_model(name)
    reported = f" (reported: {found.card.reported})" if found.card.reported else ""
    table = Table(box=box.SIMPLE, show_footer=True)
    table.add_column("Part", "all", overflow="fold")
    table.add_column("Kind")
    table.add_column("Details", overflow="fold")
    table.add_column("Parameters", f"{found.parameters:,}{reported}", justify="right")
    for part in found.parts:
        path = part.path.removeprefix("layer.")
        table.add_row(path, part.kind, part.details, f"{part.parameters:,}")
    console.print(f"[bold]{name}[/bold]  {found.card.summary}")
    if found.card.paper:
        console.print(f"Paper: {found.card.paper}")
    console.print(table)
    if found.is_equilibrium:
        console.print(f"Hidden objective: {found.objective or 'none'}", markup=False)
        console.print(f"Guarantee: {found.guarantee or 'none'}\n", markup=False)
    options = ", ".join(f"{key}={value!r}" for key, value in model_options(name).items())
    console.print(f"Options: {options}", markup=False)
