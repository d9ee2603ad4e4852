"""`equilibria explore`: one page to look into models."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from equilibria.cli.app import Best, Device, command, opened_model
from equilibria.cli.console import say
from equilibria.cli.serve import Host, Names, Port, check_installed, hosts

CLASSIFIERS = ("predict", "evaluate", "certify")
"""What is done with trained models that name classes."""


@command(
    "explore",
    "equilibria explore --open",
    "equilibria explore runs/opteq runs/geq",
)
def explore(
    runs: Annotated[
        list[Path] | None,
        Argument(help="Runs of classifiers; those that come with the program if not given."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    names: Names = None,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    best: Best = False,
    device: Device = "auto",
) -> None:
    """Serve a page: watch equilibria form, attack a model, restore a photograph."""
    check_installed()
    import equilibria as eq
    from equilibria.serving import run_server
    from equilibria.serving.explorer import explorer_app
    from equilibria.serving.exploring import Explored

    called = hosts(host, names)
    place = eq.training.choose_device(device)
    cards = eq.models.pretrained_cards().values()
    asked = runs or [Path(card.name) for card in cards if card.task in CLASSIFIERS]
    explored = [Explored(str(run), opened_model(run, place, best)) for run in asked]
    explored.sort(key=lambda one: not len(one.samples()))  # The page begins with a picture.
    app = explorer_app(explored, hosts=called)
    address = f"http://{host}:{port}/"
    say(f"Open {address}   Ctrl-C ends it.")
    if show:
        webbrowser.open(address)
    run_server(app, host, port)
