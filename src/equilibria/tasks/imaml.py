"""iMAML: weights near which every task has a good optimum, by implicit differentiation.

Rajeswaran, Finn, Kakade, Levine, "Meta-Learning with Implicit Gradients", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
class IMAML:
    """φ* = argmin L(φ) + λ/2 ‖φ − θ‖² on the support; the gradient in θ is (I + H/λ)⁻¹ ∇L_query.

    The inner problem takes `inner_steps` gradient steps, the linear system `solve_steps` of
    conjugate gradients (Algorithm 2), which stop early where H, the Hessian of the support's loss
    at φ*, makes the system indefinite.

    proximal: λ. evaluation_steps: inner steps in evaluation; None: `inner_steps`.
    """

    inner_steps: int = 16
    inner_rate: float = 0.05
    proximal: float = 2.0
    solve_steps: int = 5
    evaluation_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("inner_rate", "proximal"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("inner_steps", "solve_steps", "evaluation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        episodes = EpisodeBatch.of(inputs, targets)
        rows, gradients = [], []
        for support, labels, query, query_labels in each_episode(episodes):
            adapted = self.adapt(model, support, labels, self.inner_steps)
            with torch.enable_grad():
                logits = logits_at(model, adapted, query)
                outer = torch.autograd.grad(
                    F.cross_entropy(logits, query_labels), list(adapted.values())
                )
            gradients.append(self._solve(model, adapted, support, labels, outer))
            rows.append(logits.detach())
        logits = torch.stack(rows)
        episodes.require_ways(logits.shape[2])
        weights = list(weights_of(model).values())
        loss = loss_with_gradient(query_loss(logits, episodes), weights, mean_of(gradients))
        return training_step_of(loss, logits, episodes)

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> FewShotEvaluation:
        steps = self.evaluation_steps or self.inner_steps

        def predict(model: nn.Module, episodes: EpisodeBatch) -> Tensor:
            rows = []
            for support, labels, query, _ in each_episode(episodes):
                adapted = self.adapt(model, support, labels, steps)
                with torch.no_grad():
                    rows.append(logits_at(model, adapted, query))
            return torch.stack(rows)

        return evaluate_episodes(model, batches, predict)

    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Weights:
        """φ after so many gradient steps on the proximal problem, from θ."""
        start = {name: weight.detach() for name, weight in weights_of(model).items()}
        weights = {name: weight.clone().requires_grad_() for name, weight in start.items()}
        for _ in range(steps):
            with torch.enable_grad():
                loss = support_loss(model, weights, images, labels)
                gradients = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for name, gradient in zip(weights, gradients, strict=True):
                    pull = self.proximal * (weights[name] - start[name])
                    weights[name].sub_(self.inner_rate * (gradient + pull))
        return weights

    def _solve(
        self,
        model: nn.Module,
        adapted: Weights,
        images: Tensor,
        labels: Tensor,
        outer: tuple[Tensor, ...],
    ) -> list[Tensor]:
        """(I + H/λ)⁻¹ of the gradient of the queries' loss."""
        leaves = list(adapted.values())
        with torch.enable_grad():
            loss = support_loss(model, adapted, images, labels)
            gradient = _flat(torch.autograd.grad(loss, leaves, create_graph=True))

        def operator(vector: Tensor) -> Tensor:
            pulled = torch.autograd.grad(gradient, leaves, vector, retain_graph=True)
            return vector + _flat(pulled) / self.proximal

        found = _truncated_cg(operator, _flat(outer), self.solve_steps)
        pieces = torch.split(found, [leaf.numel() for leaf in leaves])
        return [piece.view_as(leaf) for piece, leaf in zip(pieces, leaves, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _truncated_cg(operator: Callable[[Tensor], Tensor], rhs: Tensor, steps: int) -> Tensor:
    """A few steps of conjugate gradients; the right-hand side itself where the first one fails.

    Not `equilibria.gradients.conjugate_gradients`, which adds the residual to what it has found:
    exact for I − Jᵀ with J a contraction, but an error grows by it where H/λ is large.
    """
    found, residual = torch.zeros_like(rhs), rhs
    direction, square = residual, residual @ residual
    for step in range(steps):
        image = operator(direction)
        curvature = direction @ image
        if not bool(curvature > 0):
            return rhs if step == 0 else found
        length = square / curvature
        found = found + length * direction
        residual = residual - length * image
        following = residual @ residual
        if not bool(following > torch.finfo(rhs.dtype).eps ** 2 * (rhs @ rhs)):
            break
        direction = residual + (following / square) * direction
        square = following
    return found
