"""A server in a separate thread, on a free port of the loopback interface."""

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
    """Run an application and yield the address of its server."""
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
    """Return a grayscale image with values in [0, 1] as a PNG file."""
    content = io.BytesIO()
    Image.fromarray((image[0] * 255).round().byte().numpy()).save(content, "PNG")
    return content.getvalue()
