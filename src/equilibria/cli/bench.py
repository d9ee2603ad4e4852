"""`equilibria bench`: the benchmarks of the checkout that the package is installed from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

import equilibria

HOW_TO_GET_IT = """The benchmarks are part of the repository, not of the installed package, and
there is no checkout around this one. In a clone of the repository run

    make bench

or install the clone in place, with what the benchmarks compare with, and try again:

    pip install -c constraints.txt -e '.[bench]'"""


def run_benchmarks(arguments: Sequence[str]) -> int:
    """Run `benchmarks` beside the source of the package; its exit code."""
    root = checkout()
    if root is None:
        typer.echo(HOW_TO_GET_IT, err=True)
        return 2
    path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    # The folder rather than `-m benchmarks`: that would look into the current folder first.
    return subprocess.run(
        [sys.executable, str(root / "benchmarks"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        check=False,
    ).returncode


def checkout() -> Path | None:
    """The folder of the repository, where the package is installed in place (`pip install -e`)."""
    source = Path(equilibria.__file__).resolve().parents[1]
    root = source.parent
    is_checkout = source.name == "src" and (root / "benchmarks" / "__main__.py").is_file()
    return root if is_checkout else None
