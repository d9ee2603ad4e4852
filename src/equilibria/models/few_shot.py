"""Few-shot classifiers: an equilibrium network that a task vector tells what the classes are.

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021,
Appendices B.1 and C.2. The task vector acts by feature-wise linear modulation (Perez et al., "FiLM:
Visual Reasoning with a General Conditioning Layer", AAAI 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.context import Context
from equilibria.energies import Input, Quadratic
from equilibria.equilibrium import EquilibriumLayer, Solving
from equilibria.equilibrium.layer import Inputs
from equilibria.models.base import EquilibriumModel
from equilibria.models.baselines.plain import Conv4Norm, StridedBlocks, norm_of_images
from equilibria.models.blocks import PooledLinearHead, small
from equilibria.models.mdeq.cell import MDEQCell
from equilibria.models.mdeq.layers import CellNorm
from equilibria.models.mdeq.model import MDEQHead, MDEQStem
from equilibria.models.registry import with_options_of
from equilibria.operators import Conv2d, Dense, Identity, LinearOperator
from equilibria.registry import check_at_least_one


def modulate(features: Tensor, film: Tensor) -> Tensor:
    """(1 + γ) ⊙ features + β; `film` has γ and β side by side, a number a channel each."""
    gamma, beta = film[:, :, None, None].chunk(2, dim=1)
    return torch.addcmul(features + beta, features, gamma)


class CopiesFiLM(nn.Module):
    """The injection of a cell that knows no tasks: copies of the features, each modulated.

    The task vector is γ, orthogonally mixed, to begin with; β starts at 0.
    """

    def __init__(self, task_size: int, channels: int, *, copies: int) -> None:
        super().__init__()
        check_at_least_one(task_size=task_size)
        self.copies = copies
        self.film = nn.Linear(task_size, 2 * copies * channels)
        with torch.no_grad():
            gamma, beta = self.film.weight.chunk(2)
            nn.init.orthogonal_(gamma)
            beta.zero_()
            self.film.bias.zero_()

    def forward(self, features: Tensor, tasks: Tensor) -> Tensor:
        return modulate(features.repeat(1, self.copies, 1, 1), self.film(tasks))


class ClassesFiLM(nn.Module):
    """Copies of the features, one a class, each modulated by its own part of the task vector.

    All classes share the map from a part to γ and β, which is that of `CopiesFiLM` otherwise: to
    exchange two classes exchanges their parts. A copy is (height, width, channels).
    """

    def __init__(self, task_size: int, channels: int, *, copies: int) -> None:
        super().__init__()
        if task_size % copies:
            raise ValueError(
                f"a task vector of {task_size} numbers has no equal parts for {copies} classes: "
                f"make task_size a multiple of {copies}"
            )
        self.copies = copies
        self.one = CopiesFiLM(task_size // copies, channels, copies=1)

    def forward(self, features: Tensor, tasks: Tensor) -> Tensor:
        parts = tasks.reshape(len(tasks) * self.copies, tasks.shape[1] // self.copies)
        each: Tensor = self.one(features.repeat_interleave(self.copies, dim=0), parts)
        channels_last = each.movedim(1, -1)
        return channels_last.reshape(len(tasks), self.copies, *channels_last.shape[1:])


class ClassesHead(nn.Module):
    """The logit of a class is the same linear function of its own copy, its mean over pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, 1)
        nn.init.constant_(self.classifier.weight, channels**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features.mean(dim=(2, 3))).squeeze(2)
        return logits


class BranchesFiLM(nn.Module):
    """The inputs of a `FiLMCell`: the features, and γ and β of each branch's `sizes` numbers."""

    def __init__(self, task_size: int, sizes: Sequence[int]) -> None:
        super().__init__()
        check_at_least_one(task_size=task_size)
        self.sizes = list(sizes)
        self.film = nn.Linear(task_size, sum(sizes))

    def forward(self, features: Tensor, tasks: Tensor) -> tuple[Tensor, ...]:
        return features, *torch.split(self.film(tasks), self.sizes, dim=1)


class FilmedNorm(nn.Module):
    """A norm and the modulation of its branch."""

    def __init__(self, norm: CellNorm, branch: int) -> None:
        super().__init__()
        self.norm = norm
        self.branch = branch

    def forward(self, z: Tensor, context: Context) -> Tensor:
        return modulate(self.norm(z, context), context.several("film")[self.branch])


class FiLMCell(MDEQCell):
    """MDEQ's cell with FiLM on top of the first norm of every residual block (JIIO, C.2).

    Its inputs are those of `BranchesFiLM`: the features, and γ and β of each branch. All norms are
    group norms, so that no sample sees another.
    """

    def __init__(
        self, channels: int | Sequence[int], *, expansion: int = 5, **options: Any
    ) -> None:
        super().__init__(channels, expansion=expansion, norm="group", **options)
        self.sizes = [2 * expansion * width for width in self.channels]
        for branch, block in enumerate(self.blocks):
            block.inner_norm = FilmedNorm(block.inner_norm, branch)  # type: ignore[arg-type]

    def inject(self, x: Tensor, *film: Tensor) -> Context:
        shapes = [tuple(one.shape) for one in film]
        if shapes != [(len(x), size) for size in self.sizes]:
            raise ValueError(
                f"beside the features, γ and β of the branches have {self.sizes} numbers a sample, "
                f"not the shapes {shapes}: make them with BranchesFiLM"
            )
        return super().inject(x).with_sample(film=film)


class FewShotClassifier(EquilibriumModel):
    """logits = head(z*), z* = T(z*; image, task): h_θ(x, s) of Eq. 29.

    Which classes there are, and what they are called, is for the task vector x to say. It is
    optimized as an input: `for_images` gives a model of the task vectors alone.

    stem: from images to features; conditioning: from features and task vectors to the injection.
    episode_statistics: whether the stem normalizes by the images it gets, so that it must see the
        support and the queries of every episode by themselves.

    Examples:
        >>> from equilibria.models.few_shot import few_shot_opteq
        >>> model = few_shot_opteq(num_classes=3, in_channels=1, channels=8, task_size=12)
        >>> images = torch.rand(2, 1, 16, 16)
        >>> tasks = model.no_tasks(2, like=images)
        >>> model.for_images(images)(tasks).shape
        torch.Size([2, 3])
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
        super().__init__(stem, layer, head)
        self.conditioning = conditioning
        self.task_size = task_size
        self.episode_statistics = episode_statistics

    def injected(self, images: Tensor, tasks: Tensor | None = None) -> Inputs:
        """For images, each with its row of `tasks`, or with the task vector 0.

        Episodes, shape `(B, samples, C, H, W)`, are taken as B · samples images.
        """
        if tasks is None:
            tasks = self.no_tasks(images.shape[:-3].numel(), images)
        return self.for_images(images).injected(tasks)

    def for_images(self, images: Tensor) -> EquilibriumModel:
        """The model with its images fixed, as a function of one task vector an image."""
        if self.episode_statistics and images.dim() == 5 and len(images):
            features = torch.func.vmap(self.stem)(images).flatten(0, 1)
        else:
            features = self.stem(images.flatten(0, -4))
        return EquilibriumModel(_TaskStem(self, features), self.layer, self.head)

    def no_tasks(self, count: int, like: Tensor) -> Tensor:
        """Where every task starts: task vectors of zeros."""
        return torch.zeros(count, self.task_size, dtype=like.dtype, device=like.device)


class _TaskStem(nn.Module):
    """From task vectors to the injection, the features of the images at hand."""

    def __init__(self, model: FewShotClassifier, features: Tensor) -> None:
        super().__init__()
        self.conditioning = model.conditioning
        self.task_size = model.task_size
        self.features = features

    def forward(self, tasks: Tensor) -> Inputs:
        if tasks.shape != (len(self.features), self.task_size):
            raise ValueError(
                f"expected a task vector of {self.task_size} numbers for each of the "
                f"{len(self.features)} images, not a tensor of shape {tuple(tasks.shape)}"
            )
        injection: Inputs = self.conditioning(self.features, tasks)
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
    shared: bool = False,
    activation: str | Activation = "relu",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    solving: Solving | None = None,
) -> FewShotClassifier:
    """OptEq in y-space, y = σ(WWᵀy + FiLM(g(image)) + b); it contracts for every task vector.

    The features g(image) are there once a class, and each copy is modulated on its own; W couples
    the copies. The head starts as the sum over each copy: a fresh model compares an image with
    what the task vector has of the classes. `stem_depth` strided convolutions halve the
    resolution each, one without a stride follows.

    norm: of the stem. "batch" uses the statistics of the support, and of the queries, of an episode
        together, as MAML's network does; "group" sees every image alone.
    shared: all classes have the same weights, y_c = σ(WWᵀy_c + FiLM(g(image); x_c) + b) with W at
        every pixel and x_c a part of the task vector, and the logit of c is a function of y_c: what
        a class is called cannot matter.

    Examples:
        >>> from equilibria.models.few_shot import few_shot_opteq
        >>> model = few_shot_opteq(num_classes=3, in_channels=1, channels=8, task_size=12)
        >>> model.task_size
        12
    """
    W: LinearOperator
    head: ClassesHead | PooledLinearHead
    if shared:
        W, bias = Dense(channels, channels, norm="bound", zeta=zeta), torch.zeros(channels)
        head = ClassesHead(channels)
    else:
        copies = num_classes * channels
        W, bias = Conv2d(channels, copies, 3, norm="bound", zeta=zeta), torch.zeros(copies, 1, 1)
        head = PooledLinearHead(copies, num_classes)
        with torch.no_grad():
            blocks = torch.eye(num_classes).repeat_interleave(channels, dim=1)
            head.classifier.weight.copy_(blocks / channels**0.5)
    modulation = ClassesFiLM if shared else CopiesFiLM
    energy = Input(Identity(), bias) + Quadratic(small(W, init_scale))
    return FewShotClassifier(
        stem=nn.Sequential(
            StridedBlocks(in_channels, channels, stem_depth, norm=norm, groups=groups),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm_of_images(norm, channels, groups),
        ),
        conditioning=modulation(task_size, channels, copies=num_classes),
        layer=EquilibriumLayer(energy, activation=activation, solving=solving),
        head=head,
        task_size=task_size,
        episode_statistics=norm == "batch",
    )


@with_options_of(MDEQCell, without=("norm", "dropout"))
def few_shot_mdeq(
    *,
    num_classes: int = 5,
    in_channels: int = 3,
    channels: int | Sequence[int] = (64, 128),
    head_channels: int = 32,
    final_channels: int = 256,
    task_size: int = 400,
    downsample: int = 1,
    groups: int = 8,
    solving: Solving | None = None,
    **cell: Any,
) -> FewShotClassifier:
    """An MDEQ with FiLM on top of the first norm of its residual blocks (C.2, Table 9).

    Examples:
        >>> from equilibria.models.few_shot import few_shot_mdeq
        >>> model = few_shot_mdeq(in_channels=1, channels=(8, 16), task_size=6)
        >>> model(torch.rand(2, 1, 16, 16)).shape
        torch.Size([2, 5])
    """
    made = FiLMCell(channels, groups=groups, **cell)
    outer: dict[str, Any] = {"norm": "group", "groups": groups}
    return FewShotClassifier(
        stem=MDEQStem(in_channels, made.channels[0], downsample=downsample, **outer),
        conditioning=BranchesFiLM(task_size, made.sizes),
        layer=EquilibriumLayer(made, solving=solving),
        head=MDEQHead(made.channels, head_channels, final_channels, num_classes, **outer),
        task_size=task_size,
    )
