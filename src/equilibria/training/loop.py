"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from equilibria.adjoints import get_adjoint
from equilibria.data import Augmentation, Batches, Source
from equilibria.equilibrium import EquilibriumLayer
from equilibria.tasks import SolveStatistics, Task
from equilibria.training.checkpoint import Checkpoints, TrainingState
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.optimizer import build_optimizer, set_learning_rate
from equilibria.training.settings import TrainingSettings

EVALUATION_BATCH = 256


class NonFiniteError(RuntimeError):
    """A loss or a gradient became NaN or infinite: further steps would only spread it."""


def train(
    model: nn.Module,
    task: Task,
    data: Source,
    settings: TrainingSettings,
    *,
    augmentation: Augmentation | None = None,
    validation: Source | None = None,
    device: torch.device | str = "cpu",
    checkpoints: Checkpoints | None = None,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> list[EpochMetrics]:
    """Train `model` in place and return the metrics of every epoch.

    `validation` is evaluated after every epoch. With `checkpoints` the state of the run is kept
    after every epoch, and a run that was interrupted goes on from the last one: on a CPU to the
    very same numbers. `on_epoch` and `on_step` are told how it goes (epochs of before an
    interruption are not told again); an exception they raise ends the training.
    """
    if len(data) == 0:
        raise ValueError("there is nothing to train on: the split holds no sample")
    model.to(device)
    chance = torch.Generator().manual_seed(settings.seed)
    batches = Batches(data, settings.batch_size, shuffle=chance)
    steps_per_epoch = -(-len(batches) // settings.accumulate)
    optimizer = build_optimizer(model, settings)
    step = 0
    history: list[EpochMetrics] = []
    kept = None if checkpoints is None else checkpoints.load(model, device)
    if kept is not None:
        optimizer.load_state_dict(kept.optimizer)
        chance.set_state(kept.chance)
        torch.set_rng_state(kept.torch_rng)
        history = [EpochMetrics(**metrics) for metrics in kept.history]
        step = kept.step
    solves_of = _Solves(model, settings)
    for epoch in range(len(history) + 1, settings.epochs + 1):
        model.train()
        started = time.perf_counter()
        totals = _Totals()
        solves_of.prepare_training(epoch)
        for group in _groups(batches, settings.accumulate):
            rate = set_learning_rate(optimizer, settings, step, steps_per_epoch)
            step += 1
            optimizer.zero_grad(set_to_none=True)
            for images, labels in group:
                if augmentation is not None:
                    images = augmentation(images, chance)
                with torch.autocast(
                    torch.device(device).type, dtype=torch.bfloat16, enabled=settings.autocast
                ):
                    outcome = task.training_step(model, images.to(device), labels.to(device))
                totals.solves.observe(model)
                loss = float(outcome.loss.detach())
                _require_finite(loss, "loss", epoch, step)
                (outcome.loss / len(group)).backward()  # type: ignore[no-untyped-call]
                totals.samples += outcome.samples
                totals.loss += loss * outcome.samples
                totals.correct += outcome.correct
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm))
            _require_finite(norm, "gradient", epoch, step)
            optimizer.step()
            totals.gradient += norm
            totals.learning_rate = rate
            if on_step is not None:
                steps = settings.epochs * steps_per_epoch
                on_step(StepProgress(epoch=epoch, step=step, steps=steps, loss=loss))
        solves_of.prepare_evaluation()
        held_out = (
            None
            if validation is None
            else task.evaluate(model, Batches(validation, EVALUATION_BATCH))
        )
        metrics = EpochMetrics(
            epoch=epoch,
            loss=totals.loss / totals.samples,
            accuracy=totals.correct / totals.samples,
            share_converged=totals.solves.share_converged,
            mean_iterations=totals.solves.mean_iterations,
            gradient_norm=totals.gradient / steps_per_epoch,
            learning_rate=totals.learning_rate,
            validation_accuracy=None if held_out is None else held_out.accuracy,
            validation_loss=None if held_out is None else held_out.loss,
            seconds=time.perf_counter() - started,
        )
        history.append(metrics)
        if checkpoints is not None:
            state = TrainingState.of(optimizer, chance, step, history)
            checkpoints.save(epoch, model, state)
        if on_epoch is not None:
            on_epoch(metrics)
    solves_of.prepare_evaluation()
    return history


@dataclass
class _Totals:
    """Sums over the batches of an epoch."""

    samples: int = 0
    loss: float = 0.0
    correct: int = 0
    gradient: float = 0.0
    learning_rate: float = 0.0
    solves: SolveStatistics = field(default_factory=SolveStatistics)


class _Solves:
    """Tolerances and gradient rule of a model's equilibrium layers, as the settings say."""

    def __init__(self, model: nn.Module, settings: TrainingSettings) -> None:
        self.settings = settings
        self.layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        self.own = [layer.solver.tolerance for layer in self.layers]
        if settings.gradient is not None:
            for layer in self.layers:
                layer.adjoint = get_adjoint(settings.gradient)

    def prepare_training(self, epoch: int) -> None:
        self._set(self.settings.tolerance_in(epoch))

    def prepare_evaluation(self) -> None:
        self._set(self.settings.evaluation_tolerance)

    def _set(self, tolerance: float | None) -> None:
        for layer, own in zip(self.layers, self.own, strict=True):
            layer.solver = replace(layer.solver, tolerance=own if tolerance is None else tolerance)


def set_tolerance(model: nn.Module, tolerance: float | None) -> None:
    """Give the solvers of a model this tolerance; None leaves them their own."""
    for layer in model.modules():
        if isinstance(layer, EquilibriumLayer) and tolerance is not None:
            layer.solver = replace(layer.solver, tolerance=tolerance)


def _groups(batches: Batches, size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Batches in groups of `size`; the last group may be smaller."""
    group: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _require_finite(value: float, what: str, epoch: int, step: int) -> None:
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the {what} is {value} in epoch {epoch} (step {step}): lower the learning rate or "
            "clip_norm, check the images for NaN, or bound the norm of W (norm='bound')"
        )
