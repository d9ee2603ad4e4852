"""Compiled backward solves of an equilibrium layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from equilibria.compiled.forward import converged_status
from equilibria.compiled.store import (
    GraphStore,
    padded,
    padded_size,
    padded_with_zeros,
    plain,
)
from equilibria.compiled.tracing import split, trace
from equilibria.context.state import batch_size, state_tensors, unflatten_state
from equilibria.gradients import GradientRule, Implicit, Symmetry
from equilibria.gradients.base import Backward
from equilibria.gradients.implicit import LinearSolver
from equilibria.gradients.local_step import LocalStep, StepRecipe
from equilibria.operators.norm_control import is_wrapped
from equilibria.solvers.graph import GraphIteration, GraphResult, conjugate_gradients, traced_loop
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method

MEMORY = 6
"""Number of points that the compiled linear solve of maps without symmetry mixes."""


@dataclass(frozen=True)
class CompiledImplicit(Implicit):
    """The rule `Implicit` with a compiled backward pass.

    Second derivatives, and systems that do not converge in the graph, are solved eagerly.

    Args:
        graphs: Graphs of the layer.
        tolerance, max_iterations, method, restart, warm_start: See `Implicit`.
    """

    graphs: GraphStore = field(default_factory=GraphStore)

    @classmethod
    def of(cls, rule: GradientRule, solver: Method, graphs: GraphStore) -> GradientRule:
        """Return the compiled form of a gradient rule; other rules than `Implicit` as they are.

        Args:
            rule: The rule.
            solver: Solver of the forward pass, which sets the tolerance unless the rule does.
            graphs: Where compiled graphs are kept.
        """
        if type(rule) is not Implicit or rule.warm_start or rule.method not in ("auto", "cg"):
            return rule
        options = {f.name: getattr(rule, f.name) for f in fields(rule)}
        options["tolerance"] = rule.tolerance_with(solver)
        return cls(graphs=graphs, **options)

    def linear_solver(
        self, rule: Implicit, recipe: StepRecipe, backward: Backward, epsilon: float
    ) -> LinearSolver:
        return CompiledLinearSolver(rule, recipe, backward, epsilon)


@dataclass(frozen=True)
class CompiledLinearSolver(LinearSolver):
    """Solves (I − Jᵀ) u = g and pulls u back to the inputs of the step, in one graph."""

    def pull_back_block(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor | None], LinearSolution]:
        pulled = self._in_graph(tensors, gradients, needed)
        return super().pull_back_block(tensors, gradients, needed) if pulled is None else pulled

    def _in_graph(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor | None], LinearSolution] | None:
        rule, recipe = self.rule, self.recipe
        assert isinstance(rule, CompiledImplicit)
        everything = [*tensors, *gradients]
        dtypes = {tensor.dtype for tensor in gradients}
        if any(map(is_wrapped, everything)) or not dtypes <= {torch.float32, torch.float64}:
            return None
        if torch.is_autocast_enabled(everything[0].device.type):
            return None
        samples = batch_size(recipe.state(tensors))
        couples = recipe.packing.couples_batch
        size = samples if couples else padded_size(samples)
        flags = recipe.is_per_sample()
        if size > samples:
            pairs = zip(tensors, flags, strict=True)
            tensors = [padded(t, size) if is_sample else t for t, is_sample in pairs]
            gradients = [padded_with_zeros(g, size) for g in gradients]
        inputs = [*tensors, *gradients]

        def build() -> tuple[fx.GraphModule, list[int]]:
            return pull_back_graph(recipe, rule, tensors, gradients, needed)

        key: Hashable = (
            (rule.tolerance, rule.max_iterations, tuple(needed), recipe.symmetry),
            rule.graphs.parts(recipe.cell).fingerprint(),
        )
        graph = rule.graphs.get("backward", key, size, inputs, build)
        if graph is None:
            return None
        *pulled, converged, residual, iterations = graph(inputs)
        if not bool(converged.all()):
            return None
        result: list[Tensor | None] = [None] * len(tensors)
        for place, gradient in zip(graph.notes, pulled, strict=True):
            result[place] = gradient[:samples] if flags[place] and size > samples else gradient
        rows = 1 if couples else samples
        assert rule.tolerance is not None
        solution = LinearSolution(
            value=residual.new_empty(0),
            status=converged_status(converged[:rows]),
            residual=residual[:rows],
            iterations=iterations[:rows],
            evaluations=int(iterations.max()),
            tolerance=rule.tolerance,
            method="compiled",
        )
        return result, solution


def pull_back_graph(
    recipe: StepRecipe,
    rule: Implicit,
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[fx.GraphModule, list[int]]:
    """Trace the backward pass, and return which of the saved tensors have a gradient."""
    tensors, gradients = plain(tensors), plain(gradients)
    recipe = replace(recipe, packing=replace(recipe.packing, samples=len(tensors[0])))
    vector = recipe.packing.pack(unflatten_state(recipe.state(tensors), gradients)).contiguous()
    count = len(tensors)
    places: list[int] = []

    def local(given: Sequence[Tensor]) -> LocalStep:
        return LocalStep(recipe, given, create_graph=False, through_argument=True)

    def product(flat: Tensor, *given: Tensor) -> Tensor:
        return local(given).transposed_product(flat)

    def pulled(flat: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        step = local(given)
        pieces = state_tensors(recipe.packing.unpack(flat))
        gradients = step.pull_back(pieces, needed)
        places[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return tuple(gradient for gradient in gradients if gradient is not None)

    def weight(*given: Tensor) -> tuple[Tensor, ...]:
        step = local(given)
        return () if step.weight is None or not step.at_argument else (step.weight,)

    parts = split(trace(product, vector, *tensors))
    jacobian: Callable[..., Tensor] = parts.finish
    adjoint = trace(pulled, vector, *tensors)
    weights = trace(weight, *tensors)
    is_weighted = len(weights(*tensors)) > 0

    def backward(*given: Tensor) -> tuple[Tensor, ...]:
        saved, cotangents = given[:count], given[count:]
        rhs = recipe.packing.pack(unflatten_state(recipe.state(saved), cotangents))
        constants = tuple(parts.prepare(*saved))
        scale = torch.linalg.vector_norm(rhs, dim=1)
        limits: dict[str, Any] = {
            "tolerance": rule.tolerance,
            "max_iterations": rule.max_iterations,
        }
        if is_weighted:
            # w = S^½u solves the symmetric (I − S^½HS^½) w = S^½g; see `LinearSolver`.
            root = weights(*saved)[0].sqrt()

            def symmetric(w: Tensor, c: Sequence[Tensor]) -> Tensor:
                return w - c[0] * jacobian(c[0] * w, *c[1:])

            result = conjugate_gradients(
                symmetric, rhs * root, scale, (root, *constants), traced_loop, **limits
            )
            result = result._replace(state=result.state * root)
        elif recipe.symmetry is Symmetry.PLAIN:

            def plainly(u: Tensor, c: Sequence[Tensor]) -> Tensor:
                return u - jacobian(u, *c)

            result = conjugate_gradients(plainly, rhs, scale, constants, traced_loop, **limits)
        else:
            result = _iterated(jacobian, rhs, scale, constants, limits)
        gradients = adjoint(result.state, *saved)
        return *gradients, result.converged, result.residual, result.iterations

    return trace(backward, *tensors, *gradients), places


def _iterated(
    product: Callable[..., Tensor],
    rhs: Tensor,
    scale: Tensor,
    constants: tuple[Tensor, ...],
    limits: dict[str, Any],
) -> GraphResult:
    """Solve u = g + Jᵀu by plain steps and Anderson acceleration."""

    def affine(u: Tensor, c: Sequence[Tensor]) -> Tensor:
        return c[0] + product(u, *c[1:])

    iteration = GraphIteration(memory=MEMORY, **limits)
    return iteration.solve(affine, rhs, (rhs, *constants), traced_loop, scale)
