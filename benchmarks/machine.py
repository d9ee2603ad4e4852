"""Description of a benchmark run: machine, versions, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import equilibria
from benchmarks.contest import Settings
from equilibria.papers.report import commit


def describe_run(arguments: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Describe a run without naming the machine or its folders.

    Args:
        arguments: Arguments of the command line that affect the results.
        settings: Settings of the run.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks", *arguments]),
        "quick": settings.quick,
        "repeats": settings.repeats,
        "threads": torch.get_num_threads(),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": memory_gib(),
            "system": f"{platform.system()} {platform.machine()}",
            "instructions": instructions(),
        },
        "versions": {
            "equilibria": equilibria.__version__,
            "commit": commit(),
            "torchdeq": version("torchdeq"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def instructions() -> str:
    """The instruction set that PyTorch uses, and the limit for convolutions if one is set."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    capability: str = torch.backends.cpu.get_cpu_capability()
    return capability if limit is None else f"{capability}, oneDNN up to {limit}"


def memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return round(pages * size / 2**30, 1)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
