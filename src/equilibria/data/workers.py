"""Processes that read for another one: how many, and how they begin and end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings

import torch

from equilibria.data.source import Source, behind_selections

MOST_WORKERS = 8
"""That are started unasked."""
START = "fork" if sys.platform == "linux" else None
"""How workers are started; None: as the platform does.

A forked worker starts at once and shares the lists of files. It reads, decodes and indexes, with
one thread: none of that needs the threads of the model, which a fork leaves behind.
"""


def usual_workers(source: Source, size: int, processes: int = 1) -> int:
    """For batches of `size` samples, where `processes` share the cores of the machine.

    None for samples in memory and for a few batches, and none in a process of a pool, which may not
    start any. One core is left to the process that takes the batches.

    Examples:
        >>> from equilibria.data.workers import usual_workers
        >>> usual_workers(eq.data.load_digits().train, 64)  # they are in memory
        0
    """
    base, _ = behind_selections(source, torch.arange(0))
    if not hasattr(base, "read") or multiprocessing.current_process().daemon:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(max(1, cores // processes - 1), MOST_WORKERS, len(source) // size // 2)


def begin_worker(_: int = 0) -> None:
    """What a worker does first: Ctrl-C and warnings are for the process that it works for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    end_with_parent()


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however that came about."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)  # As a kill would: whatever is being written can take that.

    threading.Thread(target=watch, name="equilibria-parent", daemon=True).start()


def portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
