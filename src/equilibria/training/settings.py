"""Settings of a training run, with its optimizer and learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import nn

from equilibria.gradients import list_gradients
from equilibria.registry import check_values

OptimizerName = Literal["adamw", "adam", "sgd"]
JacobianPlace = Literal["equilibrium", "iterate"]
NonFinite = Literal["refuse", "drop"]
SEEDS = 2**63
"""Number of non-negative seeds of a PyTorch generator."""
Schedule = Literal["cosine", "step", "polynomial", "constant"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of a training; by default AdamW with a linear warm-up and a cosine schedule.

    Attributes:
        epochs: Number of epochs.
        steps: Total number of optimizer steps, which must end in the last epoch; None trains the
            last epoch completely.
        batch_size: Number of samples per batch.
        optimizer: "adamw", "adam" or "sgd".
        learning_rate: Peak learning rate.
        momentum: Momentum of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: Weight decay of parameters with more than one dimension.
        schedule: Learning rate after the warm-up: "cosine", "step", "polynomial" or "constant".
            "step" multiplies it by `decay` at each of the epochs `milestones`; "polynomial" is
            (1 − progress)^`power`.
        milestones: Epochs at which the schedule "step" reduces the learning rate.
        decay: Factor of the schedule "step", and of the learning rate after `continued_at`.
        power: Exponent of the schedule "polynomial".
        warmup_epochs: Number of epochs in which the learning rate grows linearly.
        accumulate: Number of batches whose gradients are averaged per optimizer step.
        clip_norm: Largest norm of the gradient; larger gradients are scaled down.
        autocast: Whether to compute in bfloat16 where this is safe.
        tolerance: Tolerance of the solver in training; None uses the model's. The tolerance of an
            implicit gradient follows it, unless the rule sets one.
        max_iterations: Iteration limit of the solver in training; None uses the model's.
        final_tolerance: Tolerance in the last epoch; its logarithm is interpolated linearly between
            the first and the last epoch. None keeps `tolerance`.
        evaluation_tolerance: Tolerance of the solver in evaluation; None uses the model's.
        evaluation_batch_size: Number of samples per batch in evaluation.
        gradient: Name of the gradient rule ("one_step", "implicit", …); None uses the model's.
        warm_start: Whether the solve of each sample starts at its equilibrium of the previous
            epoch. This keeps the state of every sample in memory, and helps little if augmentation
            moves pixels.
        segments: Largest number of consecutive steps in which a sample stays in the batch. Each
            solve continues at the last state of the sample, so that a few iterations per step train
            a long solve. A sample is replaced by a new one when its output is right. An epoch has
            as many steps as without segments, and sees fewer samples.
        averaging: Decay of a moving average of the weights, such as 0.995; 0 for none. The average
            is evaluated and saved. Its decay rises from 0.1 in the first steps.
        jacobian_weight: Weight of the penalty ‖J‖²_F ÷ size of the state in the loss, with the
            Jacobian J = ∂T/∂y of the layer's map T in the state y; 0 omits it.
        jacobian_at: State at which J is taken: "equilibrium", or "iterate" for a random one of the
            first 12 iterates. If a step searches over inputs (JIIO), "iterate" is a random iterate
            of the search.
        jacobian_vectors: Number of random vectors that estimate the penalty.
        non_finite: Treatment of training samples with NaN or infinite values: "refuse" raises an
            error that lists them, "drop" removes them from their batch and warns.
        seed: Seed of the order of samples, of augmentation and of dropout. Initial weights are
            drawn from PyTorch's global generator: call `torch.manual_seed` before you create the
            model.
        continued_at: Previous numbers of epochs of a run that was given more. The first epochs do
            not change. After each of them, a cosine or polynomial schedule starts again, without
            warm-up, at `decay` times the learning rate; other schedules and the final tolerance
            continue.

    Examples:
        >>> eq.training.TrainingSettings(epochs=10, optimizer="sgd", learning_rate=0.1).batch_size
        64
    """

    epochs: int
    steps: int | None = None
    batch_size: int = 64
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-2
    schedule: Schedule = "cosine"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    power: float = 0.9
    warmup_epochs: float = 1.0
    accumulate: int = 1
    clip_norm: float = 1.0
    autocast: bool = False
    tolerance: float | None = 1e-2
    max_iterations: int | None = None
    final_tolerance: float | None = None
    evaluation_tolerance: float | None = None
    evaluation_batch_size: int = 256
    gradient: str | None = None
    warm_start: bool = False
    segments: int = 1
    averaging: float = 0.0
    jacobian_weight: float = 0.0
    jacobian_at: JacobianPlace = "equilibrium"
    jacobian_vectors: int = 1
    non_finite: NonFinite = "refuse"
    seed: int = 0
    continued_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = (
            *("epochs", "steps", "batch_size", "accumulate"),
            *("evaluation_batch_size", "jacobian_vectors", "max_iterations", "segments"),
        )
        check_values(
            self,
            at_least_one=counts,
            positive=("learning_rate", "clip_norm", "decay", "power"),
            tolerances=("tolerance", "final_tolerance", "evaluation_tolerance"),
            not_negative=("weight_decay", "warmup_epochs", "jacobian_weight"),
            below_one=("momentum", "averaging"),
            one_of={
                "optimizer": get_args(OptimizerName),
                "schedule": get_args(Schedule),
                "jacobian_at": get_args(JacobianPlace),
                "non_finite": get_args(NonFinite),
                "gradient": [None, *list_gradients()],
            },
        )
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must be from 0 to {SEEDS - 1}, got {self.seed}")
        if self.segments > 1 and (self.warm_start or self.accumulate > 1):
            raise ValueError(
                f"segments={self.segments} needs warm_start=False and accumulate=1: a sample stays "
                "in the batch with its state"
            )
        if self.final_tolerance is not None and self.tolerance is None:
            raise ValueError("final_tolerance needs a tolerance for the first epoch: set tolerance")
        ends = (0, *self.continued_at, self.epochs)
        if any(end >= following for end, following in pairwise(ends)):
            raise ValueError(
                f"continued_at must be ascending numbers from 1 to {self.epochs - 1}, below the "
                f"number of epochs, got {self.continued_at}"
            )
        if self.steps is not None and self.continued_at:
            raise ValueError("a run with `steps` cannot be given more epochs: remove steps")
        if self.schedule == "step" and not self.milestones:
            raise ValueError(
                "schedule='step' needs milestones, the epochs at which the learning rate falls"
            )

    def steps_in_all(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the training.

        Args:
            steps_per_epoch: Number of optimizer steps per epoch.

        Raises:
            ValueError: If `steps` does not end in the last epoch.
        """
        total = self.epochs * steps_per_epoch
        if self.steps is None:
            return total
        if not total - steps_per_epoch < self.steps <= total:
            last = -(-self.steps // steps_per_epoch)
            raise ValueError(
                f"steps must end in the last epoch, but {self.steps} steps of {steps_per_epoch} "
                f"per epoch end in epoch {last} of {self.epochs}: set epochs to {last}"
            )
        return self.steps

    def tolerance_in(self, epoch: int) -> float | None:
        """Return the tolerance of the solver in an epoch.

        Args:
            epoch: Number of the epoch; the first is 1.
        """
        planned = (*self.continued_at, self.epochs)[0]
        if self.tolerance is None or self.final_tolerance is None or self.epochs == 1:
            return self.tolerance
        progress = min(1.0, (epoch - 1) / max(1, planned - 1))
        return float(self.tolerance ** (1 - progress) * self.final_tolerance**progress)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: those with at most one dimension have no weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Create the optimizer of a model; some parameters have no weight decay."""
    groups = parameter_groups(model, settings.weight_decay)
    rate, momentum = settings.learning_rate, settings.momentum
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=settings.nesterov)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=rate)


def learning_rate_share(settings: TrainingSettings, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate at a step, the first being 0, as a share of the peak."""
    epoch = step // steps_per_epoch
    ends = (*settings.continued_at, settings.epochs)
    earlier = [end for end in settings.continued_at if end <= epoch]
    start, peak = round(settings.warmup_epochs * steps_per_epoch), 1.0
    if earlier:
        start, peak = earlier[-1] * steps_per_epoch, settings.decay
    elif step < start:
        return (step + 1) / (start + 1)
    steps = settings.steps or ends[len(earlier)] * steps_per_epoch
    progress = min(1.0, (step - start) / max(1, steps - start))
    if settings.schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if settings.schedule == "polynomial":
        return float(peak * (1 - progress) ** settings.power)
    if settings.schedule == "step":
        return float(settings.decay ** sum(epoch >= milestone for milestone in settings.milestones))
    return 1.0
