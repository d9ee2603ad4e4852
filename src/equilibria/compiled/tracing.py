"""Tracing of tensor functions to graphs, and their compilation."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent.parent)
"""Folders whose lines are not the cause of a failed trace."""

Compiled = Callable[..., Sequence[Tensor]]


class NotInOneGraph(Exception):  # noqa: N818, because the user need not know
    """A model cannot be one graph; its layers are compiled separately."""


class TraceError(RuntimeError):
    """A function cannot be traced to a graph; the message names the line that prevents it."""


def trace(function: Callable[..., Any], *examples: Tensor) -> fx.GraphModule:
    """Record the operations of a function of tensors, for inputs like `examples`.

    Derivatives that the function computes by autograd become operations of the graph.

    Args:
        function: Function of tensors; it returns a tensor or a tuple of tensors.
        examples: Tensors whose shapes, strides and types the graph is made for.

    Raises:
        TraceError: If the function needs values of tensors.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Two inputs that are the same tensor would become one input of the graph.
    distinct = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in examples
    ]
    try:
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*distinct)
    except NotInOneGraph:
        raise
    except Exception as error:
        raise TraceError(f"{_line_of(error)}{type(error).__name__}: {error}") from error
    graph = _without_mutations(graph, distinct)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _without_mutations(graph: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """Replace operations in place by their functional forms."""
    from torch.fx.experimental.proxy_tensor import make_fx

    changes = (n for n in graph.graph.nodes if n.op == "call_function" and _is_in_place(n.target))
    if not any(changes):
        return graph
    functional = torch.func.functionalize(graph, remove="mutations")
    return make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def _is_in_place(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _line_of(error: BaseException) -> str:
    """Return the last line outside of PyTorch and this package that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(folder in path.parents for folder in LIBRARIES):
            return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}: "
    return ""


@dataclass(frozen=True)
class Split:
    """A graph f(x, constants) in two parts, so that a loop over x repeats only the second.

    Args:
        prepare: Computes what depends on the constants only, from them.
        finish: Computes the result from x and the tensors of `prepare`.
    """

    prepare: fx.GraphModule
    finish: fx.GraphModule


def split(graph: fx.GraphModule, changing: Sequence[int] = (0,)) -> Split:
    """Separate the operations that do not depend on certain inputs of a graph.

    Views and constants are repeated in both parts: the inputs of a loop must not share memory.

    Args:
        graph: The graph.
        changing: Positions of the inputs that change; they are the first of `finish`.
    """
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    (result,) = (node for node in graph.graph.nodes if node.op == "output")
    inputs = [node for node in nodes if node.op == "placeholder"]
    dependent = {inputs[i] for i in changing}
    for node in nodes:
        if any(argument in dependent for argument in node.all_input_nodes):
            dependent.add(node)
    repeated = {n for n in nodes if n not in dependent and (n.op == "get_attr" or _is_view(n))}
    used = set(result.all_input_nodes)
    for node in reversed(nodes):
        if node in dependent or (node in repeated and node in used):
            used.update(node.all_input_nodes)
    needed = [n for n in nodes if n in used and n not in dependent and n not in repeated]

    before = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in dependent:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(tuple(copies[node] for node in needed))
    before.eliminate_dead_code()

    after = fx.Graph()
    copies = {inputs[i]: after.placeholder(f"x_{i}") for i in changing}
    copies |= {node: after.placeholder(f"given_{i}") for i, node in enumerate(needed)}
    for node in nodes:
        if node not in copies and (node in dependent or (node in repeated and node in used)):
            copies[node] = after.node_copy(node, copies.__getitem__)
    after.output(fx.node.map_arg(result.args[0], copies.__getitem__))
    return Split(fx.GraphModule(graph, before), fx.GraphModule(graph, after))


def _is_view(node: fx.Node) -> bool:
    """Return whether the result of an operation shares memory with an input."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def lift_constants(graph: fx.GraphModule) -> tuple[Tensor, ...]:
    """Turn the tensors that a graph and its loops hold into further inputs; return them."""
    loops = [n for n in graph.graph.nodes if n.target is torch.ops.higher_order.while_loop]
    for node in loops:
        _lift_from_loop(graph, node)
    names = _held_tensors(graph)
    nodes = list(graph.graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"][-1]
    inputs: dict[str, fx.Node] = {}
    for name in names:
        with graph.graph.inserting_after(last):
            inputs[name] = last = graph.graph.placeholder(f"constant_{len(inputs)}")
    _replace_held(graph, inputs)
    return tuple(value.detach() for value in names.values())


def _held_tensors(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that are attributes of a graph, by name."""
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    held = {name: attrgetter(name)(graph) for name in sorted(names)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def _replace_held(graph: fx.GraphModule, inputs: Mapping[str, fx.Node]) -> None:
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and node.target in inputs:
            node.replace_all_uses_with(inputs[node.target])
            graph.graph.erase_node(node)
    for name in inputs:  # PyTorch would pass the buffers of a compiled graph as inputs, too
        delattr(graph, name)
    graph.recompile()


def _lift_from_loop(graph: fx.GraphModule, loop: fx.Node) -> None:
    """Turn the tensors that the body of a loop holds into constants of the loop."""
    condition, body = (getattr(graph, str(part.target)) for part in loop.args[:2])  # type: ignore[union-attr]
    held = _held_tensors(body)
    if not held:
        return
    given = []
    for name, value in held.items():
        attribute = f"{loop.name}{name}"
        graph.register_buffer(attribute, value, persistent=False)
        with graph.graph.inserting_before(loop):
            given.append(graph.graph.get_attr(attribute))
    inputs: dict[str, fx.Node] = {}
    for part in (condition, body):
        last = [node for node in part.graph.nodes if node.op == "placeholder"][-1]
        for name in held:
            with part.graph.inserting_after(last):
                last = part.graph.placeholder(f"held{name}")
            if part is body:
                inputs[name] = last
        part.recompile()
    _replace_held(body, inputs)
    *others, constants = loop.args
    loop.args = (*others, (*constants, *given))  # type: ignore[misc]


def compile_graph(graph: fx.GraphModule, examples: Sequence[Tensor]) -> tuple[Compiled, float]:
    """Compile a graph with TorchInductor.

    Args:
        graph: Graph with a tuple of tensors as its result.
        examples: Inputs with the shapes, strides and types of all later calls.

    Returns:
        The compiled function, and the seconds that the compilation took.
    """
    from torch._inductor import compile as inductor_compile

    begin = time.perf_counter()
    graph = _without_repetitions(graph)
    # With the Python wrapper, an iteration of a small map takes more than twice as long.
    function = inductor_compile(graph, list(examples), options={"cpp_wrapper": True})
    with torch.no_grad():
        function(*examples)  # the first call loads the library
    return function, time.perf_counter() - begin


def _without_repetitions(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with each repeated operation computed once."""
    from torch._functorch.compile_utils import fx_graph_cse

    result = fx_graph_cse(graph.graph)
    for node in result.nodes:
        if node.target is torch.ops.higher_order.while_loop:
            # The variables of a loop must not share memory.
            condition, body, variables, constants = node.args
            distinct: list[fx.Node] = []
            for variable in variables:
                if variable in distinct:
                    with result.inserting_before(node):
                        variable = result.call_function(torch.ops.aten.clone.default, (variable,))
                distinct.append(variable)
            node.args = (condition, body, tuple(distinct), constants)
    return fx.GraphModule(graph, result)
