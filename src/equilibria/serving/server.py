"""The HTTP application: a picture is posted, its class, error bar and certificate returned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from equilibria.data.readers import DataFileError
from equilibria.serving.answers import Answer, Answerer
from equilibria.serving.batching import Batcher, OverloadedError
from equilibria.serving.forms import FormError, file_of
from equilibria.serving.metrics import Metrics
from equilibria.serving.sockets import Listener, bind

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take.

    Args:
        megabytes: Largest body of a request, in units of 10⁶ bytes.
        seconds: From the end of the body to the answer.
        largest_batch: Pictures that are solved together.
        waiting: Pictures that may wait for their turn.
        header_seconds: From the first byte of a request (for the first one, from the connection)
            to the end of its headers.
        body_seconds: From the end of the headers to the end of the body. A client has the same
            time to take an answer.
        connections: Open connections, including idle ones.

    The servers of `run_server` and of the command line enforce all of them. With another ASGI
    server, limits on headers and connections are settings of that server.

    Examples:
        >>> eq.serving.Limits(megabytes=2).bytes
        2000000
    """

    megabytes: float = 10.0
    seconds: float = 10.0
    largest_batch: int = 32
    waiting: int = 256
    header_seconds: float = 5.0
    body_seconds: float = 10.0
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name} must be greater than 0, got {getattr(self, field.name)}"
                )

    @property
    def bytes(self) -> int:
        """Largest request body in bytes."""
        return int(self.megabytes * 1e6)


class RefusedError(Exception):
    """A request that is answered by a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def prediction_app(
    answerer: Answerer,
    name: str,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOOPBACK,
    pages: Sequence[BaseRoute] = (),
) -> Starlette:
    """The server as an ASGI application.

    hosts: names that it may be called by; a page elsewhere cannot reach it under a name of its own.
    pages: more routes.

    Examples:
        >>> answerer = eq.serving.Answerer(eq.load("digits-opteq"))
        >>> app = eq.serving.prediction_app(answerer, "digits-opteq")
        >>> [route.path for route in app.routes]
        ['/predict', '/health', '/metrics']
    """
    limits = Limits() if limits is None else limits
    batcher: Batcher[Tensor, Answer] = Batcher(answerer, limits.largest_batch, limits.waiting)
    metrics = Metrics()
    started = time.monotonic()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with batcher:
            yield

    async def answered(content: bytes) -> Answer:
        # Decoding takes milliseconds in which others would wait.
        return await batcher(await asyncio.to_thread(answerer.decode, content))

    async def predict(request: Request) -> Response:
        content = await body_of(request, limits)
        answer = await asyncio.wait_for(answered(content), limits.seconds)
        metrics.answered += 1
        metrics.certified += answer.certified
        return JSONResponse(asdict(answer))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "model": name, "waiting": batcher.waiting})

    async def numbers(_: Request) -> Response:
        sizes = batcher.sizes or [0]
        now = {
            "waiting_images": batcher.waiting,
            "mean_batch_size": sum(sizes) / len(sizes),
            "uptime_seconds": time.monotonic() - started,
        }
        return PlainTextResponse(metrics.text(now))

    routes: list[BaseRoute] = [
        Route("/predict", predict, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", numbers),
        *pages,
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(_Noted, metrics=metrics), Middleware(_SameOrigin, hosts=hosts)],
        exception_handlers=HANDLERS,
    )
    app.state.limits = limits
    return app


async def body_of(request: Request, limits: Limits) -> bytes:
    """Return the picture that a request carries, as the bytes of its file.

    Args:
        request: A request whose body is a file, or a form with one file (multipart/form-data).
        limits: The size of the body, and the time in which it must arrive.

    Raises:
        RefusedError: If the body is too large, too slow or empty, or a form without just one file.
    """
    try:
        content = await asyncio.wait_for(_read_body(request, limits.bytes), limits.body_seconds)
    except asyncio.TimeoutError:
        raise RefusedError(
            408,
            f"the body was not complete after {limits.body_seconds:g} seconds: send a smaller "
            "picture",
        ) from None
    try:
        content = file_of(content, request.headers.get("content-type", ""))
    except FormError as error:
        raise RefusedError(400, str(error)) from error
    if not content:
        raise RefusedError(400, "the body is empty: send the bytes of a picture")
    return content


async def _read_body(request: Request, most: int) -> bytes:
    """The body of a request, of which no more than `most` bytes are kept."""
    too_large = RefusedError(413, f"the body has more than {most:,} bytes: send a smaller picture")
    told = request.headers.get("content-length", "0")
    if not told.isdigit():
        raise RefusedError(400, "content-length is not a number")
    if int(told) > most:
        raise too_large
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most:
            raise too_large
    return bytes(content)


def _told(status: int, sentence: str, **headers: str) -> Response:
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    # The rest of a body that came too late is not waited for.
    headers = {"Connection": "close"} if error.status == 408 else {}
    return _told(error.status, str(error), **headers)


async def _unreadable(_: Request, error: Exception) -> Response:
    return _told(400, str(error))


async def _overloaded(_: Request, error: Exception) -> Response:
    return _told(503, str(error), **{"Retry-After": "1"})


async def _late(_: Request, error: Exception) -> Response:
    return _told(504, "there was no answer in time: try again later, or send a smaller picture")


async def _gone(_: Request, error: Exception) -> Response:
    return _told(400, "the connection ended before the picture did")


async def _failed(_: Request, error: Exception) -> Response:
    return _told(500, "the model could not answer: the server's log says why")


HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    RefusedError: _refused,
    DataFileError: _unreadable,
    OverloadedError: _overloaded,
    asyncio.TimeoutError: _late,
    ClientDisconnect: _gone,
    Exception: _failed,
}


class _Noted:
    """Counts requests and their seconds."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status = time.perf_counter(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            known = scope.get("endpoint") is not None
            path = scope["path"] if known else "other"  # Not a line for every guess.
            self.metrics.note(path, status, time.perf_counter() - started)
        return None


class _SameOrigin:
    """Refuses what a page of another site sends, and names that are not this server's."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (sentence := self._refusal(scope)):
            return await _told(403, sentence)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        try:
            name = urlsplit(f"//{host}").hostname
            elsewhere = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            return "the name of the host cannot be read"
        if name not in self.hosts:
            return f"this server is not {host}"
        return "requests of pages from elsewhere are refused" if elsewhere else ""


def run_server(
    app: Starlette, host: str = "127.0.0.1", port: int = 8000, *, listener: Listener | None = None
) -> None:
    """Run an application of `prediction_app` or `explorer_app` until Ctrl-C.

    Args:
        app: The application; its `Limits` hold for connections too.
        host: Name or address to listen at; the default is reachable from this machine only.
        port: Port number; 0 takes any free port.
        listener: Sockets that are already bound, in place of `host` and `port`.

    Raises:
        OSError: If the port is in use or not permitted, or the host is not one of this machine.
    """
    from equilibria.serving.connections import server_of

    with bind(host, port) if listener is None else listener as bound, suppress(KeyboardInterrupt):
        server_of(app).run(sockets=list(bound.sockets))
