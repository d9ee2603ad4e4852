"""The explorer: one page on which equilibria form, are attacked, and restore photographs."""

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
from equilibria.serving.photographs import Tell, restored_photo, sample_photos
from equilibria.serving.server import LOOPBACK, Limits, RefusedError, body_of, prediction_app
from equilibria.solvers import list_solvers

PAGE = {"/": "index.html", "/explorer.js": "explorer.js", "/explorer.css": "explorer.css"}
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    # Nothing is fetched from outside, and no other page may show this one inside itself.
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
    """The page and what it asks for; also the server's own routes, for the first model."""
    limits = Limits(seconds=60) if limits is None else limits
    known = {one.name: one for one in explored}
    thread = ThreadPoolExecutor(1, thread_name_prefix="equilibria-explorer")

    async def in_turn(request: Request, work: Callable[[bytes, Tell], dict[str, Any]]) -> Response:
        """One thing at a time: who moves a slider asks often, and waits for the last alone.

        Work that tells something on the way is answered by lines, one for each thing it tells.
        """
        loop, gone = asyncio.get_running_loop(), threading.Event()
        told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        content = await body_of(request, limits)
        ends = loop.time() + limits.seconds

        def tell(said: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(told.put_nowait, said)

        def while_wanted() -> dict[str, Any]:
            with WhileWanted(gone):
                return work(content, tell)

        def stop() -> None:
            gone.set()
            done.cancel()

        async def lines(said: dict[str, Any] | None) -> AsyncIterator[str]:
            try:
                while said is not None:
                    yield json.dumps(said) + "\n"
                    said = await asyncio.wait_for(told.get(), ends - loop.time())
                yield json.dumps(await done) + "\n"
            except asyncio.TimeoutError:
                yield json.dumps({"error": "there was no answer in time"}) + "\n"
            except Exception:
                yield json.dumps({"error": "the picture could not be restored"}) + "\n"
                raise
            finally:
                stop()

        done = loop.run_in_executor(thread, while_wanted)
        done.add_done_callback(lambda _: told.put_nowait(None))
        left, first = asyncio.create_task(_left(request)), asyncio.create_task(told.get())
        try:
            either = (done, left, first)
            await asyncio.wait(either, timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and first.result() is not None:
                return StreamingResponse(lines(first.result()), media_type="application/x-ndjson")
            if not done.done():
                raise ClientDisconnect if left.done() else asyncio.TimeoutError
            return JSONResponse(done.result())
        finally:
            left.cancel()
            if not (first.done() and first.result() is not None):
                first.cancel()
                stop()

    def chosen(request: Request) -> Explored:
        name = request.query_params.get("model", explored[0].name)
        if name not in known:
            raise RefusedError(404, f"there is no model {name!r} here")
        return known[name]

    async def models(_: Request) -> Response:
        return JSONResponse([one.facts() for one in explored])

    async def follow(request: Request) -> Response:
        one, solver = chosen(request), request.query_params.get("solver", "auto")
        if solver not in list_solvers():
            raise RefusedError(400, f"there is no solver {solver!r}")
        asked = {
            "tolerance": number(request, "tolerance", 1e-8, 1.0, 1e-4),
            "max_iterations": number(request, "max_iterations", 1, 1000, 60),
        }
        for knob, value in one.knobs.items():
            asked[knob.name] = number(request, knob.name, knob.least, knob.most, value)
        return await in_turn(
            request, lambda content, _: one.follow(one.answerer.decode(content), asked, solver)
        )

    async def fool(request: Request) -> Response:
        one, method = chosen(request), request.query_params.get("method", "pgd")
        if method not in METHODS:
            raise RefusedError(400, f"there is no attack {method!r}: take {', '.join(METHODS)}")
        eps = number(request, "eps", 1e-4, 10.0, 0.5)
        return await in_turn(
            request, lambda content, _: one.fool(one.answerer.decode(content), eps, method)
        )

    async def photo(request: Request) -> Response:
        noise = number(request, "noise", 0.01, 0.5, 0.1)
        return await in_turn(request, lambda content, tell: restored_photo(content, noise, tell))

    samples = sample_photos()

    async def photos(_: Request) -> Response:
        return JSONResponse(list(samples))

    async def sample(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in samples:
            raise RefusedError(404, f"there is no photograph {name!r} here")
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
    """Nobody waits for what is computed."""


class WhileWanted(TorchFunctionMode):
    """Inside the block the first call of torch after `gone` is set is the last one."""

    def __init__(self, gone: threading.Event) -> None:
        super().__init__()
        self.gone = gone

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.gone.is_set():
            raise AbandonedError
        return func(*args, **(kwargs or {}))


async def _left(request: Request) -> None:
    """Until whoever asked has gone: the page asks for something else, or was closed."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)


def number(request: Request, name: str, least: float, most: float, usual: float) -> float:
    """A number of the address, between bounds."""
    text = request.query_params.get(name)
    try:
        value = usual if text is None else float(text)
    except ValueError:
        value = math.nan
    # A model may have been trained beyond what the page offers.
    if not min(least, usual) <= value <= max(most, usual):
        raise RefusedError(400, f"{name} is a number from {least:g} to {most:g}, not {text!r}")
    return value


def _file(name: str) -> Callable[[Request], Response]:
    content = (files("equilibria.serving") / "page" / name).read_bytes()
    kind = KINDS[name.rpartition(".")[2]]

    def answer(_: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer
