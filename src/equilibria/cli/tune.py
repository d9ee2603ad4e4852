"""`equilibria tune`: choose solver, tolerance and gradient rule for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import MofNCompleteColumn, TextColumn
from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import DataRoot, JsonObject, Seed, command
from equilibria.cli.console import print_json, print_table, progress_bar, say, shown

if TYPE_CHECKING:
    import torch

    from equilibria.training.tuning import Measurement, TuningReport

Names = Annotated[str | None, Option(help="Comma-separated names (default: all).")]

SIZE = 32
"""Default side of random images."""
CHANNELS = 3
"""Default number of channels of random images."""
RECOMMENDED, PRESENT = "★", "•"
NUMBERS = (
    *("Toler-\nance", "Time\n(ms)", "Evalu-\nations", "Back-\nward"),
    *("Con-\nverged", "Grad.\ncosine", "Grad.\nerror"),
)
NOISE = 1.05
"""Ratio of times below which two settings count as equally fast."""


@command(
    "tune",
    "equilibria tune opteq-small",
    "equilibria tune equilibria-demo --tolerances 1e-3,1e-5 --json",
)
def tune(
    target: Annotated[
        str, Argument(metavar="MODEL|RUN", help="Name of a model, or folder of a run.")
    ],
    batch: Annotated[int, Option(min=1, help="Images per batch.")] = 32,
    size: Annotated[
        int | None, Option(min=1, help="Side of the random images for a MODEL (default: 32).")
    ] = None,
    channels: Annotated[
        int | None, Option(min=1, help="Channels of the random images (default: 3).")
    ] = None,
    tolerances: Annotated[
        str, Option(help="Comma-separated tolerances of the forward solve.")
    ] = "1e-2,1e-3,1e-4",
    solvers: Names = None,
    gradients: Names = None,
    repeats: Annotated[int, Option(min=1, help="Timed training steps per setting.")] = 3,
    seed: Seed = 0,
    root: DataRoot = None,
    as_json: JsonObject = False,
) -> None:
    """Find the fastest solver, tolerance and gradient rule with accurate gradients."""
    import torch

    torch.manual_seed(seed)
    bar = progress_bar(MofNCompleteColumn(), TextColumn("{task.description}"))
    task = bar.add_task("exact gradient", total=None)
    with bar:
        subject = _find_subject(target, batch, size, channels, root)
        report = eq.training.tune(
            subject.model,
            subject.images,
            loss=subject.loss,
            solvers=_names(solvers),
            tolerances=_numbers(tolerances),
            gradients=_names(gradients),
            repeats=repeats,
            on_progress=lambda done, total: bar.update(
                task, completed=done, total=total, description="training steps"
            ),
        )
    data = _as_data(subject, report)
    if as_json:
        print_json(data)
    else:
        _show(data, subject.note)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--tolerances must be comma-separated numbers such as 1e-2,1e-4, got {text!r}"
        ) from None


@dataclass(frozen=True)
class Subject:
    """Model to tune, with a batch of images for it."""

    name: str
    options: dict[str, Any]
    model: torch.nn.Module
    images: torch.Tensor
    loss: Callable[[torch.Tensor], torch.Tensor] | None
    note: str
    """Origin of the images and weights."""


def _find_subject(
    target: str, batch: int, size: int | None, channels: int | None, root: Path | None
) -> Subject:
    """Create the model with a name, or load that of a run, with images."""
    import torch

    try:
        eq.models.registry.model_card(target)
    except ValueError as error:
        if not Path(target).is_dir():
            raise ValueError(f"{error} There is no run folder {target!r} either.") from None
        if size is not None or channels is not None:
            raise ValueError(
                "--size and --channels are for models by name; a run uses its test images"
            ) from None
        return _finished_run(Path(target), batch, root)
    in_channels = channels or CHANNELS
    return Subject(
        name=target,
        options={} if in_channels == CHANNELS else {"in_channels": in_channels},
        model=eq.models.create_model(target, in_channels=in_channels),
        images=torch.rand(batch, in_channels, size or SIZE, size or SIZE),
        loss=None,
        note="random images and initial weights; trained maps contract less, so also tune a "
        "finished run",
    )


def _finished_run(folder: Path, batch: int, root: Path | None) -> Subject:
    """Load a trained model and test images."""
    import torch

    experiment = eq.training.experiment.trained(folder, root=root)
    recipe, test = experiment.recipe, experiment.data.test
    images, labels = test.fetch(torch.randperm(len(test))[:batch])

    def loss(logits: torch.Tensor) -> torch.Tensor:
        smoothing = recipe.task.label_smoothing
        return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)

    return Subject(
        name=recipe.model.name,
        options=recipe.model.options,
        model=experiment.model,
        images=images,
        loss=loss,
        note="test images, trained weights",
    )


def _show(data: Mapping[str, Any], note: str) -> None:
    shape = " × ".join(map(str, data["images"]))
    rows = []
    for row in data["measurements"]:
        by = f" → {row['found_by']}" if row["solver"].startswith("Auto") else ""
        backward = shown(row["backward_evaluations"]) or "?"
        rows.append(
            (
                RECOMMENDED * row["recommended"] + PRESENT * row["present"],
                row["solver"] + by,
                row["gradient"],
                f"{row['tolerance']:g}",
                f"{1e3 * row['seconds']:.1f}",
                str(row["evaluations"]),
                backward + ("" if row["backward_converged"] else " (failed)"),
                f"{row['share_converged']:.0%}",
                f"{row['cosine']:.5f}",
                f"{row['relative_error']:.1e}",
            )
        )
    title = f"{data['model']}, a training step on {shape}"
    headings = ("", "Solver", "Gradient", *NUMBERS)
    print_table(headings, rows, right=NUMBERS, unbroken=NUMBERS, title=title)
    say(
        f"{RECOMMENDED} recommended, {PRESENT} current setting. Evaluations: of the map, in the "
        "forward solve. Backward: products with its Jacobian. The solver auto chooses "
        f"{data['auto']}. Measured on {note}.",
        wrap=True,
    )
    for line in data["advice"]:
        say(line)


def advice(subject: Subject, report: TuningReport) -> list[str]:
    """Return lines of text that recommend a solver, tolerance and gradient rule."""
    from equilibria.training.tuning import explain_none, overrides

    best, speedup = report.recommended, report.speedup
    if best is None or speedup is None:
        return [f"No recommendation: {explain_none(report.measurements)}."]
    quality = f"cosine {best.cosine:.5f}, relative gradient error {best.relative_error:.1e}"
    if best is report.present:
        return [f"Keep the current setting, the fastest that qualifies: {quality}."]
    options = "".join(f"{name}={value!r}, " for name, value in subject.options.items())
    call = f'eq.create_model("{subject.name}", {options}{overrides(best.setting)})'
    lines = [f"Recommended ({quality}):", f"  {call}"]
    times = f"{1e3 * best.seconds:.0f} ms instead of {1e3 * report.present.seconds:.0f} ms"
    if speedup >= NOISE:
        lines.append(f"{speedup:.2f}× faster than the current setting: {times}.")
    elif report.present.qualifies:
        lines.append(f"Not measurably faster than the current setting: {times}.")
    else:
        lines.append(f"The current setting does not qualify: {times}.")
    if isinstance(best.setting.gradient, eq.Unrolled):
        lines.append(
            "Unrolled has a fixed number of iterations: check that other images converge too."
        )
    return lines


def _as_data(subject: Subject, report: TuningReport) -> dict[str, Any]:
    from equilibria.training.tuning import labels, overrides

    def measured(measurement: Measurement) -> dict[str, Any]:
        setting = measurement.setting
        solver, rule = labels(setting)
        return {
            "solver": solver,
            "found_by": measurement.found_by,
            "tolerance": setting.tolerance,
            "gradient": rule,
            "overrides": overrides(setting),
            **{name: value for name, value in vars(measurement).items() if name != "setting"},
            "qualifies": measurement.qualifies,
            "present": measurement is report.present,
            "recommended": measurement is report.recommended,
        }

    best = report.recommended
    return {
        "model": subject.name,
        "images": list(subject.images.shape),
        "auto": report.auto,
        "measurements": [measured(measurement) for measurement in report.measurements],
        "present": measured(report.present),
        "recommended": None if best is None else measured(best),
        "speedup": report.speedup,
        "advice": advice(subject, report),
    }
