"""Starts the processes of a training on this machine, and ends them together."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing
import typer

from equilibria.cli.console import fail
from equilibria.training import Place, ProcessLostError

LOST = 75
"""The exit code of a process that ends because another one did."""
PATIENCE = 10.0
"""Seconds that processes have to end by themselves, and then once more to obey."""


def run_processes(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(place, *arguments)` in `count` processes; if one fails, all end, and so do we.

    `work` is a function of a module, and prints what goes wrong itself.
    """
    with tempfile.TemporaryDirectory(prefix="equilibria-") as folder:
        meeting_point = Path(folder) / "meeting-point"
        context = torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _process, args=(count, meeting_point, work, arguments), nprocs=count, join=False
        )
        processes: list[BaseProcess] = list(context.processes)
        try:
            codes = _exit_codes(processes)
        finally:
            _end(processes)
    _report(codes)


def _process(
    rank: int, count: int, meeting_point: Path, work: Callable[..., None], arguments: Sequence[Any]
) -> None:
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in loopback:
            os.environ.setdefault(variable, name)
    if rank > 0:
        warnings.simplefilter("ignore")  # The first process says the same.
    try:
        work(Place(rank, count, rank, count, meeting_point), *arguments)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except ProcessLostError:
        sys.exit(LOST)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _exit_codes(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Those of all processes, or, once one fails, of those that end soon after it."""
    deadline: float | None = None
    while running := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in running], None if deadline is None else 0.1)
        failed = any(process.exitcode for process in processes)
        if failed and deadline is None:
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            break
    return [process.exitcode for process in processes]


def _end(processes: Sequence[BaseProcess]) -> None:
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            if process.is_alive():
                end(process)
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))


def _report(codes: Sequence[int | None]) -> None:
    failures = [(rank, code) for rank, code in enumerate(codes) if code]
    if not failures:
        return
    rank, code = next((f for f in failures if f[1] != LOST), failures[0])
    which = f"process {rank + 1} of {len(codes)}"
    remedy = "--resume goes on from the last checkpoint"
    if code < 0:
        name = signal.Signals(-code).name
        fail(f"{which} was ended by {name} (is there enough memory?): {remedy}", code=1)
    if code == LOST:
        fail(f"{which} lost the others: {remedy}", code=1)
    raise typer.Exit(code)
