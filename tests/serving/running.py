"""A server in a thread of its own, on a free port of the loopback device."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image
from starlette.applications import Starlette
from torch import Tensor

from equilibria.serving import bind
from equilibria.serving.connections import server_of
from equilibria.serving.sockets import Listener


@contextmanager
def running(app: Starlette, listener: Listener | None = None) -> Iterator[str]:
    """The address that the application answers at."""
    listener = bind("127.0.0.1", 0) if listener is None else listener
    server = server_of(app, log_level="critical")
    thread = threading.Thread(target=server.run, args=[list(listener.sockets)], daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield listener.address
    finally:
        server.should_exit = True
        thread.join(60)


def png(image: Tensor) -> bytes:
    """A gray image with values in [0, 1] as a file."""
    content = io.BytesIO()
    Image.fromarray((image[0] * 255).round().byte().numpy()).save(content, "PNG")
    return content.getvalue()
