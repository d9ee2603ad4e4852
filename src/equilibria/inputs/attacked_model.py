"""A model under attack: exact gradients in the images, and counts of evaluations."""

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
    """A model under attack, which counts evaluations.

    It counts evaluations of the map and vector-Jacobian products, each for the whole batch. For a
    model without an equilibrium layer it counts forward and backward passes.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model = model
        self.record = record
        self.layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        self.forward_passes = self.backward_passes = 0
        self.search_evaluations = self.search_vjps = 0
        """Evaluations by JIIO, in addition to forward and backward passes of the model."""

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
        """Return logits, losses, and the gradient of the loss of each sample in its image."""
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
    """Provide a copy of the model in evaluation mode, with exact gradients in its input.

    Approximate gradient rules (one step, phantom) are replaced by implicit ones, because an attack
    with a wrong gradient is weak and overestimates the robustness. The backward solve is as
    accurate as the forward one.

    Args:
        model: Model under attack; it is not changed.
        tolerance: Tolerance of the solves; None keeps the model's.
        warm_start: Start each forward and backward solve at the result of the previous one.
    """
    # Half precision is too coarse to detect convergence and to compare losses.
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.autocast(device, enabled=False), torch.inference_mode(False):
        model = as_constant(model, evaluating=True)
        start: Literal["last"] | None = "last" if warm_start else None
        with solving(model, start=start, record=True) as record:
            attacked = AttackedModel(model, record)
            for layer in attacked.layers:
                layer.solving = _exact(layer.solving.changed(tolerance=tolerance), warm_start)
            yield attacked


def _exact(settings: Solving, warm_start: bool) -> Solving:
    """Return the settings with an exact gradient rule."""
    rule = settings.gradient if settings.gradient.exact else Implicit()
    if isinstance(rule, Implicit):
        tolerance = max(rule.tolerance_with(settings.solver), settings.solver.tolerance)
        rule = replace(rule, tolerance=tolerance, warm_start=rule.warm_start or warm_start)
    return settings.changed(gradient=rule)
