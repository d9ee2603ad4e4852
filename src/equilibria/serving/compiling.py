"""Compiled solves of a served model, prepared while it answers requests eagerly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch import Tensor, nn

from equilibria.compiled import CompiledModel
from equilibria.compiled.store import padded_size
from equilibria.equilibrium import EquilibriumLayer

Backend = Literal["compiled", "eager"]

ROUNDS = 15
"""Number of timed solves of each backend, in turns. The shortest times are compared, because
requests that are answered meanwhile lengthen others."""


class CompiledSolves:
    """Chooses for each batch size whether a served model solves eagerly or in compiled graphs.

    All solves are eager until `prepare` has made graphs and found them to be faster.

    Args:
        model: Model in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        has_layers = any(isinstance(part, EquilibriumLayer) for part in model.modules())
        self._compiled = CompiledModel(model) if has_layers else None
        self._preparing = threading.Lock()
        self.largest = 0
        """Largest number of images that is solved in compiled graphs."""

    def backend(self, samples: int) -> Backend:
        """Return how a batch is solved now.

        Args:
            samples: Number of images in the batch.
        """
        return "compiled" if samples <= self.largest else "eager"

    def block(self, backend: Backend) -> AbstractContextManager[None]:
        """Return a context manager in which this thread's solves use a backend.

        Args:
            backend: Result of `backend`.
        """
        if backend == "eager" or self._compiled is None:
            return nullcontext()
        return self._compiled.in_graphs()

    def prepare(
        self, solve: Callable[[Tensor], object], images: Tensor, largest_batch: int
    ) -> None:
        """Compile the solves of growing batches, as long as they are faster than eager solves.

        Takes seconds per batch size. Other threads may solve meanwhile.

        Args:
            solve: Solves a batch.
            images: One image, shape (1, C, H, W).
            largest_batch: Largest number of images in a batch.
        """
        if self._compiled is None:
            return
        with self._preparing:
            size = padded_size(self.largest + 1)
            while size <= padded_size(largest_batch):
                batch = images.expand(size, *images.shape[1:]).contiguous()
                if not self._compiles(solve, batch) or not self._is_faster(solve, batch):
                    return
                self.largest = size
                size = padded_size(size + 1)

    def _compiles(self, solve: Callable[[Tensor], object], batch: Tensor) -> bool:
        """Compile the solve of a batch, and return whether that succeeded."""
        assert self._compiled is not None
        before = len(self._compiled.compilations)
        with self.block("compiled"):
            solve(batch)
        return len(self._compiled.compilations) > before  # a warning gives the reason if not

    def _is_faster(self, solve: Callable[[Tensor], object], batch: Tensor) -> bool:
        """Return whether the compiled solve of a batch is faster than the eager solve."""
        times: dict[Backend, list[float]] = {"compiled": [], "eager": []}
        for _ in range(ROUNDS):
            for backend, seconds in times.items():
                begin = time.perf_counter()
                with self.block(backend):
                    solve(batch)
                seconds.append(time.perf_counter() - begin)
        return min(times["compiled"]) < min(times["eager"])
