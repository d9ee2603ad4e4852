"""`equilibria tune`: which solver, tolerance and gradient rule suit a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

from equilibria.cli.console import fail
from equilibria.gradients import Unrolled
from equilibria.models import create_model, model_card
from equilibria.solvers import Auto, ConvergenceError
from equilibria.training import (
    Measurement,
    RunFolder,
    TuningReport,
    explain_none,
    trained,
    tune,
)

SIZE = 32
CHANNELS = 3
RECOMMENDED, PRESENT = "★", "•"
NOISE = 1.05
"""Settings whose times differ by less are as fast as each other."""


@dataclass(frozen=True)
class Subject:
    """What is tuned, and on which images."""

    name: str
    options: dict[str, Any]
    model: nn.Module
    images: Tensor
    loss: Callable[[Tensor], Tensor] | None
    note: str
    """What the images and weights are."""


def run_tune(
    target: str,
    *,
    batch: int,
    size: int | None,
    channels: int | None,
    tolerances: str,
    solvers: str | None,
    adjoints: str | None,
    repeats: int,
    seed: int,
    as_json: bool,
) -> None:
    torch.manual_seed(seed)
    try:
        subject = find_subject(target, batch, size, channels)
        with progress_bar() as on_progress:
            report = tune(
                subject.model,
                subject.images,
                loss=subject.loss,
                solvers=split_names(solvers),
                tolerances=parse_tolerances(tolerances),
                adjoints=split_names(adjoints),
                repeats=repeats,
                on_progress=on_progress,
            )
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    except ConvergenceError as error:
        fail(str(error), code=1)
    if as_json:
        print(json.dumps(as_data(subject, report), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        show(Console(highlight=False), subject, report)


def find_subject(target: str, batch: int, size: int | None, channels: int | None) -> Subject:
    """The model that a name or the folder of a run stands for, with images for it."""
    folder = Path(target)
    try:
        model_card(target)
    except ValueError as error:
        if not folder.is_dir():
            raise ValueError(
                f"{error} Nor is there a run folder {target!r}, as `equilibria demo` writes one."
            ) from None
        if size is not None or channels is not None:
            raise ValueError(
                "--size and --channels are for models by name: a run brings its own images"
            ) from None
        return finished_run(RunFolder(folder), batch)
    return named_model(target, batch, size or SIZE, channels or CHANNELS)


def named_model(name: str, batch: int, size: int, channels: int) -> Subject:
    options = {} if channels == CHANNELS else {"in_channels": channels}
    return Subject(
        name=name,
        options=options,
        model=create_model(name, in_channels=channels),
        images=torch.rand(batch, channels, size, size),
        loss=None,
        note="random images and initial weights; a trained map contracts less, so tune a finished "
        "run too",
    )


def finished_run(run: RunFolder, batch: int) -> Subject:
    """A trained model, with images that it was not trained on."""
    experiment = trained(run.path)
    recipe, test = experiment.recipe, experiment.data.test
    images, labels = test.fetch(torch.randperm(len(test))[:batch])

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=recipe.task.label_smoothing)

    return Subject(
        name=recipe.model.name,
        options=recipe.model.options,
        model=experiment.model,
        images=images,
        loss=loss,
        note="test images, trained weights",
    )


def split_names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def parse_tolerances(text: str) -> list[float]:
    try:
        return [float(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--tolerances takes numbers with commas between them, such as 1e-2,1e-4, not {text!r}"
        ) from None


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    # On stderr, so that what is piped on is the result alone.
    console = Console(stderr=True)
    progress = Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("the exact gradient", total=None)

    def on_progress(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total, description="training steps")

    with progress:
        yield on_progress


def show(console: Console, subject: Subject, report: TuningReport) -> None:
    shape = " × ".join(str(length) for length in subject.images.shape)
    title = f"{subject.name}, a training step on {shape}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "Solver", "Adjoint"):
        table.add_column(heading, overflow="fold", min_width=len("Implicit") if heading else 1)
    for heading in (
        "Toler-\nance",
        "Time\n(ms)",
        "Evalu-\nations",
        "Back-\nward",
        "Con-\nverged",
        "Grad.\ncosine",
        "Grad.\nerror",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for measurement in report.measurements:
        style = "bold" if measurement is report.recommended else None
        table.add_row(*cells(measurement, report), style=style)
    console.print(table)
    console.print(
        f"{RECOMMENDED} recommended, {PRESENT} present. Evaluations of the map in the forward "
        "solve, products with its Jacobian in the backward pass. The solver auto chooses "
        f"{report.auto}. Measured on {subject.note}."
    )
    for line in advice(subject, report):
        console.print(escape(line), soft_wrap=True)


def cells(measurement: Measurement, report: TuningReport) -> list[str]:
    setting = measurement.setting
    solver = setting.solver_label
    if isinstance(setting.solver, Auto):
        solver += f" → {measurement.found_by}"
    marks = RECOMMENDED * (measurement is report.recommended)
    marks += PRESENT * (measurement is report.present)
    backward = measurement.backward_evaluations
    failed = "" if measurement.backward_converged else " (failed)"
    return [
        marks,
        escape(solver),
        escape(setting.gradient_label),
        f"{setting.tolerance:g}",
        f"{1e3 * measurement.seconds:.1f}",
        str(measurement.evaluations),
        ("?" if backward is None else str(backward)) + failed,
        f"{measurement.share_converged:.0%}",
        f"{measurement.cosine:.5f}",
        f"{measurement.relative_error:.1e}",
    ]


def advice(subject: Subject, report: TuningReport) -> list[str]:
    """What to do, in a few lines."""
    best, speedup = report.recommended, report.speedup
    if best is None or speedup is None:
        reason = explain_none(report.measurements)
        return [f"No recommendation: {reason}."]
    quality = f"cosine {best.cosine:.5f}, relative gradient error {best.relative_error:.1e}"
    if best is report.present:
        return [f"Keep the present setting, the fastest that qualifies: {quality}."]
    lines = [f"Recommended ({quality}):", f"  {call(subject, best)}"]
    times = f"{1e3 * best.seconds:.0f} ms in place of {1e3 * report.present.seconds:.0f} ms"
    if speedup >= NOISE:
        lines.append(f"{speedup:.2f} times as fast as the present setting: {times}.")
    elif report.present.qualifies:
        lines.append(f"No faster than the present setting, but for noise: {times}.")
    else:
        lines.append(f"The present setting does not qualify: {times}.")
    if isinstance(best.setting.gradient, Unrolled):
        lines.append(
            "Unrolled takes as many steps for every input: see that other images converge too."
        )
    return lines


def call(subject: Subject, measurement: Measurement) -> str:
    """The Python that makes the model with a setting."""
    options = "".join(f"{name}={value!r}, " for name, value in subject.options.items())
    return f'eq.create_model("{subject.name}", {options}{measurement.setting.overrides})'


def as_data(subject: Subject, report: TuningReport) -> dict[str, Any]:
    best = report.recommended
    return {
        "model": subject.name,
        "images": list(subject.images.shape),
        "auto": report.auto,
        "measurements": [measurement_data(m, report) for m in report.measurements],
        "present": measurement_data(report.present, report),
        "recommended": None if best is None else measurement_data(best, report),
        "speedup": report.speedup,
        "advice": advice(subject, report),
    }


def measurement_data(measurement: Measurement, report: TuningReport) -> dict[str, Any]:
    return {
        "solver": measurement.setting.solver_label,
        "found_by": measurement.found_by,
        "tolerance": measurement.setting.tolerance,
        "gradient": measurement.setting.gradient_label,
        "overrides": measurement.setting.overrides,
        "seconds": measurement.seconds,
        "evaluations": measurement.evaluations,
        "backward_evaluations": measurement.backward_evaluations,
        "share_converged": measurement.share_converged,
        "backward_converged": measurement.backward_converged,
        "cosine": finite(measurement.cosine),
        "relative_error": finite(measurement.relative_error),
        "qualifies": measurement.qualifies,
        "present": measurement is report.present,
        "recommended": measurement is report.recommended,
    }


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
