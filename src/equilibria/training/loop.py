"""The training loop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.context import State
from equilibria.context.caller import warn_caller
from equilibria.context.state import state_tensors
from equilibria.data import Augmentation, Batches, Source
from equilibria.data.workers import usual_workers
from equilibria.equilibrium import EquilibriumLayer, jacobian_penalty, solving
from equilibria.equilibrium.jacobian import random_iterate
from equilibria.equilibrium.solving import Record
from equilibria.models import NonFiniteInputError, finite_samples
from equilibria.models.non_finite import listed
from equilibria.tasks import Evaluation, Outcome, Task
from equilibria.tasks.evaluation import Solved, SolveStatistics, last_solves
from equilibria.training.averaging import WeightAverage
from equilibria.training.carried import CarriedBatches
from equilibria.training.checkpoints import Checkpoints, TrainingState
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.processes import ALONE, Processes, denormals_as_zero
from equilibria.training.settings import TrainingSettings, build_optimizer, learning_rate_share

FINITE_CHECK_INTERVAL = 20
"""Number of steps between checks for a finite loss on an accelerator."""
MAX_PENALIZED_ITERATE = 12
"""Largest number of iterations of a random iterate at which the Jacobian is penalized."""

Batch = tuple[Tensor, Tensor, Tensor]


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""


@denormals_as_zero()
def fit(
    model: nn.Module,
    task: Task,
    data: Source,
    settings: TrainingSettings,
    *,
    augmentation: Augmentation | None = None,
    validation: Source | None = None,
    device: torch.device | str = "cpu",
    checkpoints: Checkpoints | None = None,
    processes: Processes = ALONE,
    workers: int | None = None,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> list[EpochMetrics]:
    """Train a model in place.

    During the training, denormal numbers are flushed to zero (`denormals_as_zero`).

    Args:
        model: Model to train.
        task: Task that computes the loss.
        data: Training samples.
        settings: Settings of the training.
        augmentation: Augmentation of the training images.
        validation: Samples that are evaluated after every epoch.
        device: Device to train on.
        checkpoints: Folder for a checkpoint after every epoch. An interrupted run continues from
            the last one; on a CPU, the results are those of an uninterrupted run, bitwise.
        processes: Processes that train together. Each takes its share of every batch, and the first
            one calls the callbacks.
        workers: Number of processes that read ahead; by default it depends on the data and the
            number of cores.
        on_epoch: Callback with the metrics of each new epoch; an exception it raises ends the
            training.
        on_step: Callback after each step; an exception it raises ends the training.

    Returns:
        The metrics of all epochs, including those before an interruption.

    Raises:
        NonFiniteError: If the loss, the gradient or a weight becomes NaN or infinite.
        NonFiniteInputError: If a training sample has NaN or infinite values and
            `settings.non_finite` is "refuse".

    Examples:
        >>> model, task = eq.create_model("opteq-small", in_channels=1), eq.tasks.Classification()
        >>> data = eq.data.Split(torch.rand(8, 1, 8, 8), torch.arange(8))
        >>> settings = eq.training.TrainingSettings(epochs=1, batch_size=4)
        >>> eq.training.fit(model, task, data, settings)[0].epoch
        1
    """
    if len(data) == 0:
        raise ValueError("there are no training samples: pass data with at least one")
    if validation is not None and len(validation) < processes.count:
        raise ValueError(
            f"there are {len(validation)} validation samples, but every one of the "
            f"{processes.count} processes needs one: hold out more, or start fewer processes"
        )
    if settings.batch_size < processes.count:
        raise ValueError(
            f"batch_size must be at least {processes.count}, the number of processes, got "
            f"{settings.batch_size}: raise it, or start fewer processes"
        )
    training = _Training(
        model=model.to(device),
        task=task,
        data=data,
        settings=settings,
        augmentation=augmentation,
        validation=validation,
        device=torch.device(device),
        checkpoints=checkpoints,
        processes=processes,
        workers=workers,
        on_step=on_step if processes.leads else None,
    )
    with processes.joined(model):
        training.resume()
        for epoch in range(len(training.history) + 1, settings.epochs + 1):
            metrics = training.run_epoch(epoch)
            if on_epoch is not None and processes.leads:
                on_epoch(metrics)
    training.average.store(training.average.values)
    return training.history


@dataclass
class _Training:
    """State of a running training."""

    model: nn.Module
    task: Task
    data: Source
    settings: TrainingSettings
    augmentation: Augmentation | None
    validation: Source | None
    device: torch.device
    checkpoints: Checkpoints | None
    processes: Processes
    workers: int | None
    on_step: Callable[[StepProgress], None] | None
    step: int = 0
    history: list[EpochMetrics] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.model, self.settings)
        layers = [m for m in self.model.modules() if isinstance(m, EquilibriumLayer)]
        warm = layers if self.settings.warm_start else []
        self.starts = {layer: _Starts(len(self.data)) for layer in warm}
        self.average = WeightAverage(self.model, self.settings.averaging)
        self.carried: CarriedBatches | None = None
        if self.settings.segments > 1:
            self.carried = CarriedBatches(self.settings.segments, layers)
        # The order of the samples is the same in all processes.
        self.order = torch.Generator()
        self.batches = Batches(
            self.data,
            self.settings.batch_size,
            shuffle=self.order,
            part=(self.processes.rank, self.processes.count),
            **self._reading(self.data, self.settings.batch_size),
        )
        self.steps_per_epoch = -(-len(self.batches) // self.settings.accumulate)
        self.steps = self.settings.steps_in_all(self.steps_per_epoch)
        self.held_out: Batches | None = None
        if self.validation is not None:
            own, size = self.processes.part_of(self.validation), self.settings.evaluation_batch_size
            self.held_out = Batches(own, size, **self._reading(own, size))

    def _reading(self, source: Source, size: int) -> dict[str, Any]:
        """Return the options of `Batches` for batches of `size` samples."""
        workers = self.workers
        if workers is None:
            workers = usual_workers(source, size, self.processes.count)
        return {"workers": workers, "pinned": self.device.type == "cuda"}

    def resume(self) -> None:
        """Restore the last checkpoint, if there is one."""
        if self.checkpoints is not None:
            self.checkpoints.load(self._restore)
        leading = torch.tensor(self.step)
        self.processes.share([leading])
        if int(leading) != self.step:
            raise RuntimeError(
                f"process {self.processes.rank} would resume at step {self.step}, but the first "
                f"one at step {int(leading)}: give all the same folder of checkpoints"
            )

    def _restore(self, weights: dict[str, Tensor], state: TrainingState) -> None:
        """Restore a checkpoint; change nothing if it does not fit."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(weights)
        optimizer = build_optimizer(model, self.settings)
        optimizer.load_state_dict(state.optimizer)
        history = [EpochMetrics(**metrics) for metrics in state.history]
        pairs = list(zip(self.starts.values(), state.starts, strict=True))
        self.model.load_state_dict(weights)
        self.average = WeightAverage(self.model, self.settings.averaging)
        if state.trained:
            self.average.store(state.trained)
        self.optimizer.load_state_dict(state.optimizer)
        for starts, (known, *tensors) in pairs:
            starts.known, starts.tensors = known, tensors
        self.history, self.step = history, state.step

    def run_epoch(self, epoch: int) -> EpochMetrics:
        started, cpu_started = time.perf_counter(), time.process_time()
        tolerance, rule = self.settings.tolerance_in(epoch), self.settings.gradient
        before = self.step
        forked = [self.device] if self.device.type == "cuda" else []
        # The global generators, from which dropout draws, are restored afterwards.
        with (
            torch.random.fork_rng(devices=forked),
            solving(
                self.model,
                tolerance=tolerance,
                gradient=rule,
                max_iterations=self.settings.max_iterations,
            ),
        ):
            torch.manual_seed(self._seed(epoch, self.processes.rank, 2))
            totals = self._train_epoch(epoch)
        if not totals.sums[0]:
            raise ValueError("no training image can be read: check that their disk is available")
        # Statistics of unsynchronized layers differ: evaluate those of the first process, which
        # the checkpoint has.
        self.processes.share(self.model.buffers())
        with self.average.applied():
            held_out = self._validate()
        samples, loss, correct = totals.sums.tolist()
        solves = SolveStatistics.of(totals.solves, self.processes.gathered)
        cpu_seconds = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
        metrics = EpochMetrics(
            epoch=epoch,
            loss=loss / samples,
            accuracy=correct / samples if totals.counts_correct else None,
            share_converged=solves.share_converged,
            mean_iterations=solves.mean_iterations,
            gradient_norm=float(totals.gradient) / (self.step - before),
            learning_rate=totals.learning_rate,
            validation_accuracy=None if held_out is None else held_out.accuracy,
            validation_loss=None if held_out is None else held_out.loss,
            validation_score=None if held_out is None else held_out.score,
            seconds=time.perf_counter() - started,
            cpu_seconds=float(self.processes.total(cpu_seconds)),
        )
        self._record(metrics)
        return metrics

    def _train_epoch(self, epoch: int) -> _Totals:
        self.model.train()
        generator = torch.Generator().manual_seed(self._seed(epoch, self.processes.rank, 1))
        self.order.manual_seed(self._seed(epoch, 0, 0))
        totals = _Totals(self.device)
        batch = self._prepared(generator, totals)
        if self.carried is not None:
            batch = self.carried.batches(batch, len(self.batches))
        while self.step < self.steps and (group := list(islice(batch, self.settings.accumulate))):
            share = learning_rate_share(self.settings, self.step, self.steps_per_epoch)
            totals.learning_rate = self.settings.learning_rate * share
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = totals.learning_rate
            self.step += 1
            self.optimizer.zero_grad(set_to_none=True)
            loss = torch.stack(
                [self._backward(part, 1 / len(group), generator, totals) for part in group]
            ).mean()
            self.processes.sum_gradients(self.model.parameters())
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
            self._require_finite(norm, "gradient")
            self.optimizer.step()
            self.average.update(self.step)
            totals.gradient += norm.detach()
            if self.on_step is not None:
                self.on_step(StepProgress(epoch=epoch, step=self.step, steps=self.steps, loss=loss))
        if totals.dropped and epoch == 1:
            warn_caller(
                f"skipped {len(totals.dropped)} training samples with NaN or infinite values: "
                f"{listed(totals.dropped)}"
            )
        self._require_finite(totals.sums[1], "loss", always=True)
        # No loss has been computed with the weights after the last step.
        largest = [p.detach().abs().amax().double() for p in self.model.parameters() if p.numel()]
        self._require_finite(torch.stack(largest).max(), "largest weight", always=True)
        return totals

    def _backward(
        self, batch: Batch, share: float, generator: torch.Generator, totals: _Totals
    ) -> Tensor:
        """Add the gradient of a batch, times `share`; return its loss over all processes."""
        indices, images, targets = batch
        with (
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.settings.autocast),
            self._recording(indices) as record,
        ):
            outcome = self._forward(images, targets)
            jacobian = self._jacobian_term(record, generator)
        if self.carried is not None:
            self.carried.keep(record.equilibria, outcome)
        totals.solves += last_solves(outcome, record.solutions)
        samples, loss = outcome.samples, outcome.loss
        totals.counts_correct = totals.counts_correct and outcome.correct is not None
        correct = torch.zeros_like(samples) if outcome.correct is None else outcome.correct
        local = torch.stack((samples, loss.detach() * samples, correct)).double()
        summed = self.processes.total(local)
        totals.sums = totals.sums + summed
        self._require_finite(summed[1], "loss")
        loss = loss if jacobian is None else loss + jacobian
        weight = share * (local[0] / summed[0].clamp_min(1)).to(loss.dtype)
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return summed[1] / summed[0].clamp_min(1)

    def _prepared(self, generator: torch.Generator, totals: _Totals) -> Iterator[Batch]:
        """Yield the batches of an epoch on the device, augmented and finite."""
        for indices, images, targets in self.batches.indexed():
            images = images.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            if self.augmentation is not None and len(images):
                images, targets = self.augmentation(images, targets, generator)
            yield self._finite(indices, images, targets, totals)

    def _finite(self, indices: Tensor, images: Tensor, targets: Tensor, totals: _Totals) -> Batch:
        """Return the samples of a batch with finite images; raise or drop the others."""
        finite = finite_samples(images) if len(images) else torch.ones(0, dtype=torch.bool)
        if bool(finite.all()):
            return indices, images, targets
        non_finite = indices[~finite.to(indices.device)].tolist()
        if self.settings.non_finite == "refuse":
            raise NonFiniteInputError(
                f"the training samples {listed(non_finite)} have NaN or infinite values: repair or "
                "remove them, or skip them with training.non_finite=drop"
            )
        totals.dropped += non_finite
        return indices[finite.to(indices.device)], images[finite], targets[finite]

    def _forward(self, images: Tensor, targets: Tensor) -> Outcome:
        if len(images):
            return self.task.training_step(self.model, images, targets)
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            # The other processes wait for this one in the norms, even if it has no samples.
            loss = self.model(images).sum()
        else:
            first = next(p for p in self.model.parameters() if p.requires_grad)
            loss = first.sum()
        zero = torch.zeros(1, dtype=torch.int64, device=loss.device)
        return Outcome({"loss": loss[None] * 0, "correct": zero, "weight": zero})

    @contextmanager
    def _recording(self, indices: Tensor) -> Iterator[Record]:
        """Record the solves of the forward pass of these samples, and update their warm starts."""
        starts = {layer: starts.of(indices) for layer, starts in self.starts.items()}
        if self.carried is not None:
            starts = self.carried.states
        needs_equilibria = bool(starts) or self.settings.jacobian_weight > 0
        with solving(
            self.model,
            start=starts or None,
            record="equilibria" if needs_equilibria else True,
        ) as record:
            yield record
        for equilibrium in record.equilibria if self.starts else ():
            self.starts[equilibrium.layer].keep(indices, equilibrium.state)

    def _jacobian_term(self, record: Record, generator: torch.Generator) -> Tensor | None:
        """Return the Jacobian penalty of a batch; None if its weight is 0."""
        settings = self.settings
        penalties = []
        at_iterate = settings.jacobian_at == "iterate"
        # The iterates of a search over inputs are pairs (x, z) (JIIO Eq. 27).
        joint = at_iterate and bool(record.visited)
        points = record.visited if joint else record.equilibria
        for point in points if settings.jacobian_weight else ():
            if not len(point.inputs[0]):
                continue
            state, context = point.state, point.context
            if at_iterate and not joint:
                state, context = random_iterate(
                    point.layer.cell,
                    *point.inputs,
                    max_iterations=MAX_PENALIZED_ITERATE,
                    generator=generator,
                )
            penalty = jacobian_penalty(
                point.layer.cell,
                state,
                context,
                vectors=settings.jacobian_vectors,
                generator=generator,
            )
            penalties.append(penalty.mean())
        return settings.jacobian_weight * torch.stack(penalties).sum() if penalties else None

    def _require_finite(self, value: Tensor, name: str, *, always: bool = False) -> None:
        # Reading a value synchronizes with the device. A late check loses nothing, because the
        # checkpoints have finite weights.
        if not (always or self.device.type == "cpu" or self.step % FINITE_CHECK_INTERVAL == 0):
            return
        if not math.isfinite(float(value)):
            raise NonFiniteError(
                f"the {name} is {float(value)} in epoch {len(self.history) + 1} (step {self.step}):"
                " lower the learning rate or clip_norm, check the images for NaN, or bound the "
                "norm of W (norm='bound')"
            )

    def _validate(self) -> Evaluation | None:
        if self.held_out is None:
            return None
        tolerance, rule = self.settings.evaluation_tolerance, self.settings.gradient
        with solving(self.model, tolerance=tolerance, gradient=rule):
            return self.task.evaluate(self.model, self.held_out, self.processes.gathered)

    def _seed(self, epoch: int, rank: int, purpose: int) -> int:
        """Return a seed for one run, epoch, process and purpose.

        The random numbers of an epoch do not depend on earlier epochs, so that a checkpoint does
        not need the state of a generator.
        """
        mixed = np.random.SeedSequence((self.settings.seed, epoch, rank, purpose))
        return int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _record(self, metrics: EpochMetrics) -> None:
        """Record the metrics of an epoch; write the best weights and then a checkpoint.

        If the process is killed between the two, the epoch runs again and gives the same weights.
        """
        earlier = [m.validation_score for m in self.history if m.validation_score is not None]
        score = metrics.validation_score
        self.history.append(metrics)
        if self.checkpoints is None or not self.processes.leads:
            return
        with self.average.applied() as trained:
            if score is not None and all(score > other for other in earlier):
                self.checkpoints.save_best(self.model, metrics.epoch, score)
            state = TrainingState(
                optimizer=self.optimizer.state_dict(),
                step=self.step,
                history=[asdict(m) for m in self.history],
                starts=[[starts.known, *starts.tensors] for starts in self.starts.values()],
                trained=trained,
            )
            self.checkpoints.save(metrics.epoch, self.model, state)


class _Totals:
    """Sums over the batches of an epoch, on the device to avoid synchronization."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Number of samples, sum of losses, number of correct samples, over all processes."""
        self.gradient = torch.zeros((), device=device)
        self.counts_correct = True
        self.learning_rate = 0.0
        self.solves: list[Solved] = []
        self.dropped: list[int] = []
        """Indices of samples that were dropped because they are not finite."""


class _Starts:
    """Last equilibrium of every sample in one layer."""

    def __init__(self, samples: int) -> None:
        self.known = torch.zeros(samples, dtype=torch.bool)
        self.tensors: list[Tensor] = []

    def of(self, indices: Tensor) -> State | None:
        """Return the states of samples; None if all are new, because the cell's start is better."""
        if not self.known[indices].any():
            return None
        return tuple(tensor[indices] for tensor in self.tensors)

    def keep(self, indices: Tensor, state: State) -> None:
        new = [tensor.detach().cpu() for tensor in state_tensors(state)]
        if len(new[0]) != len(indices):
            raise ValueError(
                f"training.warm_start needs one equilibrium per sample, but the model solves for "
                f"{len(new[0])} with {len(indices)} samples, as it does for episodes: set it to "
                "false"
            )
        if not self.tensors:
            self.tensors = [tensor.new_zeros(len(self.known), *tensor.shape[1:]) for tensor in new]
        for kept, tensor in zip(self.tensors, new, strict=True):
            kept[indices] = tensor
        self.known[indices] = True
