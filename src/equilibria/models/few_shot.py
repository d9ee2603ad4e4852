"""Few-shot classifiers: an equilibrium network that a task vector tells what the classes are.

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021,
Appendices B.1 and C.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.energies import Input, Quadratic
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import GradientRule
from equilibria.models.blocks import PooledLinearHead
from equilibria.models.conv4 import Conv4Norm, StridedBlocks, norm_of_images
from equilibria.models.film import CopiesFiLM, FiLMCell, PackedFiLM
from equilibria.models.mdeq import branch_channels
from equilibria.models.mdeq_parts import MDEQHead, MDEQStem
from equilibria.models.options import initialize_small, solver_from_options
from equilibria.operators import Conv2d, Identity
from equilibria.solvers import LinearSolution, Solution, Solver


class FewShotClassifier(nn.Module):
    """logits = head(z*), z* = T(z*; image, task): h_θ(x, s) of Eq. 29.

    Which classes there are, and what they are called, is for the task vector x to say. It is
    optimized as an input: `for_images` gives a model of the task vectors alone.

    stem: from images to features; conditioning: from features and task vectors to the injection.
    episode_statistics: whether the stem normalizes by the images it gets, so that it must see the
        support and the queries of every episode by themselves.
    """

    def __init__(
        self,
        stem: nn.Module,
        conditioning: nn.Module,
        layer: EquilibriumLayer,
        head: nn.Module,
        *,
        task_size: int,
        episode_statistics: bool = False,
    ) -> None:
        super().__init__()
        self.episode_statistics = episode_statistics
        self.stem = stem
        self.conditioning = conditioning
        self.layer = layer
        self.head = head
        self.task_size = task_size

    def forward(self, images: Tensor, tasks: Tensor | None = None) -> Tensor:
        """The logits of images, each with its row of `tasks`, or with the task vector 0.

        Episodes, shape `(B, samples, C, H, W)`, are taken as B · samples images.
        """
        if tasks is None:
            tasks = self.no_tasks(images.shape[:-3].numel(), images)
        logits: Tensor = self.for_images(images)(tasks)
        return logits

    def for_images(self, images: Tensor) -> ImagesGiven:
        """The model with its images fixed, as a function of one task vector an image."""
        if self.episode_statistics and images.dim() == 5 and len(images):
            features = torch.func.vmap(self.stem)(images).flatten(0, 1)
        else:
            features = self.stem(images.flatten(0, -4))
        return ImagesGiven(self, features)

    def no_tasks(self, count: int, like: Tensor) -> Tensor:
        """Where every task starts: task vectors of zeros."""
        return torch.zeros(count, self.task_size, dtype=like.dtype, device=like.device)

    @property
    def last_solution(self) -> Solution | None:
        """How the last forward solve went."""
        return self.layer.last_solution

    @property
    def last_backward(self) -> LinearSolution | None:
        """How the last backward solve went."""
        return self.layer.last_backward


class ImagesGiven(nn.Module):
    """A few-shot classifier with its images fixed: stem, layer and head for `optimize_input`."""

    def __init__(self, model: FewShotClassifier, features: Tensor) -> None:
        super().__init__()
        self.stem = _TaskStem(model, features)
        self.layer = model.layer
        self.head = model.head

    def forward(self, tasks: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.stem(tasks)))
        return logits


class _TaskStem(nn.Module):
    """From task vectors to the injection, the features of the images at hand."""

    def __init__(self, model: FewShotClassifier, features: Tensor) -> None:
        super().__init__()
        self.conditioning = model.conditioning
        self.task_size = model.task_size
        self.features = features

    def forward(self, tasks: Tensor) -> Tensor:
        if tasks.shape != (len(self.features), self.task_size):
            raise ValueError(
                f"expected a task vector of {self.task_size} numbers for each of the "
                f"{len(self.features)} images, not a tensor of shape {tuple(tasks.shape)}"
            )
        injection: Tensor = self.conditioning(self.features, tasks)
        return injection


def few_shot_opteq(
    *,
    num_classes: int = 5,
    in_channels: int = 3,
    channels: int = 64,
    task_size: int = 320,
    stem_depth: int = 4,
    norm: Conv4Norm = "group",
    groups: int = 8,
    activation: str | Activation = "relu",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> FewShotClassifier:
    """y = σ(WWᵀy + FiLM(g(image)) + b), OptEq in y-space: it contracts whatever the task vector.

    The features g(image) are there once a class, and each copy is modulated on its own; W couples
    the copies. The head starts as the sum over each copy: a fresh model compares an image with
    what the task vector has of the classes. `stem_depth` strided convolutions halve the
    resolution each, one without a stride follows.

    norm: of the stem. "batch" uses the statistics of the support, and of the queries, of an episode
        together, as MAML's network does; "group" sees every image alone.
    """
    copies = num_classes * channels
    W = Conv2d(channels, copies, 3, norm="bound", zeta=zeta)
    initialize_small(W, init_scale)
    energy = Input(Identity(), torch.zeros(copies, 1, 1)) + Quadratic(W)
    head = PooledLinearHead(copies, num_classes)
    with torch.no_grad():
        blocks = torch.eye(num_classes).repeat_interleave(channels, dim=1)
        head.classifier.weight.copy_(blocks / channels**0.5)
    return FewShotClassifier(
        stem=nn.Sequential(
            StridedBlocks(in_channels, channels, stem_depth, norm=norm, groups=groups),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm_of_images(norm, channels, groups),
        ),
        conditioning=CopiesFiLM(task_size, channels, copies=num_classes),
        layer=EquilibriumLayer(
            energy,
            activation=activation,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=head,
        task_size=task_size,
        episode_statistics=norm == "batch",
    )


def few_shot_mdeq(
    *,
    num_classes: int = 5,
    in_channels: int = 3,
    channels: int | Sequence[int] = (64, 128),
    expansion: int = 5,
    head_channels: int = 32,
    final_channels: int = 256,
    task_size: int = 400,
    downsample: int = 1,
    activation: str | Activation = "relu",
    groups: int = 8,
    weight_norm: bool = True,
    init_gain: float = 0.05,
    feedback: float = 0.1,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> FewShotClassifier:
    """An MDEQ with FiLM on top of the first norm of its residual blocks (C.2, Table 9)."""
    widths = branch_channels(channels)
    cell = FiLMCell(
        widths,
        expansion=expansion,
        activation=activation,
        groups=groups,
        weight_norm=weight_norm,
        init_gain=init_gain,
        feedback=feedback,
    )
    return FewShotClassifier(
        stem=MDEQStem(in_channels, widths[0], downsample=downsample, norm="group", groups=groups),
        conditioning=PackedFiLM(task_size, cell.film_size),
        layer=EquilibriumLayer(
            cell=cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=MDEQHead(
            widths, head_channels, final_channels, num_classes, norm="group", groups=groups
        ),
        task_size=task_size,
    )
