"""`equilibria recipes`: what `equilibria train` knows by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.cli.app import command
from equilibria.cli.console import fail, one_line_errors, output_console, print_line, table_of
from equilibria.training import find_recipe, list_recipes, load_recipe


@command(
    "recipes",
    "equilibria recipes",
    "equilibria recipes digits-opteq",
    "equilibria recipes digits-opteq --copy mine.yaml",
)
def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, to see what it says.")] = None,
    file: Annotated[
        Path | None, typer.Argument(help="With --copy: the new file; NAME.yaml if not set.")
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Write the recipe to a file, to change it.")
    ] = False,
) -> None:
    """List the recipes that `equilibria train` knows by name, or show one, or copy it."""
    if name is None:
        _show_recipes()
        return
    if file is not None and not copy:
        fail(f"{file} is where --copy would write: add --copy")
    with one_line_errors():
        text = find_recipe(name).read_text(encoding="utf-8")
    if not copy:
        print(text, end="")
        return
    target = Path(f"{name}.yaml") if file is None else file
    try:
        with target.open("x", encoding="utf-8") as copied:
            copied.write(text)
    except FileExistsError:
        fail(f"{target} is there already, and stays as it is: name another file")
    except OSError as error:
        fail(f"cannot write the recipe: {error}")
    print_line(f"Written: {target}; follow it with: equilibria train {target}")


def _show_recipes() -> None:
    table = table_of(("Name",))
    table.add_column("Epochs", justify="right")
    table.add_column("What it is")
    for name, path in list_recipes().items():
        recipe = load_recipe(path)
        table.add_row(name, str(recipe.training.epochs), recipe.about)
    output_console().print(table)
