"""Training and evaluation of one model of a study, with their costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import equilibria as eq
from equilibria.data import Augmentation, Batches, Split
from equilibria.papers.studies.family import Contestant
from equilibria.papers.studies.study import Work
from equilibria.tasks import Classification
from equilibria.training import TrainingSettings
from equilibria.training import fit as fit_model
from equilibria.training.metrics import StepProgress

TASK = Classification(label_smoothing=0.05)
TRAINING_TOLERANCE = 1e-2
EVALUATION_TOLERANCE = 1e-4
GRADIENT_RULE = eq.OneStep()
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class FitOutcome:
    """Result of one training.

    Attributes:
        name: Name of the model.
        seed: Seed of initialization and batches.
        parameters: Number of parameters.
        correct: Number of correct test samples.
        samples: Number of test samples.
        training_accuracy: Accuracy in the last epoch, on the augmented images.
        seconds: CPU seconds of the training.
        elapsed: Elapsed seconds of the training.
        mean_iterations: Mean iterations per sample in the evaluation; None without an equilibrium.
        share_converged: Share of converged samples in the evaluation; None without an equilibrium.
    """

    name: str
    seed: int
    parameters: int
    correct: int
    samples: int
    training_accuracy: float
    seconds: float
    elapsed: float
    mean_iterations: float | None
    share_converged: float | None

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def fit(
    contestant: Contestant,
    training: Split,
    test: Split,
    settings: TrainingSettings,
    *,
    augmentation: Augmentation | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> FitOutcome:
    """Train the model and evaluate it; `settings.seed` also draws the initial weights."""
    torch.manual_seed(settings.seed)
    classes = int(training.labels.max()) + 1
    model = contestant.build(in_channels=training.images.shape[1], num_classes=classes)
    started, started_cpu = time.perf_counter(), time.process_time()
    with study_settings(model, TRAINING_TOLERANCE):
        history = fit_model(
            model, TASK, training, settings, augmentation=augmentation, on_step=on_step
        )
    elapsed, seconds = time.perf_counter() - started, time.process_time() - started_cpu
    with study_settings(model, EVALUATION_TOLERANCE):
        result = Classification().evaluate(model, Batches(test, EVALUATION_BATCH))
    assert result.correct is not None
    assert history[-1].accuracy is not None
    return FitOutcome(
        name=contestant.name,
        seed=settings.seed,
        parameters=eq.models.registry.parameter_count(model),
        correct=result.correct,
        samples=result.samples,
        training_accuracy=history[-1].accuracy,
        seconds=seconds,
        elapsed=elapsed,
        mean_iterations=result.solves.mean_iterations,
        share_converged=result.solves.share_converged,
    )


def study_settings(model: nn.Module, tolerance: float) -> AbstractContextManager[Any]:
    """Context in which every layer has this tolerance and the gradient rule of studies."""
    return eq.solving(model, tolerance=tolerance, gradient=GRADIENT_RULE)


class Progress:
    """Counts the finished runs of a study, and reports the share of the running one."""

    def __init__(self, work: Work, runs: int) -> None:
        self.work = work
        self.runs = runs
        self.done = 0

    def follow(self, title: str) -> Callable[[StepProgress], None]:
        """Return the function that a training calls after every step."""

        def on_step(step: StepProgress) -> None:
            self.work.on_progress(self.done + step.step / step.steps, self.runs, title)

        return on_step

    def finish_run(self) -> None:
        """Count one more finished run."""
        self.done += 1
        self.work.on_progress(self.done, self.runs, "")


def optional(value: float | None, form: str) -> str:
    """Format a number; None becomes a dash."""
    return "–" if value is None else format(value, form)


def machine() -> str:
    """Describe the machine and the versions of the measurements."""
    import os
    import platform

    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {torch.get_num_threads()} thread, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
