"""POST a picture, get its class, with an error bar and a certificate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
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
from equilibria.serving.metrics import Metrics

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them, may take.

    Examples:
        >>> eq.serving.Limits(megabytes=2).bytes
        2000000
    """

    megabytes: float = 10.0
    """Of a body."""
    seconds: float = 10.0
    """From the first byte to the answer."""
    largest_batch: int = 32
    waiting: int = 256
    """Pictures that may wait for their turn."""

    @property
    def bytes(self) -> int:
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

    async def answered(request: Request) -> Answer:
        content = await body_of(request, limits.bytes)
        # Decoding takes milliseconds in which others would wait.
        return await batcher(await asyncio.to_thread(answerer.decode, content))

    async def predict(request: Request) -> Response:
        answer = await asyncio.wait_for(answered(request), limits.seconds)
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
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(_Noted, metrics=metrics), Middleware(_SameOrigin, hosts=hosts)],
        exception_handlers=HANDLERS,
    )


async def body_of(request: Request, most: int) -> bytes:
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
    if not content:
        raise RefusedError(400, "the body is empty: send the bytes of a picture")
    return bytes(content)


def _told(status: int, sentence: str, **headers: str) -> Response:
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _told(error.status, str(error))


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


def run_server(app: Starlette, host: str, port: int) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_keep_alive=5)
