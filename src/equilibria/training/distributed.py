"""Processes that train one model together, by torch.distributed."""

from __future__ import annotations

import importlib
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from equilibria.training.processes import Processes
from equilibria.training.synchronized import synchronized_batches


class ProcessLostError(RuntimeError):
    """Another process of the training has ended, and the rest cannot go on without it."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that train together.

    Examples:
        >>> from equilibria.training.distributed import Place
        >>> place = Place(rank=1, count=4, local_rank=1, local_count=2)
        >>> place.rank, place.count  # the second of four processes, two of them on this machine
        (1, 4)
    """

    rank: int
    count: int
    local_rank: int
    """Among those of this machine, as is the next."""
    local_count: int
    meeting_point: Path | None = None
    """The file by which they find each other; None: by the address in the environment."""

    @classmethod
    def from_environment(
        cls, variables: Mapping[str, str] = os.environ, *, meeting_point: Path | None = None
    ) -> Place | None:
        """As torchrun and its like say it; None where this process is alone."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in variables for name in needed):
            return None
        rank, count = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        if count == 1:
            return None
        return cls(
            rank=rank,
            count=count,
            local_rank=int(variables.get("LOCAL_RANK", rank)),
            local_count=int(variables.get("LOCAL_WORLD_SIZE", count)),
            meeting_point=meeting_point,
        )

    def device(self, name: str = "auto") -> torch.device:
        """The device of this process: a GPU of its own, or the processor."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name not in ("cpu", "cuda"):
            raise ValueError(
                f"{self.count} processes train on cpu or cuda, each with a GPU of its own, "
                f"not on {name!r}"
            )
        if name == "cpu":
            return torch.device("cpu")
        if torch.cuda.device_count() < self.local_count:
            raise ValueError(
                f"{self.local_count} processes need as many GPUs, but there are "
                f"{torch.cuda.device_count()}: start fewer, or use --device cpu"
            )
        return torch.device("cuda", self.local_rank)

    def threads(self) -> int:
        """This process's share of the processors."""
        usable = getattr(os, "sched_getaffinity", None)
        processors = len(usable(0)) if usable is not None else os.cpu_count() or 1
        return max(1, processors // self.local_count)


class ProcessGroup(Processes):
    """The processes of torch.distributed's default group, which `joined_group` makes."""

    def __init__(self, device: torch.device) -> None:
        self.rank = distributed.get_rank()
        self.count = distributed.get_world_size()
        # NCCL takes what is on the GPU only, Gloo whatever comes.
        self.meets_on = device if distributed.get_backend() == "nccl" else None

    @contextmanager
    def joined(self, model: nn.Module) -> Iterator[None]:
        """The first process's weights for all, and statistics of whole batches."""
        self.share([*model.parameters(), *model.buffers()])
        with synchronized_batches(model, self):
            yield

    def total(self, values: Tensor) -> Tensor:
        buffer = self._copy(values)
        with _noticing_the_lost():
            distributed.all_reduce(buffer)
        return buffer.to(values.device)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """All gradients of a type in one exchange; what has none in any process keeps none."""
        by_type: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            if parameter.requires_grad:
                by_type[parameter.dtype].append(parameter)
        for group in by_type.values():
            self._sum_group(group)

    def _sum_group(self, parameters: list[nn.Parameter]) -> None:
        present = torch.tensor([p.grad is not None for p in parameters]).to(parameters[0])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        summed = torch.cat([present, *(gradient.flatten() for gradient in gradients)])
        with _noticing_the_lost():
            distributed.all_reduce(summed)
        flags, *sums = torch.split(summed, [len(parameters), *(p.numel() for p in parameters)])
        # Looking at the flags makes a GPU wait: only where there is something to decide.
        undecided = any(p.grad is None for p in parameters)
        somewhere = (flags > 0).tolist() if undecided else [True] * len(parameters)
        for parameter, gradient, is_there in zip(parameters, sums, somewhere, strict=True):
            parameter.grad = gradient.view_as(parameter) if is_there else None

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            buffer = self._copy(tensor)
            with _noticing_the_lost():
                distributed.broadcast(buffer, 0)
            if not self.leads:
                tensor.copy_(buffer)

    def gathered(self, values: Tensor) -> Tensor:
        return torch.cat(self._said_by_all(values.cpu())).to(values.device)

    def first_message(self, own: str | None) -> str | None:
        return next((said for said in self._said_by_all(own) if said is not None), None)

    def _said_by_all(self, own: Any) -> list[Any]:
        said = [None] * self.count
        with _noticing_the_lost():
            distributed.all_gather_object(said, own)
        return said

    def _copy(self, values: Tensor) -> Tensor:
        values = values.detach()
        moved = values if self.meets_on is None else values.to(self.meets_on)
        return moved.clone(memory_format=torch.contiguous_format)


@contextmanager
def joined_group(place: Place, device: torch.device) -> Iterator[ProcessGroup]:
    """Meet the other processes; all of them leave together, unless one fails."""
    # Its functions take the default group when they are imported, which making an optimizer may do.
    # Imported in a group, they would keep it and its threads past `destroy_process_group`, and a
    # thread that lives on into the interpreter's end aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    nccl = device.type == "cuda" and distributed.is_nccl_available()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = None
    if place.meeting_point is not None:
        file = str(place.meeting_point)
        store = distributed.FileStore(file, place.count)  # type: ignore[attr-defined]
        # All are on this machine: nothing has to listen on the network.
        for _, loopback in socket.if_nameindex():
            if loopback in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.count,
    )
    group = ProcessGroup(device)
    try:
        yield group
        group.total(torch.zeros(()))
    except BaseException:
        # NCCL would wait here for what the lost process never sends; the exit ends it as well.
        if not nccl:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


@contextmanager
def _noticing_the_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split(". ")[0]
        raise ProcessLostError(
            "another process of this training has ended, or cannot be reached any more: its own "
            f"message says why, and --resume goes on from the last checkpoint ({reason})"
        ) from error
