"""What `equilibria attack` does to images, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn

from equilibria.cli.console import print_json, print_table, progress_bar
from equilibria.cli.faults import warn
from equilibria.inputs import AttackResult, AttackSettings, measure_attack
from equilibria.report import AttackedFile
from equilibria.training import RecipeModel

AnyRun = TypeVar("AnyRun", bound=RecipeModel)


def classifier(run: AnyRun) -> AnyRun:
    if run.images.kind != "classification" or not run.task.names_classes:
        raise ValueError(
            f"an attack needs a run that classifies images, and {run.recipe.model.name} on "
            f"{run.recipe.data.name} does not"
        )
    return run


def refusal(settings: AttackSettings, error: Exception) -> str:
    """Of a method that does not take the model."""
    return f"{settings.method} passed over: {error}"


def attack_images(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    asked: Sequence[AttackSettings],
    batch_size: int,
    is_silent: bool,
) -> list[AttackResult]:
    """The results of those methods that take the model; of one alone it is an error if it fails."""
    found, passed_over = [], []
    with progress_bar(silent=is_silent) as progress:
        batches = math.ceil(len(images) / batch_size)
        task = progress.add_task("attacking", total=batches * len(asked))
        for settings in asked:
            progress.update(task, description=settings.method)
            try:
                found.append(
                    measure_attack(
                        model, images, labels, settings, batch_size, lambda: progress.advance(task)
                    )
                )
            except (TypeError, ValueError) as error:
                if len(asked) == 1:
                    raise
                passed_over.append(refusal(settings, error))
    if not found:
        raise ValueError("; ".join(passed_over))
    for line in passed_over:
        warn(line)
    return found


def show_files(attacked: Iterator[AttackedFile], count: int, as_json: bool) -> None:
    found = []
    with progress_bar(silent=as_json) as progress:
        for one in progress.track(attacked, total=count, description="attacking"):
            found.append(one)
    if as_json:
        print_json(found)
        return
    columns = ("Distance", "Steps", "Evaluations")
    in_file = ("In the file", "Attacked") if any(one.attacked for one in found) else ()
    rows = [
        (
            one.file,
            one.method,
            one.before,
            one.after or "no answer",
            "yes" if one.changed else "no",
            f"{one.distance:.3g}",
            f"{one.steps}",
            f"{one.evaluations}",
            *((one.after_in_file or "no answer", one.attacked or "") if in_file else ()),
        )
        for one in found
    ]
    print_table(
        ("File", "Attack", "Class", "After", "Changed", *columns, *in_file), rows, right=columns
    )


def show(title: str, results: Sequence[AttackResult]) -> None:
    columns = ("Clean", "Robust", "95% interval", "Loss", "Evaluations", "Pull-backs", "CPU s")
    rows = []
    for row in (result.figures() for result in results):
        runs = f" × {row['restarts']}" if row["restarts"] > 1 else ""
        steps = "" if row["method"] == "fgsm" else f"-{row['steps']}"
        rows.append(
            (
                row["method"] + steps + runs,
                f"{row['accuracy']:.2%}",
                f"{row['robust_accuracy']:.2%}",
                f"{row['low']:.1%} – {row['high']:.1%}",
                f"{row['clean_loss']:.3f} → {row['loss']:.3f}",
                f"{row['evaluations']}",
                f"{row['vjps']}",
                f"{row['cpu_seconds']:.1f}",
            )
        )
    print_table(("Attack", *columns), rows, right=columns, title=title)
