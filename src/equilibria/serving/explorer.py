"""The explorer: a web page that shows solves, attacks and restored photographs."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch.overrides import TorchFunctionMode

from equilibria.serving.exploring import Explored
from equilibria.serving.photographs import Send, restored_photo, sample_photos
from equilibria.serving.server import LOOPBACK, Limits, RefusedError, body_of, prediction_app
from equilibria.solvers import list_solvers

PAGE = {"/": "index.html", "/explorer.js": "explorer.js", "/explorer.css": "explorer.css"}
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    # The page loads nothing from other sites, and cannot be embedded in other pages.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
METHODS = ("jiio", "pgd", "fgsm")


def explorer_app(
    explored: Sequence[Explored], limits: Limits | None = None, hosts: Sequence[str] = LOOPBACK
) -> Starlette:
    """Return the explorer as an ASGI application.

    It also has the routes of `prediction_app`, for the first model.

    Args:
        explored: Classifiers to explore, at least one.
        limits: Limits on requests; by default with 60 seconds per request.
        hosts: Accepted host names.
    """
    limits = Limits(seconds=60) if limits is None else limits
    by_name = {classifier.name: classifier for classifier in explored}
    thread = ThreadPoolExecutor(1, thread_name_prefix="equilibria-explorer")

    async def run(request: Request, work: Callable[[bytes, Send], dict[str, Any]]) -> Response:
        """Run work in the thread, and stop it when the client disconnects or time is up.

        Work runs one request at a time: moving a slider sends many requests, and only the last
        one matters. The response is JSON, or one line of JSON per result if work sends partial
        results.
        """
        loop, is_abandoned = asyncio.get_running_loop(), threading.Event()
        partial_results: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        content = await body_of(request, limits)
        deadline = loop.time() + limits.seconds

        def send(result: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(partial_results.put_nowait, result)

        def stoppable_work() -> dict[str, Any]:
            with WhileWanted(is_abandoned):
                return work(content, send)

        def stop() -> None:
            is_abandoned.set()
            done.cancel()

        async def lines(result: dict[str, Any] | None) -> AsyncIterator[str]:
            try:
                while result is not None:
                    yield json.dumps(result) + "\n"
                    result = await asyncio.wait_for(partial_results.get(), deadline - loop.time())
                yield json.dumps(await done) + "\n"
            except asyncio.TimeoutError:
                yield json.dumps({"error": "the restoration took too long"}) + "\n"
            except Exception:
                yield json.dumps({"error": "the image could not be restored"}) + "\n"
                raise
            finally:
                stop()

        done = loop.run_in_executor(thread, stoppable_work)
        done.add_done_callback(lambda _: partial_results.put_nowait(None))
        disconnected = asyncio.create_task(_disconnected(request))
        first = asyncio.create_task(partial_results.get())
        try:
            events = (done, disconnected, first)
            await asyncio.wait(events, timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and first.result() is not None:
                return StreamingResponse(lines(first.result()), media_type="application/x-ndjson")
            if not done.done():
                raise ClientDisconnect if disconnected.done() else asyncio.TimeoutError
            return JSONResponse(done.result())
        finally:
            disconnected.cancel()
            if not (first.done() and first.result() is not None):
                first.cancel()
                stop()

    def classifier_of(request: Request) -> Explored:
        name = request.query_params.get("model", explored[0].name)
        if name not in by_name:
            raise RefusedError(404, f"there is no model {name!r}; use {', '.join(by_name)}")
        return by_name[name]

    async def models(_: Request) -> Response:
        return JSONResponse([classifier.facts() for classifier in explored])

    async def follow(request: Request) -> Response:
        classifier = classifier_of(request)
        solver = request.query_params.get("solver", "auto")
        if solver not in list_solvers():
            raise RefusedError(
                400, f"there is no solver {solver!r}; use {', '.join(list_solvers())}"
            )
        options = {
            "tolerance": number(request, "tolerance", 1e-8, 1.0, 1e-4),
            "max_iterations": number(request, "max_iterations", 1, 1000, 60),
        }
        for knob, value in classifier.knobs.items():
            options[knob.name] = number(request, knob.name, knob.least, knob.most, value)
        decode = classifier.answerer.decode
        return await run(
            request, lambda content, _: classifier.follow(decode(content), options, solver)
        )

    async def fool(request: Request) -> Response:
        classifier, method = classifier_of(request), request.query_params.get("method", "pgd")
        if method not in METHODS:
            raise RefusedError(400, f"there is no attack {method!r}; use {', '.join(METHODS)}")
        eps = number(request, "eps", 1e-4, 10.0, 0.5)
        decode = classifier.answerer.decode
        return await run(request, lambda content, _: classifier.fool(decode(content), eps, method))

    async def photo(request: Request) -> Response:
        noise = number(request, "noise", 0.01, 0.5, 0.1)
        return await run(request, lambda content, send: restored_photo(content, noise, send))

    samples = sample_photos()

    async def photos(_: Request) -> Response:
        return JSONResponse(list(samples))

    async def sample(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in samples:
            raise RefusedError(404, f"there is no sample photograph {name!r}")
        return FileResponse(samples[name])

    pages = [Route(path, _file(name)) for path, name in PAGE.items()]
    routes = [
        Route("/explorer/models", models),
        Route("/explorer/follow", follow, methods=["POST"]),
        Route("/explorer/fool", fool, methods=["POST"]),
        Route("/explorer/photo", photo, methods=["POST"]),
        Route("/explorer/photos", photos),
        Route("/explorer/photos/{name}", sample),
    ]
    answerer = explored[0].answerer
    return prediction_app(answerer, explored[0].name, limits, hosts, [*pages, *routes])


class AbandonedError(Exception):
    """The client has disconnected, or its time is up."""


class WhileWanted(TorchFunctionMode):
    """Context in which PyTorch calls raise `AbandonedError` once an event is set.

    Args:
        is_abandoned: The event.
    """

    def __init__(self, is_abandoned: threading.Event) -> None:
        super().__init__()
        self.is_abandoned = is_abandoned

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.is_abandoned.is_set():
            raise AbandonedError
        return func(*args, **(kwargs or {}))


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)


def number(request: Request, name: str, least: float, most: float, default: float) -> float:
    """Return a query parameter as a number.

    Args:
        request: The request.
        name: Name of the parameter.
        least: Minimum.
        most: Maximum.
        default: Default value, which is valid even if outside of the range: a model may have been
            trained with it.

    Raises:
        RefusedError: If the parameter is not a number in the range.
    """
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not min(least, default) <= value <= max(most, default):
        raise RefusedError(400, f"{name} must be a number from {least:g} to {most:g}, got {text!r}")
    return value


def _file(name: str) -> Callable[[Request], Response]:
    """Return an endpoint that serves a file of the page."""
    content = (files("equilibria.serving") / "page" / name).read_bytes()
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    def endpoint(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return endpoint
