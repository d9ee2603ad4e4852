"""A server binds its port before it says where it answers."""

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
def test_a_port_in_use_ends_the_program_with_one_sentence(command: str, busy_port: int) -> None:
    said = invoke(command, "digits-opteq", "--port", busy_port)
    assert said.exit_code == 2
    assert said.stdout == ""
    assert said.stderr.strip() == (
        f"Error: port {busy_port} of 127.0.0.1 is already in use: choose another port (--port), "
        "or 0 for any free port (--port 0)"
    )


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_port_0_takes_a_free_port_and_the_program_says_which(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []
    addresses: list[str] = []

    def serve(app: object, *, listener: Listener) -> None:
        addresses.append(listener.address)
        with running(app, listener) as address:  # type: ignore[arg-type]
            image = png(load_digits().test.images[0])
            answer = requests.post(f"{address}/predict", data=image, timeout=60)
            answers.append(answer.status_code)

    monkeypatch.setattr("equilibria.serving.run_server", serve)
    said = invoke(command, "digits-opteq", "--port", 0)
    assert said.exit_code == 0, said.output
    assert answers == [200]
    assert f"{addresses[0]}/" in said.stdout


def test_a_port_in_use_is_an_error_in_python(busy_port: int) -> None:
    with pytest.raises(OSError, match="is already in use: choose another port"):
        run_server(None, "127.0.0.1", busy_port)  # type: ignore[arg-type]


def test_localhost_has_one_port_at_all_its_addresses() -> None:
    with bind("localhost", 0) as listener:
        assert {one.getsockname()[1] for one in listener.sockets} == {listener.port}
        assert listener.address == f"http://localhost:{listener.port}"


def test_addresses_of_version_6_stand_in_brackets() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert Listener([one], "::1").address == f"http://[::1]:{one.getsockname()[1]}"


@pytest.mark.parametrize("host", ["192.0.2.1", "no..host"])
def test_a_host_that_is_not_this_machine_is_an_error_with_a_remedy(host: str) -> None:
    with pytest.raises(OSError, match=r"use 127\.0\.0\.1"):
        bind(host, 0)
