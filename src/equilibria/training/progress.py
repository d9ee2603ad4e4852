"""Console output of a training: five lines of summary, then a bar or one line per epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from equilibria.equilibrium import EquilibriumLayer, solving
from equilibria.models.registry import parameter_count
from equilibria.training.checkpoints import Checkpoints
from equilibria.training.experiment import Experiment
from equilibria.training.folder import RunFolder
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.planning import RunPlan
from equilibria.training.processes import ALONE, Processes

if TYPE_CHECKING:
    from rich.console import Console

Event = TypeVar("Event")


def summary(
    experiment: Experiment, run: RunFolder, device: torch.device, processes: Processes = ALONE
) -> list[str]:
    """Describe a training in five lines: model, data, schedule, solver and output folder."""
    recipe, data = experiment.recipe, experiment.data
    training = recipe.training
    parts = [(experiment.training, "training"), (experiment.validation, "validation")]
    sizes = [f"{len(part):,} {name}" for part, name in parts if part is not None]
    shape = "×".join(map(str, experiment.images.image_shape))
    classes = f", {data.num_classes} classes" if experiment.images.names_classes else ""
    epochs = f"{training.epochs} epoch" + ("s" if training.epochs > 1 else "")
    end = f" (at most {training.steps:,} steps)" if training.steps is not None else ""
    hardware = str(device)
    if processes.count > 1:
        hardware = f"{device.type} with {processes.count} processes"
    hardware += " (denormal numbers are flushed to zero)" if device.type == "cpu" else ""
    facts = {
        "Model": f"{recipe.model.name}, {parameter_count(experiment.model):,} parameters",
        "Data": f"{data.name}: {', '.join(sizes)} and {len(experiment.test):,} test images of "
        f"{shape}{classes}",
        "Schedule": f"{epochs}{end}, batches of {training.batch_size}, "
        f"{training.optimizer}, learning rate {training.learning_rate:g} ({training.schedule})",
        "Solver": f"{_solver(experiment)}, on {hardware}",
        "Output": f"{run.path} (all settings: {run.config.name})",
    }
    return [f"{name:<10}{value}" for name, value in facts.items()]


def _solver(experiment: Experiment) -> str:
    """Describe the solver and the gradient rule of the layers in training."""
    settings = experiment.recipe.training
    layers = [m for m in experiment.model.modules() if isinstance(m, EquilibriumLayer)]
    if not layers:
        return "none (no equilibrium layer)"
    with solving(experiment.model, tolerance=settings.tolerance_in(1), gradient=settings.gradient):
        descriptions = {
            f"{type(layer.solver).__name__} to a tolerance of {layer.solver.tolerance:g}, "
            f"gradient {type(layer.gradient).__name__}"
            for layer in layers
        }
    return " / ".join(sorted(descriptions))


def notes(plan: RunPlan, run: RunFolder) -> list[str]:
    """Describe how a run starts, if it is not a new one with random weights."""
    lines, training = [], plan.recipe.training
    if plan.from_beginning:
        lines.append(
            f"The run in {run.path} ended before its first checkpoint; it starts from the "
            "beginning."
        )
    if plan.earlier is not None:
        rate = "the learning rate follows its schedule"
        if training.schedule in ("cosine", "polynomial"):
            peak = training.decay * training.learning_rate
            rate = f"the learning rate starts again at {peak:g} and falls to zero"
        last = plan.earlier.training.epochs
        lines.append(f"From epoch {last + 1} to {training.epochs} {rate}.")
    origin = run.facts().get("started_from")
    if origin is not None and not Checkpoints(run.checkpoints).present():
        new = f"; new, for other classes: {', '.join(origin['new'])}" if origin["new"] else ""
        lines.append(f"Started with the weights of {origin['run']}{new}.")
    return lines


def both(
    first: Callable[[Event], None], second: Callable[[Event], None] | None
) -> Callable[[Event], None]:
    """Return a function that calls both functions, or only the first."""

    def call(event: Event) -> None:
        first(event)
        if second is not None:
            second(event)

    return call


class TrainingDisplay:
    """A progress bar on a terminal; elsewhere one plain line per epoch.

    Args:
        console: Console to print on.
        epochs: Number of epochs of the run.
    """

    def __init__(self, console: Console, epochs: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console
        self.epochs = epochs
        self.progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=console.quiet or not console.is_terminal,
            # The bar is on stderr; redirect stdout only if it is the same terminal.
            redirect_stdout=getattr(sys.stdout, "isatty", bool)(),
        )
        self.task = self.progress.add_task(f"[dim]epoch[/] 1/{epochs}", total=None)

    def on_read(self, done: int, total: int) -> None:
        """Show how many images have been read into memory."""
        self.progress.update(
            self.task, description="[dim]reading images[/]", completed=done, total=total
        )
        if done == total:
            self.progress.update(self.task, description=f"[dim]epoch[/] 1/{self.epochs}")

    def on_step(self, step: StepProgress) -> None:
        """Advance the bar to a step."""
        self.progress.update(self.task, completed=step.step, total=step.steps)

    def on_epoch(self, metrics: EpochMetrics) -> None:
        """Print the metrics of an epoch."""
        score, form = metrics.validation_accuracy, ".1%"
        if score is None:
            score, form = metrics.validation_score, ".2f"
        values = {
            "loss": (metrics.loss, ".4f"),
            "accuracy": (metrics.accuracy, ".1%"),
            "validation": (score, form),
            "converged": (metrics.share_converged, ".1%"),
            "iterations": (metrics.mean_iterations, ".1f"),
        }
        entries = [("epoch", f"{metrics.epoch:>{len(str(self.epochs))}}/{self.epochs}")]
        entries += [(name, format(v, how)) for name, (v, how) in values.items() if v is not None]
        if self.console.is_terminal:
            line = " ".join(f"[dim]{label}[/] {value}" for label, value in entries)
            self.progress.update(self.task, description=line)
        else:
            line = "  ".join(f"{label} {value}" for label, value in entries)
            self.console.print(f"{line}  {metrics.seconds:.1f} s", highlight=False, soft_wrap=True)
