"""HTTP connections with timeouts for slow clients and a limit on their number."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from equilibria.serving.server import Limits

REFUSAL_SECONDS = 1.0
"""Time in which a client above the connection limit can send a request and read the response."""
MAX_REFUSALS = 32
"""Connections above the limit that get a response at the same time; further ones are closed."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 connection that a slow client cannot keep open.

    The application limits the time for reading the body of a request. This class limits the times
    for the headers, for the rest of a body that the application did not read, and for sending the
    response. uvicorn closes connections that are idle between requests (`timeout_keep_alive`).

    Args:
        limits: Timeouts and the maximum number of open connections.
        refused: Connections above that number, a set shared by all connections of a server.
    """

    def __init__(
        self, *args: Any, limits: Limits, refused: set[BoundedProtocol], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.limits = limits
        self.refused = refused
        self.awaited: object = None
        """Event that `read_timer` limits, or None."""
        self.is_answered = False
        """Whether a refused client has got its response."""
        self.read_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With a limit of 0, `pause_writing` is called whenever sent data are still unread.
        transport.set_write_buffer_limits(0)
        if len(self.connections) <= self.limits.connections:
            self._await("headers", self.limits.header_seconds)
            return
        self.connections.discard(self)
        self.refused.add(self)
        if len(self.refused) > MAX_REFUSALS:
            transport.abort()
        else:
            self._await("a request to refuse", REFUSAL_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self not in self.refused:
            super().data_received(data)
        elif not self.is_answered:
            # Further data are read and dropped. Closing a socket with unread data would reset the
            # connection, and the client might lose the response.
            self.is_answered = True
            message = f"{self.limits.connections} connections are already open; try again later"
            self._write_error(HTTPStatus.SERVICE_UNAVAILABLE, message, "Retry-After: 1\r\n")
            self.transport.write_eof()

    def handle_events(self) -> None:
        super().handle_events()
        self._update_read_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.refused.discard(self)
        self._await(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.write_timer is None:
            seconds = self.limits.body_seconds
            self.write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def _update_read_timer(self) -> None:
        """Start the timer for the next data from the client, unless it is already running."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._await(None)
        elif state is h11.IDLE and self._unparsed():
            self._await("headers", self.limits.header_seconds)
        elif state is h11.SEND_BODY and self.cycle.response_complete:
            self._await(self.cycle, self.limits.body_seconds)
        else:
            self._await(None)

    def _await(self, event: object, seconds: float = 0.0) -> None:
        if event == self.awaited:
            return
        if self.read_timer is not None:
            self.read_timer.cancel()
        self.awaited = event
        self.read_timer = None if event is None else self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        """Close the connection, with a response if part of a request has arrived."""
        if self.awaited == "headers" and self._unparsed():
            self._write_error(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the headers were not complete after {self.limits.header_seconds:g} seconds",
            )
        self.transport.close()

    def _unparsed(self) -> bytes:
        """Return the part of the request headers that has arrived."""
        return self.conn.trailing_data[0]

    def _write_error(self, status: HTTPStatus, message: str, headers: str = "") -> None:
        body = json.dumps({"error": message})
        self.transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}Connection: close\r\n\r\n{body}".encode()
        )


def server_of(app: Starlette, *, log_level: str = "warning") -> uvicorn.Server:
    """Return the uvicorn server of an application, with the limits in `app.state.limits`."""
    limits = getattr(app.state, "limits", Limits())
    protocol = partial(BoundedProtocol, limits=limits, refused=set())
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        log_level=log_level,
        timeout_keep_alive=5,
    )
    return uvicorn.Server(config)
