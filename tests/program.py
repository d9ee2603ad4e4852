"""The program as a user calls it."""

from __future__ import annotations

import torch
from typer.testing import CliRunner, Result

from equilibria.cli import app


def invoke(*arguments: object) -> Result:
    """Run a command; the number of threads that it sets is set back."""
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)
