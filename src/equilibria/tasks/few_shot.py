"""Few-shot learning: episodes, and adaptation to them by input optimization.

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021,
Appendix B.1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.inputs import InputResult, SearchSettings, get_engine, optimal_input, optimize_input
from equilibria.inputs.outer import Outer
from equilibria.models.base import predicted_classes
from equilibria.models.few_shot import FewShotClassifier
from equilibria.registry import check_values
from equilibria.tasks.base import Task
from equilibria.tasks.evaluation import Outcome


@dataclass(frozen=True)
class EpisodeBatch:
    """A batch of B episodes.

    Attributes:
        support: Support images, shape (B, ways · shots, C, H, W).
        support_labels: Labels of the support, shape (B, ways · shots).
        query: Query images, shape (B, queries, C, H, W).
        query_labels: Labels of the queries, shape (B, queries).
        ways: Number of classes of an episode.
        shots: Number of support images per class.

    Examples:
        >>> images, labels = torch.rand(2, 6, 1, 8, 8), torch.tensor([[0, 1, 0, 0, 1, 1]] * 2)
        >>> from equilibria.tasks.few_shot import EpisodeBatch
        >>> batch = EpisodeBatch.of(images, labels)
        >>> batch.ways, batch.shots, batch.query.shape
        (2, 1, torch.Size([2, 4, 1, 8, 8]))
    """

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor
    ways: int
    shots: int

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> EpisodeBatch:
        """Split the samples of episodes from a data set (`Episodes`) into support and queries.

        Args:
            inputs: Images, shape (B, samples, C, H, W).
            targets: Labels, shape (B, samples). Those of the support come first: 0 … 0 1 … 1 and so
                on, each `shots` times. The labels of the queries begin with 0.
        """
        if inputs.dim() != 5 or targets.shape != inputs.shape[:2] or not len(targets):
            raise ValueError(
                "few-shot tasks need images of shape (episodes, samples, channels, height, width) "
                f"and labels of shape (episodes, samples), got {tuple(inputs.shape)} and "
                f"{tuple(targets.shape)}; use a data set of episodes, such as omniglot-episodes"
            )
        ways = int(targets.max()) + 1
        shots = int((targets[0] != 0).int().argmax())
        size = ways * shots
        expected = torch.arange(ways, device=targets.device).repeat_interleave(shots)
        if shots < 1 or size >= targets.shape[1] or not bool((targets[:, :size] == expected).all()):
            raise ValueError(
                "the labels of an episode must begin with those of the support, 0 … 0 1 … 1 and so "
                "on, once per shot, followed by those of the queries, got labels that begin with "
                f"{targets[0, : max(size, 1) + 1].tolist()}"
            )
        return cls(
            support=inputs[:, :size],
            support_labels=targets[:, :size],
            query=inputs[:, size:],
            query_labels=targets[:, size:],
            ways=ways,
            shots=shots,
        )

    def __len__(self) -> int:
        return len(self.support)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield support images and labels, query images and labels of each episode."""
        parts = (self.support, self.support_labels, self.query, self.query_labels)
        return zip(*parts, strict=True)

    def groups(self, part: Tensor) -> Tensor:
        """Return the index of the episode of each image of a part, shape (B · images,)."""
        count, size = part.shape[:2]
        return torch.arange(count, device=part.device).repeat_interleave(size)

    def require_ways(self, classes: int) -> None:
        """Raise `ValueError` if the number of classes of a model is not that of the episodes."""
        if classes != self.ways:
            raise ValueError(
                f"the model has {classes} classes, but the episodes have {self.ways} ways: create "
                f"it with num_classes={self.ways}"
            )


class EpisodicTask(Task):
    """Base class of tasks that learn each episode separately and count its queries."""

    unit: ClassVar[str] = "episode"

    @abstractmethod
    def predict(self, model: nn.Module, episodes: EpisodeBatch) -> Tensor:
        """Return the logits of the queries in an evaluation, shape (B, queries, ways).

        Args:
            model: Model in evaluation mode.
            episodes: B episodes.
        """

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        return answers(self.predict(model, episodes).float(), episodes)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        """Return the accuracy and half the width of its 95 % interval (None for one episode)."""
        shares = (outcome.values["correct"] / outcome.values["weight"]).double()
        count, quantile = len(shares), NormalDist().inv_cdf(0.975)
        width = quantile * float(shares.std()) / math.sqrt(count) if count > 1 else None
        return {"accuracy": outcome.accuracy, "interval": width, "episodes": float(count)}


def answers(logits: Tensor, episodes: EpisodeBatch) -> Outcome:
    """Return the losses of the queries of each episode, for logits (B, queries, ways)."""
    labels = episodes.query_labels
    episodes.require_ways(logits.shape[2])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    predictions = predicted_classes(logits.movedim(2, 1))
    return Outcome(
        {
            "loss": losses.view_as(labels).sum(dim=1),
            "correct": (predictions == labels).sum(dim=1),
            "unanswered": (predictions < 0).sum(dim=1),
            "weight": torch.full_like(labels[:, 0], labels.shape[1]),
        }
    )


@dataclass(frozen=True)
class FewShot(EpisodicTask):
    """Few-shot learning by JIIO: the loss of the queries at an optimal task vector (Eq. 29).

    The inner problem is to minimize Σ cross-entropy(support | x) + ridge/2 ‖x‖² over one x per
    episode, from x = 0, together with the equilibria of its images (`optimize_input`).

    Args:
        ridge: Weight of ‖x‖²/2, which makes the optimum unique and well conditioned.
        outer: "detached" differentiates the loss of the queries at a fixed x*, as the paper does.
            "implicit" also differentiates x* (`optimal_input`); it needs a ridge, and applies only
            to episodes whose inner problem converged.
        engine: Engine of `optimize_input`, a name or a mapping with a name and options.
        iterations: Largest number of steps of x in training.
        evaluation_iterations: Largest number of steps in evaluations; None for `iterations`.
        sweeps: As in `SearchSettings`.
        step_size: As in `SearchSettings`.
        tolerance: As in `SearchSettings`.
        check_tolerance: Tolerance of the equilibria at the result of the inner problem.
        outer_iterations: Limit of the iterations of the linear solve of "implicit".

    Examples:
        >>> from equilibria.models.few_shot import few_shot_opteq
        >>> model = few_shot_opteq(num_classes=2, in_channels=1, channels=4, task_size=4)
        >>> images, labels = torch.rand(1, 4, 1, 16, 16), torch.tensor([[0, 1, 0, 1]])
        >>> task = eq.tasks.FewShot(iterations=3)
        >>> task.training_step(model, images, labels).loss.isfinite()
        tensor(True)
    """

    ridge: float = 1e-2
    outer: Outer = "detached"
    engine: str | Mapping[str, Any] = "anderson"
    iterations: int = 20
    evaluation_iterations: int | None = None
    sweeps: int = 2
    step_size: float | None = None
    tolerance: float = 1e-3
    check_tolerance: float = 1e-3
    outer_iterations: int = 40

    def __post_init__(self) -> None:
        check_values(
            self,
            at_least_one=("iterations", "sweeps", "outer_iterations", "evaluation_iterations"),
            positive=("step_size",),
            not_negative=("ridge",),
            tolerances=("tolerance", "check_tolerance"),
            one_of={"outer": get_args(Outer)},
        )
        if self.outer == "implicit" and not self.ridge:
            raise ValueError(
                "outer='implicit' needs a positive ridge, got 0: the optimum may be flat otherwise"
            )
        get_engine(self.engine)

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        result = self.adapt(model, episodes, attached=self.outer == "implicit")
        result.report_visited()
        return answers(_query_logits(model, episodes, self._outer_tasks(result)), episodes)

    def _outer_tasks(self, result: InputResult) -> Tensor:
        """Return x*, differentiable where `outer` requires it and the inner problem converged.

        Away from an optimum the linear system can be indefinite, and its solution arbitrarily
        large.
        """
        if self.outer == "detached":
            return result.x
        attached = optimal_input(
            result, "implicit", max_iterations=self.outer_iterations, strict=False
        )
        return torch.where(result.converged[:, None], attached, result.x)

    def predict(self, model: nn.Module, episodes: EpisodeBatch) -> Tensor:
        iterations = self.evaluation_iterations or self.iterations
        return _query_logits(model, episodes, self.adapt(model, episodes, iterations=iterations).x)

    def adapt(
        self,
        model: nn.Module,
        episodes: EpisodeBatch,
        *,
        iterations: int | None = None,
        attached: bool = False,
    ) -> InputResult:
        """Optimize the task vectors of the episodes on their support.

        Args:
            model: Few-shot classifier.
            episodes: B episodes.
            iterations: Largest number of steps; by default that of training.
            attached: Keep the graph of the support's features for `optimal_input`. It is also kept
                if `InputResult.report_visited` needs it.

        Returns:
            The task vectors as `x`, shape (B, task_size).

        Raises:
            TypeError: If the model has no task vector as input.
        """
        if not isinstance(model, FewShotClassifier):
            raise TypeError(
                f"{type(model).__name__} has no task vector as input: use a model such as "
                "few-shot-opteq or few-shot-mdeq, or a task that adapts weights (maml, reptile, "
                "imaml)"
            )
        labels = episodes.support_labels.flatten()

        def loss(logits: Tensor) -> Tensor:
            episodes.require_ways(logits.shape[1])
            return F.cross_entropy(logits, labels, reduction="none")

        with torch.set_grad_enabled(attached or model.layer.is_heard):
            of_support = model.for_images(episodes.support)
        return optimize_input(
            of_support,
            loss,
            model.no_tasks(len(episodes), episodes.support),
            groups=episodes.groups(episodes.support),
            penalty=lambda x: 0.5 * self.ridge * x.square().sum(dim=1),
            engine=self.engine,
            iterations=iterations or self.iterations,
            settings=SearchSettings(
                sweeps=self.sweeps,
                step_size=self.step_size,
                tolerance=self.tolerance,
                check_tolerance=self.check_tolerance,
                polish=attached,
            ),
        )


def _query_logits(model: nn.Module, episodes: EpisodeBatch, tasks: Tensor) -> Tensor:
    """Return the logits of all queries with the task vector of their episode."""
    logits: Tensor = model(episodes.query, tasks[episodes.groups(episodes.query)])
    return logits.reshape(*episodes.query_labels.shape, -1)
