"""`equilibria bench`: the benchmarks of the checkout that the package is installed from."""

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
    # Options belong to the benchmarks, --help among them.
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench(context: typer.Context) -> None:
    """Measure against TorchDEQ in one run (--quick, --rows NAME, --json FILE, --list, --help)."""
    root = checkout()
    if root is None:
        fail(
            "the benchmarks are part of the repository, not of the installed package: run "
            "`make bench` in a clone of it, or install the clone in place, with what the "
            "benchmarks compare with (pip install -c constraints.txt -e '.[bench]')"
        )
    path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    # The folder rather than `-m benchmarks`: that would look into the current folder first.
    ended = subprocess.run(
        [sys.executable, str(root / "benchmarks"), *context.args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        check=False,
    )
    raise typer.Exit(ended.returncode)


def checkout() -> Path | None:
    """The folder of the repository, where the package is installed in place (`pip install -e`)."""
    source = Path(equilibria.__file__).resolve().parents[1]
    root = source.parent
    is_checkout = source.name == "src" and (root / "benchmarks" / "__main__.py").is_file()
    return root if is_checkout else None
