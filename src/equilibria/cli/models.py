"""`equilibria models`: list models and pretrained models."""

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
        str | None,
        Argument(help="Name of a model, to show its parts and the objective its output minimizes."),
    ] = None,
    markdown: Annotated[bool, Option(help="Print the list as a Markdown table.")] = False,
    pretrained: Annotated[
        bool, Option("--pretrained", help="List pretrained models, or show one.")
    ] = False,
    as_json: JsonList = False,
) -> None:
    """List the models that can be created by name, or show one of them."""
    if pretrained:
        _show_pretrained(name, as_json)
    elif as_json:
        print_json([_as_data(model) for model in ([name] if name else eq.models.list_models())])
    elif name is None or markdown:
        _show_models(markdown)
    else:
        _show_model(name)


def _as_data(name: str) -> dict[str, Any]:
    description = eq.models.describe_model(name)
    card = {key: value for key, value in vars(description.card).items() if key != "options"}
    facts = {key: value for key, value in vars(description).items() if key not in ("card", "parts")}
    return {"name": name, **card, **facts}


def _show_pretrained(name: str | None, as_json: bool) -> None:
    """Print the cards of pretrained models."""
    cards = eq.models.pretrained_cards()
    if name is not None:
        if name not in cards:
            eq.models.pretrained.pretrained_file(name)  # Raises an error with similar names.
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
        say("Training and accuracy of one model: equilibria models NAME --pretrained")


def _size(card: eq.models.PretrainedCard) -> str:
    return f"{card.file.stat().st_size / 1024:.0f} KiB"


def _show_models(markdown: bool) -> None:
    """Print the list of models as a table, or in Markdown for docs/models.md."""
    rows = []
    lines = ["| name | what it is | paper | parameters | reported | objective | guarantee |"]
    lines.append("|---|---|---|---:|---:|---|---|")
    for name in eq.models.list_models():
        description = eq.models.describe_model(name)
        kind = description.objective_kind if description.is_equilibrium else ""
        cells = [
            description.card.paper,
            f"{description.parameters:,}",
            description.card.reported,
            kind,
        ]
        cells.append(description.guarantee or "")
        rows.append((name, *cells))
        lines.append(f"| {' | '.join([f'`{name}`', description.card.summary, *cells])} |")
    if markdown:
        print("\n".join(lines))
        return
    headings = ("Name", "Paper", "Parameters", "reported", "Objective", "Guarantee")
    unbroken = {*headings} - {"Paper", "Objective"}
    print_table(headings, rows, right=("Parameters", "reported"), unbroken=unbroken)
    say(
        "Objective: whether the output minimizes a known function (empty: no equilibrium). "
        "Guarantee: properties that hold for every input; q is the contraction factor of the map.\n"
        "Details of one model: equilibria models NAME",
        wrap=True,
    )


def _show_model(name: str) -> None:
    """Print the parts, the hidden objective, and the options of a model."""
    description = eq.models.describe_model(name)
    rows = [
        (part.path.removeprefix("layer."), part.kind, part.details, f"{part.parameters:,}")
        for part in description.parts
    ]
    reported = f" (reported: {description.card.reported})" if description.card.reported else ""
    total = ("all", "", "", f"{description.parameters:,}{reported}")
    say(f"{name}  {description.card.summary}")
    if description.card.paper:
        say(f"Paper: {description.card.paper}")
    print_table(
        ("Part", "Kind", "Details", "Parameters"), [*rows, None, total], right=("Parameters",)
    )
    if description.is_equilibrium:
        say(f"Hidden objective: {description.objective or 'none'}")
        say(f"Guarantee: {description.guarantee or 'none'}\n")
    options = ", ".join(f"{key}={value!r}" for key, value in eq.models.model_options(name).items())
    say(f"Options: {options}")
