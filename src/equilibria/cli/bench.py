"""`equilibria bench`: run the benchmarks of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import equilibria
from equilibria.cli.app import command
from equilibria.cli.faults import fail


@command(
    "bench",
    # All options, including --help, are passed to the benchmarks.
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench(context: typer.Context) -> None:
    """Compare speed with TorchDEQ (--quick, --rows NAME, --json FILE, --list, --help)."""
    root = checkout()
    if root is None:
        fail(
            "the benchmarks are part of the repository, not of the installed package. Run "
            "`make bench` in a clone, or install the clone in place with the packages for "
            "comparison: pip install -c constraints.txt -e '.[bench]'"
        )
    path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    # `-m benchmarks` would prefer a folder `benchmarks` in the current directory.
    ended = subprocess.run(
        [sys.executable, str(root / "benchmarks"), *context.args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        check=False,
    )
    raise typer.Exit(ended.returncode)


def checkout() -> Path | None:
    """Return the repository if the package is installed in place (`pip install -e`), else None."""
    source = Path(equilibria.__file__).resolve().parents[1]
    root = source.parent
    is_checkout = source.name == "src" and (root / "benchmarks" / "__main__.py").is_file()
    return root if is_checkout else None
