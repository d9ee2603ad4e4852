"""Models with one equilibrium layer between a stem and a head, and the image classifier."""

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
    """Base class of hidden objectives (functions that equilibria minimize) for a cell's map T.

    The residual of a state y is ‖T(y) − y‖.

    Args:
        cell: Cell that defines T.
        context: Tensors that T reads besides the state: the result of the cell's `inject`.
    """

    def __init__(self, cell: C, context: Context) -> None:
        self.cell = cell
        self.context = context

    def residual(self, state: State) -> Tensor:
        return distance_per_sample(state, self.cell.step(state, self.context))


class EquilibriumModel(nn.Module):
    """Stem, equilibrium layer and head: output = head(z*), z* the equilibrium for stem(inputs).

    Args:
        stem: From the model's inputs to the arguments of the cell's `inject`: a tensor, or a tuple
            of tensors.
        layer: The equilibrium layer.
        head: From the feature z* to the output.

    Examples:
        >>> layer = eq.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * z + x))
        >>> model = eq.models.EquilibriumModel(torch.nn.Linear(2, 3), layer, torch.nn.Linear(3, 1))
        >>> model(torch.ones(4, 2)).shape, model.last_solution.converged.all()
        (torch.Size([4, 1]), tensor(True))
    """

    images: ImageSpec | None = None
    """Description of the images that the model expects; None if it is not known."""

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
        """Return the input of the equilibrium layer: the output of the stem for `inputs`."""
        injected: Inputs = self.stem(*inputs)
        return injected

    def features(self, *inputs: Any, start: State | None = None) -> Tensor:
        """Return the feature z*, the input of the head.

        Args:
            inputs: Inputs of the model.
            start: State at which the solve starts; by default the cell's initial state.
        """
        feature: Tensor = self.layer(self.injected(*inputs), start)
        return feature

    def solve(
        self,
        *inputs: Any,
        start: State | None = None,
        solver: str | Method | None = None,
        trace: bool | Literal["states"] = False,
        **options: Any,
    ) -> Solution:
        """Compute the equilibrium without gradients.

        Args:
            inputs: Inputs of the model.
            start: State at which the solve starts; by default the cell's initial state.
            solver: Solver or its name; by default the layer's.
            trace: True records the residuals of all iterations, "states" also the states.
            options: Other settings of this call, such as `max_iterations=1000` or `starts=8` (see
                `EquilibriumLayer.solve`).

        Returns:
            The state of each sample and whether it converged; `output` computes the model's output.
        """
        injected = self.injected(*inputs)
        return self.layer.solve(injected, start, solver=solver, trace=trace, **options)

    def output(self, solution: Solution) -> Tensor:
        """Return the output of the model at a solution; NaN for samples that diverged.

        Args:
            solution: Result of `solve`.
        """
        output: Tensor = self.head(self.layer.output(solution))
        return output

    def objective(self, *inputs: Any) -> Objective:
        """Return the hidden objective that the equilibrium minimizes, one problem per sample.

        Args:
            inputs: Inputs of the model.

        Raises:
            NoObjectiveError: If the cell has no objective.
        """
        return self.layer.objective(self.injected(*inputs))

    def contraction_bound(self, *inputs: Any) -> Tensor | None:
        """Return a proven upper bound on the contraction factor of the map.

        Args:
            inputs: Inputs of the model.

        Returns:
            One bound per sample, shape (B,), or None if the cell proves none.
        """
        return self.layer.contraction_bound(self.injected(*inputs))

    @property
    def last_solution(self) -> Solution | None:
        """Solution of the last forward pass; None before the first."""
        return self.layer.last_solution

    @property
    def last_backward(self) -> LinearSolution | None:
        """Solution of the linear system of the last backward pass; None before the first."""
        return self.layer.last_backward


M = TypeVar("M", bound=EquilibriumModel)


def in_float64(model: M) -> M:
    """Return a copy of `model` in float64 and evaluation mode, without gradients.

    Args:
        model: Model whose weights are copied. Weights in float32 are represented exactly.
    """

    def wide(tensor: Tensor) -> Tensor:
        values = tensor.detach()
        return values.to(torch.float64, copy=True) if values.is_floating_point() else values

    return twin(model, wide).eval()


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the class with the largest logit, or −1 if the logits have no softmax.

    A NaN or infinite logit must not count as a prediction: its argmax is an arbitrary class, which
    is correct for some samples.

    Args:
        logits: Logits with the classes in dimension 1, shape (B, classes, ...).

    Returns:
        Class indices, shape (B, ...).

    Examples:
        >>> from equilibria.models.base import predicted_classes
        >>> predicted_classes(torch.tensor([[0.1, 0.9], [float("nan"), 1.0]]))
        tensor([ 1, -1])
    """
    valid = logits.detach().logsumexp(dim=1).isfinite()
    return torch.where(valid, logits.detach().argmax(dim=1), -1)


class EquilibriumClassifier(EquilibriumModel):
    """Classifier logits = head(z*), z* the equilibrium for the input stem(image) (OptEq Eq. 5).

    Args:
        stem: From images (B, C, H, W) to the input of the cell (g in the papers).
        layer: The equilibrium layer.
        head: From the feature z* to the logits.

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
    """Build an image classifier around any cell: a convolutional stem, the cell, a linear head.

    Args:
        cell: Cell of the equilibrium layer.
        channels: Channels of the cell's input.
        head: Called with `(feature_channels, num_classes, pool=pool)` to make the head.
        feature_channels: Channels of the cell's output; by default `channels`.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        stem_depth: Number of 3×3 convolutions of the stem. With 0 there is no stem if
            `channels == in_channels`.
        stem_strides: How many of the first convolutions have stride 2.
        downsample: Side of the average pooling after the stem.
        recompute: Do not store the stem's activations in training; compute them again in the
            backward pass.
        pool: Side of the map that the head pools the feature to.
        solving: How the layer solves; by default `Solving()`.

    Returns:
        The classifier, for images of shape (B, in_channels, H, W).

    Raises:
        ValueError: If there is no stem but `downsample` or `stem_strides` is set.

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
        stem = ImageLayers(in_channels)
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
