"""`equilibria serve`: serve a trained model over HTTP."""

from __future__ import annotations

import re
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from equilibria.cli.app import Best, Device, SomeRun, command, opened_model
from equilibria.cli.console import say
from equilibria.registry import check_positive

if TYPE_CHECKING:
    from equilibria.serving import Answerer


def check_installed() -> None:
    """Raise a ValueError if the packages of the server, an extra, are not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ValueError(
            f"the server needs {' and '.join(missing)}; run pip install 'equilibria[serve]'"
        )


Host = Annotated[
    str, Option(help="Address to listen on; the default accepts local connections only.")
]
Names = Annotated[
    list[str] | None,
    Option(
        "--name",
        metavar="HOST",
        help="Additional host name that requests may use; can be repeated.",
    ),
]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")]


HeaderSeconds = Annotated[
    float, Option(min=0.1, help="Timeout for the headers of a request, in seconds.")
]
BodySeconds = Annotated[
    float,
    Option(
        min=0.1, help="Timeout for the body of a request, or for sending a response, in seconds."
    ),
]
Connections = Annotated[
    int, Option(min=1, help="Largest number of open connections; others are rejected (503).")
]


def hosts(host: str, names: list[str] | None) -> tuple[str, ...]:
    """Return the accepted host names: local ones, the address, and those of --name."""
    from equilibria.serving.server import LOOPBACK

    for name in names or ():
        if not re.fullmatch(r"[\w.:-]+", name) or re.search(r"^[\w.-]+:\d*$", name):
            raise ValueError(
                f"{name!r} is not a host name; give it without http:// and port, for example "
                "--name models.example.org"
            )
    if host in ("0.0.0.0", "::") and not names:
        say(
            f"The server listens on all addresses but accepts only requests for "
            f"{', '.join(LOOPBACK)}; add other host names with --name HOST."
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
        bool,
        Option("--certificates/--no-certificates", help="Whether predictions have certificates."),
    ] = True,
    megabytes: Annotated[float, Option(min=0.001, help="Largest size of an image, in MB.")] = 10.0,
    seconds: Annotated[float, Option(min=0.1, help="Timeout for a prediction, in seconds.")] = 10.0,
    header_seconds: HeaderSeconds = 5.0,
    body_seconds: BodySeconds = 10.0,
    connections: Connections = 512,
    batch: Annotated[int, Option(min=1, help="Largest number of images per batch.")] = 32,
    waiting: Annotated[int, Option(min=1, help="Largest number of queued images.")] = 256,
    backend: Annotated[
        Literal["auto", "compiled", "eager"],
        Option(
            help="How solves run. auto: eagerly at first, and in compiled graphs once these are "
            "ready and faster; compiled: compile before the first request; eager: never compile."
        ),
    ] = "auto",
    best: Best = False,
    device: Device = "auto",
) -> None:
    """Serve predictions over HTTP: POST an image to /predict.

    The response has class, confidence and certificate.
    """
    check_installed()
    check_positive(megabytes=megabytes, seconds=seconds)
    import equilibria as eq
    from equilibria.serving import Answerer, Limits, bind, prediction_app, run_server

    limits = Limits(megabytes, seconds, batch, waiting, header_seconds, body_seconds, connections)
    with bind(host, port) as listener:
        host_names = hosts(host, names)
        model = opened_model(run, eq.training.processes.choose_device(device), best).model
        answerer = Answerer(model, certificates=certificates)
        app = prediction_app(answerer, str(run), limits, host_names)
        address = listener.address
        if backend == "compiled":
            say("Compiling the solves; this takes seconds to minutes.")
            answerer.compile(limits.largest_batch)
            if not answerer.compiled_solves.largest:
                raise ValueError(
                    "no compiled graph is faster than the eager solves of this model; use "
                    "--backend auto"
                )
        listener.listen()
        say(f"Serving {run} at {address}/predict; state at {address}/health and /metrics.")
        say(f"Try: curl --data-binary @picture.png {address}/predict   Press Ctrl-C to stop.")
        if backend == "auto":
            say("Solves run eagerly until their graphs are compiled (--backend).")
            Thread(target=compile_in_background, args=(answerer, batch), daemon=True).start()
        elif backend == "compiled":
            say(backend_in_words(answerer))
        run_server(app, listener=listener)


def compile_in_background(answerer: Answerer, largest_batch: int) -> None:
    """Compile the solves of a server that is running, and print the result."""
    answerer.compile(largest_batch)
    say(backend_in_words(answerer))


def backend_in_words(answerer: Answerer) -> str:
    """Return how the solves of a server run, as a sentence."""
    largest = answerer.compiled_solves.largest
    return (
        f"Batches of up to {largest} are solved in compiled graphs."
        if largest
        else "Solves run eagerly."
    )
