"""Few-shot learning by adaptation of weights: MAML, Reptile and iMAML.

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
    """Return the parameters that require gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def with_weights(model: nn.Module, weights: Iterable[Tensor]) -> nn.Module:
    """Return a copy of the model with other values of its `trained_weights`."""
    replacements = dict(zip(map(id, trained_weights(model)), weights, strict=True))
    return twin(model, lambda tensor: replacements.get(id(tensor), tensor))


class WeightAdaptation(EpisodicTask):
    """Base class of tasks that adapt the weights of the model to each episode.

    Attributes:
        inner_steps: Number of steps on an episode in training.
        inner_rate: Learning rate of these steps.
        evaluation_steps: Number of steps in evaluations; None for `inner_steps`.
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
        """Return a copy of the model whose weights are trained on an episode's labelled images.

        Args:
            model: The model; it is not changed.
            images: Images to train on, shape (N, C, H, W).
            labels: Their labels, shape (N,).
            steps: Number of gradient steps.
        """

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
        """Train a copy of the model by gradient descent φ ← φ − rate (∇L(φ) + proximal (φ − θ)).

        L is the cross-entropy of the images, and φ starts at the weights θ of the model.

        Args:
            model: The model; it is not changed.
            images: Images, shape (N, C, H, W).
            labels: Labels, shape (N,).
            steps: Number of steps.
            proximal: Weight of the proximal term.
            create_graph: Make the gradients differentiable.

        Returns:
            A copy of the model with the weights φ, differentiable in θ.
        """
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
        """Return the logits of the queries after adaptation, shape (B, queries, ways).

        Args:
            model: The model; it is not changed.
            episodes: B episodes.
            steps: Number of steps on the support of each episode.
        """
        return torch.stack(
            [
                self.adapt(model, support, labels, steps)(query)
                for support, labels, query, _ in episodes
            ]
        )


def with_gradient(
    model: nn.Module, outcome: Outcome, gradients: Sequence[Sequence[Tensor]]
) -> Outcome:
    """Return the same losses, with a given gradient in the weights.

    Methods that compute their update directly (Reptile's θ − θ′, iMAML's linear solve) can then use
    the same training loop and optimizers as a differentiable loss.

    Args:
        model: The model.
        outcome: Losses of the episodes.
        gradients: Gradient in each trained weight, for each episode. The mean loss gets their mean.
    """
    total = outcome.values["loss"].new_zeros(())
    for weight, *of_episodes in zip(trained_weights(model), *gradients, strict=True):
        gradient = torch.stack(of_episodes).mean(dim=0).detach()
        total = total + ((weight - weight.detach()) * gradient).sum()
    loss = outcome.values["loss"].detach() + outcome.values["weight"] * total
    return Outcome({**outcome.values, "loss": loss})


@dataclass(frozen=True)
class MAML(WeightAdaptation):
    """MAML: minimize the loss of the queries after gradient steps on the support.

    Args:
        inner_steps: Number of steps on the support in training.
        inner_rate: Learning rate of these steps.
        first_order: Treat the inner gradients as constants (FOMAML).
        evaluation_steps: Number of steps in evaluations; None for `inner_steps`.

    Examples:
        >>> model, labels = eq.create_model("conv4", num_classes=2, in_channels=1), [0, 1, 0, 1]
        >>> outcome = eq.tasks.MAML().training_step(
        ...     model, torch.rand(1, 4, 1, 28, 28), torch.tensor([labels])
        ... )
        >>> outcome.loss.requires_grad
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
    """Reptile: move the model's weights θ towards weights θ′ trained on single episodes.

    A step is θ ← θ + ε mean(θ′ − θ), with θ′ from gradient steps on all images of an episode. The
    loss has the gradient θ − θ′, so SGD with learning rate ε and without momentum, weight decay and
    clipping takes exactly this step. The value of the loss is that of the queries, which are part
    of the training images. In evaluations the steps use the support only.

    Args:
        inner_steps: Number of steps on an episode in training.
        evaluation_steps: Number of steps in evaluations; None for `inner_steps`.
        inner_rate: Learning rate of these steps.
        inner_batch: Number of images per step; the images are shuffled in every pass.
        optimizer: Optimizer of the inner steps: "adam" with β₁ = 0, as in the paper, or "sgd".

    Examples:
        >>> model, labels = eq.create_model("conv4", num_classes=2, in_channels=1), [0, 1, 0, 1]
        >>> task = eq.tasks.Reptile(inner_steps=1)
        >>> outcome = task.training_step(model, torch.rand(1, 4, 1, 28, 28), torch.tensor([labels]))
        >>> outcome.loss.requires_grad
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
            moves.append([initial.detach() - final.detach() for initial, final in pairs])
            with torch.no_grad():
                rows.append(adapted(query))
        return with_gradient(model, answers(torch.stack(rows), episodes), moves)

    def adapt(self, model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> nn.Module:
        """Return a copy of the model with weights trained on an episode's images.

        They are not differentiable in the weights of the model.
        """
        leaves = [weight.detach().clone().requires_grad_() for weight in trained_weights(model)]
        adapted = with_weights(model, leaves)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(leaves, lr=self.inner_rate)
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(leaves, lr=self.inner_rate, betas=(0.0, 0.999))
        with torch.enable_grad():
            for rows in _batches(len(images), self.inner_batch, steps):
                optimizer.zero_grad()
                F.cross_entropy(adapted(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return adapted


def _batches(samples: int, size: int, steps: int) -> list[Tensor]:
    """Return the sample indices of each step; they are shuffled if a batch is not all samples."""
    if size >= samples:
        return [torch.arange(samples)] * steps
    batches: list[Tensor] = []
    while len(batches) < steps:
        whole = torch.randperm(samples)[: samples - samples % size]
        batches += list(torch.split(whole, size))
    return batches[:steps]


@dataclass(frozen=True)
class IMAML(WeightAdaptation):
    """iMAML: minimize the loss of the queries at weights φ* that stay near the model's weights θ.

    On the support of an episode, φ* minimizes L(φ) + λ/2 ‖φ − θ‖², L the loss of the support. The
    gradient in θ is (I + H/λ)⁻¹ ∇L_query, with H the Hessian of L at φ* and L_query the loss of the
    queries. The linear system is solved by conjugate gradients (Algorithm 2), which stop early if
    it is indefinite.

    Args:
        inner_steps: Number of gradient steps on the inner problem in training.
        inner_rate: Learning rate of these steps.
        proximal: λ, the weight of the proximal term.
        solve_steps: Limit of the steps of conjugate gradients.
        evaluation_steps: Number of gradient steps in evaluations; None for `inner_steps`.

    Examples:
        >>> model, labels = eq.create_model("conv4", num_classes=2, in_channels=1), [0, 1, 0, 1]
        >>> task = eq.tasks.IMAML(inner_steps=1, solve_steps=1)
        >>> outcome = task.training_step(model, torch.rand(1, 4, 1, 28, 28), torch.tensor([labels]))
        >>> outcome.loss.requires_grad
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
        adapted = self.descend(model, images, labels, steps, proximal=self.proximal)
        leaves = (weight.detach().requires_grad_() for weight in trained_weights(adapted))
        return with_weights(adapted, leaves)

    def _solve(
        self, adapted: nn.Module, images: Tensor, labels: Tensor, outer: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """Return (I + H/λ)⁻¹ times `outer`, the gradient of the queries' loss."""
        leaves = trained_weights(adapted)
        with torch.enable_grad():
            loss = F.cross_entropy(adapted(images), labels)
            gradient = _flat(torch.autograd.grad(loss, leaves, create_graph=True))

        def operator(vector: Tensor) -> Tensor:
            pulled = torch.autograd.grad(gradient, leaves, vector, retain_graph=True)
            return vector + _flat(pulled) / self.proximal

        solution = _truncated_cg(operator, _flat(outer), self.solve_steps)
        pieces = torch.split(solution, [leaf.numel() for leaf in leaves])
        return [piece.view_as(leaf) for piece, leaf in zip(pieces, leaves, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _truncated_cg(operator: Callable[[Tensor], Tensor], rhs: Tensor, steps: int) -> Tensor:
    """Take a few steps of conjugate gradients; return the right-hand side if the first one fails.

    `equilibria.solvers.conjugate_gradients` is not suitable, because it adds the residual to its
    result. This is accurate for I − Jᵀ with J a contraction, but amplifies errors for a large H/λ.
    """
    result, residual = torch.zeros_like(rhs), rhs
    direction, square = residual, residual @ residual
    for step in range(steps):
        image = operator(direction)
        curvature = direction @ image
        if not bool(curvature > 0):
            return rhs if step == 0 else result
        length = square / curvature
        result = result + length * direction
        residual = residual - length * image
        new_square = residual @ residual
        if not bool(new_square > torch.finfo(rhs.dtype).eps ** 2 * (rhs @ rhs)):
            break
        direction = residual + (new_square / square) * direction
        square = new_square
    return result
