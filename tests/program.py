"""Calls of the program, as by a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from typer.testing import CliRunner, Result

import equilibria
from equilibria.cli import app

SOURCE = Path(equilibria.__file__).parents[1]


def invoke(*arguments: object) -> Result:
    """Run a command in this process, and restore the number of threads that it changes."""
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, _without_report(arguments))
    finally:
        torch.set_num_threads(threads)


def _without_report(arguments: tuple[object, ...]) -> list[str]:
    """Add --no-report to `train`, unless a test passes --report, because reports take seconds."""
    words = [str(argument) for argument in arguments]
    is_plain = words[:1] == ["train"] and not {"--report", "--help"} & {*words}
    return [*words, "--no-report"] if is_plain else words


def program(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a separate process, with `folder` as its working directory."""
    return subprocess.run(
        [sys.executable, "-m", "equilibria", *_without_report(arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def output_of_python(program: str) -> str:
    """Return the output of Python code in a new interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
