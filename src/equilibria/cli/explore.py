"""`equilibria explore`: an interactive page about models."""

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
"""Tasks of pretrained models that are classifiers."""


@command(
    "explore",
    "equilibria explore --open",
    "equilibria explore runs/opteq runs/geq",
)
def explore(
    runs: Annotated[
        list[Path] | None,
        Argument(help="Runs of classifiers (default: the pretrained classifiers)."),
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
        host_names = hosts(host, names)
        torch_device = eq.training.processes.choose_device(device)
        cards = eq.models.pretrained_cards().values()
        selected = runs or [Path(card.name) for card in cards if card.task in CLASSIFIERS]
        explored = [Explored(str(run), opened_model(run, torch_device, best)) for run in selected]
        # The page starts with the first model: one with samples, and among pretrained models the
        # one that is most confident in its first sample.
        explored.sort(
            key=lambda model: (not len(model.samples()), 0 if runs else -model.confidence())
        )
        app = explorer_app(explored, limits, host_names)
        listener.listen()
        say(f"Open {listener.address}/   Press Ctrl-C to stop.")
        if show:
            webbrowser.open(f"{listener.address}/")
        run_server(app, listener=listener)
