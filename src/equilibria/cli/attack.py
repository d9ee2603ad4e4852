"""`equilibria attack`: how a trained classifier does when somebody changes its images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from equilibria.cli.console import fail
from equilibria.inputs import (
    AttackFigures,
    AttackResult,
    AttackSettings,
    Method,
    measure_attack,
)
from equilibria.report.figures import attack_png
from equilibria.training import Experiment, choose_device, trained, write_atomically

WIDTH_OF_A_FILE = 160
"""Columns where the output is not a terminal."""


def run_attack(
    *,
    folder: Path,
    norm: str,
    eps: float,
    method: str,
    steps: int | None,
    restarts: int,
    step_size: float | None,
    warm_start: bool,
    loss: str,
    samples: int,
    batch_size: int,
    best: bool,
    draw: Path | None,
    device_name: str,
    as_json: bool,
) -> None:
    """Attack a finished run on test images, in pixels with values in [0, 1]."""
    common: dict[str, Any] = {
        "norm": norm,
        "eps": eps,
        "restarts": restarts,
        "loss": loss,
    }
    try:
        asked = [
            AttackSettings(
                method=name,
                steps=steps if _takes_steps(name, method) else None,
                step_size=step_size if _takes_steps(name, method) else None,
                warm_start=warm_start and (name == "pgd" or method != "all"),
                **common,
            )
            for name in _methods(method)
        ]
        device = choose_device(device_name)
        experiment = trained(folder, device=device, weights="best" if best else "last")
        images, labels = chosen_images(experiment, samples)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_FILE)
    model = experiment.model
    found: list[tuple[AttackFigures, AttackResult]] = []
    passed_over: list[str] = []
    batches = math.ceil(len(images) / batch_size)
    with _progress(as_json) as progress:
        task = progress.add_task("attacking", total=batches * len(asked))
        for settings in asked:
            progress.update(task, description=settings.method)
            try:
                found.append(
                    measure_attack(
                        model,
                        images.to(device),
                        labels.to(device),
                        settings,
                        batch_size,
                        lambda: progress.advance(task),
                    )
                )
            except (TypeError, ValueError) as error:
                if method != "all":
                    fail(str(error))
                passed_over.append(f"{settings.method} passed over: {error}")
    if not found:
        fail("; ".join(passed_over))
    if draw is not None:
        names = experiment.data.class_names
        write_atomically(draw, attack_png(images, found[0][1], names))
    rows = [figures for figures, _ in found]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False))
        return
    title = f"{experiment.recipe.model.name} on {len(images)} test images, {norm}, eps {eps:g}"
    console.print(_table(title, rows))
    for reason in passed_over:
        console.print(reason, soft_wrap=True, markup=False)
    if draw is not None:
        console.print(f"Drawn: {draw}", soft_wrap=True)


def chosen_images(experiment: Experiment, samples: int) -> tuple[Tensor, Tensor]:
    """Test images with values in [0, 1], evenly spread over the test set."""
    if experiment.data.kind != "classification":
        raise ValueError(
            f"an attack needs a run that classifies images, and {experiment.data.name} is for "
            f"{experiment.data.kind}"
        )
    return experiment.some_test_images(samples)


def _methods(asked: str) -> Iterable[Method]:
    known: tuple[Method, ...] = get_args(Method)
    if asked == "all":
        return known
    if asked not in known:
        raise ValueError(f"--method must be one of {', '.join(known)} or all, not {asked!r}")
    return [name for name in known if name == asked]


def _takes_steps(name: Method, asked: str) -> bool:
    """FGSM is one step: of all methods it alone passes over what is said of steps."""
    return name != "fgsm" or asked != "all"


def _progress(silent: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=silent or not console.is_terminal,
    )


def _table(title: str, rows: Sequence[AttackFigures]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("Attack", no_wrap=True)
    for column in ("Clean", "Robust", "95% interval", "Loss", "Evaluations", "Pull-backs", "CPU s"):
        table.add_column(column, justify="right")
    for row in rows:
        runs = f" × {row.restarts}" if row.restarts > 1 else ""
        name = row.method if row.method == "fgsm" else f"{row.method}-{row.steps}"
        table.add_row(
            name + runs,
            f"{row.accuracy:.2%}",
            f"{row.robust_accuracy:.2%}",
            f"{row.low:.1%} – {row.high:.1%}",
            f"{row.clean_loss:.3f} → {row.loss:.3f}",
            f"{row.evaluations}",
            f"{row.vjps}",
            f"{row.cpu_seconds:.1f}",
        )
    return table
