"""Slow clients lose their connection, and a limit holds for the number of connections."""

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
"""Seconds that the servers of these tests wait for a client."""
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
BODY = HEAD + b"Content-Length: 99999\r\n\r\nab"
ELSEWHERE = BODY.replace(b"/predict", b"/nothing")
CLIENTS = (
    ("nothing", b"", None),
    ("half the headers", HEAD[:30], 408),
    ("half the body", BODY, 408),
    ("half a body that is not read", ELSEWHERE, 404),
)
"""Name, bytes that a client sends before it stops, and status of the answer (None: no answer)."""


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(eq.load("digits-opteq"), certificates=False)


@pytest.fixture(scope="module")
def digit() -> bytes:
    return png(load_digits().test.images[0])


@pytest.fixture(scope="module")
def address(answerer: Answerer) -> Iterator[str]:
    """Address of a server with short time-outs."""
    limits = Limits(seconds=60, header_seconds=SHORT, body_seconds=SHORT)
    with running(prediction_app(answerer, "digits", limits)) as place:
        yield place


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def received(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    content = b""
    with suppress(ConnectionError):
        while piece := client.recv(65536):
            content += piece
    return content


def trickle(client: socket.socket) -> None:
    """Send a byte now and then, until the connection is closed."""
    with suppress(OSError):
        while True:
            client.sendall(b"x")
            time.sleep(SHORT / 10)


def status_of(address: str, digit: bytes) -> int:
    return requests.post(f"{address}/predict", data=digit, timeout=60).status_code


def test_clients_that_stop_lose_their_connections(address: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in CLIENTS]
        for client, (_, sent, _) in zip(clients, CLIENTS, strict=True):
            client.sendall(sent)
        for client, (what, _, status) in zip(clients, CLIENTS, strict=True):
            content = received(client)
            head = b"" if status is None else f"HTTP/1.1 {status} ".encode()
            assert content[: len(head) or None] == head, what
            assert (b"not complete after 0.5 seconds" in content) == (status == 408), what


def test_clients_that_send_a_byte_now_and_then_lose_their_connections(address: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in CLIENTS]
        for client, (_, sent, _) in zip(clients, CLIENTS, strict=True):
            client.sendall(sent)
            threading.Thread(target=trickle, args=[client], daemon=True).start()
        for client in clients:
            received(client)  # It returns when the connection has ended.


def test_an_idle_connection_is_kept_and_its_second_request_must_be_quick_too(address: str) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(address) as client:
        client.sendall(request)
        content = client.recv(65536)
        time.sleep(2 * SHORT)
        client.sendall(request + HEAD[:30])
        content += received(client)
    assert content.count(b"HTTP/1.1 200 ") == 2
    assert content.count(b"HTTP/1.1 408 ") == 1


def test_a_client_that_does_not_take_its_answer_loses_its_connection(
    answerer: Answerer, digit: bytes
) -> None:
    def large(_: Request) -> Response:
        return Response(bytes(50_000_000))

    limits = Limits(body_seconds=SHORT, connections=1)
    app = prediction_app(answerer, "digits", limits, pages=[Route("/large", large)])
    with running(app) as address, connect(address) as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert slow.recv(1)
        # There is room for one connection only.
        deadline = time.monotonic() + 60
        while status_of(address, digit) != 200:
            assert time.monotonic() < deadline
        assert len(received(slow)) < 50_000_000


class Held(Answerer):
    """Answers when a test lets it."""

    def __init__(self) -> None:
        super().__init__(eq.load("digits-opteq"), certificates=False)
        self.begun, self.let = threading.Event(), threading.Event()

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        self.begun.set()
        assert self.let.wait(60)
        return super().__call__(images)


def test_connections_above_the_limit_are_refused_and_running_requests_end(digit: bytes) -> None:
    held = Held()
    app = prediction_app(held, "digits", Limits(seconds=60, header_seconds=60, connections=4))
    statuses: list[int] = []
    with running(app) as address, ExitStack() as stack:
        asking = threading.Thread(target=lambda: statuses.append(status_of(address, digit)))
        asking.start()
        assert held.begun.wait(60)
        idle = [stack.enter_context(connect(address)) for _ in range(3)]
        for _ in range(5):
            refused = requests.post(f"{address}/predict", data=bytes(200_000), timeout=60)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"] == "1"
            assert "4 connections are open already" in refused.json()["error"]
        held.let.set()
        asking.join(60)
        assert statuses == [200]
        for one in idle:
            one.close()
        deadline = time.monotonic() + 60
        while status_of(address, digit) != 200:
            assert time.monotonic() < deadline


def test_a_crowd_of_connections_leaves_the_server_as_it_was(answerer: Answerer) -> None:
    limits = Limits(seconds=60, header_seconds=SHORT, connections=8)
    with running(prediction_app(answerer, "digits", limits)) as address, ExitStack() as stack:
        crowd = [stack.enter_context(connect(address)) for _ in range(100)]
        assert [received(one) for one in crowd] == [b""] * 100
        assert requests.get(f"{address}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("name", ["header_seconds", "body_seconds", "connections", "megabytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be greater than 0, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_the_program_takes_the_limits(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[Starlette] = []
    monkeypatch.setattr("equilibria.serving.run_server", lambda app, **_: apps.append(app))
    said = invoke(
        *(command, "digits-opteq", "--port", 0),
        *("--header-seconds", 3, "--body-seconds", 7, "--connections", 9),
    )
    assert said.exit_code == 0, said.output
    limits = apps[0].state.limits
    assert (limits.header_seconds, limits.body_seconds, limits.connections) == (3, 7, 9)
