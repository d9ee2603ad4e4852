"""Memory allocation settings of the C library (glibc)."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_KEPT_BYTES = 2**30
"""Largest amount of freed memory that the program keeps."""
MAX_BLOCK_BYTES = 2**25
"""Largest block that is kept when freed, the largest value that glibc allows."""


def keep_freed_memory() -> bool:
    """Make glibc keep up to 1 GiB of freed memory instead of returning it to the system.

    Every tensor operation allocates its result. By default glibc requests large blocks from the
    system each time, and the page faults take a tenth of a training step. Environment variables
    `MALLOC_…` take precedence.

    Returns:
        Whether the setting was applied: False without glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, MAX_BLOCK_BYTES) and mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
    )
