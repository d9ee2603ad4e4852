"""What `equilibria attack` does to images, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from equilibria.cli.app import opened
from equilibria.cli.console import print_json, print_table, progress_bar, say
from equilibria.cli.faults import warn
from equilibria.inputs import (
    AttackResult,
    AttackSettings,
    RobustnessCurves,
    curve_methods,
    measure_attack,
    measure_robustness,
)
from equilibria.inputs.robustness import SHARES, STEP_COUNTS
from equilibria.report import (
    AttackedFile,
    robustness_charts,
    store_robustness,
    themed,
    with_certified,
)
from equilibria.training import RecipeModel, choose_device, write_atomically

AnyRun = TypeVar("AnyRun", bound=RecipeModel)


def classifier(run: AnyRun) -> AnyRun:
    if run.images.kind != "classification" or not run.task.names_classes:
        raise ValueError(
            f"this command needs a run that classifies images, and {run.recipe.model.name} on "
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


def draw_curves(
    run: Path,
    settings: AttackSettings,
    *,
    samples: int,
    batch_size: int,
    draw: Path | None,
    as_json: bool,
    device: str,
    best: bool,
    root: Path | None,
) -> None:
    """Accuracy over the distance and the steps, with what is certified below it."""
    where = choose_device(device)
    experiment = classifier(opened(run, where, best, root))
    images, labels = (some.to(where) for some in experiment.some_test_images(samples))
    methods = curve_methods(settings.norm)
    with progress_bar(silent=as_json) as progress:
        task = progress.add_task("attacking", total=len(methods) * (len(SHARES) + len(STEP_COUNTS)))

        def tell(method: str) -> None:
            progress.update(task, description=method, advance=1)

        curves = measure_robustness(
            experiment.model, images, labels, settings, batch_size=batch_size, on_measured=tell
        )
        progress.update(task, description="certifying")
        with experiment.solving():
            curves = with_certified(experiment.model, images, labels, curves)
    if not best and run.is_dir():
        store_robustness(run, curves)
    if draw is not None:
        charts = robustness_charts(curves)
        write_atomically(draw, themed(charts).light)
    if as_json:
        print_json(curves)
        return
    _show_curves(experiment.recipe.model.name, curves)
    for line in curves.passed_over:
        warn(f"passed over: {line}")
    if curves.why_not_certified:
        say(f"Nothing is certified: {curves.why_not_certified}")
    if draw is not None:
        say(f"Drawn: {draw}")


def _show_curves(model: str, curves: RobustnessCurves) -> None:
    tables = {
        f"{model} on {curves.samples} test images, {curves.norm}, over eps": curves.over_eps,
        f"over steps, at eps {curves.step_eps:g}": curves.over_steps,
    }
    for title, found in tables.items():
        if not found:
            continue
        over_eps = found is curves.over_eps
        points = next(iter(found.values()))
        headings = [f"{p.eps:g}" if over_eps else f"{p.steps}" for p in points]
        rows = [
            (method, *(f"{p.accuracy:.1%}" for p in places)) for method, places in found.items()
        ]
        if over_eps:
            held = [max((s for e, s in curves.certified if e > p.eps), default=0.0) for p in points]
            rows.append(("certified", *(f"{share:.1%}" for share in held)))
        print_table(("Attack", *headings), rows, right=headings, title=title)
    say(f"Without an attack: {curves.accuracy:.1%}")
