"""A model while it is attacked: its exact gradient, and the count of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from equilibria.equilibrium import EquilibriumLayer, Solving, solving
from equilibria.equilibrium.solving import Record
from equilibria.gradients import Implicit
from equilibria.inputs.problem import as_constant


class AttackedModel:
    """A model that is under attack.

    Counted are calls for the whole batch: of the map and of products with its Jacobian; for a model
    without an equilibrium its forward and backward passes.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model = model
        self.record = record
        self.layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        self.forward_passes = self.backward_passes = 0
        self.search_evaluations = self.search_vjps = 0
        """What was computed beside the model's own passes, by JIIO."""

    @property
    def evaluations(self) -> int:
        solved = self.record.evaluations if self.layers else self.forward_passes
        return solved + self.search_evaluations

    @property
    def vjps(self) -> int:
        pulled = sum(solution.evaluations for solution in self.record.backward)
        return pulled + self.backward_passes + self.search_vjps

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        self.forward_passes += 1
        return logits

    def gradient(
        self, images: Tensor, loss: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, losses and the gradient of each sample's loss in its own image."""
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            logits = self.logits(leaf)
            losses = loss(logits)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        self.backward_passes += 1
        return logits.detach(), losses.detach(), gradient


@contextmanager
def under_attack(
    model: nn.Module, tolerance: float | None, warm_start: bool
) -> Iterator[AttackedModel]:
    """A twin of the model in evaluation mode, with exact gradients in its input alone.

    Gradient rules that are cheap approximations (one step, phantom) become implicit ones: an attack
    that follows a wrong gradient is weak, and takes a model for robust that is not. The backward
    solve is as accurate as the forward one.

    tolerance: of the solves; None leaves them their own.
    warm_start: start a solve, and its backward one, where the one before ended.
    """
    # Half precision cannot say when a solve has converged, nor which loss is larger.
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.autocast(device, enabled=False), torch.inference_mode(False):
        model = as_constant(model, evaluating=True)
        start: Literal["last"] | None = "last" if warm_start else None
        with solving(model, start=start, record=True) as record:
            attacked = AttackedModel(model, record)
            for layer in attacked.layers:
                layer.solving = _exact(layer.solving.changed(tolerance=tolerance), warm_start)
            yield attacked


def _exact(own: Solving, warm_start: bool) -> Solving:
    rule = own.gradient if own.gradient.exact else Implicit()
    if isinstance(rule, Implicit):
        tolerance = max(rule.tolerance_with(own.solver), own.solver.tolerance)
        rule = replace(rule, tolerance=tolerance, warm_start=rule.warm_start or warm_start)
    return own.changed(gradient=rule)
