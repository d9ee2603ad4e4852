"""`equilibria tune`: which solver, tolerance and gradient rule suit a model."""

from __future__ import annotations

import sys
from typing import Annotated

from rich.progress import MofNCompleteColumn, TextColumn
from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import DataRoot, JsonObject, Seed, command
from equilibria.cli.console import print_json, progress_bar

Names = Annotated[str | None, Option(help="Names, with commas between them; all if not set.")]


@command(
    "tune",
    "equilibria tune opteq-small",
    "equilibria tune equilibria-demo --tolerances 1e-3,1e-5 --json",
)
def tune(
    target: Annotated[
        str, Argument(metavar="MODEL|RUN", help="Name of a model, or folder of a run.")
    ],
    batch: Annotated[int, Option(min=1, help="Images in the batch.")] = 32,
    size: Annotated[
        int | None, Option(min=1, help="Side of the random images of a MODEL; 32 if not set.")
    ] = None,
    channels: Annotated[int | None, Option(min=1, help="Their channels; 3 if not set.")] = None,
    tolerances: Annotated[str, Option(help="Of the forward solve.")] = "1e-2,1e-3,1e-4",
    solvers: Names = None,
    gradients: Names = None,
    adjoints: Annotated[str | None, Option(hidden=True)] = None,
    repeats: Annotated[int, Option(min=1, help="Timed steps of each setting.")] = 3,
    seed: Seed = 0,
    root: DataRoot = None,
    as_json: JsonObject = False,
) -> None:
    """Find the fastest solver, tolerance and gradient rule that trains a model right."""
    import torch

    from equilibria.cli.tuning import as_data, find_subject, show

    if adjoints is not None:
        print("--adjoints is now --gradients; it is understood until version 0.3", file=sys.stderr)
    torch.manual_seed(seed)
    bar = progress_bar(MofNCompleteColumn(), TextColumn("{task.description}"))
    task = bar.add_task("the exact gradient", total=None)
    with bar:
        subject = find_subject(target, batch, size, channels, root)
        report = eq.training.tune(
            subject.model,
            subject.images,
            loss=subject.loss,
            solvers=_names(solvers),
            tolerances=_numbers(tolerances),
            gradients=_names(gradients or adjoints),
            repeats=repeats,
            on_progress=lambda done, total: bar.update(
                task, completed=done, total=total, description="training steps"
            ),
        )
    found = as_data(subject, report)
    if as_json:
        print_json(found)
    else:
        show(found, subject.note)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--tolerances takes numbers with commas between them, such as 1e-2,1e-4, not {text!r}"
        ) from None
