"""`equilibria models`: what can be made by name."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import command
from equilibria.cli.console import print_table, say


@command("models", "equilibria models", "equilibria models mopteq-small")
def models(
    name: Annotated[
        str | None, Argument(help="A model, to see its parts and its hidden objective.")
    ] = None,
    markdown: Annotated[bool, Option(help="The list as a Markdown table.")] = False,
) -> None:
    """List the models that can be made by name, or show one of them."""
    if name is None or markdown:
        _show_models(markdown)
    else:
        _show_model(name)


def _show_models(markdown: bool) -> None:
    """A table for the terminal, or as docs/models.md holds it."""
    rows = []
    lines = ["| name | what it is | paper | parameters | reported | objective | guarantee |"]
    lines.append("|---|---|---|---:|---:|---|---|")
    for name in eq.models.list_models():
        found = eq.models.describe_model(name)
        kind = found.objective_kind if found.is_equilibrium else ""
        cells = [found.card.paper, f"{found.parameters:,}", found.card.reported, kind]
        cells.append(found.guarantee or "")
        rows.append((name, *cells))
        lines.append(f"| {' | '.join([f'`{name}`', found.card.summary, *cells])} |")
    if markdown:
        print("\n".join(lines))
        return
    headings = ("Name", "Paper", "Parameters", "reported", "Objective", "Guarantee")
    unbroken = {*headings} - {"Paper", "Objective"}
    print_table(headings, rows, right=("Parameters", "reported"), unbroken=unbroken)
    say(
        "Objective: whether the output minimizes a known function (empty: no equilibrium). "
        "Guarantee: what is proven for every input; q is the contraction factor of the map.\n"
        "More on one of them: equilibria models NAME",
        wrap=True,
    )


def _show_model(name: str) -> None:
    """The parts of a model, its hidden objective and its options."""
    found = eq.models.describe_model(name)
    rows = [
        (part.path.removeprefix("layer."), part.kind, part.details, f"{part.parameters:,}")
        for part in found.parts
    ]
    reported = f" (reported: {found.card.reported})" if found.card.reported else ""
    total = ("all", "", "", f"{found.parameters:,}{reported}")
    say(f"{name}  {found.card.summary}")
    if found.card.paper:
        say(f"Paper: {found.card.paper}")
    print_table(
        ("Part", "Kind", "Details", "Parameters"), [*rows, None, total], right=("Parameters",)
    )
    if found.is_equilibrium:
        say(f"Hidden objective: {found.objective or 'none'}")
        say(f"Guarantee: {found.guarantee or 'none'}\n")
    options = ", ".join(f"{key}={value!r}" for key, value in eq.models.model_options(name).items())
    say(f"Options: {options}")
