"""`equilibria runs`: list finished and interrupted runs."""

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
    folder: Annotated[Path, Argument(help="Folder that contains runs, at any depth.")] = Path(),
    as_json: JsonList = False,
) -> None:
    """List the runs in a folder, finished or interrupted."""
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {folder}; give a folder of runs")
    entries, damaged = [], []
    for path in sorted(path.parent for path in folder.glob("**/config.yaml")):
        run = eq.training.RunFolder(path)
        try:
            recipe = run.recipe()
        except (OSError, ValueError) as error:
            # Without these, the file is the configuration of something else.
            if run.checkpoints.exists() or run.weights.exists():
                damaged.append(f"{path} cannot be read: {sentence(error)}")
            continue
        metrics = run.read_metrics()
        last = metrics[-1] if metrics else {}
        entries.append(
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
        print_json(entries)
    else:
        _show(entries)
    if damaged:
        raise FaultError("\n".join(damaged))


def _show(entries: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            *(run["run"], run["model"], run["data"]),
            f"{run['epochs']}/{run['epochs_asked']}",
            shown(run["loss"], ".4f"),
            shown(run["accuracy"], ".2%"),
            run["state"],
        )
        for run in entries
    ]
    print_table(("Run", "Model", "Data", "Epochs", "Loss", "Accuracy", "State"), rows)
