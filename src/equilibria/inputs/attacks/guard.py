"""A model while it is attacked: its exact gradient, and nothing of it changed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Context, State, map_state
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import GradientRule, Implicit
from equilibria.solvers import Solver


@dataclass
class Effort:
    """What an attack computed, in calls for the whole batch.

    For a model without an equilibrium: its forward and backward passes.
    """

    evaluations: int = 0
    vjps: int = 0


class Guarded:
    """A model that is under attack, and the count of what it computes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.effort = Effort()
        self.layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        solves = (layer.last_solution for layer in self.layers)
        solved = [solution.evaluations for solution in solves if solution is not None]
        self.effort.evaluations += sum(solved) if solved else 1
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
        exact = (layer for layer in self.layers if isinstance(layer.gradient, Implicit))
        solves = (layer.last_backward for layer in exact)
        solved = [solution.evaluations for solution in solves if solution is not None]
        self.effort.vjps += sum(solved) + 1
        return logits.detach(), losses.detach(), gradient

    @contextmanager
    def cold(self) -> Iterator[None]:
        """Solves inside start where the cell does, whatever was solved before."""
        kept = [layer.start for layer in self.layers]
        for layer in self.layers:
            layer.start = None
        try:
            yield
        finally:
            for layer, start in zip(self.layers, kept, strict=True):
                layer.start = start


@dataclass(frozen=True)
class _Kept:
    """What a layer had before."""

    solver: Solver[Any]
    gradient: GradientRule
    start: State | None
    on_equilibrium: Callable[[Tensor, State, Context], None] | None


@contextmanager
def guarded(
    model: nn.Module, *, tolerance: float | None = None, warm_start: bool = False
) -> Iterator[Guarded]:
    """The model in evaluation mode, with exact gradients in its input alone.

    Gradient rules that are cheap approximations (one step, phantom) become implicit ones: an attack
    that follows a wrong gradient is weak, and takes a model for robust that is not. The backward
    solve is as accurate as the forward one. Whoever listens to the layers (a Jacobian penalty, warm
    starts of training) does not hear of the attack. Modes, parameters and layers are as before in
    the end. Layers of a model in training do not warn where they run out of iterations.

    tolerance: of the solves; None leaves them their own.
    warm_start: start a solve, and its backward one, where the one before ended.
    """
    held = Guarded(model)
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kept = [_Kept(m.solver, m.gradient, m.start, m.on_equilibrium) for m in held.layers]
    try:
        for module, training in modes:
            module.training = training and isinstance(module, EquilibriumLayer)
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        for layer in held.layers:
            layer.solver = replace(layer.solver, tolerance=tolerance or layer.solver.tolerance)
            layer.gradient = _exact(layer.gradient, layer.solver.tolerance, warm_start)
            layer.start = None
            layer.on_equilibrium = _remember(layer) if warm_start else None
        device = next((p.device.type for p, _ in wanted), "cpu")
        # Half precision cannot say when a solve has converged, nor which of two losses is larger.
        with torch.autocast(device, enabled=False), torch.inference_mode(False):
            yield held
    finally:
        for module, training in modes:
            module.training = training
        for parameter, needs in wanted:
            parameter.requires_grad_(needs)
        for layer, before in zip(held.layers, kept, strict=True):
            layer.solver, layer.gradient = before.solver, before.gradient
            layer.start, layer.on_equilibrium = before.start, before.on_equilibrium


def _exact(rule: GradientRule, tolerance: float, warm_start: bool) -> GradientRule:
    if not rule.exact:
        rule = Implicit()
    if not isinstance(rule, Implicit):
        return rule
    warm = rule.warm_start or warm_start
    return replace(rule, tolerance=max(rule.tolerance, tolerance), warm_start=warm)


def _remember(layer: EquilibriumLayer) -> Callable[[Tensor, State, Context], None]:
    def listen(_: Tensor, state: State, __: Context) -> None:
        layer.start = map_state(lambda tensor: tensor.detach(), state)

    return listen
