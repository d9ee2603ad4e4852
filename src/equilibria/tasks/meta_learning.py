"""Few-shot learning by adapting weights: MAML, Reptile and iMAML.

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML
2017. Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018. Rajeswaran, Finn,
Kakade, Levine, "Meta-Learning with Implicit Gradients", NeurIPS 2019.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context.twin import twin
from equilibria.registry import check_values
from equilibria.tasks.evaluation import Outcome
from equilibria.tasks.few_shot import EpisodeBatch, EpisodicTask, answers


def trained_weights(model: nn.Module) -> list[Tensor]:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def with_weights(model: nn.Module, weights: Iterable[Tensor]) -> nn.Module:
    """A twin of the model with these weights in the place of those that are trained."""
    given = dict(zip(map(id, trained_weights(model)), weights, strict=True))
    return twin(model, lambda held: given.get(id(held), held))


class WeightAdaptation(EpisodicTask):
    """Episodes are learned by steps of the weights, from those of the model.

    inner_rate: of the steps. inner_steps: in training. evaluation_steps: in evaluation; None: as
    many.
    """

    inner_steps: int
    inner_rate: float
    evaluation_steps: int | None

    def __post_init__(self) -> None:
        check_values(
            self, at_least_one=("inner_steps", "evaluation_steps"), positive=("inner_rate",)
        )

    @abstractmethod
    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> nn.Module:
        """A twin of the model after so many steps on labelled images."""

    @torch.enable_grad()
    def descend(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        steps: int,
        *,
        proximal: float = 0.0,
        create_graph: bool = False,
    ) -> nn.Module:
        """φ ← φ − rate (∇L(φ) + proximal (φ − θ)) from the model's θ, so often, in θ's graph."""
        start, adapted = trained_weights(model), model
        for _ in range(steps):
            weights = trained_weights(adapted)
            loss = F.cross_entropy(adapted(images), labels)
            slopes = torch.autograd.grad(loss, weights, create_graph=create_graph)
            moved = (
                weight - self.inner_rate * (slope + proximal * (weight - first))
                for weight, slope, first in zip(weights, slopes, start, strict=True)
            )
            adapted = with_weights(adapted, moved)
        return adapted

    def predict(self, model: nn.Module, episodes: EpisodeBatch) -> Tensor:
        return self.query_logits(model, episodes, self.evaluation_steps or self.inner_steps)

    def query_logits(self, model: nn.Module, episodes: EpisodeBatch, steps: int) -> Tensor:
        """What the queries are answered after so many steps, shape (B, queries, ways)."""
        return torch.stack(
            [
                self.adapt(model, support, labels, steps)(query)
                for support, labels, query, _ in episodes
            ]
        )


def with_gradient(
    model: nn.Module, found: Outcome, gradients: Sequence[Sequence[Tensor]]
) -> Outcome:
    """The same losses, whose mean has the mean over episodes of given gradients in the weights.

    So a method that has its update from elsewhere (Reptile's θ − θ′, iMAML's linear solve) trains
    by the same loop and optimizers as a loss that is differentiated.
    """
    total = found.values["loss"].new_zeros(())
    for weight, *given in zip(trained_weights(model), *gradients, strict=True):
        gradient = torch.stack(given).mean(dim=0).detach()
        total = total + ((weight - weight.detach()) * gradient).sum()
    loss = found.values["loss"].detach() + found.values["weight"] * total
    return Outcome({**found.values, "loss": loss})


@dataclass(frozen=True)
class MAML(WeightAdaptation):
    """The loss of the queries after `inner_steps` gradient steps on the support, differentiated.

    first_order: take the inner gradients as constants (FOMAML).

    Examples:
        >>> model, labels = eq.create_model("conv4", num_classes=2, in_channels=1), [0, 1, 0, 1]
        >>> found = eq.tasks.MAML().training_step(
        ...     model, torch.rand(1, 4, 1, 28, 28), torch.tensor([labels])
        ... )
        >>> found.loss.requires_grad
        True
    """

    inner_steps: int = 1
    inner_rate: float = 0.4
    first_order: bool = False
    evaluation_steps: int | None = 3

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        return answers(self.query_logits(model, episodes, self.inner_steps), episodes)

    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> nn.Module:
        create_graph = torch.is_grad_enabled() and not self.first_order
        return self.descend(model, images, labels, steps, create_graph=create_graph)


@dataclass(frozen=True)
class Reptile(WeightAdaptation):
    """θ ← θ + ε mean(θ′ − θ), θ′ from `inner_steps` steps on all images of an episode.

    The loss has the gradient θ − θ′: SGD without momentum, weight decay and clipping makes exactly
    that step, with ε its learning rate. Its value is that of the queries, which training has seen
    too. In evaluation the steps are on the support alone.

    inner_batch: images of a step in training, drawn anew in every pass.
    optimizer: of the inner steps; Adam without momentum (β₁ = 0), as the paper has it, or SGD.

    Examples:
        >>> model, labels = eq.create_model("conv4", num_classes=2, in_channels=1), [0, 1, 0, 1]
        >>> task = eq.tasks.Reptile(inner_steps=1)
        >>> found = task.training_step(model, torch.rand(1, 4, 1, 28, 28), torch.tensor([labels]))
        >>> found.loss.requires_grad
        True
    """

    inner_steps: int = 5
    evaluation_steps: int | None = 50
    inner_rate: float = 1e-3
    inner_batch: int = 10
    optimizer: Literal["adam", "sgd"] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, at_least_one=("inner_batch",), one_of={"optimizer": ("adam", "sgd")})

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        rows, moves = [], []
        for support, support_labels, query, query_labels in episodes:
            images = torch.cat([support, query])
            labels = torch.cat([support_labels, query_labels])
            adapted = self.adapt(model, images, labels, self.inner_steps)
            pairs = zip(trained_weights(model), trained_weights(adapted), strict=True)
            moves.append([before.detach() - after.detach() for before, after in pairs])
            with torch.no_grad():
                rows.append(adapted(query))
        return with_gradient(model, answers(torch.stack(rows), episodes), moves)

    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> nn.Module:
        """With θ′, from the model's own weights."""
        leaves = [weight.detach().clone().requires_grad_() for weight in trained_weights(model)]
        adapted = with_weights(model, leaves)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(leaves, lr=self.inner_rate)
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(leaves, lr=self.inner_rate, betas=(0.0, 0.999))
        with torch.enable_grad():
            for chosen in _passes(len(images), self.inner_batch, steps):
                optimizer.zero_grad()
                F.cross_entropy(adapted(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return adapted


def _passes(samples: int, size: int, steps: int) -> list[Tensor]:
    """Indices of the batches of so many steps: all samples at once, or in turn, shuffled."""
    if size >= samples:
        return [torch.arange(samples)] * steps
    batches: list[Tensor] = []
    while len(batches) < steps:
        whole = torch.randperm(samples)[: samples - samples % size]
        batches += list(torch.split(whole, size))
    return batches[:steps]


@dataclass(frozen=True)
class IMAML(WeightAdaptation):
    """φ* = argmin L(φ) + λ/2 ‖φ − θ‖² on the support; the gradient in θ is (I + H/λ)⁻¹ ∇L_query.

    The inner problem takes `inner_steps` gradient steps, the linear system `solve_steps` of
    conjugate gradients (Algorithm 2), which stop early where H, the Hessian of the support's loss
    at φ*, makes the system indefinite.

    proximal: λ.

    Examples:
        >>> model, labels = eq.create_model("conv4", num_classes=2, in_channels=1), [0, 1, 0, 1]
        >>> task = eq.tasks.IMAML(inner_steps=1, solve_steps=1)
        >>> found = task.training_step(model, torch.rand(1, 4, 1, 28, 28), torch.tensor([labels]))
        >>> found.loss.requires_grad
        True
    """

    inner_steps: int = 16
    inner_rate: float = 0.05
    proximal: float = 2.0
    solve_steps: int = 5
    evaluation_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, at_least_one=("solve_steps",), positive=("proximal",))

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        episodes = EpisodeBatch.of(inputs, targets)
        rows, gradients = [], []
        for support, labels, query, query_labels in episodes:
            adapted = self.adapt(model, support, labels, self.inner_steps)
            with torch.enable_grad():
                logits = adapted(query)
                loss = F.cross_entropy(logits, query_labels)
                outer = torch.autograd.grad(loss, trained_weights(adapted))
            gradients.append(self._solve(adapted, support, labels, outer))
            rows.append(logits.detach())
        return with_gradient(model, answers(torch.stack(rows), episodes), gradients)

    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> nn.Module:
        found = self.descend(model, images, labels, steps, proximal=self.proximal)
        leaves = (weight.detach().requires_grad_() for weight in trained_weights(found))
        return with_weights(found, leaves)

    def _solve(
        self, adapted: nn.Module, images: Tensor, labels: Tensor, outer: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """(I + H/λ)⁻¹ of the gradient of the queries' loss."""
        leaves = trained_weights(adapted)
        with torch.enable_grad():
            loss = F.cross_entropy(adapted(images), labels)
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
