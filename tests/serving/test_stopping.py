"""What nobody waits for any more is stopped, and does not keep others waiting."""

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
    """A step that never ends by itself."""
    started.set()
    try:
        total = torch.zeros(1)
        while True:
            total = total + 1
    finally:
        ended.set()


def test_torch_stops_at_its_next_call() -> None:
    gone = threading.Event()
    with explorer.WhileWanted(gone):
        assert float(torch.ones(2).sum()) == 2
        gone.set()
        with pytest.raises(explorer.AbandonedError):
            torch.ones(2)
    assert float(torch.ones(2).sum()) == 2


@pytest.mark.parametrize("leaves", [True, False])
def test_the_next_visitor_is_answered(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before has left, or has waited for as long as is allowed."""
    started, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(explorer, "restored_photo", lambda *_: endless(started, ended))
    explored = [Explored("digits", trained_model("digits-opteq"))]
    digit = png(load_digits().test.images[0])
    limits = Limits(seconds=600 if leaves else 1)
    with running(explorer.explorer_app(explored, limits)) as address:
        visitor = HTTPConnection(urlsplit(address).netloc, timeout=60)
        visitor.request("POST", "/explorer/photo", digit)
        assert started.wait(60)
        if not leaves:
            assert visitor.getresponse().status == 504
        visitor.close()
        assert ended.wait(60)
