"""The memory that a program has freed stays with it, where the C library can be told so."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 2**30
"""Bytes of freed memory that the program keeps at most."""
LARGEST = 2**25
"""The largest piece that can be kept: glibc has no larger threshold."""


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, up to 1 GiB; False where there is no glibc.

    Every operation on tensors allocates its result. By default large pieces are returned to the
    system and asked for anew, and each page then costs a fault when it is first written: a tenth of
    the time of a training step. The environment's `MALLOC_…` settings go first.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEPT))
