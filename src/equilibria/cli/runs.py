"""`equilibria runs`: what has been trained, or half of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

import equilibria as eq
from equilibria.cli.app import JsonList, command
from equilibria.cli.console import print_json, print_table, shown
from equilibria.cli.faults import FaultError, sentence


@command("runs", "equilibria runs runs")
def runs(
    folder: Annotated[Path, Argument(help="Where to look for runs.")] = Path(),
    as_json: JsonList = False,
) -> None:
    """List the runs in a folder, finished or interrupted."""
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {folder} to look for runs in")
    found, damaged = [], []
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
        found.append(
            {
                "run": str(path),
                "model": recipe.model.name,
                "data": recipe.data.name,
                "epochs": len(metrics),
                "epochs_asked": recipe.training.epochs,
                "loss": last.get("loss"),
                "accuracy": last.get("accuracy"),
                "state": "finished" if run.is_finished() else "interrupted",
            }
        )
    if as_json:
        print_json(found)
    else:
        _show(found)
    if damaged:
        raise FaultError("\n".join(damaged))


def _show(found: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            *(one["run"], one["model"], one["data"]),
            f"{one['epochs']}/{one['epochs_asked']}",
            shown(one["loss"], ".4f"),
            shown(one["accuracy"], ".2%"),
            one["state"],
        )
        for one in found
    ]
    print_table(("Run", "Model", "Data", "Epochs", "Loss", "Accuracy", "State"), rows)
