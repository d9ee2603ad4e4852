"""The most memory that tensors hold at one time during a computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """How many bytes tensors that `run` makes hold at its peak, what autograd saves included.

    On CUDA it is the allocator's count; elsewhere the storages of all results of operations are
    counted from when they are made until they are freed. Working memory inside an operation is
    not seen there, and the numbers are the same in every run.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    counter = _Counter()
    with counter:
        run()
    return counter.peak


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the result of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(_storage(leaf)) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and id(_storage(leaf)) not in before:
                self._count(_storage(leaf))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def _storage(tensor: Any) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = tensor.untyped_storage()
    return storage
