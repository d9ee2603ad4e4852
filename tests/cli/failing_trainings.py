"""A program that runs failing trainings with two processes, one after the other.

It is a separate program because the launcher changes signal handlers, and a single one because
importing torch takes seconds. Its argument is a JSON list with the settings of each training, or
null for an error in one process only. After each training it prints the exit code to stderr.
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
    """Raise an error in the second process, while the first waits for it."""
    torch.set_num_threads(1)
    with joined_group(place, torch.device("cpu")) as group:
        if group.rank == 1:
            raise KeyError("error of the second process")
        group.total(torch.zeros(1))


def exit_code(settings: list[str] | None, folder: Path) -> int:
    try:
        if settings is None:
            launch(2, fail_alone)
        else:
            train("digits-opteq", settings, output=folder, devices=2)
    except typer.Exit as end:
        return end.exit_code
    return 0


if __name__ == "__main__":
    for number, settings in enumerate(json.loads(sys.argv[1])):
        code = exit_code(settings, Path(f"run {number}"))
        print(f"{ENDED}{code}", file=sys.stderr, flush=True)
