"""Timeouts for slow clients, and the limit on the number of connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import pytest
import requests
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

import equilibria as eq
from equilibria.data import load_digits
from equilibria.serving import Answerer, Limits, prediction_app
from equilibria.serving.answers import Answer
from tests.program import invoke
from tests.serving.running import png, running

SHORT = 0.5
"""Timeout of the servers in these tests, in seconds."""
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
BODY = HEAD + b"Content-Length: 99999\r\n\r\nab"
ELSEWHERE = BODY.replace(b"/predict", b"/nothing")
CLIENTS = (
    ("nothing", b"", None),
    ("half the headers", HEAD[:30], 408),
    ("half the body", BODY, 408),
    ("half a body that is not read", ELSEWHERE, 404),
)
"""Name, bytes sent before the client stops, and status of the response (None: no response)."""


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(eq.load("digits-opteq"), certificates=False)


@pytest.fixture(scope="module")
def digit() -> bytes:
    return png(load_digits().test.images[0])


@pytest.fixture(scope="module")
def address(answerer: Answerer) -> Iterator[str]:
    """Address of a server with short timeouts."""
    limits = Limits(seconds=60, header_seconds=SHORT, body_seconds=SHORT)
    with running(prediction_app(answerer, "digits", limits)) as url:
        yield url


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def received(client: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    content = b""
    with suppress(ConnectionError):
        while piece := client.recv(65536):
            content += piece
    return content


def trickle(client: socket.socket) -> None:
    """Send single bytes slowly until the connection is closed."""
    with suppress(OSError):
        while True:
            client.sendall(b"x")
            time.sleep(SHORT / 10)


def status_of(address: str, digit: bytes) -> int:
    return requests.post(f"{address}/predict", data=digit, timeout=60).status_code


def test_connections_of_clients_that_stop_sending_are_closed(address: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in CLIENTS]
        for client, (_, sent, _) in zip(clients, CLIENTS, strict=True):
            client.sendall(sent)
        for client, (name, _, status) in zip(clients, CLIENTS, strict=True):
            content = received(client)
            head = b"" if status is None else f"HTTP/1.1 {status} ".encode()
            assert content[: len(head) or None] == head, name
            assert (b"not complete after 0.5 seconds" in content) == (status == 408), name


def test_connections_of_clients_that_send_slowly_are_closed(address: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in CLIENTS]
        for client, (_, sent, _) in zip(clients, CLIENTS, strict=True):
            client.sendall(sent)
            threading.Thread(target=trickle, args=[client], daemon=True).start()
        for client in clients:
            received(client)  # returns when the connection is closed


def test_idle_connections_stay_open_and_header_timeouts_apply_to_later_requests(
    address: str,
) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(address) as client:
        client.sendall(request)
        content = client.recv(65536)
        time.sleep(2 * SHORT)
        client.sendall(request + HEAD[:30])
        content += received(client)
    assert content.count(b"HTTP/1.1 200 ") == 2
    assert content.count(b"HTTP/1.1 408 ") == 1


def test_connections_of_clients_that_do_not_read_the_response_are_closed(
    answerer: Answerer, digit: bytes
) -> None:
    def large(_: Request) -> Response:
        return Response(bytes(50_000_000))

    limits = Limits(body_seconds=SHORT, connections=1)
    app = prediction_app(answerer, "digits", limits, pages=[Route("/large", large)])
    with running(app) as address, connect(address) as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert slow.recv(1)
        # The server accepts one connection only.
        deadline = time.monotonic() + 60
        while status_of(address, digit) != 200:
            assert time.monotonic() < deadline
        assert len(received(slow)) < 50_000_000


class BlockedAnswerer(Answerer):
    """Answers only after `released` is set."""

    def __init__(self) -> None:
        super().__init__(eq.load("digits-opteq"), certificates=False)
        self.started, self.released = threading.Event(), threading.Event()

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        self.started.set()
        assert self.released.wait(60)
        return super().__call__(images)


def test_connections_above_the_limit_get_503_and_running_requests_finish(digit: bytes) -> None:
    answerer = BlockedAnswerer()
    app = prediction_app(answerer, "digits", Limits(seconds=60, header_seconds=60, connections=4))
    statuses: list[int] = []
    with running(app) as address, ExitStack() as stack:
        client = threading.Thread(target=lambda: statuses.append(status_of(address, digit)))
        client.start()
        assert answerer.started.wait(60)
        idle = [stack.enter_context(connect(address)) for _ in range(3)]
        for _ in range(5):
            refused = requests.post(f"{address}/predict", data=bytes(200_000), timeout=60)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"] == "1"
            assert "4 connections are already open" in refused.json()["error"]
        answerer.released.set()
        client.join(60)
        assert statuses == [200]
        for connection in idle:
            connection.close()
        deadline = time.monotonic() + 60
        while status_of(address, digit) != 200:
            assert time.monotonic() < deadline


def test_server_works_after_many_idle_connections(answerer: Answerer) -> None:
    limits = Limits(seconds=60, header_seconds=SHORT, connections=8)
    with running(prediction_app(answerer, "digits", limits)) as address, ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(100)]
        assert [received(client) for client in clients] == [b""] * 100
        assert requests.get(f"{address}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("name", ["header_seconds", "body_seconds", "connections", "megabytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be greater than 0, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_commands_have_options_for_the_limits(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[Starlette] = []
    monkeypatch.setattr("equilibria.serving.run_server", lambda app, **_: apps.append(app))
    # The command returns while the thread that compiles solves would still run.
    backend = ("--backend", "eager") if command == "serve" else ()
    result = invoke(
        *(command, "digits-opteq", "--port", 0, *backend),
        *("--header-seconds", 3, "--body-seconds", 7, "--connections", 9),
    )
    assert result.exit_code == 0, result.output
    limits = apps[0].state.limits
    assert (limits.header_seconds, limits.body_seconds, limits.connections) == (3, 7, 9)
