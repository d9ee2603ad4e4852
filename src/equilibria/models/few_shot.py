"""Few-shot classifiers: equilibrium networks conditioned on a task vector that encodes the classes.

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021,
Appendices B.1 and C.2. The conditioning is feature-wise linear modulation (Perez et al., "FiLM:
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
    """Modulate feature maps per channel: return (1 + γ) ⊙ features + β (FiLM).

    Args:
        features: Maps, shape (B, C, H, W).
        film: γ and β, concatenated, shape (B, 2C).
    """
    gamma, beta = film[:, :, None, None].chunk(2, dim=1)
    return torch.addcmul(features + beta, features, gamma)


class CopiesFiLM(nn.Module):
    """Injection for a cell without task inputs: modulated copies of the features.

    Initially γ is an orthogonal map of the task vector, and β is 0.

    Args:
        task_size: Length of the task vector.
        channels: Channels of the features.
        copies: Number of copies, one per class.
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
    """One copy of the features per class, each modulated by a separate part of the task vector.

    All classes share the map from a part to γ and β, so exchanging two classes exchanges their
    parts. The output has shape (B, copies, H, W, C).

    Args:
        task_size: Length of the task vector, a multiple of `copies`.
        channels: Channels of the features.
        copies: Number of classes.
    """

    def __init__(self, task_size: int, channels: int, *, copies: int) -> None:
        super().__init__()
        if task_size % copies:
            raise ValueError(
                f"task_size must be a multiple of the {copies} classes, which all get a part of "
                f"the same length, got {task_size}"
            )
        self.copies = copies
        self.one = CopiesFiLM(task_size // copies, channels, copies=1)

    def forward(self, features: Tensor, tasks: Tensor) -> Tensor:
        parts = tasks.reshape(len(tasks) * self.copies, tasks.shape[1] // self.copies)
        copies: Tensor = self.one(features.repeat_interleave(self.copies, dim=0), parts)
        channels_last = copies.movedim(1, -1)
        return channels_last.reshape(len(tasks), self.copies, *channels_last.shape[1:])


class ClassesHead(nn.Module):
    """One linear function from the mean over the pixels of each copy to the logit of its class."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, 1)
        nn.init.constant_(self.classifier.weight, channels**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features.mean(dim=(2, 3))).squeeze(2)
        return logits


class BranchesFiLM(nn.Module):
    """The inputs of a `FiLMCell`: the features, and scales γ and shifts β for each branch.

    Args:
        task_size: Length of the task vector.
        sizes: Length of γ and β together, one number per branch.
    """

    def __init__(self, task_size: int, sizes: Sequence[int]) -> None:
        super().__init__()
        check_at_least_one(task_size=task_size)
        self.sizes = list(sizes)
        self.film = nn.Linear(task_size, sum(sizes))

    def forward(self, features: Tensor, tasks: Tensor) -> tuple[Tensor, ...]:
        return features, *torch.split(self.film(tasks), self.sizes, dim=1)


class FilmedNorm(nn.Module):
    """A norm followed by the modulation of its branch."""

    def __init__(self, norm: CellNorm, branch: int) -> None:
        super().__init__()
        self.norm = norm
        self.branch = branch

    def forward(self, z: Tensor, context: Context) -> Tensor:
        return modulate(self.norm(z, context), context.several("film")[self.branch])


class FiLMCell(MDEQCell):
    """MDEQ's cell with FiLM after the first norm of every residual block (JIIO, C.2).

    Its inputs are the outputs of `BranchesFiLM`. All norms are group norms, so that samples are
    independent.

    Args:
        channels: Channels of each branch, the finest first.
        expansion: Ratio of the inner width of a residual block to its channels.
        options: Options of `MDEQCell`.
    """

    def __init__(
        self, channels: int | Sequence[int], *, expansion: int = 5, **options: Any
    ) -> None:
        super().__init__(channels, expansion=expansion, norm="group", **options)
        self.sizes = [2 * expansion * width for width in self.channels]
        for branch, block in enumerate(self.blocks):
            block.inner_norm = FilmedNorm(block.inner_norm, branch)  # type: ignore[arg-type]

    def inject(self, x: Tensor, *film: Tensor) -> Context:
        shapes = [tuple(tensor.shape) for tensor in film]
        if shapes != [(len(x), size) for size in self.sizes]:
            raise ValueError(
                f"γ and β of the branches must have shapes (batch, size) with sizes {self.sizes}, "
                f"got {shapes}; compute them with BranchesFiLM"
            )
        return super().inject(x).with_sample(film=film)


class FewShotClassifier(EquilibriumModel):
    """Classifier logits = head(z*), z* = T(z*; image, task): h_θ(x, s) of JIIO's Eq. 29.

    The task vector encodes the classes and their order. It is optimized as an input: `for_images`
    returns a model of the task vectors alone.

    Args:
        stem: From images to features.
        conditioning: From features and task vectors to the injection.
        layer: The equilibrium layer.
        head: From the feature z* to the logits.
        task_size: Length of the task vector.
        episode_statistics: Whether the stem normalizes with statistics of the images it receives.
            It then processes the images of each episode separately.

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
        """Return the input of the equilibrium layer.

        Args:
            images: Images (B, C, H, W), or episodes (B, samples, C, H, W), which count as
                B · samples images.
            tasks: Task vectors, one row per image; by default zeros.
        """
        if tasks is None:
            tasks = self.no_tasks(images.shape[:-3].numel(), images)
        return self.for_images(images).injected(tasks)

    def for_images(self, images: Tensor) -> EquilibriumModel:
        """Return a model whose input is the task vectors, for fixed images.

        A task vector encodes the classes of a task and their order. The stem processes the images
        once; calling the model with task vectors (one per image) then gives the logits of the
        images.

        Args:
            images: Images (B, C, H, W), or episodes (B, samples, C, H, W), which count as
                B · samples images.
        """
        if self.episode_statistics and images.dim() == 5 and len(images):
            features = torch.func.vmap(self.stem)(images).flatten(0, 1)
        else:
            features = self.stem(images.flatten(0, -4))
        return EquilibriumModel(_TaskStem(self, features), self.layer, self.head)

    def no_tasks(self, count: int, like: Tensor) -> Tensor:
        """Return task vectors of zeros, the initial point for every task.

        Args:
            count: Number of task vectors.
            like: Tensor whose dtype and device they get.
        """
        return torch.zeros(count, self.task_size, dtype=like.dtype, device=like.device)


class _TaskStem(nn.Module):
    """From task vectors to the injection, for fixed features."""

    def __init__(self, model: FewShotClassifier, features: Tensor) -> None:
        super().__init__()
        self.conditioning = model.conditioning
        self.task_size = model.task_size
        self.features = features

    def forward(self, tasks: Tensor) -> Inputs:
        if tasks.shape != (len(self.features), self.task_size):
            raise ValueError(
                f"expected one task vector of {self.task_size} numbers for each of the "
                f"{len(self.features)} images, got a tensor of shape {tuple(tasks.shape)}"
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
    """Build a few-shot classifier from an OptEq whose input is modulated by the task vector.

    The map is y ↦ σ(WWᵀy + FiLM(g(image)) + b), with features g(image).

    The map is a contraction for every task vector. There is one modulated copy of the features
    g(image) per class, and W couples the copies. The head is initialized as the sum over each copy,
    so an untrained model compares the features of an image with the task vector's part of each
    class.

    Args:
        num_classes: Number of classes of an episode.
        in_channels: Channels of the images.
        channels: Channels of the features g(image), and of each copy.
        task_size: Length of the task vector.
        stem_depth: Number of convolutions of stride 2 in the stem; one of stride 1 follows.
        norm: Norm of the stem. "batch" uses the statistics of all images of the support, or of the
            queries, as the network of MAML does; "group" normalizes every image alone.
        groups: Groups of a group norm.
        shared: Share all weights between the classes: y_c = σ(WWᵀy_c + FiLM(g(image); x_c) + b)
            with a pixelwise W, x_c a part of the task vector, and the logit of class c a function
            of y_c. The order of the classes then has no influence.
        activation: σ.
        zeta: Upper bound on ‖W‖.
        init_scale: Factor of W's initial weights.
        solving: How the layer solves.

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
    """Build a few-shot classifier from an MDEQ with FiLM in its residual blocks (JIIO, Table 9).

    Args:
        num_classes: Number of classes of an episode.
        in_channels: Channels of the images.
        channels: Channels of each branch, the finest first.
        head_channels: Width of the head's first bottleneck.
        final_channels: Channels of the pooled feature.
        task_size: Length of the task vector.
        downsample: Factor by which the stem reduces the resolution: 1, 2 or 4.
        groups: Groups of the group norms.
        solving: How the layer solves.
        cell: Options of `MDEQCell`.

    Examples:
        >>> from equilibria.models.few_shot import few_shot_mdeq
        >>> model = few_shot_mdeq(in_channels=1, channels=(8, 16), task_size=6)
        >>> model(torch.rand(2, 1, 16, 16)).shape
        torch.Size([2, 5])
    """
    film_cell = FiLMCell(channels, groups=groups, **cell)
    widths = film_cell.channels
    outer: dict[str, Any] = {"norm": "group", "groups": groups}
    return FewShotClassifier(
        stem=MDEQStem(in_channels, widths[0], downsample=downsample, **outer),
        conditioning=BranchesFiLM(task_size, film_cell.sizes),
        layer=EquilibriumLayer(film_cell, solving=solving),
        head=MDEQHead(widths, head_channels, final_channels, num_classes, **outer),
        task_size=task_size,
    )
