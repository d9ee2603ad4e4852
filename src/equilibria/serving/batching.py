"""Batching of concurrent requests, so that one solve answers all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class OverloadedError(RuntimeError):
    """The queue of waiting items is full."""


class Batcher(Generic[Item, Result]):
    """Processes single items in batches, in a separate thread and in order of arrival.

    A batch consists of the items that arrived while the previous one was processed. A single client
    therefore never waits, and batches grow with the number of clients. If a batch fails, its items
    are processed one by one, so that an invalid item does not affect others.

    Args:
        process: Function from a list of items to their results, in the same order.
        max_batch: Maximum number of items per batch.
        max_waiting: Maximum number of waiting items; more raise `OverloadedError`.
    """

    def __init__(
        self,
        process: Callable[[Sequence[Item]], Sequence[Result]],
        max_batch: int,
        max_waiting: int,
    ) -> None:
        self.process = process
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.sizes: list[int] = []
        """Sizes of the last thousand batches."""
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equilibria-batches")
        self._work: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting items."""
        return len(self._waiting)

    async def __call__(self, item: Item) -> Result:
        """Return the result of one item; cancelling the call removes the item from the queue."""
        if len(self._waiting) >= self.max_waiting:
            raise OverloadedError(f"{self.max_waiting} images are already waiting; try again later")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._arrived.set()
        return await future

    async def __aenter__(self) -> Batcher[Item, Result]:
        self._work = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel waiting items, after the current batch has finished."""
        assert self._work is not None
        self._work.cancel()
        with suppress(asyncio.CancelledError):
            await self._work
        for _item, future in self._waiting:
            future.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            batch, self._waiting = (
                self._waiting[: self.max_batch],
                self._waiting[self.max_batch :],
            )
            if not self._waiting:
                self._arrived.clear()
            pending = [(item, future) for item, future in batch if not future.done()]
            if pending:
                await self._process(pending)

    async def _process(self, pending: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        loop = asyncio.get_running_loop()
        self.sizes = [*self.sizes[-999:], len(pending)]
        try:
            items = [item for item, _ in pending]
            results = await loop.run_in_executor(self._thread, self.process, items)
        except Exception as error:
            if len(pending) > 1:
                for single in pending:
                    await self._process([single])
            elif not pending[0][1].done():
                pending[0][1].set_exception(error)
            return
        for (_, future), result in zip(pending, results, strict=True):
            if not future.done():
                future.set_result(result)
