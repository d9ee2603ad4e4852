"""`equilibria serve`: a trained model that answers over HTTP."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated

from typer import Option

from equilibria.cli.app import Best, Device, SomeRun, command, opened_model
from equilibria.cli.console import say
from equilibria.registry import check_positive


def check_installed() -> None:
    """The server's packages are an extra."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ValueError(
            f"{' and '.join(missing)} must be installed for this: pip install 'equilibria[serve]'"
        )


Host = Annotated[str, Option(help="Address to listen at; the default reaches this machine only.")]
Names = Annotated[
    list[str] | None,
    Option(
        "--name",
        metavar="HOST",
        help="A name that it may be called by, beside localhost and --host; several times.",
    ),
]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen at; 0 takes any free one.")]


HeaderSeconds = Annotated[
    float, Option(min=0.1, help="Seconds in which the headers of a request must arrive.")
]
BodySeconds = Annotated[
    float, Option(min=0.1, help="Seconds in which a body must arrive, or an answer be taken.")
]
Connections = Annotated[
    int, Option(min=1, help="Connections that may be open; further ones are refused (503).")
]


def hosts(host: str, names: list[str] | None) -> tuple[str, ...]:
    """What the server may be called: itself, and what the user names."""
    from equilibria.serving.server import LOOPBACK

    for name in names or ():
        if not re.fullmatch(r"[\w.:-]+", name) or re.search(r"^[\w.-]+:\d*$", name):
            raise ValueError(
                f"{name!r} is not the name of a host: give it as clients do, without http:// and "
                "port, such as --name models.example.org"
            )
    if host in ("0.0.0.0", "::") and not names:
        say(
            f"It listens everywhere, but may be called {', '.join(LOOPBACK)} alone: --name HOST "
            "gives it another name."
        )
    return (*LOOPBACK, host, *(name.lower() for name in names or ()))


@command(
    "serve",
    "equilibria serve runs/opteq",
    "equilibria serve runs/opteq --port 9000 --no-certificates",
    "equilibria serve runs/opteq --host 0.0.0.0 --name models.example.org",
    "curl --data-binary @digit.png http://127.0.0.1:8000/predict",
    "curl -F file=@digit.png http://127.0.0.1:8000/predict",
)
def serve(
    run: SomeRun,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    names: Names = None,
    certificates: Annotated[
        bool, Option("--certificates/--no-certificates", help="What is certain of each answer.")
    ] = True,
    megabytes: Annotated[float, Option(min=0.001, help="Of a picture, at the most.")] = 10.0,
    seconds: Annotated[
        float, Option(min=0.1, help="Seconds from the whole picture to its answer, at most.")
    ] = 10.0,
    header_seconds: HeaderSeconds = 5.0,
    body_seconds: BodySeconds = 10.0,
    connections: Connections = 512,
    batch: Annotated[int, Option(min=1, help="Pictures that are solved together.")] = 32,
    waiting: Annotated[int, Option(min=1, help="Pictures that may wait for their turn.")] = 256,
    best: Best = False,
    device: Device = "auto",
) -> None:
    """Answer pictures over HTTP: POST one to /predict, get class, confidence and certificate."""
    check_installed()
    check_positive(megabytes=megabytes, seconds=seconds)
    import equilibria as eq
    from equilibria.serving import Answerer, Limits, bind, prediction_app, run_server

    limits = Limits(megabytes, seconds, batch, waiting, header_seconds, body_seconds, connections)
    with bind(host, port) as listener:
        called = hosts(host, names)
        model = opened_model(run, eq.training.processes.choose_device(device), best).model
        answerer = Answerer(model, certificates=certificates)
        app = prediction_app(answerer, str(run), limits, called)
        address = listener.address
        listener.listen()
        say(f"{run} answers at {address}/predict; {address}/health and /metrics show its state.")
        say(f"Try: curl --data-binary @picture.png {address}/predict   Press Ctrl-C to stop.")
        run_server(app, listener=listener)
