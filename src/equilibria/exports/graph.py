"""A model as one graph: its weights as they act, and each equilibrium as a loop that stops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Context, State, is_exporting, map_state, state_tensors
from equilibria.context.state import unflatten_state
from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.kernel_scale import TYPICAL_EXPONENT, FixedScale, RunningScale
from equilibria.equilibrium import Cell, EquilibriumLayer, capabilities
from equilibria.models import EquilibriumModel
from equilibria.operators.norm_control import KernelOperator
from equilibria.registry import check_at_least_one, check_tolerances

SMALLEST = 1e-30
"""Of the size that a residual is divided by."""


class ExportError(ValueError):
    """The model cannot be written in this format, and why."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How the graph iterates y ← T(y), sample by sample.

    A sample stops where ‖T(y) − y‖ ≤ tolerance·‖T(y)‖, and keeps its T(y): what else is in its
    batch does not matter. `unrolled`: so many evaluations instead, for all, without a loop.

    Examples:
        >>> eq.exports.Loop(tolerance=1e-5, max_iterations=100).unrolled is None
        True
    """

    tolerance: float = 3e-6
    max_iterations: int = 200
    unrolled: int | None = None

    def __post_init__(self) -> None:
        check_tolerances(tolerance=self.tolerance)
        check_at_least_one(max_iterations=self.max_iterations, unrolled=self.unrolled)


class LoopLayer(nn.Module):
    """An equilibrium layer as a graph has it."""

    def __init__(self, cell: Cell, loop: Loop) -> None:
        super().__init__()
        self.cell = cell
        self.loop = loop
        self.residual: Tensor | None = None
        """‖T(y) − y‖ of every sample in the last call; T(y) is the state that counts."""
        self.iterations: Tensor | None = None

    def forward(self, x: Tensor, start: State | None = None) -> Tensor:
        context = self.cell.inject(x)
        first = capabilities.first_image(self.cell, context)
        begin = self.cell.initial_state(x, context) if first is None else first
        solve = self._looped if self.loop.unrolled is None else self._unrolled
        state = solve(begin, context)
        return self.cell.output(state, context)

    def _looped(self, begin: State, context: Context) -> State:
        from torch._higher_order_ops.while_loop import while_loop

        like = state_tensors(begin)[0]
        limit, tolerance = self.loop.max_iterations, self.loop.tolerance

        def goes_on(count: Tensor, runs: Tensor, *_: Tensor) -> Tensor:
            return runs.any() & (count < limit)

        def once(
            count: Tensor, runs: Tensor, residual: Tensor, iterations: Tensor, *state: Tensor
        ) -> tuple[Tensor, ...]:
            before = unflatten_state(begin, state)
            image = self.cell.step(before, context)
            change = _size(map_state(torch.sub, image, before))
            is_close = change <= tolerance * _size(image).clamp_min(SMALLEST)
            kept = map_state(
                lambda new, old: torch.where(_rows(runs, new), new, old), image, before
            )
            return (
                count + 1,
                runs & ~is_close,
                torch.where(runs, change, residual),
                iterations + runs,
                *(tensor.contiguous() for tensor in state_tensors(kept)),
            )

        samples = like.flatten(1)[:, 0]
        started: tuple[Tensor, ...] = (
            torch.zeros((), dtype=torch.int64),
            torch.ones_like(samples, dtype=torch.bool),
            torch.full_like(samples, torch.inf),
            torch.zeros_like(samples, dtype=torch.int64),
            *(tensor.clone().contiguous() for tensor in state_tensors(begin)),
        )
        if is_exporting():
            started = while_loop(goes_on, once, started)  # type: ignore[no-untyped-call]
        else:
            while bool(goes_on(*started)):
                started = once(*started)
        _, _, self.residual, self.iterations, *state = started
        return unflatten_state(begin, state)

    def _unrolled(self, state: State, context: Context) -> State:
        assert self.loop.unrolled is not None
        before = state
        for _ in range(self.loop.unrolled):
            before, state = state, self.cell.step(state, context)
        self.residual = _size(map_state(torch.sub, state, before))
        self.iterations = torch.full_like(self.residual, self.loop.unrolled, dtype=torch.int64)
        return state


def _size(state: State) -> Tensor:
    """‖·‖ of each sample."""
    squares = [tensor.flatten(1).square().sum(dim=1) for tensor in state_tensors(state)]
    return torch.stack(squares).sum(dim=0).sqrt()


def _rows(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (like.dim() - 1))


class ModelGraph(nn.Module):
    """images ↦ (logits, residual, iterations); of several equilibria the largest of each counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.model(images)
        loops = [part for part in self.model.modules() if isinstance(part, LoopLayer)]
        residuals = torch.stack([loop.residual for loop in loops if loop.residual is not None])
        counts = torch.stack([loop.iterations for loop in loops if loop.iterations is not None])
        return logits, residuals.amax(dim=0), counts.amax(dim=0)


@torch.no_grad()
def model_graph(model: nn.Module, probe: Tensor, loop: Loop, *, any_size: bool) -> ModelGraph:
    """The graph of a model for images like the probe, of any size if asked; it is a copy.

    Examples:
        >>> model, probe = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> loop = eq.exports.Loop(unrolled=20)
        >>> graph = eq.exports.model_graph(model, probe, loop, any_size=False)
        >>> logits, residual, iterations = graph(probe)
        >>> logits.argmax()
        tensor(0)
    """
    refuse_unknown(model)
    fixed = copy.deepcopy(model).eval()
    if any_size:
        _refuse_sizes(fixed)
    _fix_scales(fixed)
    _fix_weights(fixed, lambda: fixed(probe))
    for parent in list(fixed.modules()):
        for name, child in parent.named_children():
            if isinstance(child, EquilibriumLayer):
                setattr(parent, name, LoopLayer(child.cell, loop))
    return ModelGraph(fixed.requires_grad_(False)).eval()


def refuse_unknown(model: nn.Module) -> None:
    """A clear error for models whose equilibrium a plain loop does not find."""
    if not isinstance(model, EquilibriumModel):
        raise ExportError(
            f"{type(model).__name__} has no stem, equilibrium layer and head: export is for "
            "equilibrium models (OptEq, Deep OptEq, POptEqs, MOptEqs, GEQ, reflections); others go "
            "through torch.export and torch.onnx as they are"
        )
    for layer in model.modules():
        if not isinstance(layer, EquilibriumLayer):
            continue
        what = type(layer.cell).__name__
        if layer.couples_batch:
            raise ExportError(
                f"{what} couples the samples of a batch, which a graph that stops each sample on "
                "its own cannot hold: train without that regularizer (gamma: 0)"
            )
        if capabilities.refresh_until(layer.cell):
            raise ExportError(
                f"{what} renews its signs or perturbations in the first iterations, so that its "
                "map depends on where they went: use sign='smooth' and pe='train'"
            )
        limit = layer.cell.limits.contraction
        if limit is None and capabilities.formula(layer.cell) is None:
            raise ExportError(
                f"nothing proves that a plain iteration of {what} converges, and it has no "
                "objective that would fall: bound its norms (norm='bound'), or run it in PyTorch"
            )


def _refuse_sizes(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, KernelOperator) and part.norm and part.norm_depends_on_size:
            raise ExportError(
                f"the norm of {name} is bounded for images of one size, and its weights are scaled "
                "with it: export it for that size, or train with norm: null"
            )
        if isinstance(part, nn.AdaptiveAvgPool2d) and part.output_size not in (1, (1, 1)):
            raise ExportError(
                f"{name} pools to {part.output_size} places, which no graph knows for every size: "
                "export it for one size, or train with pool: 1"
            )


def _fix_scales(model: nn.Module) -> None:
    """γ of Gaussian kernels as a number."""
    for part in model.modules():
        if isinstance(part, GaussianKernel) and isinstance(part.scale, RunningScale):
            energy = float(part.scale.patch_energy)
            if not energy > 0:
                raise ExportError("γ of its kernel has seen no data yet: train the model first")
            part.scale = FixedScale(TYPICAL_EXPONENT / energy)


def _fix_weights(model: nn.Module, run: Callable[[], Any]) -> None:
    """Operators whose norm is controlled hold the weights that act, found once for all images."""
    seen: dict[KernelOperator, list[tuple[Tensor, ...]]] = {}
    for operator in model.modules():
        if isinstance(operator, KernelOperator) and operator.norm is not None:
            seen[operator] = []
            operator.weights = _noting(operator.weights, seen[operator])  # type: ignore[method-assign]
    run()
    for operator, found in seen.items():
        del operator.weights
        if any(not torch.equal(one[0], found[0][0]) for one in found):
            raise ExportError(
                f"{operator} acts on maps of several sizes, with other weights on each: it cannot "
                "be written as one"
            )
        for name, weight in zip(operator.kernel_names, found[0] if found else (), strict=False):
            setattr(operator, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
        operator.norm = None


def _noting(weights: Callable[..., Any], into: list[Any]) -> Callable[..., Any]:
    def noted(*shape: Any) -> Any:
        into.append(weights(*shape))
        return into[-1]

    return noted
