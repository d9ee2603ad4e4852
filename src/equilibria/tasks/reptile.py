"""Reptile: weights that are moved towards those that tasks lead to.

Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from equilibria.tasks.adaptation import (
    Weights,
    each_episode,
    logits_at,
    loss_with_gradient,
    mean_of,
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
class Reptile:
    """θ ← θ + ε mean(θ′ − θ), θ′ from `inner_steps` steps on all images of an episode.

    The loss has the gradient θ − θ′: SGD without momentum, weight decay and clipping makes exactly
    that step, with ε its learning rate. Its value is that of the queries, which training has seen
    too. In evaluation the steps are on the support alone.

    inner_batch: images of a step in training, drawn anew in every pass.
    optimizer: of the inner steps; Adam without momentum (β₁ = 0), as the paper has it, or SGD.
    """

    inner_steps: int = 5
    evaluation_steps: int = 50
    inner_rate: float = 1e-3
    inner_batch: int = 10
    optimizer: Literal["adam", "sgd"] = "adam"

    def __post_init__(self) -> None:
        for name in ("inner_steps", "evaluation_steps", "inner_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.inner_rate > 0:
            raise ValueError(f"inner_rate must be positive, not {self.inner_rate}")
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f"optimizer must be 'adam' or 'sgd', not {self.optimizer!r}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        episodes = EpisodeBatch.of(inputs, targets)
        weights = list(weights_of(model).values())
        rows, moves = [], []
        for support, support_labels, query, query_labels in each_episode(episodes):
            images = torch.cat([support, query])
            labels = torch.cat([support_labels, query_labels])
            adapted = self.adapt(model, images, labels, self.inner_steps)
            moves.append([w.detach() - a for w, a in zip(weights, adapted.values(), strict=True)])
            with torch.no_grad():
                rows.append(logits_at(model, adapted, query))
        logits = torch.stack(rows)
        episodes.require_ways(logits.shape[2])
        loss = loss_with_gradient(query_loss(logits, episodes), weights, mean_of(moves))
        return training_step_of(loss, logits, episodes)

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> FewShotEvaluation:
        def predict(model: nn.Module, episodes: EpisodeBatch) -> Tensor:
            rows = []
            for support, labels, query, _ in each_episode(episodes):
                adapted = self.adapt(model, support, labels, self.evaluation_steps)
                with torch.no_grad():
                    rows.append(logits_at(model, adapted, query))
            return torch.stack(rows)

        return evaluate_episodes(model, batches, predict)

    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Weights:
        """θ′, from the model's own weights."""
        weights = {
            name: weight.detach().clone().requires_grad_()
            for name, weight in weights_of(model).items()
        }
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(
                list(weights.values()), lr=self.inner_rate, betas=(0.0, 0.999)
            )
        else:
            optimizer = torch.optim.SGD(list(weights.values()), lr=self.inner_rate)
        batches = _passes(len(images), self.inner_batch, steps)
        with torch.enable_grad():
            for chosen in batches:
                optimizer.zero_grad()
                support_loss(model, weights, images[chosen], labels[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {name: weight.detach() for name, weight in weights.items()}


def _passes(samples: int, size: int, steps: int) -> list[Tensor]:
    """Indices of the batches of so many steps: all samples at once, or in turn, shuffled."""
    if size >= samples:
        return [torch.arange(samples)] * steps
    batches: list[Tensor] = []
    while len(batches) < steps:
        whole = torch.randperm(samples)[: samples - samples % size]
        batches += list(torch.split(whole, size))
    return batches[:steps]
