"""Models around one equilibrium layer, and how all image classifiers are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.twin import twin
from equilibria.equilibrium import Cell, EquilibriumLayer, Objective, Solving
from equilibria.equilibrium.layer import Inputs
from equilibria.equilibrium.objective import distance_per_sample
from equilibria.images import ImageSpec
from equilibria.models.blocks import ImageLayers, ImageStem, PooledLinearHead
from equilibria.models.non_finite import guard
from equilibria.solvers import Solution
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method

C = TypeVar("C", bound=Cell)


class MapObjective(Objective, Generic[C]):
    """The objective of a cell that is evaluated by means of the cell's own map."""

    def __init__(self, cell: C, context: Context) -> None:
        self.cell = cell
        self.context = context

    def residual(self, state: State) -> Tensor:
        return distance_per_sample(state, self.cell.step(state, self.context))


class EquilibriumModel(nn.Module):
    """head(z*), z* the feature at the equilibrium whose input the stem makes.

    The stem returns a tensor, or a tuple of them: what the cell's `inject` takes.

    Examples:
        >>> layer = eq.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * z + x))
        >>> model = eq.models.EquilibriumModel(torch.nn.Linear(2, 3), layer, torch.nn.Linear(3, 1))
        >>> model(torch.ones(4, 2)).shape, model.last_solution.converged.all()
        (torch.Size([4, 1]), tensor(True))
    """

    images: ImageSpec | None = None
    """Images that the model expects. `create_model(images=…)`, `load` and `train` set it."""

    def __init__(self, stem: nn.Module, layer: EquilibriumLayer, head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.layer = layer
        self.head = head
        guard(self)

    def forward(self, *inputs: Any, start: State | None = None) -> Tensor:
        output: Tensor = self.head(self.features(*inputs, start=start))
        return output

    def injected(self, *inputs: Any) -> Inputs:
        """What the equilibrium layer takes."""
        injected: Inputs = self.stem(*inputs)
        return injected

    def features(self, *inputs: Any, start: State | None = None) -> Tensor:
        """The feature z* that the head sees."""
        feature: Tensor = self.layer(self.injected(*inputs), start)
        return feature

    def solve(
        self,
        *inputs: Any,
        start: State | None = None,
        solver: str | Method | None = None,
        trace: bool | Literal["states"] = False,
    ) -> Solution:
        """The equilibrium of each sample, with its status; no gradients."""
        return self.layer.solve(self.injected(*inputs), start, solver=solver, trace=trace)

    def objective(self, *inputs: Any) -> Objective:
        """The hidden objective that the equilibrium of each sample minimizes."""
        return self.layer.objective(self.injected(*inputs))

    def contraction_bound(self, *inputs: Any) -> Tensor | None:
        """A proven bound of the contraction factor of the map, for each sample."""
        return self.layer.contraction_bound(self.injected(*inputs))

    @property
    def last_solution(self) -> Solution | None:
        """How the last forward solve went."""
        return self.layer.last_solution

    @property
    def last_backward(self) -> LinearSolution | None:
        """How the last backward solve went."""
        return self.layer.last_backward


M = TypeVar("M", bound=EquilibriumModel)


def in_float64(model: M) -> M:
    """Return a twin in float64 and evaluation mode, with the same numbers: float32 is exact there.

    Args:
        model: Model whose weights are copied.

    Returns:
        The twin; its parameters need no gradient.
    """

    def wide(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        return kept.to(torch.float64, copy=True) if kept.is_floating_point() else kept

    return twin(model, wide).eval()


def predicted_classes(logits: Tensor) -> Tensor:
    """The class with the largest logit (dimension 1); −1, "no answer", where there is none.

    Logits without a softmax (NaN, an infinite one) say nothing, and a maximum among them would be
    class 0 or any other: an answer that is right for some samples.

    Examples:
        >>> from equilibria.models.base import predicted_classes
        >>> predicted_classes(torch.tensor([[0.1, 0.9], [float("nan"), 1.0]]))
        tensor([ 1, -1])
    """
    answered = logits.detach().logsumexp(dim=1).isfinite()
    return torch.where(answered, logits.detach().argmax(dim=1), -1)


class EquilibriumClassifier(EquilibriumModel):
    """logits = head(z*), z* the feature at the equilibrium for the input g(image) (OptEq Eq. 5).

    Examples:
        >>> model = eq.create_model("opteq-small", in_channels=1)
        >>> images = torch.rand(2, 1, 8, 8)
        >>> model.features(images).shape, model.solve(images).converged
        (torch.Size([2, 32, 8, 8]), tensor([True, True]))
    """


def image_classifier(
    cell: Cell,
    channels: int,
    head: Callable[..., nn.Module] = PooledLinearHead,
    feature_channels: int | None = None,
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    stem_depth: int = 1,
    stem_strides: int = 0,
    downsample: int = 1,
    recompute: bool = False,
    pool: int = 2,
    solving: Solving | None = None,
) -> EquilibriumClassifier:
    """A classifier around any cell, whose input (and feature) has `channels` channels.

    The stem is an `ImageStem`; with stem_depth=0 a cell of the images' own channels takes them as
    they are. `recompute`: training keeps nothing of the stem, and computes it twice.
    The head is made by `head(feature_channels, num_classes, pool=pool)`.

    Examples:
        >>> from equilibria.models.opteq.spaces import opteq_cell
        >>> cell = opteq_cell(eq.Conv2d(8, 8, 3, norm="bound"), eq.Conv2d(8, 8, 3))
        >>> model = eq.models.image_classifier(cell, 8, num_classes=3, in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 3])
    """
    stem: nn.Module
    if stem_depth == 0 and channels == in_channels:
        if downsample != 1 or stem_strides:
            raise ValueError("downsample and stem_strides need a stem: set stem_depth to 1 or more")
        stem = ImageLayers(in_channels)  # none
    else:
        stem = ImageStem(
            in_channels,
            channels,
            depth=stem_depth,
            downsample=downsample,
            strides=stem_strides,
            recompute=recompute,
        )
    return EquilibriumClassifier(
        stem,
        EquilibriumLayer(cell, solving=solving),
        head(feature_channels or channels, num_classes, pool=pool),
    )
