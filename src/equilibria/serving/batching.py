"""What is asked for at the same time is answered by one solve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class OverloadedError(RuntimeError):
    """More is waiting than is taken on."""


class Batcher(Generic[Item, Result]):
    """Answers single items by batches, in a thread of its own, in the order they came.

    A batch is what has come while the last one was being answered: with one client at a time
    nobody waits, with many the batches grow by themselves. If a batch fails, its items are
    answered one by one, so that one of them cannot take the others along.

    answer: gives as many results as it gets items, in their order.
    largest: items of a batch at the most.
    longest: items that may wait; one more is an `OverloadedError`.
    """

    def __init__(
        self, answer: Callable[[Sequence[Item]], Sequence[Result]], largest: int, longest: int
    ) -> None:
        self.answer = answer
        self.largest = largest
        self.longest = longest
        self.sizes: list[int] = []
        """Of the batches that were answered, the last thousand."""
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equilibria-batches")
        self._work: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def __call__(self, item: Item) -> Result:
        """The result of one item; who stops waiting for it takes it out of the queue."""
        if len(self._waiting) >= self.longest:
            raise OverloadedError(f"{self.longest} images are waiting already: try again later")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._arrived.set()
        return await future

    async def __aenter__(self) -> Batcher[Item, Result]:
        self._work = asyncio.create_task(self._answer_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Whoever still waits is told; a batch that is being answered ends first."""
        assert self._work is not None
        self._work.cancel()
        with suppress(asyncio.CancelledError):
            await self._work
        for _item, future in self._waiting:
            future.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _answer_forever(self) -> None:
        while True:
            await self._arrived.wait()
            taken, self._waiting = (
                self._waiting[: self.largest],
                self._waiting[self.largest :],
            )
            if not self._waiting:
                self._arrived.clear()
            wanted = [(item, future) for item, future in taken if not future.done()]
            if wanted:
                await self._answer(wanted)

    async def _answer(self, wanted: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        loop = asyncio.get_running_loop()
        self.sizes = [*self.sizes[-999:], len(wanted)]
        try:
            items = [item for item, _ in wanted]
            results = await loop.run_in_executor(self._thread, self.answer, items)
        except Exception as error:
            if len(wanted) > 1:
                for one in wanted:
                    await self._answer([one])
            elif not wanted[0][1].done():
                wanted[0][1].set_exception(error)
            return
        for (_, future), result in zip(wanted, results, strict=True):
            if not future.done():
                future.set_result(result)
