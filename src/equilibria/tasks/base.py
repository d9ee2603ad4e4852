"""Base class of tasks, and the registry of tasks by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from equilibria.equilibrium import solving
from equilibria.registry import Registry
from equilibria.tasks.evaluation import (
    Evaluation,
    Gather,
    Outcome,
    Solved,
    SolveStatistics,
    join_outcomes,
    last_solves,
)


class Task(ABC):
    """A learning task: the loss of a training step, and the measures of an evaluation.

    A custom task implements `training_step`, which returns per-sample losses, and usually `figures`
    and `score`.

    Attributes:
        score: Name of the measure by which models are ranked, a key of `figures`; larger is better.
        names_classes: Whether models predict classes of images or pixels.
        draws_pictures: Whether models output pictures with pixels in [0, 1].
        starts_at_zero: Whether the task sets the start of every solve, so that warm starts of the
            training loop have no effect.
        any_size: Whether a model of this task takes images of any size, so that images are not
            scaled to the size of the training images.
        unit: Name of one counted item in messages.
        seed: Seed of the random numbers of an evaluation.

    Examples:
        >>> class SmallLogits(eq.tasks.Task):
        ...     score = "size"
        ...
        ...     def training_step(self, model, inputs, targets):
        ...         return eq.tasks.Outcome({"loss": model(inputs).square().sum(dim=1)})
        ...
        ...     def figures(self, outcome):
        ...         return {"size": -outcome.mean("loss")}
        >>> batches = [(torch.ones(2, 3), torch.zeros(2))]
        >>> SmallLogits().evaluate(torch.nn.Identity(), batches).figures
        {'size': -3.0}
    """

    score: ClassVar[str] = "accuracy"
    names_classes: ClassVar[bool] = False
    draws_pictures: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = False
    any_size: ClassVar[bool] = False
    unit: ClassVar[str] = "sample"
    seed: int = 0

    @abstractmethod
    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        """Return the losses of a batch, differentiable in the parameters.

        Args:
            model: Model in training mode.
            inputs: Inputs of the batch, shape (B, ...).
            targets: Targets of the batch, shape (B, ...).
        """

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Return the outcome of a batch in an evaluation; by default that of a training step.

        Args:
            model: Model in evaluation mode.
            inputs: Inputs of the batch, shape (B, ...).
            targets: Targets of the batch, shape (B, ...).
            generator: Source of random numbers.
        """
        return self.training_step(model, inputs, targets)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        """Return all measures of the model except the loss, by name.

        Args:
            outcome: Outcome of all batches.
        """
        return {"accuracy": outcome.accuracy}

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Tensor, Tensor]],
        gather: Gather = lambda local: local,
    ) -> Evaluation:
        """Evaluate a model. Random numbers are the same in every evaluation.

        Args:
            model: The model; it is put in evaluation mode for the duration of the call.
            batches: Pairs of inputs and targets.
            gather: Concatenates vectors of all processes, if each evaluates a part of the batches.

        Returns:
            Loss, score and other measures over all samples.

        Raises:
            ValueError: If the batches are empty.
        """
        was_training = model.training
        parameter = next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        generator = torch.Generator().manual_seed(self.seed)
        parts: list[Outcome] = []
        solves: list[Solved] = []
        model.eval()
        try:
            for inputs, targets in batches:
                with solving(model, record=True) as record:
                    outcome = self.evaluation_step(
                        model, inputs.to(device), targets.to(device), generator
                    )
                solves += last_solves(outcome, record.solutions)
                parts.append(outcome.detached())
        finally:
            model.train(was_training)
        joined = join_outcomes(parts, gather)
        if joined is None or not float(joined.samples):
            raise ValueError(
                f"batches must hold at least one {self.unit}, got none; check the data set and its "
                "limits"
            )
        figures = self.figures(joined)
        unanswered = {**joined.values, **joined.counts}.get("unanswered")
        if unanswered is not None and bool(unanswered.any()):
            figures["unanswered"] = float(unanswered.sum())
        return Evaluation(
            loss=float(joined.loss),
            accuracy=joined.accuracy,
            score=float(figures[self.score] or 0.0),
            samples=int(joined.samples),
            correct=None if joined.correct is None else int(joined.correct),
            figures=figures,
            values=joined.values,
            counts=joined.counts,
            solves=SolveStatistics.of(solves, gather),
        )


_tasks: Registry[Task] = Registry("task")


register_task = _tasks.register
list_tasks = _tasks.names
create_task = _tasks.create
"""Create a task by name, with options."""
