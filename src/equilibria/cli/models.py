"""`equilibria models`: what can be made by name."""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import JsonList, command
from equilibria.cli.console import print_json, print_table, say


@command(
    "models",
    "equilibria models",
    "equilibria models mopteq-small",
    "equilibria models --pretrained",
    "equilibria models digits-certified --pretrained",
)
def models(
    name: Annotated[
        str | None, Argument(help="A model, to see its parts and its hidden objective.")
    ] = None,
    markdown: Annotated[bool, Option(help="The list as a Markdown table.")] = False,
    pretrained: Annotated[
        bool, Option("--pretrained", help="Trained models that come with the program.")
    ] = False,
    as_json: JsonList = False,
) -> None:
    """List the models that can be made by name, or show one of them."""
    if pretrained:
        _show_pretrained(name, as_json)
    elif as_json:
        print_json([_as_data(one) for one in ([name] if name else eq.models.list_models())])
    elif name is None or markdown:
        _show_models(markdown)
    else:
        _show_model(name)


def _as_data(name: str) -> dict[str, Any]:
    found = eq.models.describe_model(name)
    card = {key: value for key, value in vars(found.card).items() if key != "options"}
    known = {key: value for key, value in vars(found).items() if key not in ("card", "parts")}
    return {"name": name, **card, **known}


def _show_pretrained(name: str | None, as_json: bool) -> None:
    """The cards of trained models."""
    cards = eq.models.pretrained_cards()
    if name is not None:
        if name not in cards:
            eq.models.pretrained.pretrained_file(name)  # An error that names the nearest.
        cards = {name: cards[name]}
    if as_json:
        print_json([vars(card) for card in cards.values()])
    elif name is not None:
        print(yaml.safe_dump(vars(cards[name]), sort_keys=False, allow_unicode=True), end="")
    else:
        rows = [
            (card.name, card.summary, card.data, _size(card), card.use) for card in cards.values()
        ]
        print_table(("Name", "What it is", "Data", "Size", "Try"), rows, unbroken=("Name",))
        say("How one was made, and its figures: equilibria models NAME --pretrained")


def _size(card: eq.models.PretrainedCard) -> str:
    return f"{card.file.stat().st_size / 1024:.0f} KiB"


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
