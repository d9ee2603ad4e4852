"""Worker processes that read samples: how many there are, how they start and end."""

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

MAX_DEFAULT_WORKERS = 8
"""Largest number of workers that is chosen by default."""
START_METHOD = "fork" if sys.platform == "linux" else None
"""How workers are started; None uses the default of the platform.

A forked worker starts immediately and shares the lists of files. Forking is safe although it does
not copy the model's threads: a worker only reads, decodes and indexes, in one thread.
"""


def usual_workers(source: Source, size: int, processes: int = 1) -> int:
    """Return the default number of worker processes.

    It is 0 for samples in memory, for a few batches, and in daemonic processes, which may not start
    others. One core is reserved for the process that consumes the batches.

    Args:
        source: The samples.
        size: Number of samples per batch.
        processes: Number of processes that share the cores of the machine.

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
    return min(max(1, cores // processes - 1), MAX_DEFAULT_WORKERS, len(source) // size // 2)


def begin_worker(_: int = 0) -> None:
    """Initialize a worker: leave Ctrl-C and warnings to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    end_with_parent()


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)  # Files are written atomically, so that an abrupt end leaves no damage.

    threading.Thread(target=watch, name="equilibria-parent", daemon=True).start()


def picklable(error: Exception) -> Exception:
    """Return the error, or a `RuntimeError` with its message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
