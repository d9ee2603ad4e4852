"""When, with what and on what results were made; names neither the machine nor its folders."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import equilibria


def provenance() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "versions": {
            "equilibria": equilibria.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
    }


def commit() -> str | None:
    """The commit of the checkout that the package is in, with a + if files differ from it."""
    root = Path(equilibria.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() or None
