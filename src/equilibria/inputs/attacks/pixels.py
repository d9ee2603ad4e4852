"""A model of prepared images, as a model of pixels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from equilibria.context import State
from equilibria.equilibrium import EquilibriumLayer
from equilibria.solvers import Solution


class InPixels(nn.Module):
    """model(prepare(images)): an attack's budget and range are then those of the pixels.

    prepare: differentiable, sample by sample, such as a normalization.
    """

    def __init__(self, model: nn.Module, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.prepare = prepare
        self.train(model.training)

    def forward(self, images: Tensor, start: State | None = None) -> Tensor:
        prepared = self.prepare(images)
        logits: Tensor = self.model(prepared) if start is None else self.model(prepared, start)
        return logits

    def stem(self, images: Tensor) -> Tensor:
        feature: Tensor = self.model.stem(self.prepare(images))  # type: ignore[operator]
        return feature

    @property
    def layer(self) -> EquilibriumLayer:
        layer = self.model.layer
        assert isinstance(layer, EquilibriumLayer)
        return layer

    @property
    def head(self) -> nn.Module:
        head = self.model.head
        assert isinstance(head, nn.Module)
        return head

    @property
    def last_solution(self) -> Solution | None:
        """How the last forward solve went."""
        solution = getattr(self.model, "last_solution", None)
        return solution if isinstance(solution, Solution) else None
