"""Peak memory of a function, to be measured in a separate process.

On Linux the kernel's high-water mark is reset first, so that earlier peaks do not count. Elsewhere
the result is the increase of `ru_maxrss`.
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
    """Return the MiB by which the resident memory rises during `run`."""
    gc.collect()
    before = _resident() if _reset() else _high_water()
    run()
    return (_high_water() - before) / 2**20


def _reset() -> bool:
    """Reset the high-water mark; return whether that is possible."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def _resident() -> float:
    return _status("VmRSS") or _high_water()


def _high_water() -> float:
    # Not ru_maxrss on Linux, where a child inherits the value of its parent.
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
