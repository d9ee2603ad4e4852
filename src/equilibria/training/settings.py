"""The numbers that a training run depends on, its optimizer and learning rate."""

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
"""How many a generator of torch knows, without the negative ones."""
Schedule = Literal["cosine", "step", "polynomial", "constant"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a model is trained; by default AdamW with a warm-up, then a cosine down to zero.

    schedule: what the learning rate does after `warmup_epochs` of linear growth. "step" multiplies
        it by `decay` at each of the epochs `milestones`; "polynomial" is (1 − progress)^`power`.
    continued_at: where the run was to end before it was given more epochs. Up to there all is as it
        was. A cosine or polynomial, which has come down to zero there, runs again over the epochs
        that follow, without a warm-up and from `decay` times the learning rate; the other schedules
        go on as they are, and so does the final tolerance.
    steps: of the optimizer, after which the last epoch ends early; None: all of its steps.
    accumulate: batches whose gradients are averaged for one step of the optimizer.
    clip_norm: the largest norm of the gradient; longer ones are scaled down to it.
    autocast: compute in bfloat16 where that is safe.
    tolerance, final_tolerance: of the solver in training, the second one in the last epoch, with
        the logarithm on a line between them. The tolerance of an implicit gradient follows it,
        unless it has one of its own. None: the model's own.
    evaluation_tolerance: of the solver in evaluation. None: the model's own.
    evaluation_batch_size: fewer where images are large.
    gradient: the gradient rule by name ("one_step", "implicit", …). None: the model's own.
    warm_start: start the solve of each sample at its equilibrium of the epoch before. Takes memory
        for the state of every sample, and gains little where augmentation moves the pixels.
    jacobian_weight: of the mean of ‖J‖²_F ÷ size in the loss, J being ∂T/∂y; 0 leaves it out.
        Estimated with `jacobian_vectors` random vectors at the equilibrium, or, for
        `jacobian_at`="iterate", at a random one of the first 12 iterates; where a step searches
        over inputs (JIIO), at a random one of that search, with the x it had there.
    non_finite: What happens to training samples with NaN or infinite values: "refuse" ends the
        training with an error that names them, "drop" leaves them out of their batch and warns.
    seed: of the order of samples and of augmentation. The model's initial weights come from torch's
        own generator: call `torch.manual_seed` before making the model.

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
    final_tolerance: float | None = None
    evaluation_tolerance: float | None = None
    evaluation_batch_size: int = 256
    gradient: str | None = None
    warm_start: bool = False
    jacobian_weight: float = 0.0
    jacobian_at: JacobianPlace = "equilibrium"
    jacobian_vectors: int = 1
    non_finite: NonFinite = "refuse"
    seed: int = 0
    continued_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = (
            *("epochs", "steps", "batch_size", "accumulate"),
            *("evaluation_batch_size", "jacobian_vectors"),
        )
        check_values(
            self,
            at_least_one=counts,
            positive=("learning_rate", "clip_norm", "decay", "power"),
            tolerances=("tolerance", "final_tolerance", "evaluation_tolerance"),
            not_negative=("weight_decay", "warmup_epochs", "jacobian_weight"),
            below_one=("momentum",),
            one_of={
                "optimizer": get_args(OptimizerName),
                "schedule": get_args(Schedule),
                "jacobian_at": get_args(JacobianPlace),
                "non_finite": get_args(NonFinite),
                "gradient": [None, *list_gradients()],
            },
        )
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must be from 0 to {SEEDS - 1}, not {self.seed}")
        if self.final_tolerance is not None and self.tolerance is None:
            raise ValueError("final_tolerance needs a tolerance to start from")
        ends = (0, *self.continued_at, self.epochs)
        if any(end >= following for end, following in pairwise(ends)):
            raise ValueError(
                f"continued_at must hold growing numbers from 1 to below {self.epochs}, the number "
                f"of epochs, not {self.continued_at}"
            )
        if self.steps is not None and self.continued_at:
            raise ValueError("a run that ends with a step cannot have more epochs: leave out steps")
        if self.schedule == "step" and not self.milestones:
            raise ValueError("schedule='step' needs milestones, the epochs at which it steps")

    def steps_in_all(self, steps_per_epoch: int) -> int:
        """Of the optimizer; an error where `steps` does not lie in the last epoch."""
        whole = self.epochs * steps_per_epoch
        if self.steps is None:
            return whole
        if not whole - steps_per_epoch < self.steps <= whole:
            raise ValueError(
                f"{self.steps} steps of {steps_per_epoch} an epoch end in epoch "
                f"{-(-self.steps // steps_per_epoch)}: set epochs to that, not to {self.epochs}"
            )
        return self.steps

    def tolerance_in(self, epoch: int) -> float | None:
        """The solver's tolerance in an epoch, the first being 1."""
        planned = (*self.continued_at, self.epochs)[0]
        if self.tolerance is None or self.final_tolerance is None or self.epochs == 1:
            return self.tolerance
        progress = min(1.0, (epoch - 1) / max(1, planned - 1))
        return float(self.tolerance ** (1 - progress) * self.final_tolerance**progress)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights decay; biases, scales and other parameters of at most one dimension do not."""
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
    """The share of the full learning rate at a step, the first being 0."""
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
