"""`equilibria runs`: what has been trained, or half of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

import equilibria as eq
from equilibria.cli.app import command
from equilibria.cli.console import print_table, shown
from equilibria.cli.faults import FaultError, sentence


@command("runs", "equilibria runs runs")
def runs(
    folder: Annotated[Path, Argument(help="Where to look for runs.")] = Path(),
) -> None:
    """List the runs in a folder, finished or interrupted."""
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {folder} to look for runs in")
    rows = []
    damaged = []
    for path in sorted(path.parent for path in folder.glob("**/config.yaml")):
        run = eq.training.RunFolder(path)
        try:
            recipe = run.recipe()
        except (OSError, ValueError) as error:
            # Otherwise the configuration of something else.
            if run.checkpoints.exists() or run.weights.exists():
                damaged.append(f"{path} cannot be read: {sentence(error)}")
            continue
        metrics = run.read_metrics()
        last = metrics[-1] if metrics else {}
        rows.append(
            (
                str(path),
                recipe.model.name,
                recipe.data.name,
                f"{len(metrics)}/{recipe.training.epochs}",
                shown(last.get("loss"), ".4f"),
                shown(last.get("accuracy"), ".2%"),
                "finished" if run.is_finished() else "interrupted",
            )
        )
    print_table(("Run", "Model", "Data", "Epochs", "Loss", "Accuracy", "State"), rows)
    if damaged:
        raise FaultError("\n".join(damaged))
