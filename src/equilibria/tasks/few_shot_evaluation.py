"""How few-shot learners do: the accuracy over queries, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.tasks.base import TrainingStep
from equilibria.tasks.episodes import EpisodeBatch
from equilibria.tasks.solve_statistics import SolveStatistics

NORMAL_QUANTILE = 1.959964
"""Of a 95 % interval."""

Predict = Callable[[nn.Module, EpisodeBatch], Tensor]
"""From a model and episodes to the logits of the queries, shape (B, queries, ways)."""


@dataclass(frozen=True)
class FewShotEvaluation:
    """The mean accuracy over episodes, each learned from its own start."""

    loss: float
    """Mean cross-entropy of a query."""
    samples: int
    """The queries of all episodes."""
    moments: Tensor
    """How many episodes, and the sums of their accuracies and of the squares of these."""
    solves: SolveStatistics

    @property
    def episodes(self) -> int:
        return int(self.moments[0])

    @property
    def accuracy(self) -> float:
        """Of the queries; all episodes have as many."""
        return float(self.moments[1] / self.moments[0])

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % interval of `accuracy` over episodes; None for one alone."""
        count, total, squares = self.moments.tolist()
        if count < 2:
            return None
        variance = max(squares - total**2 / count, 0.0) / (count - 1)
        return NORMAL_QUANTILE * math.sqrt(variance / count)

    @property
    def score(self) -> float:
        """The accuracy."""
        return self.accuracy

    @property
    def figures(self) -> dict[str, float | None]:
        return {
            "accuracy": self.accuracy,
            "interval": self.interval,
            "episodes": float(self.episodes),
        }

    def with_solves(self, solves: SolveStatistics) -> FewShotEvaluation:
        return replace(self, solves=solves)

    def pooled(self, total: Callable[[Tensor], Tensor]) -> FewShotEvaluation:
        """Loss and accuracies over all processes; the solves stay those of this one."""
        own = torch.tensor([self.loss * self.samples, self.samples], dtype=torch.float64)
        summed, samples = total(own).tolist()
        return replace(
            self, loss=summed / samples, samples=int(samples), moments=total(self.moments)
        )


def evaluate_episodes(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], predict: Predict
) -> FewShotEvaluation:
    """Learn every episode on its own, by `predict`, and ask its queries."""
    was_training = model.training
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    solves = SolveStatistics()
    moments = torch.zeros(3, dtype=torch.float64)
    loss, samples = 0.0, 0
    model.eval()
    try:
        for inputs, targets in batches:
            episodes = EpisodeBatch.of(inputs.to(device), targets.to(device))
            logits = predict(model, episodes).detach().float()
            solves.observe(model)
            right = (logits.argmax(dim=2) == episodes.query_labels).double().mean(dim=1).cpu()
            moments += torch.stack((torch.ones_like(right), right, right.square())).sum(dim=1)
            loss += float(query_loss(logits, episodes)) * episodes.query_labels.numel()
            samples += episodes.query_labels.numel()
    finally:
        model.train(was_training)
    if not samples:
        raise ValueError("there is nothing to evaluate: the batches hold no episode")
    return FewShotEvaluation(loss=loss / samples, samples=samples, moments=moments, solves=solves)


def query_loss(logits: Tensor, episodes: EpisodeBatch) -> Tensor:
    """The mean cross-entropy over the queries of all episodes."""
    return F.cross_entropy(logits.flatten(0, 1), episodes.query_labels.flatten())


def training_step_of(loss: Tensor, logits: Tensor, episodes: EpisodeBatch) -> TrainingStep:
    """A training step whose samples are the queries."""
    correct = (logits.detach().argmax(dim=2) == episodes.query_labels).sum()
    count = torch.full_like(correct, episodes.query_labels.numel())
    return TrainingStep(loss=loss, samples=count, correct=correct)
