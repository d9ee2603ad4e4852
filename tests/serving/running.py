"""A server in a thread of its own, on a free port of the loopback device."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from PIL import Image
from starlette.applications import Starlette
from torch import Tensor


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    """The address that the application answers at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)


def png(image: Tensor) -> bytes:
    """A gray image with values in [0, 1] as a file."""
    content = io.BytesIO()
    Image.fromarray((image[0] * 255).round().byte().numpy()).save(content, "PNG")
    return content.getvalue()
