"""Distributed training of one model with `torch.distributed`."""

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
    """Another process of a distributed training has ended."""


@dataclass(frozen=True)
class Place:
    """Rank of a process in a distributed training.

    Attributes:
        rank: Rank among all processes.
        count: Number of all processes.
        local_rank: Rank among the processes of this machine.
        local_count: Number of processes of this machine.
        meeting_point: File through which the processes connect; None uses the address in the
            environment.

    Examples:
        >>> from equilibria.training.distributed import Place
        >>> place = Place(rank=1, count=4, local_rank=1, local_count=2)
        >>> place.rank, place.count  # the second of four processes, two of them on this machine
        (1, 4)
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    meeting_point: Path | None = None

    @classmethod
    def from_environment(
        cls, variables: Mapping[str, str] = os.environ, *, meeting_point: Path | None = None
    ) -> Place | None:
        """Read the variables of torchrun; return None if there is only one process."""
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
        """Return the device of this process: the CPU, or one GPU per process."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name not in ("cpu", "cuda"):
            raise ValueError(
                f"distributed training needs the device 'cpu' or 'cuda', got {name!r}: the rank "
                "determines the GPU of each process"
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
        """Return the number of cores per process."""
        usable = getattr(os, "sched_getaffinity", None)
        processors = len(usable(0)) if usable is not None else os.cpu_count() or 1
        return max(1, processors // self.local_count)


class ProcessGroup(Processes):
    """Processes of the default group of `torch.distributed`, which `joined_group` initializes."""

    def __init__(self, device: torch.device) -> None:
        self.rank = distributed.get_rank()
        self.count = distributed.get_world_size()
        # NCCL only transfers tensors on the GPU.
        self.transfer_device = device if distributed.get_backend() == "nccl" else None

    @contextmanager
    def joined(self, model: nn.Module) -> Iterator[None]:
        """Broadcast the weights of the first process, and synchronize batch statistics."""
        self.share([*model.parameters(), *model.buffers()])
        with synchronized_batches(model, self):
            yield

    def total(self, values: Tensor) -> Tensor:
        buffer = self._copy(values)
        with _detecting_lost_processes():
            distributed.all_reduce(buffer)
        return buffer.to(values.device)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients in one exchange per dtype; those that are None in all stay None."""
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
        with _detecting_lost_processes():
            distributed.all_reduce(summed)
        flags, *sums = torch.split(summed, [len(parameters), *(p.numel() for p in parameters)])
        # Reading the flags synchronizes with the GPU, so they are read only if necessary.
        any_missing = any(p.grad is None for p in parameters)
        has_gradient = (flags > 0).tolist() if any_missing else [True] * len(parameters)
        for parameter, gradient, is_present in zip(parameters, sums, has_gradient, strict=True):
            parameter.grad = gradient.view_as(parameter) if is_present else None

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            buffer = self._copy(tensor)
            with _detecting_lost_processes():
                distributed.broadcast(buffer, 0)
            if not self.leads:
                tensor.copy_(buffer)

    def gathered(self, values: Tensor) -> Tensor:
        return torch.cat(self._gather_objects(values.cpu())).to(values.device)

    def first_message(self, own: str | None) -> str | None:
        return next((text for text in self._gather_objects(own) if text is not None), None)

    def _gather_objects(self, own: Any) -> list[Any]:
        objects = [None] * self.count
        with _detecting_lost_processes():
            distributed.all_gather_object(objects, own)
        return objects

    def _copy(self, values: Tensor) -> Tensor:
        values = values.detach()
        moved = values if self.transfer_device is None else values.to(self.transfer_device)
        return moved.clone(memory_format=torch.contiguous_format)


@contextmanager
def joined_group(place: Place, device: torch.device) -> Iterator[ProcessGroup]:
    """Initialize the group of processes; at the end, wait for the others unless one fails."""
    # The functions of this module keep the default group that exists when they are imported, and
    # making an optimizer may import them. If they were imported inside a group, its threads would
    # survive `destroy_process_group` and abort the process when the interpreter exits.
    importlib.import_module("torch.distributed.nn.functional")
    nccl = device.type == "cuda" and distributed.is_nccl_available()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = None
    if place.meeting_point is not None:
        file = str(place.meeting_point)
        store = distributed.FileStore(file, place.count)  # type: ignore[attr-defined]
        # All processes are on this machine, so that nothing needs to listen on the network.
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
        # NCCL would wait here for the lost process; exiting destroys its group as well.
        if not nccl:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


@contextmanager
def _detecting_lost_processes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split(". ")[0]
        raise ProcessLostError(
            "another process of this training has ended or cannot be reached; its own message has "
            f"the reason. Use --resume to continue from the last checkpoint ({reason})"
        ) from error
