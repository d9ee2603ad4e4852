"""Matrix products and convolutions of graphs by kernels that are compiled into them.

PyTorch's libraries are made for large problems: a call of oneDNN takes about 10 µs, a convolution
of one small image 20 µs, and MKL takes twice as long on processors of other vendors.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from equilibria.compiled.kernels import SOURCE

COLUMNS = 16
"""Columns and output channels must be divisible by this number, a multiple of all vector sizes."""

LARGEST_WEIGHT = 2**17
"""Products with larger weights are left to PyTorch: the kernels need them to stay in the cache."""

aten = torch.ops.aten

VIEWS = (aten.t.default, aten.permute.default, aten.transpose.int, aten.view.default)

LOOP = torch.ops.higher_order.while_loop


def use_kernels(graph: fx.GraphModule) -> None:
    """Replace matrix products and convolutions in a graph and in its loops.

    The weights' layouts are changed outside of the loops.

    Args:
        graph: Graph with the example values that PyTorch notes during a trace; it is changed.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    if not pick_vec_isa():  # the kernels are written with PyTorch's vector types
        return
    for loop in graph.graph.find_nodes(op="call_function", target=LOOP):
        LoopWeights(graph, loop).use_kernels()
    _replace(graph.graph, lambda weight, pack: pack(graph.graph, weight))
    graph.recompile()


Pack = Callable[[fx.Graph, fx.Node], fx.Node]
"""Adds the operations to a graph that bring a weight to the layout of a kernel."""

Prepare = Callable[[fx.Node, Pack], fx.Node | None]
"""Returns a packed weight; None if that would cost more than it saves."""


def _replace(graph: fx.Graph, prepare: Prepare) -> None:
    """Replace the products and convolutions of one graph, given how weights are prepared."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.mm.default, aten.addmm.default):
            _replace_product(graph, node, prepare)
        elif node.target is aten.convolution.default:
            _replace_convolution(graph, node, prepare)


def _replace_product(graph: fx.Graph, node: fx.Node, prepare: Prepare) -> None:
    *bias, left, right = _arguments(node)
    a, b = _suitable(left), _suitable(right)
    if node.kwargs or a is None or b is None:
        return
    if b.shape[1] % COLUMNS or b.numel() > LARGEST_WEIGHT:
        return
    with graph.inserting_before(node):
        weight = right if b.is_contiguous() else prepare(right, _contiguous)
        if weight is None:
            return
        result = graph.call_function(operators().product, (left, weight))
        if bias:
            result = graph.call_function(aten.add.Tensor, (result, bias[0]))
    _substitute(graph, node, result)


def _replace_convolution(graph: fx.Graph, node: fx.Node, prepare: Prepare) -> None:
    x, kernel, bias, stride, padding, dilation, transposed, extra, groups = _arguments(node)
    a, w = _suitable(x), _suitable(kernel)
    if a is None or w is None or w.dim() != 4 or w.numel() > LARGEST_WEIGHT:
        return
    if {*stride, *dilation, groups} != {1} or any(extra):
        return
    if transposed:
        padding = [k - 1 - p for k, p in zip(w.shape[2:], padding, strict=True)]
    if w.shape[1 if transposed else 0] % COLUMNS or min(padding) < 0:
        return
    with graph.inserting_before(node):
        weight = prepare(kernel, _flipped if transposed else _channels_last)
        if weight is None:
            return
        result = graph.call_function(operators().convolution, (x, weight, list(padding)))
        if bias is not None:
            column = graph.call_function(aten.view.default, (bias, [-1, 1, 1]))
            result = graph.call_function(aten.add.Tensor, (result, column))
    _substitute(graph, node, result)


def _arguments(node: fx.Node) -> Any:
    """Return the arguments of a node, whose types its operator determines."""
    return node.args


def _substitute(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _suitable(node: Any) -> Tensor | None:
    """Return the example value of a node if the kernels can work with it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return None
    fits = value.dtype == torch.float32 and all(isinstance(size, int) for size in value.shape)
    return value if fits and value.numel() > 0 else None


def _contiguous(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    return graph.call_function(aten.clone.default, (weight,), options)


def _channels_last(graph: fx.Graph, kernel: fx.Node) -> fx.Node:
    """Bring a kernel (outputs, channels, rows, columns) to the order of its loops."""
    return _contiguous(graph, graph.call_function(aten.permute.default, (kernel, [2, 3, 1, 0])))


def _flipped(graph: fx.Graph, kernel: fx.Node) -> fx.Node:
    """Return the kernel of a transposed convolution as that of a convolution."""
    kernel = graph.call_function(aten.flip.default, (kernel, [2, 3]))
    return _contiguous(graph, graph.call_function(aten.permute.default, (kernel, [2, 3, 0, 1])))


class LoopWeights:
    """Weights of one loop, which are packed before the loop and become constants of it.

    Args:
        graph: Graph with the loop.
        loop: Its node.
    """

    def __init__(self, graph: fx.GraphModule, loop: fx.Node) -> None:
        self.graph, self.loop = graph.graph, loop
        condition, body, variables, _ = _arguments(loop)
        self.parts = [getattr(graph, str(part.target)) for part in (condition, body)]
        self.inputs = [n for n in self.parts[1].graph.nodes if n.op == "placeholder"]
        self.count = len(variables)
        self.packed: dict[tuple[Any, ...], fx.Node] = {}

    def use_kernels(self) -> None:
        """Replace the products and convolutions in the loop."""
        _replace(self.parts[1].graph, self._prepared)
        for part in self.parts:
            part.recompile()

    def _prepared(self, weight: fx.Node, pack: Pack) -> fx.Node | None:
        """Return a new input of the body with a packed constant; None for what changes."""
        views: list[Any] = []
        root: Any = weight
        while root.op == "call_function" and root.target in VIEWS:
            views.append(root)
            root = root.args[0]
        if root not in self.inputs[self.count :]:
            return None
        key = (root, pack, *((view.target, str(view.args[1:])) for view in views))
        if key not in self.packed:
            *others, constants = _arguments(self.loop)
            value = constants[self.inputs.index(root) - self.count]
            with self.graph.inserting_before(self.loop):
                for view in reversed(views):
                    value = self.graph.call_function(view.target, (value, *view.args[1:]))
                value = pack(self.graph, value)
            self.loop.args = (*others, (*constants, value))
            for part in self.parts:
                last = [node for node in part.graph.nodes if node.op == "placeholder"][-1]
                with part.graph.inserting_after(last):
                    self.packed[key] = part.graph.placeholder(f"packed_{len(self.packed)}")
        return self.packed[key]


class Operators:
    """Operators of graphs for the kernels, with their lowerings in TorchInductor.

    Their names depend on the source of the kernels, so that PyTorch's cache of compiled graphs
    notices other kernels.
    """

    def __init__(self) -> None:
        version = hashlib.sha256(SOURCE.encode()).hexdigest()[:12]
        self._library: Any = torch.library.Library("equilibria", "FRAGMENT")  # type: ignore[no-untyped-call]
        self.product = self._define(
            f"product_{version}(Tensor x, Tensor weight) -> Tensor", _product, _product
        )
        self.convolution = self._define(
            f"convolution_{version}(Tensor x, Tensor kernel, int[] padding) -> Tensor",
            _convolution,
            _convolution,
        )
        _lower(self.product, self.convolution)

    def _define(self, signature: str, run: Any, like: Any) -> Any:
        name = signature.split("(")[0]
        self._library.define(signature)
        self._library.impl(name, run, "CPU")
        self._library.impl(name, like, "Meta")
        return getattr(torch.ops.equilibria, name).default


operators = functools.cache(Operators)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).contiguous()


def _convolution(x: Tensor, kernel: Tensor, padding: list[int]) -> Tensor:
    result = F.conv2d(x, kernel.permute(3, 2, 0, 1), padding=padding)
    return result.contiguous(memory_format=torch.channels_last)


def _lower(product: Any, convolution: Any) -> None:
    """Register how TorchInductor calls the kernels."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    class Kernel(ir.ExternKernelOut):
        call: Callable[[str, str, str], str]

        def codegen(self, wrapper: Any) -> None:
            if "equilibria" not in wrapper._included_extra_headers:
                wrapper._included_extra_headers.add("equilibria")
                wrapper.header.splice(SOURCE)
            wrapper.writeline(self.call(_pointer(self), *map(_pointer, self.inputs)))

    def _pointer(node: Any) -> str:
        return f"(float*)({node.get_name()}.data_ptr()) + {node.get_layout().offset}"

    def result(operator: Any, x: Any, weight: Any, layout: dict[str, Any], call: Any) -> Any:
        fixed = ir.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), **layout)
        kernel = Kernel(fixed, [x, weight], cpp_kernel_name="equilibria", op_overload=operator)
        kernel.call = call
        return ir.TensorBox.create(kernel)

    def realized(x: Any) -> Any:
        return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))

    @register_lowering(product, type_promotion_kind=None)
    def lowered_product(x: Any, weight: Any) -> Any:
        x, weight = realized(x), realized(weight)
        (m, k), (_, n) = x.get_size(), weight.get_size()

        def call(out: str, a: str, b: str) -> str:
            return f"equilibria::product({out}, {a}, {b}, {m}, {n}, {k});"

        return result(product, x, weight, {"size": [m, n]}, call)

    @register_lowering(convolution, type_promotion_kind=None)
    def lowered_convolution(x: Any, kernel: Any, padding: list[int]) -> Any:
        x = ir.ExternKernel.require_channels_last(ir.ExternKernel.realize_input(x))
        kernel = realized(kernel)
        samples, channels, height, width = (int(size) for size in x.get_size())
        rows, columns, _, outputs = (int(size) for size in kernel.get_size())
        top, left = padding
        size = [samples, outputs, height + 2 * top - rows + 1, width + 2 * left - columns + 1]
        stride = [math.prod(size[1:]), 1, size[3] * outputs, outputs]
        numbers = (samples, height, width, channels, outputs, rows, columns, top, left)

        def call(out: str, a: str, b: str) -> str:
            return f"equilibria::convolution({', '.join([out, a, b, *map(str, numbers)])});"

        return result(convolution, x, kernel, {"size": size, "stride": stride}, call)
