"""Trainings by two processes that fail, one after the other.

A program of its own, as the launcher changes how a process takes signals; and one for all of them,
as every process that starts takes seconds to import torch. What it is given is a JSON list of
settings, and null for an error of one process alone. After each it writes the exit code to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import typer

from equilibria.cli.processes import launch
from equilibria.cli.train import train
from equilibria.training.distributed import Place, joined_group

ENDED = "ended with "


def fail_alone(place: Place) -> None:
    """An error of the second process alone, while the first waits for it."""
    torch.set_num_threads(1)
    with joined_group(place, torch.device("cpu")) as group:
        if group.rank == 1:
            raise KeyError("the second process stumbles")
        group.total(torch.zeros(1))


def exit_code(settings: list[str] | None, folder: Path) -> int:
    try:
        if settings is None:
            launch(2, fail_alone)
        else:
            train("digits-opteq", settings, folder, devices=2)
    except typer.Exit as end:
        return end.exit_code
    return 0


if __name__ == "__main__":
    for number, settings in enumerate(json.loads(sys.argv[1])):
        code = exit_code(settings, Path(f"run {number}"))
        print(f"{ENDED}{code}", file=sys.stderr, flush=True)
