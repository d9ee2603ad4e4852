"""Abandoned work of the explorer is stopped, so that it does not delay other requests."""

from __future__ import annotations

import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
import torch

from equilibria.data import load_digits
from equilibria.serving import Limits, explorer
from equilibria.serving.exploring import Explored
from equilibria.training.experiment import trained_model
from tests.serving.running import png, running


def endless(started: threading.Event, ended: threading.Event) -> None:
    """Run PyTorch operations until one raises an error."""
    started.set()
    try:
        total = torch.zeros(1)
        while True:
            total = total + 1
    finally:
        ended.set()


def test_the_next_torch_call_raises_after_abandonment() -> None:
    is_abandoned = threading.Event()
    with explorer.WhileWanted(is_abandoned):
        assert float(torch.ones(2).sum()) == 2
        is_abandoned.set()
        with pytest.raises(explorer.AbandonedError):
            torch.ones(2)
    assert float(torch.ones(2).sum()) == 2


@pytest.mark.parametrize("disconnects", [True, False])
def test_work_stops_after_a_disconnect_or_the_time_limit(
    disconnects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(explorer, "restored_photo", lambda *_: endless(started, ended))
    explored = [Explored("digits", trained_model("digits-opteq"))]
    digit = png(load_digits().test.images[0])
    limits = Limits(seconds=600 if disconnects else 1)
    with running(explorer.explorer_app(explored, limits)) as address:
        client = HTTPConnection(urlsplit(address).netloc, timeout=60)
        client.request("POST", "/explorer/photo", digit)
        assert started.wait(60)
        if not disconnects:
            assert client.getresponse().status == 504
        client.close()
        assert ended.wait(60)
