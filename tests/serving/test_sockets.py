"""Servers bind their port before they report their address."""

from __future__ import annotations

import socket

import pytest
import requests

from equilibria.data import load_digits
from equilibria.serving import bind, run_server
from equilibria.serving.sockets import Listener
from tests.program import invoke
from tests.serving.running import png, running


@pytest.fixture
def busy_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_commands_exit_with_an_error_if_the_port_is_in_use(command: str, busy_port: int) -> None:
    result = invoke(command, "digits-opteq", "--port", busy_port)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.strip() == (
        f"Error: port {busy_port} of 127.0.0.1 is already in use; choose another port (--port), "
        "or any free port (--port 0)"
    )


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_port_0_selects_a_free_port_and_prints_it(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    addresses: list[str] = []

    def serve(app: object, *, listener: Listener) -> None:
        addresses.append(listener.address)
        with running(app, listener) as address:  # type: ignore[arg-type]
            image = png(load_digits().test.images[0])
            response = requests.post(f"{address}/predict", data=image, timeout=60)
            statuses.append(response.status_code)

    monkeypatch.setattr("equilibria.serving.run_server", serve)
    # The command returns while the thread that compiles solves would still run.
    backend = ("--backend", "eager") if command == "serve" else ()
    result = invoke(command, "digits-opteq", "--port", 0, *backend)
    assert result.exit_code == 0, result.output
    assert statuses == [200]
    assert f"{addresses[0]}/" in result.stdout


def test_run_server_raises_if_the_port_is_in_use(busy_port: int) -> None:
    with pytest.raises(OSError, match="is already in use; choose another port"):
        run_server(None, "127.0.0.1", busy_port)  # type: ignore[arg-type]


def test_all_sockets_of_localhost_have_the_same_port() -> None:
    with bind("localhost", 0) as listener:
        assert {each.getsockname()[1] for each in listener.sockets} == {listener.port}
        assert listener.address == f"http://localhost:{listener.port}"


def test_ipv6_addresses_are_enclosed_in_brackets() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert Listener([bound], "::1").address == f"http://[::1]:{bound.getsockname()[1]}"


@pytest.mark.parametrize("host", ["192.0.2.1", "no..host"])
def test_hosts_that_are_not_this_machine_raise(host: str) -> None:
    with pytest.raises(OSError, match=r"use 127\.0\.0\.1"):
        bind(host, 0)
