"""The peak memory of a stretch of code, in a process of its own.

On Linux the kernel's high-water mark is set back first, so that what an import or a start used for
a moment hides nothing. Elsewhere it is `ru_maxrss`, less what it was before.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def peak_mebibytes(run: Callable[[], object]) -> float:
    """How far the resident memory rises above its level before `run`, in MiB."""
    gc.collect()
    before = _resident() if _reset() else _high_water()
    run()
    return (_high_water() - before) / 2**20


def _reset() -> bool:
    """Set the high-water mark back to the present; False where that cannot be done."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def _resident() -> float:
    return _status("VmRSS") or _high_water()


def _high_water() -> float:
    # Not ru_maxrss on Linux: a child inherits there the mark of the process that started it.
    return _status("VmHWM") or _maximum()


def _status(name: str) -> float | None:
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024.0 * float(line.split()[1])
    return None


def _maximum() -> float:
    used = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return used if sys.platform == "darwin" else 1024 * used
