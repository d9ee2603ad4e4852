"""Few-shot learning: episodes, and learning them by input optimization.

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
    """B episodes: `support` images with their labels, then `query` images with theirs.

    Examples:
        >>> images, labels = torch.rand(2, 6, 1, 8, 8), torch.tensor([[0, 1, 0, 0, 1, 1]] * 2)
        >>> from equilibria.tasks.few_shot import EpisodeBatch
        >>> batch = EpisodeBatch.of(images, labels)
        >>> batch.ways, batch.shots, batch.query.shape
        (2, 1, torch.Size([2, 4, 1, 8, 8]))
    """

    support: Tensor
    """(B, ways · shots, C, H, W)"""
    support_labels: Tensor
    """(B, ways · shots)"""
    query: Tensor
    query_labels: Tensor
    ways: int
    shots: int

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> EpisodeBatch:
        """Episodes as a data set of episodes gives them (`Episodes`).

        The labels say how many shots there are: those of the support are 0 … 0 1 … 1 and so on,
        `shots` times each, and those of the queries begin with 0 again.
        """
        if inputs.dim() != 5 or targets.shape != inputs.shape[:2] or not len(targets):
            raise ValueError(
                "expected episodes, images (episodes, samples, channels, height, width) and labels "
                f"(episodes, samples), not {tuple(inputs.shape)} and {tuple(targets.shape)}: "
                "few-shot tasks need a data set of episodes, such as omniglot-episodes"
            )
        ways = int(targets.max()) + 1
        shots = int((targets[0] != 0).int().argmax())
        size = ways * shots
        expected = torch.arange(ways, device=targets.device).repeat_interleave(shots)
        if shots < 1 or size >= targets.shape[1] or not bool((targets[:, :size] == expected).all()):
            raise ValueError(
                "the labels of an episode are 0 … 0 1 … 1 and so on for what is learned from, as "
                "often each as there are shots, then those of the queries; here they begin with "
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
        """Support images and labels, query images and labels, one episode after the other."""
        parts = (self.support, self.support_labels, self.query, self.query_labels)
        return zip(*parts, strict=True)

    def groups(self, part: Tensor) -> Tensor:
        """The episode of every image of a part, laid end to end."""
        count, size = part.shape[:2]
        return torch.arange(count, device=part.device).repeat_interleave(size)

    def require_ways(self, classes: int) -> None:
        """An error where a model has logits for another number of classes."""
        if classes != self.ways:
            raise ValueError(
                f"the model has {classes} classes, but the episodes {self.ways} ways: give it "
                f"num_classes={self.ways}"
            )


class EpisodicTask(Task):
    """Learning every episode on its own, from its own start; what is counted are its queries."""

    unit: ClassVar[str] = "episode"

    @abstractmethod
    def predict(self, model: nn.Module, episodes: EpisodeBatch) -> Tensor:
        """The logits of the queries in an evaluation, shape (B, queries, ways)."""

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        return answers(self.predict(model, episodes).float(), episodes)

    def figures(self, found: Outcome) -> dict[str, float | None]:
        """The accuracy with half the width of its 95 % interval, None for one episode alone."""
        shares = (found.values["correct"] / found.values["weight"]).double()
        count, quantile = len(shares), NormalDist().inv_cdf(0.975)
        width = quantile * float(shares.std()) / math.sqrt(count) if count > 1 else None
        return {"accuracy": found.accuracy, "interval": width, "episodes": float(count)}


def answers(logits: Tensor, episodes: EpisodeBatch) -> Outcome:
    """What the queries of each episode are answered, shape (B, queries, ways)."""
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
    """Eq. 29: the task vector x* that explains the support best, judged by the queries.

    The inner problem is minimize Σ cross-entropy(support | x) + ridge/2 ‖x‖² over x, one x an
    episode, from x = 0, together with the equilibria of its images (`optimize_input`).

    outer: "detached" differentiates the loss of the queries at a fixed x*, as the paper does;
        "implicit" also through x* (`optimal_input`), which needs a ridge, and counts only for
        episodes whose inner problem has converged to `tolerance`.
    ridge: what makes the optimum unique and well conditioned.
    engine: of `optimize_input`, by name or as a mapping with a name and options.
    iterations: largest number of steps of x.
    sweeps, step_size, tolerance: of `SearchSettings`.
    evaluation_iterations: in evaluation; None: `iterations`.
    check_tolerance: of the equilibria at the result of the inner problem.
    outer_iterations: of the linear solve of "implicit".

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
            raise ValueError("outer='implicit' needs a ridge: without one the optimum may be flat")
        get_engine(self.engine)

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        found = self.adapt(model, episodes, attached=self.outer == "implicit")
        found.report_visited()
        return answers(_query_logits(model, episodes, self._outer_tasks(found)), episodes)

    def _outer_tasks(self, found: InputResult) -> Tensor:
        """x* as the outer gradient sees it.

        A point that is no optimum has no implicit derivative: the system can be indefinite there,
        and its solution of any size. Episodes whose x* has not converged are taken as detached.
        """
        if self.outer == "detached":
            return found.x
        attached = optimal_input(
            found, "implicit", max_iterations=self.outer_iterations, strict=False
        )
        return torch.where(found.converged[:, None], attached, found.x)

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
        """The task vectors of the episodes, learned from their support.

        attached: keep the graph of the support's features, for `optimal_input`; it is also kept
            where `InputResult.report_visited` needs it.
        """
        if not isinstance(model, FewShotClassifier):
            raise TypeError(
                f"{type(model).__name__} takes no task vector: use a model such as few-shot-opteq "
                "or few-shot-mdeq, or a task that adapts weights (maml, reptile, imaml)"
            )
        labels = episodes.support_labels.flatten()

        def loss(logits: Tensor) -> Tensor:
            episodes.require_ways(logits.shape[1])
            return F.cross_entropy(logits, labels, reduction="none")

        with torch.set_grad_enabled(attached or model.layer.is_heard):
            given = model.for_images(episodes.support)
        return optimize_input(
            given,
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
    """Of every query with the task vector of its episode, shape (B, queries, ways)."""
    logits: Tensor = model(episodes.query, tasks[episodes.groups(episodes.query)])
    return logits.reshape(*episodes.query_labels.shape, -1)
