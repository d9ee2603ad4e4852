"""`equilibria explore`: one page to look into models."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from equilibria.cli.app import Best, Device, command, opened_model
from equilibria.cli.console import say
from equilibria.cli.serve import (
    BodySeconds,
    Connections,
    HeaderSeconds,
    Host,
    Names,
    Port,
    check_installed,
    hosts,
)

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
    header_seconds: HeaderSeconds = 5.0,
    body_seconds: BodySeconds = 10.0,
    connections: Connections = 512,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    best: Best = False,
    device: Device = "auto",
) -> None:
    """Serve a page: watch equilibria form, attack a model, restore a photograph."""
    check_installed()
    import equilibria as eq
    from equilibria.serving import Limits, bind, run_server
    from equilibria.serving.explorer import explorer_app
    from equilibria.serving.exploring import Explored

    limits = Limits(
        seconds=60,
        header_seconds=header_seconds,
        body_seconds=body_seconds,
        connections=connections,
    )
    with bind(host, port) as listener:
        called = hosts(host, names)
        place = eq.training.processes.choose_device(device)
        cards = eq.models.pretrained_cards().values()
        asked = runs or [Path(card.name) for card in cards if card.task in CLASSIFIERS]
        explored = [Explored(str(run), opened_model(run, place, best)) for run in asked]
        # The page starts with the first model: one with samples, and of the models of the package
        # the one that is most confident in its first sample.
        explored.sort(key=lambda one: (not len(one.samples()), 0 if runs else -one.confidence()))
        app = explorer_app(explored, limits, called)
        listener.listen()
        say(f"Open {listener.address}/   Press Ctrl-C to stop.")
        if show:
            webbrowser.open(f"{listener.address}/")
        run_server(app, listener=listener)
