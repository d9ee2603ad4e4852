"""HTTP application that classifies posted images and returns certificates."""

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
    """Limits of a server on sizes, times and numbers.

    `run_server` and the command line enforce all limits. With another ASGI server, configure the
    limits on headers and connections there.

    Args:
        megabytes: Maximum size of a request body, in units of 10⁶ bytes.
        seconds: Maximum time from the end of the body to the response.
        largest_batch: Maximum number of images that are solved together.
        waiting: Maximum number of waiting images.
        header_seconds: Maximum time from the first byte of a request (for the first request, from
            the connection) to the end of its headers.
        body_seconds: Maximum time from the end of the headers to the end of the body, and for
            reading a response.
        connections: Maximum number of open connections, including idle ones.

    Raises:
        ValueError: If a limit is not positive.

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
        """Maximum size of a request body in bytes."""
        return int(self.megabytes * 1e6)


class RefusedError(Exception):
    """A request that is rejected with an HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def prediction_app(
    answerer: Answerer,
    name: str,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOOPBACK,
    pages: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return the server as an ASGI application.

    `POST /predict` returns an `Answer` as JSON. `/health` and `/metrics` (Prometheus) report the
    state of the server.

    Args:
        answerer: Classifier that answers the requests.
        name: Name of the model, reported by `/health`.
        limits: Limits on requests; None for the defaults.
        hosts: Accepted host names, which protects against requests from pages of other sites.
        pages: Additional routes.

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

    async def answer_to(content: bytes) -> Answer:
        # Decoding takes milliseconds, and would block other requests in the event loop.
        return await batcher(await asyncio.to_thread(answerer.decode, content))

    async def predict(request: Request) -> Response:
        content = await body_of(request, limits)
        answer = await asyncio.wait_for(answer_to(content), limits.seconds)
        metrics.answered += 1
        metrics.certified += answer.certified
        return JSONResponse(asdict(answer))

    async def health(_: Request) -> Response:
        backend = answerer.compiled_solves.backend(1)
        state = {"status": "ok", "model": name, "backend": backend, "waiting": batcher.waiting}
        return JSONResponse(state)

    async def prometheus(_: Request) -> Response:
        sizes = batcher.sizes or [0]
        gauges = {
            "waiting_images": batcher.waiting,
            "mean_batch_size": sum(sizes) / len(sizes),
            "largest_compiled_batch": answerer.compiled_solves.largest,
            "uptime_seconds": time.monotonic() - started,
        }
        return PlainTextResponse(metrics.text(gauges, answerer.batches))

    routes: list[BaseRoute] = [
        Route("/predict", predict, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", prometheus),
        *pages,
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(_Counted, metrics=metrics), Middleware(_SameOrigin, hosts=hosts)],
        exception_handlers=HANDLERS,
    )
    app.state.limits = limits
    return app


async def body_of(request: Request, limits: Limits) -> bytes:
    """Return the content of the image file in a request.

    Args:
        request: Request whose body is a file, or a form with one file (multipart/form-data).
        limits: Limits on the size of the body and the time for reading it.

    Raises:
        RefusedError: If the body is too large, too slow or empty, or a form without exactly one
            file.
    """
    try:
        content = await asyncio.wait_for(_read_body(request, limits.bytes), limits.body_seconds)
    except asyncio.TimeoutError:
        raise RefusedError(
            408,
            f"the body was not complete after {limits.body_seconds:g} seconds; send a smaller "
            "image",
        ) from None
    try:
        content = file_of(content, request.headers.get("content-type", ""))
    except FormError as error:
        raise RefusedError(400, str(error)) from error
    if not content:
        raise RefusedError(400, "the body is empty; send an image file")
    return content


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request, at most `max_bytes` bytes."""
    too_large = RefusedError(
        413, f"the body has more than {max_bytes:,} bytes; send a smaller image"
    )
    length = request.headers.get("content-length", "0")
    if not length.isdigit():
        raise RefusedError(400, f"content-length must be a number, got {length!r}")
    if int(length) > max_bytes:
        raise too_large
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > max_bytes:
            raise too_large
    return bytes(content)


def _error_response(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    # After a timeout the rest of the body is not read.
    headers = {"Connection": "close"} if error.status == 408 else {}
    return _error_response(error.status, str(error), **headers)


async def _on_unreadable(_: Request, error: Exception) -> Response:
    return _error_response(400, str(error))


async def _on_overloaded(_: Request, error: Exception) -> Response:
    return _error_response(503, str(error), **{"Retry-After": "1"})


async def _on_timeout(_: Request, error: Exception) -> Response:
    return _error_response(
        504, "the model did not answer in time; try again later, or send a smaller image"
    )


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return _error_response(400, "the connection was closed before the image was complete")


async def _on_failure(_: Request, error: Exception) -> Response:
    return _error_response(500, "the model failed; see the server log for the reason")


HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    RefusedError: _on_refused,
    DataFileError: _on_unreadable,
    OverloadedError: _on_overloaded,
    asyncio.TimeoutError: _on_timeout,
    ClientDisconnect: _on_disconnect,
    Exception: _on_failure,
}


class _Counted:
    """Middleware that counts requests and measures their time."""

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
            has_route = scope.get("endpoint") is not None
            path = scope["path"] if has_route else "other"  # limits the number of metrics
            self.metrics.note(path, status, time.perf_counter() - started)
        return None


class _SameOrigin:
    """Middleware that rejects requests from pages of other sites and for other host names."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (message := self._refusal(scope)):
            return await _error_response(403, message)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        try:
            name = urlsplit(f"//{host}").hostname
            is_foreign = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            return "the Host or Origin header is invalid"
        if name not in self.hosts:
            return f"unknown host name {host!r}; use a name that the server was started with"
        return f"requests from pages of other sites ({origin}) are rejected" if is_foreign else ""


def run_server(
    app: Starlette, host: str = "127.0.0.1", port: int = 8000, *, listener: Listener | None = None
) -> None:
    """Run an application of `prediction_app` or `explorer_app` until Ctrl-C.

    Args:
        app: The application; its `Limits` also apply to connections.
        host: Name or address to listen on; the default accepts connections from this machine only.
        port: Port number; 0 selects any free port.
        listener: Bound sockets, which replace `host` and `port`.

    Raises:
        OSError: If the port is in use or not permitted, or the host is not this machine.
    """
    from equilibria.serving.connections import server_of

    if listener is None:
        listener = bind(host, port)
    with listener, suppress(KeyboardInterrupt):
        server_of(app).run(sockets=list(listener.sockets))
