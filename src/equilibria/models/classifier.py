"""An image classifier around one equilibrium layer."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from equilibria.context import State
from equilibria.equilibrium import EquilibriumLayer
from equilibria.equilibrium.objective import Objective
from equilibria.solvers import LinearSolution, Solution, Solver


class EquilibriumClassifier(nn.Module):
    """logits = head(z*), z* the feature at the equilibrium for the input g(image) (OptEq Eq. 5)."""

    def __init__(self, stem: nn.Module, layer: EquilibriumLayer, head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.layer = layer
        self.head = head

    def forward(self, images: Tensor, start: State | None = None) -> Tensor:
        logits: Tensor = self.head(self.features(images, start))
        return logits

    def features(self, images: Tensor, start: State | None = None) -> Tensor:
        """The feature z* that the head sees."""
        feature: Tensor = self.layer(self.stem(images), start)
        return feature

    def solve(
        self,
        images: Tensor,
        start: State | None = None,
        *,
        solver: str | Solver[Any] | None = None,
        trace: bool | Literal["states"] = False,
    ) -> Solution:
        """The equilibrium of each image, with its status; no gradients."""
        return self.layer.solve(self.stem(images), start, solver=solver, trace=trace)

    def objective(self, images: Tensor) -> Objective:
        """The hidden objective that the equilibrium of each image minimizes."""
        return self.layer.objective(self.stem(images))

    def contraction_bound(self, images: Tensor) -> Tensor | None:
        """A proven bound of the contraction factor of the map, for each image."""
        return self.layer.contraction_bound(self.stem(images))

    @property
    def last_solution(self) -> Solution | None:
        """How the last forward solve went."""
        return self.layer.last_solution

    @property
    def last_backward(self) -> LinearSolution | None:
        """How the last backward solve went."""
        return self.layer.last_backward
