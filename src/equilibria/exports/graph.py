"""Conversion of a model to a graph with fixed weights and a loop per equilibrium layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.compiled.fixed_weights import FixedWeightsError, fix_scales, fix_weights
from equilibria.compiled.lifted import lifted_step
from equilibria.context import Context, State
from equilibria.context.context import is_exporting
from equilibria.context.state import map_state, state_tensors, unflatten_state
from equilibria.equilibrium import Cell, EquilibriumLayer, capabilities
from equilibria.models import EquilibriumModel
from equilibria.operators.norm_control import KernelOperator
from equilibria.registry import check_at_least_one, check_tolerances
from equilibria.solvers.graph import GraphIteration, row_norms, run_loop, traced_loop


class ExportError(ValueError):
    """The model cannot be exported in this format; the message states the reason."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Iteration y ← T(y) of an exported graph.

    Each sample stops separately, so results do not depend on the rest of the batch.

    Args:
        tolerance: A sample stops when ‖T(y) − y‖ ≤ tolerance·‖T(y)‖; its state is then T(y).
        max_iterations: Iteration limit.
        unrolled: Fixed number of evaluations for all samples, without a loop; None for a loop.

    Examples:
        >>> from equilibria.exports.graph import Loop
        >>> Loop(tolerance=1e-5, max_iterations=100).unrolled is None
        True
    """

    tolerance: float = 3e-6
    max_iterations: int = 200
    unrolled: int | None = None

    def __post_init__(self) -> None:
        check_tolerances(tolerance=self.tolerance)
        check_at_least_one(max_iterations=self.max_iterations, unrolled=self.unrolled)


class LoopLayer(nn.Module):
    """Equilibrium layer in an exported graph."""

    def __init__(self, cell: Cell, loop: Loop) -> None:
        super().__init__()
        self.cell = cell
        self.loop = loop
        self.residual: Tensor | None = None
        """‖T(y) − y‖ of every sample in the last call, whose resulting state is T(y); 0 if the
        equilibrium has a closed form."""
        self.iterations: Tensor | None = None

    def forward(self, x: Tensor, start: State | None = None) -> Tensor:
        context = self.cell.inject(x)
        closed_form = capabilities.closed_form(self.cell)
        if closed_form is not None:
            state = closed_form(context)
            samples = state_tensors(state)[0].flatten(1)[:, 0]
            self.residual = torch.zeros_like(samples)
            self.iterations = torch.ones_like(samples, dtype=torch.int64)
            return self.cell.output(state, context)
        first = capabilities.first_image(self.cell, context)
        initial = self.cell.initial_state(x, context) if first is None else first
        solve = self._loop if self.loop.unrolled is None else self._unrolled
        state = solve(initial, context)
        return self.cell.output(state, context)

    def _loop(self, initial: State, context: Context) -> State:
        step, constants = lifted_step(self.cell, context, initial)
        iteration = GraphIteration(self.loop.tolerance, self.loop.max_iterations)
        state, self.residual, self.iterations = iteration.iterate(
            step,
            state_tensors(initial),
            constants,
            traced_loop if is_exporting() else run_loop,
        )
        return unflatten_state(initial, state)

    def _unrolled(self, state: State, context: Context) -> State:
        assert self.loop.unrolled is not None
        previous = state
        for _ in range(self.loop.unrolled):
            previous, state = state, self.cell.step(state, context)
        changes = map_state(torch.sub, state, previous)
        self.residual = row_norms(state_tensors(changes))
        self.iterations = torch.full_like(self.residual, self.loop.unrolled, dtype=torch.int64)
        return state


class ModelGraph(nn.Module):
    """Map from images to logits, residual and iterations.

    Residual and iterations are the maximum over the equilibrium layers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.model(images)
        loops = [module for module in self.model.modules() if isinstance(module, LoopLayer)]
        residuals = torch.stack([loop.residual for loop in loops if loop.residual is not None])
        counts = torch.stack([loop.iterations for loop in loops if loop.iterations is not None])
        return logits, residuals.amax(dim=0), counts.amax(dim=0)


@torch.no_grad()
def model_graph(model: nn.Module, probe: Tensor, loop: Loop, *, any_size: bool) -> ModelGraph:
    """Return a copy of a model as a graph with fixed weights, ready for export.

    Args:
        model: Equilibrium model.
        probe: One image, shape (1, C, H, W), which defines the image size.
        loop: Iteration of the equilibrium layers.
        any_size: Whether the graph must accept images of any size.

    Returns:
        A module from images to logits, residual and iterations.

    Raises:
        ExportError: If the model cannot be exported.

    Examples:
        >>> model, probe = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> from equilibria.exports.graph import Loop, model_graph
        >>> loop = Loop(unrolled=20)
        >>> graph = model_graph(model, probe, loop, any_size=False)
        >>> logits, residual, iterations = graph(probe)
        >>> logits.argmax()
        tensor(0)
    """
    check_supported(model)
    fixed = copy.deepcopy(model).eval()
    if any_size:
        _check_size_independent(fixed)
    try:
        fix_scales(fixed)
        fix_weights(fixed, lambda: fixed(probe))
    except FixedWeightsError as error:
        raise ExportError(str(error)) from error
    for parent in list(fixed.modules()):
        for name, child in parent.named_children():
            if isinstance(child, EquilibriumLayer):
                setattr(parent, name, LoopLayer(child.cell, loop))
    return ModelGraph(fixed.requires_grad_(False)).eval()


def check_supported(model: nn.Module) -> None:
    """Raise `ExportError` for models that a plain loop does not solve."""
    if not isinstance(model, EquilibriumModel):
        raise ExportError(
            f"{type(model).__name__} has no stem, equilibrium layer and head; only equilibrium "
            "models (OptEq, Deep OptEq, POptEqs, MOptEqs, GEQ, reflections) can be exported here. "
            "Use torch.export or torch.onnx directly for others"
        )
    for layer in model.modules():
        if not isinstance(layer, EquilibriumLayer):
            continue
        cell = type(layer.cell).__name__
        if layer.couples_batch:
            raise ExportError(
                f"{cell} couples the samples of a batch, but an exported graph stops each sample "
                "separately; train without the coupling regularizer (gamma: 0)"
            )
        if capabilities.refresh_until(layer.cell):
            raise ExportError(
                f"{cell} updates its signs or perturbations in the first iterations, so its map "
                "depends on the iterates; use sign='smooth' and pe='train'"
            )
        limit = layer.cell.limits.contraction
        if limit is None and capabilities.formula(layer.cell) is None:
            raise ExportError(
                f"{cell} has neither a proof that plain iterations converge nor an objective that "
                "they decrease; bound its norms (norm='bound'), or run it in PyTorch"
            )


def _check_size_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, KernelOperator) and module.norm and module.norm_depends_on_size:
            raise ExportError(
                f"the norm of {name} is bounded for images of one size, and its weights are scaled "
                "accordingly; export it for that size, or train with norm: null"
            )
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size not in (1, (1, 1)):
            raise ExportError(
                f"{name} pools to the size {module.output_size}, which cannot be exported for "
                "images of any size; export it for one size, or train with pool: 1"
            )
