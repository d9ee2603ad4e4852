"""`equilibria recipes`: what `equilibria train` knows by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import JsonList, command
from equilibria.cli.console import print_json, print_table, say
from equilibria.cli.faults import printable


@command(
    "recipes",
    "equilibria recipes",
    "equilibria recipes digits-opteq",
    "equilibria recipes digits-opteq --copy mine.yaml",
)
def recipes(
    name: Annotated[str | None, Argument(help="A recipe, to see what it says.")] = None,
    file: Annotated[
        Path | None, Argument(help="With --copy: the new file; NAME.yaml if not set.")
    ] = None,
    copy: Annotated[
        bool, Option("--copy", help="Write the recipe to a file, to change it.")
    ] = False,
    as_json: JsonList = False,
) -> None:
    """List the recipes that `equilibria train` knows by name, or show one, or copy it."""
    if name is None:
        found = {
            key: eq.training.load_recipe(path) for key, path in eq.training.list_recipes().items()
        }
        if as_json:
            print_json([{"name": key, **recipe.as_data()} for key, recipe in found.items()])
            return
        rows = [(key, str(recipe.training.epochs), recipe.about) for key, recipe in found.items()]
        print_table(("Name", "Epochs", "What it is"), rows, right=("Epochs",))
        return
    if as_json:
        if copy:
            raise ValueError("--json shows the recipe, --copy writes it as YAML: choose one")
        print_json([{"name": name, **eq.training.load_recipe(name).as_data()}])
        return
    if file is not None and not copy:
        raise ValueError(f"{file} is where --copy would write: add --copy")
    text = eq.training.recipe.find_recipe(name).read_text(encoding="utf-8")
    if not copy:
        print(printable(text), end="")
        return
    target = Path(f"{name}.yaml") if file is None else file
    try:
        with target.open("x", encoding="utf-8") as copied:
            copied.write(text)
    except FileExistsError:
        raise FileExistsError(
            f"{target} is there already, and stays as it is: name another file"
        ) from None
    say(f"Written: {target}; follow it with: equilibria train {target}")
