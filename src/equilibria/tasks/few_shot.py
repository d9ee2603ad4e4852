"""Few-shot learning by input optimization: what an episode teaches is one task vector.

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021,
Appendix B.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.inputs import InputResult, get_engine, optimal_input, optimize_input
from equilibria.models.few_shot import FewShotClassifier
from equilibria.tasks.base import TrainingStep
from equilibria.tasks.episodes import EpisodeBatch
from equilibria.tasks.few_shot_evaluation import (
    FewShotEvaluation,
    evaluate_episodes,
    query_loss,
    training_step_of,
)


@dataclass(frozen=True)
class FewShot:
    """Eq. 29: the task vector x* that explains the support best, judged by the queries.

    The inner problem is minimize Σ cross-entropy(support | x) + ridge/2 ‖x‖² over x, one x an
    episode, from x = 0, together with the equilibria of its images (`optimize_input`).

    outer: "detached" differentiates the loss of the queries at a fixed x*, as the paper does;
        "implicit" also through x* (`optimal_input`), which needs a ridge, and counts only for
        episodes whose inner problem has converged to `tolerance`.
    ridge: what makes the optimum unique and well conditioned.
    engine, engine_options, iterations, sweeps, step_size, tolerance: of `optimize_input`.
    evaluation_iterations: in evaluation; None: `iterations`.
    check_tolerance: of the equilibria at the result of the inner problem.
    outer_iterations: of the linear solve of "implicit".
    """

    ridge: float = 1e-2
    outer: Literal["detached", "implicit"] = "detached"
    engine: str = "anderson"
    engine_options: dict[str, Any] = field(default_factory=dict)
    iterations: int = 20
    evaluation_iterations: int | None = None
    sweeps: int = 2
    step_size: float | None = None
    tolerance: float = 1e-3
    check_tolerance: float = 1e-3
    outer_iterations: int = 40

    def __post_init__(self) -> None:
        if not self.ridge >= 0:
            raise ValueError(f"ridge must not be negative, but is {self.ridge}")
        if self.outer not in ("detached", "implicit"):
            raise ValueError(f"outer must be 'detached' or 'implicit', not {self.outer!r}")
        if self.outer == "implicit" and not self.ridge:
            raise ValueError("outer='implicit' needs a ridge: without one the optimum may be flat")
        for name in ("iterations", "sweeps", "outer_iterations", "evaluation_iterations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        get_engine(self.engine, **self.engine_options)

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        episodes = EpisodeBatch.of(inputs, targets)
        found = self.adapt(model, episodes, attached=self.outer == "implicit")
        logits = _query_logits(model, episodes, self._outer_tasks(found))
        return training_step_of(query_loss(logits, episodes), logits, episodes)

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

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> FewShotEvaluation:
        def predict(model: nn.Module, episodes: EpisodeBatch) -> Tensor:
            iterations = self.evaluation_iterations or self.iterations
            found = self.adapt(model, episodes, iterations=iterations)
            with torch.no_grad():
                return _query_logits(model, episodes, found.x)

        return evaluate_episodes(model, batches, predict)

    def adapt(
        self,
        model: nn.Module,
        episodes: EpisodeBatch,
        *,
        iterations: int | None = None,
        attached: bool = False,
    ) -> InputResult:
        """The task vectors of the episodes, learned from their support.

        attached: keep the graph of the support's features, for `optimal_input`.
        """
        few_shot = _few_shot_classifier(model)
        labels = episodes.support_labels.flatten()

        def loss(logits: Tensor) -> Tensor:
            episodes.require_ways(logits.shape[1])
            return F.cross_entropy(logits, labels, reduction="none")

        with torch.set_grad_enabled(attached):
            given = few_shot.for_images(episodes.support)
        return optimize_input(
            given,
            loss,
            few_shot.no_tasks(len(episodes), episodes.support),
            groups=episodes.groups(episodes.support),
            penalty=lambda x: 0.5 * self.ridge * x.square().sum(dim=1),
            engine=self.engine,
            engine_options=self.engine_options,
            iterations=iterations or self.iterations,
            sweeps=self.sweeps,
            step_size=self.step_size,
            tolerance=self.tolerance,
            check_tolerance=self.check_tolerance,
            polish=attached,
        )


def _query_logits(model: nn.Module, episodes: EpisodeBatch, tasks: Tensor) -> Tensor:
    """Of every query with the task vector of its episode, shape (B, queries, ways)."""
    logits: Tensor = model(episodes.query, tasks[episodes.groups(episodes.query)])
    return logits.reshape(*episodes.query_labels.shape, -1)


def _few_shot_classifier(model: nn.Module) -> FewShotClassifier:
    if isinstance(model, FewShotClassifier):
        return model
    raise TypeError(
        f"{type(model).__name__} takes no task vector: use a model such as few-shot-opteq or "
        "few-shot-mdeq, or a task that adapts weights (maml, reptile, imaml)"
    )
