"""MAML: weights from which a few gradient steps learn a task.

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML
2017.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.tasks.adaptation import (
    Weights,
    each_episode,
    logits_at,
    support_loss,
    weights_of,
)
from equilibria.tasks.base import TrainingStep
from equilibria.tasks.episodes import EpisodeBatch
from equilibria.tasks.few_shot_evaluation import (
    FewShotEvaluation,
    evaluate_episodes,
    query_loss,
    training_step_of,
)


@dataclass(frozen=True)
class MAML:
    """The loss of the queries after `inner_steps` gradient steps on the support, differentiated.

    first_order: take the inner gradients as constants (FOMAML).
    evaluation_steps: inner steps in evaluation; None: `inner_steps`.
    """

    inner_steps: int = 1
    inner_rate: float = 0.4
    first_order: bool = False
    evaluation_steps: int | None = 3

    def __post_init__(self) -> None:
        if not self.inner_rate > 0:
            raise ValueError(f"inner_rate must be positive, not {self.inner_rate}")
        for name in ("inner_steps", "evaluation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        episodes = EpisodeBatch.of(inputs, targets)
        logits = self._predict(model, episodes, self.inner_steps, create_graph=not self.first_order)
        return training_step_of(query_loss(logits, episodes), logits, episodes)

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> FewShotEvaluation:
        steps = self.evaluation_steps or self.inner_steps

        def predict(model: nn.Module, episodes: EpisodeBatch) -> Tensor:
            return self._predict(model, episodes, steps, create_graph=False).detach()

        return evaluate_episodes(model, batches, predict)

    def adapt(
        self, model: nn.Module, images: Tensor, labels: Tensor, steps: int, *, create_graph: bool
    ) -> Weights:
        """θ′ = θ − rate ∇L(θ), `steps` times, from the model's own weights."""
        weights = weights_of(model)
        with torch.enable_grad():
            for _ in range(steps):
                loss = support_loss(model, weights, images, labels)
                gradients = torch.autograd.grad(
                    loss, list(weights.values()), create_graph=create_graph
                )
                weights = {
                    name: weight - self.inner_rate * gradient
                    for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
                }
        return weights

    def _predict(
        self, model: nn.Module, episodes: EpisodeBatch, steps: int, *, create_graph: bool
    ) -> Tensor:
        rows = []
        for support, labels, query, _ in each_episode(episodes):
            adapted = self.adapt(model, support, labels, steps, create_graph=create_graph)
            rows.append(logits_at(model, adapted, query))
        logits = torch.stack(rows)
        episodes.require_ways(logits.shape[2])
        return logits
