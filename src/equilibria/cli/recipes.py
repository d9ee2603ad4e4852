"""`equilibria recipes`: list, show and copy training recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import JsonList, command
from equilibria.cli.console import print_json, print_table, say
from equilibria.registry import printable


@command(
    "recipes",
    "equilibria recipes",
    "equilibria recipes digits-opteq",
    "equilibria recipes digits-opteq --copy mine.yaml",
)
def recipes(
    name: Annotated[str | None, Argument(help="Name of a recipe, to print it.")] = None,
    file: Annotated[Path | None, Argument(help="New file for --copy (default: NAME.yaml).")] = None,
    copy: Annotated[bool, Option("--copy", help="Copy the recipe to a file.")] = False,
    as_json: JsonList = False,
) -> None:
    """List the recipes of `equilibria train`, print one, or copy one."""
    if name is None:
        recipes_by_name = {
            key: eq.training.load_recipe(path) for key, path in eq.training.list_recipes().items()
        }
        if as_json:
            print_json(
                [{"name": key, **recipe.as_data()} for key, recipe in recipes_by_name.items()]
            )
            return
        rows = [
            (key, str(recipe.training.epochs), recipe.about)
            for key, recipe in recipes_by_name.items()
        ]
        print_table(("Name", "Epochs", "What it is"), rows, right=("Epochs",))
        return
    if as_json:
        if copy:
            raise ValueError(
                "--json prints the recipe and --copy writes it to a file; use one of them"
            )
        print_json([{"name": name, **eq.training.load_recipe(name).as_data()}])
        return
    if file is not None and not copy:
        raise ValueError(f"{file} is the file for --copy; add --copy, or leave it out")
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
            f"{target} exists and is not overwritten; give another file"
        ) from None
    say(f"Written: {target}. Train with: equilibria train {target}")
