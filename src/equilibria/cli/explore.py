"""`equilibria explore`: one page to look into models."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from equilibria.cli.app import Best, Device, command, opened_model
from equilibria.cli.console import say
from equilibria.cli.serve import Host, Port, check_installed


@command(
    "explore",
    "equilibria explore runs/opteq runs/geq",
    "equilibria explore runs/opteq --open",
)
def explore(
    runs: Annotated[list[Path], Argument(help="Runs of classifiers.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
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
    from equilibria.serving.server import LOOPBACK

    place = eq.training.choose_device(device)
    explored = [Explored(str(run), opened_model(run, place, best)) for run in runs]
    app = explorer_app(explored, hosts=(*LOOPBACK, host))
    address = f"http://{host}:{port}/"
    say(f"Open {address}   Ctrl-C ends it.")
    if show:
        webbrowser.open(address)
    run_server(app, host, port)
