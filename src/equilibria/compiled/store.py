"""Compiled graphs of one model, with what they depend on besides the shapes of their inputs."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from equilibria.compiled.products import use_kernels
from equilibria.compiled.tracing import (
    Compiled,
    NotInOneGraph,
    TraceError,
    compile_graph,
    lift_constants,
    split,
    trace,
)
from equilibria.context.caller import warn_caller
from equilibria.gradients.local_step import has_replaced_methods

logger = logging.getLogger("equilibria.compiled")

SCALARS = (bool, int, float, str)
"""Types of attributes whose values become part of a graph."""

MAX_GRAPHS = 32
"""Largest number of graphs per layer; further shapes are solved eagerly."""

SIZES_PER_OCTAVE = 4
"""Number of batch sizes between n and 2n for which graphs are compiled; others are padded."""


class CompileWarning(UserWarning):
    """A layer or model runs eagerly because no graph could be compiled; the message says why."""


@dataclass(frozen=True)
class Compilation:
    """One compiled graph.

    Attributes:
        kind: What the graph computes: "forward", "backward" or "model".
        samples: Batch size that the graph was compiled for; smaller batches are padded.
        seconds: Duration of the compilation. A graph from the cache of an earlier process takes
            one or two seconds.
    """

    kind: str
    samples: int
    seconds: float


@dataclass(frozen=True)
class Graph:
    """A compiled graph.

    Args:
        function: The compiled function.
        constants: Tensors that the traced function read without being given; they are further
            inputs, so that changes in place take effect.
        notes: What the caller needs to know about the results.
        prepare: Computes the last inputs from those that rarely change, if there are any.
    """

    function: Compiled
    constants: tuple[Tensor, ...]
    notes: Any = None
    prepare: Callable[..., Sequence[Tensor]] | None = None

    def __call__(
        self, inputs: Sequence[Tensor], prepared: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        """Return the results of the graph.

        Args:
            inputs: The inputs that change with every call.
            prepared: Results of `prepared_from`.
        """
        with torch.no_grad():
            return self.function(*map(_plain, inputs), *self.constants, *prepared)

    def prepared_from(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what depends on the inputs that rarely change.

        Args:
            tensors: These inputs.
        """
        if self.prepare is None:
            return ()
        with torch.no_grad():
            return self.prepare(*plain(tensors))


class GraphStore:
    """Graphs of one model, compiled when they are first needed.

    Attributes:
        compilations: The compiled graphs, in the order of their compilation.
    """

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []
        self._graphs: dict[Hashable, Graph | None] = {}
        self._parts: dict[int, Parts] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def get(
        self,
        kind: str,
        key: Hashable,
        samples: int,
        inputs: Sequence[Tensor],
        build: Callable[[], tuple[fx.GraphModule, Any]],
        fixed: int = 0,
    ) -> Graph | None:
        """Return the graph for a key, or None if it cannot be compiled.

        Args:
            kind: What the graph computes.
            key: What it depends on besides the shapes, strides and types of the inputs.
            samples: Batch size of the inputs.
            inputs: Inputs of the graph.
            build: Returns the traced graph and the `notes` of the result.
            fixed: Number of the last inputs that rarely change.
        """
        full = (kind, key, tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs))
        try:
            return self._graphs[full]
        except KeyError:
            pass
        with self._lock:
            if full not in self._graphs:
                self._graphs[full] = self._compile(kind, samples, inputs, build, fixed)
            return self._graphs[full]

    def _compile(
        self,
        kind: str,
        samples: int,
        inputs: Sequence[Tensor],
        build: Callable[[], tuple[fx.GraphModule, Any]],
        fixed: int,
    ) -> Graph | None:
        if len(self._graphs) >= MAX_GRAPHS:
            self.warn(
                f"{MAX_GRAPHS} graphs have been compiled, for different shapes or settings; others "
                "are solved eagerly. Use fewer different batch or image sizes"
            )
            return None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # PyTorch warns about its internal deprecations.
                warnings.simplefilter("ignore")
                graph, notes = build()
                constants = lift_constants(graph)
                examples = [*map(_plain, inputs), *constants]
                if constants:  # the changed graph lacks what PyTorch notes during a trace
                    graph = trace(graph, *examples)
                use_kernels(graph)
                prepare = None
                if fixed:
                    count, total = len(inputs), len(examples)
                    first = count - fixed
                    parts = split(graph, [*range(first), *range(count, total)])
                    graph, prepare = parts.finish, parts.prepare
                    prepared = prepare(*examples[first:count])
                    examples = [*examples[:first], *constants, *prepared]
                    graph = trace(graph, *examples)
                function, seconds = compile_graph(graph, examples)
        except NotInOneGraph:
            return None
        except Exception as error:
            reason = str(error) if isinstance(error, TraceError) else _first_line(error)
            self.warn(f"no {kind} graph could be compiled, so it runs eagerly: {reason}")
            return None
        self.compilations.append(Compilation(kind, samples, seconds))
        logger.info("compiled a %s graph for %d samples in %.1f s", kind, samples, seconds)
        return Graph(function, constants, notes, prepare)

    def parts(self, module: nn.Module) -> Parts:
        """Return the parts of a module, which are collected once."""
        parts = self._parts.get(id(module))
        if parts is None:
            parts = self._parts[id(module)] = Parts(module)
        return parts

    def warn(self, message: str) -> None:
        """Warn once per message."""
        if message not in self._warned:
            self._warned.add(message)
            warn_caller(message, CompileWarning)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps or overlaps in memory, as graphs expect."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors detached and without gaps or overlaps in memory."""
    return [_plain(tensor) for tensor in tensors]


class Parts:
    """The submodules of a module, and the tensors and Python values in them.

    Args:
        module: Module whose submodules do not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = list(module.modules())
        self.has_replaced_methods = has_replaced_methods(module)

    def tensors(self) -> list[Tensor]:
        """Return all distinct tensors: parameters, buffers and attributes."""
        held: dict[int, Tensor] = {}
        for part in self.modules:
            attributes = vars(part)
            for tensors in (attributes["_parameters"], attributes["_buffers"], attributes):
                for tensor in tensors.values():
                    if isinstance(tensor, Tensor):
                        held[id(tensor)] = tensor
        return list(held.values())

    def fingerprint(self) -> tuple[Hashable, ...]:
        """Return the Python values that a trace of the module depends on.

        Numbers, flags and strings in its attributes, and what its functions capture. A graph is
        traced again if one of them changes.
        """
        values: list[Hashable] = []
        for part in self.modules:
            for value in vars(part).values():
                kind = type(value)
                if kind in SCALARS:
                    values.append(value)
                elif kind is FunctionType:
                    values.extend(captured(value))
        return tuple(values)


def captured(function: FunctionType) -> list[Hashable]:
    """Return the values of what a function captures, or the objects themselves."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    values = [*cells, *(function.__globals__[name] for name in names)]
    return [v if isinstance(v, SCALARS) else Same(v) for v in values]


class Same:
    """Key that equals only keys of the same object, which it keeps alive.

    Args:
        value: The object.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def padded_size(samples: int) -> int:
    """Return the batch size that a graph is compiled for."""
    octave: int = 2 ** (samples.bit_length() - 1)
    step = max(1, octave // SIZES_PER_OCTAVE)
    return -(-samples // step) * step


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return a batch with its last sample repeated up to this number of samples."""
    missing = rows - len(tensor)
    if not missing:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])


def padded_with_zeros(tensor: Tensor, rows: int) -> Tensor:
    """Return a batch with samples of zeros appended up to this number of samples."""
    missing = rows - len(tensor)
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
