"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from equilibria.data import Augmentation, Batches, Split
from equilibria.tasks import SolveStatistics, Task
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.optimizer import build_optimizer, warmup_cosine
from equilibria.training.settings import TrainingSettings


class NonFiniteError(RuntimeError):
    """A loss or a gradient became NaN or infinite: further steps would only spread it."""


def train(
    model: nn.Module,
    task: Task,
    data: Split,
    settings: TrainingSettings,
    *,
    augmentation: Augmentation | None = None,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> list[EpochMetrics]:
    """Train `model` in place and return the metrics of every epoch.

    `on_epoch` and `on_step` are told how it goes; an exception they raise ends the training.
    """
    if len(data) == 0:
        raise ValueError("there is nothing to train on: the split holds no sample")
    model.to(device)
    chance = torch.Generator().manual_seed(settings.seed)
    batches = Batches(data, settings.batch_size, shuffle=chance)
    steps = settings.epochs * len(batches)
    optimizer = build_optimizer(model, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        partial(warmup_cosine, steps=steps, warmup=round(settings.warmup_epochs * len(batches))),
    )
    step = 0
    history: list[EpochMetrics] = []
    for epoch in range(1, settings.epochs + 1):
        model.train()
        started = time.perf_counter()
        solves = SolveStatistics()
        loss_sum = gradient_sum = 0.0
        correct = 0
        learning_rate = 0.0
        for images, labels in batches:
            step += 1
            if augmentation is not None:
                images = augmentation(images, chance)
            outcome = task.training_step(model, images.to(device), labels.to(device))
            solves.observe(model)
            loss = float(outcome.loss.detach())
            _require_finite(loss, "loss", epoch, step)
            optimizer.zero_grad(set_to_none=True)
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            gradient_norm = float(nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm))
            _require_finite(gradient_norm, "gradient", epoch, step)
            learning_rate = float(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            loss_sum += loss * outcome.samples
            gradient_sum += gradient_norm
            correct += outcome.correct
            if on_step is not None:
                on_step(StepProgress(epoch=epoch, step=step, steps=steps, loss=loss))
        metrics = EpochMetrics(
            epoch=epoch,
            loss=loss_sum / len(data),
            accuracy=correct / len(data),
            share_converged=solves.share_converged,
            mean_iterations=solves.mean_iterations,
            gradient_norm=gradient_sum / len(batches),
            learning_rate=learning_rate,
            seconds=time.perf_counter() - started,
        )
        history.append(metrics)
        if on_epoch is not None:
            on_epoch(metrics)
    return history


def _require_finite(value: float, what: str, epoch: int, step: int) -> None:
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the {what} is {value} in epoch {epoch} (step {step}): lower the learning rate or "
            "clip_norm, check the images for NaN, or bound the norm of W (norm='bound')"
        )
