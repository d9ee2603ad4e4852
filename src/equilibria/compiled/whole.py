"""One graph from the inputs of a model to its output, for inference."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from equilibria.compiled.fixed_weights import FixedWeightsError, fix_scales, fix_weights
from equilibria.compiled.forward import converged_status, graph_iteration
from equilibria.compiled.lifted import lifted_step
from equilibria.compiled.store import (
    Graph,
    GraphStore,
    Parts,
    Same,
    padded,
    padded_size,
)
from equilibria.compiled.tracing import NotInOneGraph, trace
from equilibria.context import Context, State
from equilibria.context.state import map_state, state_tensors, unflatten_state
from equilibria.context.twin import twin
from equilibria.equilibrium import EquilibriumLayer, capabilities
from equilibria.equilibrium.closed_form import METHOD, closed_form_solution
from equilibria.equilibrium.formats import usable
from equilibria.equilibrium.layer import Inputs, as_inputs
from equilibria.solvers.graph import traced_loop
from equilibria.solvers.solution import Solution

COUNTS = 4
"""Number of outputs of a graph for each layer: status, residual, absolute residual, iterations."""

NO_STATE, NO_CONTEXT = torch.empty(0), Context()


class GraphLayer(nn.Module):
    """Equilibrium layer in a graph of a whole model.

    Args:
        layer: Copy of the layer with fixed weights.
        source: The layer itself, whose limits on norms the copy no longer declares.
    """

    def __init__(self, layer: EquilibriumLayer, source: EquilibriumLayer) -> None:
        super().__init__()
        self.layer = layer
        self._source = (source,)  # in a tuple, so that it is not a submodule
        self.counts: tuple[Tensor, ...] = ()
        """Status, residual, absolute residual and iterations of each sample."""
        self.epsilon = 0.0

    def forward(self, x: Inputs, start: State | None = None) -> Tensor:
        (layer,), inputs = self._source, usable(as_inputs(x))
        cell = self.layer.cell
        random = layer.solving.starts > 1 or layer.solving.random_start is not None
        if random or capabilities.refresh_until(cell) or layer.couples_batch:
            raise NotInOneGraph
        context = cell.inject(*inputs)
        closed_form = capabilities.closed_form(cell)
        if closed_form is not None:
            state = closed_form(context)
            solution = closed_form_solution(layer.solving.solver, state, context)
            self.counts = (
                solution.converged,
                solution.residual,
                solution.absolute_residual,
                solution.iterations,
            )
            self.epsilon = solution.epsilon
            return cell.output(state, context)
        if start is None:
            start = capabilities.first_image(cell, context)
        if start is None:
            start = cell.initial_state(*inputs, context)
        start = map_state(lambda t: torch.nan_to_num(t.detach(), 0.0, 0.0, 0.0), start)
        problem = layer.problem_at(context, start)
        potential = problem.potential
        if potential is not None and not potential.is_convex:
            raise NotInOneGraph  # each solution is tested for a minimum
        iteration = graph_iteration(layer.solving.solver, problem, GraphStore())
        if isinstance(iteration, str):
            raise NotInOneGraph
        packing = problem.packing
        step, constants = lifted_step(cell, context, start)

        def evaluate(flat: Tensor, given: Sequence[Tensor]) -> Tensor:
            image = step(state_tensors(packing.unpack(flat)), given)
            return packing.pack(unflatten_state(start, image))

        result = iteration.solve(evaluate, packing.pack(start), constants, traced_loop)
        self.counts = (converged_status(result.converged), *result[2:])
        self.epsilon = problem.epsilon
        output: Tensor = cell.output(packing.unpack(result.state), context)
        return output


@dataclass(frozen=True)
class Plan:
    """A model as one graph, for inputs of certain shapes.

    Args:
        graph: From the inputs and the prepared tensors to the output.
        prepared: What the graph needs of the model's tensors.
        signature: Versions of the model's tensors from which that was computed.
    """

    graph: Graph
    prepared: Sequence[Tensor]
    signature: list[Hashable]


class WholeModel:
    """Graphs of a whole model in evaluation mode, one per shape of the inputs.

    Args:
        model: The model.
        graphs: Where compiled graphs are kept.
    """

    def __init__(self, model: nn.Module, graphs: GraphStore) -> None:
        self.model = model
        self.graphs = graphs
        self.layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        self._modules = list(model.modules())
        self._holders = [t for m in self._modules for t in (m._parameters, m._buffers)]
        self._plans: dict[Hashable, Plan | None] = {}

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        """Return the output of the model; None if it must be computed layer by layer."""
        samples = len(inputs[0])
        size = padded_size(samples)
        key = (size, *[(x.shape[1:], x.dtype, x.device) for x in inputs], *self._settings())
        plan = self._plans.get(key, self)
        signature = self._signature()
        if plan is self or (isinstance(plan, Plan) and plan.signature != signature):
            plan = self._plans[key] = self._plan(key, size, inputs, signature)
        if not isinstance(plan, Plan):
            return None
        given = inputs if size == samples else [padded(x, size) for x in inputs]
        output, summary, *counts = plan.graph(given, plan.prepared)
        is_sound, *evaluations = summary.tolist()
        if not is_sound:
            return None
        for i, layer in enumerate(self.layers):
            facts = counts[COUNTS * i : COUNTS * (i + 1)]
            if size > samples:
                facts = [t[:samples] for t in facts]
            layer.note_solution(_facts(layer, facts, evaluations[i], plan.graph.notes[i]))
        return output if size == samples else output[:samples]

    @property
    def is_training(self) -> bool:
        """Whether any part of the model is in training mode."""
        return any(module.training for module in self._modules)

    def _settings(self) -> list[Hashable]:
        """Python values that the graphs depend on."""
        return [Same(layer.solving) for layer in self.layers]

    def _signature(self) -> list[Hashable]:
        """Return the identity and the version of each tensor of the model."""
        signature: list[Hashable] = []
        for tensors in self._holders:
            for tensor in tensors.values():
                if tensor is not None:
                    signature.append(id(tensor))
                    signature.append(0 if tensor.is_inference() else tensor._version)
        return signature

    def _plan(
        self,
        key: Hashable,
        size: int,
        inputs: Sequence[Tensor],
        signature: list[Hashable],
    ) -> Plan | None:
        try:
            fixed = _fixed_copy(self.model, inputs)
        except (FixedWeightsError, NotInOneGraph):
            return None
        tensors = Parts(fixed).tensors()
        given = [padded(x, size) for x in inputs]

        def build() -> tuple[fx.GraphModule, list[float]]:
            return _model_graph(fixed, given, tensors)

        graph = self.graphs.get("model", key, size, [*given, *tensors], build, fixed=len(tensors))
        return None if graph is None else Plan(graph, graph.prepared_from(tensors), signature)


def _facts(
    layer: EquilibriumLayer, counts: Sequence[Tensor], evaluations: int, epsilon: float
) -> Solution:
    """Return the result of a layer's solve without its state."""
    status, residual, absolute, iterations = counts
    solver = layer.solving.solver
    return Solution(
        state=NO_STATE,
        status=status,
        residual=residual,
        absolute_residual=absolute,
        iterations=iterations,
        evaluations=evaluations,
        sample_evaluations=len(status) * evaluations,
        tolerance=solver.tolerance,
        solver=solver.method if capabilities.closed_form(layer.cell) is None else METHOD,
        epsilon=epsilon,
        context=NO_CONTEXT,
    )


@torch.no_grad()
def _fixed_copy(model: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """Return a copy of a model with fixed weights and with its layers replaced."""
    fixed = copy.deepcopy(model)
    sources = dict(zip(fixed.modules(), model.modules(), strict=True))
    fix_scales(fixed)
    fix_weights(fixed, lambda: fixed(*(x[:1] for x in inputs)))
    if isinstance(fixed, EquilibriumLayer):
        return GraphLayer(fixed, sources[fixed])  # type: ignore[arg-type]
    for parent in list(fixed.modules()):
        for name, child in parent.named_children():
            if isinstance(child, EquilibriumLayer):
                setattr(parent, name, GraphLayer(child, sources[child]))  # type: ignore[arg-type]
    return fixed


def _model_graph(
    fixed: nn.Module, inputs: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[float]]:
    """Trace a model as a function of its inputs and its tensors."""
    epsilons: list[float] = []

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        moved = dict(zip(map(id, tensors), given[len(inputs) :], strict=True))
        model = twin(fixed, lambda tensor: moved.get(id(tensor), tensor))
        # `forward` instead of a call: the checks of non-finite values read numbers.
        output = model.forward(*given[: len(inputs)])
        if not isinstance(output, Tensor):
            raise NotInOneGraph
        layers = [module for module in model.modules() if isinstance(module, GraphLayer)]
        epsilons[:] = [layer.epsilon for layer in layers]
        counts = [tensor for layer in layers for tensor in layer.counts]
        is_sound = torch.isfinite(given[0].sum())
        for layer in layers:
            is_sound = is_sound & (layer.counts[0] == 0).all()
        evaluations = [layer.counts[3].max() for layer in layers]
        return output, torch.stack([is_sound.to(torch.int64), *evaluations]), *counts

    return trace(run, *inputs, *tensors), epsilons
