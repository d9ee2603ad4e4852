"""What a training loop asks of a task, and tasks by name."""

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
    """What is learned: what one training step is, and how a model is judged.

    A task of one's own gives the losses of a batch, sample by sample, and figures.

    Examples:
        >>> class SmallLogits(eq.tasks.Task):
        ...     score = "size"
        ...
        ...     def training_step(self, model, inputs, targets):
        ...         return eq.tasks.Outcome({"loss": model(inputs).square().sum(dim=1)})
        ...
        ...     def figures(self, found):
        ...         return {"size": -found.mean("loss")}
        >>> batches = [(torch.ones(2, 3), torch.zeros(2))]
        >>> SmallLogits().evaluate(torch.nn.Identity(), batches).figures
        {'size': -3.0}
    """

    score: ClassVar[str] = "accuracy"
    """The figure that the best of several models has most of."""
    names_classes: ClassVar[bool] = False
    """Whether models say classes, of images or of their pixels."""
    draws_pictures: ClassVar[bool] = False
    """Whether models give pictures back, whose values are in [0, 1] as those they get."""
    starts_at_zero: ClassVar[bool] = False
    """Whether it starts every equilibrium itself, so that a warm start has nothing to start."""
    unit: ClassVar[str] = "sample"
    """What is counted, for messages."""
    seed: int = 0
    """Of what is random in an evaluation."""

    @abstractmethod
    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        """The losses of a batch, in the graph."""

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """What is found on a batch of an evaluation: that of a training step, or more."""
        return self.training_step(model, inputs, targets)

    def figures(self, found: Outcome) -> dict[str, float | None]:
        """All measures by name, besides the loss, of all batches together."""
        return {"accuracy": found.accuracy}

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        batches: Iterable[tuple[Tensor, Tensor]],
        gather: Gather = lambda own: own,
    ) -> Evaluation:
        """Run `model`, in evaluation mode, over batches; what is random is the same every time.

        gather: of several processes that each have their share of the batches.
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
        found = join_outcomes(parts, gather)
        if found is None or not float(found.samples):
            raise ValueError(f"there is nothing to evaluate: the batches hold no {self.unit}")
        figures = self.figures(found)
        unanswered = {**found.values, **found.counts}.get("unanswered")
        if unanswered is not None and bool(unanswered.any()):
            figures["unanswered"] = float(unanswered.sum())
        return Evaluation(
            loss=float(found.loss),
            accuracy=found.accuracy,
            score=float(figures[self.score] or 0.0),
            samples=int(found.samples),
            correct=None if found.correct is None else int(found.correct),
            figures=figures,
            values=found.values,
            counts=found.counts,
            solves=SolveStatistics.of(solves, gather),
        )


_tasks: Registry[Task] = Registry("task")


register_task = _tasks.register
list_tasks = _tasks.names
create_task = _tasks.create
"""The task called by a name, with options."""
