"""The program as a user calls it."""

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
    """Run a command; the number of threads that it sets is set back."""
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, _without_report(arguments))
    finally:
        torch.set_num_threads(threads)


def _without_report(arguments: tuple[object, ...]) -> list[str]:
    """A training ends with a report only where a test asks for it (--report): it takes seconds."""
    words = [str(argument) for argument in arguments]
    is_plain = words[:1] == ["train"] and not {"--report", "--help"} & {*words}
    return [*words, "--no-report"] if is_plain else words


def program(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, with `folder` as its working directory."""
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
    """What a program prints that a fresh interpreter runs."""
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()
