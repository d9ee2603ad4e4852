"""The function `compile`: solves of a model as compiled graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.compiled.backward import CompiledImplicit
from equilibria.compiled.forward import CompiledSolver
from equilibria.compiled.store import Compilation, GraphStore
from equilibria.compiled.whole import WholeModel
from equilibria.context.context import run_eagerly
from equilibria.equilibrium import EquilibriumLayer, Solving
from equilibria.equilibrium.solving import in_block, replaced_settings, solving_of
from equilibria.operators.norm_control import is_wrapped

FLOATS = (torch.float32, torch.float64)


def compile(model: nn.Module | Callable[..., Tensor], **solving_options: Any) -> CompiledModel:
    """Return a model whose solves run as compiled graphs, forward and backward.

    Map, iteration and bookkeeping become one graph, so that a solve costs little more than its
    evaluations of the map: small models become two to ten times as fast (docs/benchmarks.md).
    Results and statuses are those of the eager solve, to its tolerance. The first call with a new
    batch size compiles for some seconds; sizes in between are padded, and later processes reuse
    the compiled code.

    In evaluation mode without gradients, the whole model is one graph. In training, the layer's
    solve is one graph and its backward pass another. What a graph cannot do runs eagerly: samples
    that do not converge, gradient rules other than `Implicit`, second derivatives, autocast,
    stopping criteria, recorded iterates. If no graph can be compiled, for example without a C++
    compiler or because the map reads values of tensors, a warning says why.

    The graphs follow changes of parameters and buffers in place, as optimizers and
    `load_state_dict` make them. Call `compile` again after editing tensors through `.data`, or
    after replacing Python attributes of a model.

    Args:
        model: Module with equilibrium layers, or a map f(z, x).
        solving_options: Options of `EquilibriumLayer` if `model` is a map.

    Returns:
        A module with the same parameters, state_dict and attributes.

    Raises:
        TypeError: If `model` is a module without an equilibrium layer, or not callable.

    Examples:
        >>> layer = eq.EquilibriumLayer(lambda z, x: torch.tanh(z / 2 + x)).eval()
        >>> fast = eq.compile(layer)
        >>> x = torch.ones(3, 2)
        >>> torch.allclose(fast(x), layer(x), atol=1e-4)
        True
    """
    if not isinstance(model, nn.Module):
        model = EquilibriumLayer(model, **solving_options).eval()
    elif solving_options:
        raise TypeError(f"{', '.join(solving_options)} can be given only with a map f(z, x)")
    if isinstance(model, CompiledModel):
        return model
    return CompiledModel(model)


class CompiledModel(nn.Module):
    """A model whose solves are compiled graphs; see `compile`.

    It shares all parameters with `model`, has the same `state_dict`, and other attributes are those
    of `model`.

    Args:
        model: Module with equilibrium layers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        if not layers:
            raise TypeError(f"{type(model).__name__} has no equilibrium layer to compile")
        self._layers = [(layer, GraphStore()) for layer in layers]
        self._settings: dict[object, tuple[Solving, Solving]] = {}
        self._whole = WholeModel(model, GraphStore())
        self.training = model.training

    @property
    def compilations(self) -> list[Compilation]:
        """The graphs that were compiled so far, with the duration of each compilation."""
        stores = [self._whole.graphs, *(graphs for _, graphs in self._layers)]
        return [compilation for store in stores for compilation in store.compilations]

    @run_eagerly
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the output of the model.

        Args:
            inputs: Inputs of the model.
            options: Further options of the model.
        """
        if not options and self._fits_one_graph(inputs):
            output = self._whole(*inputs)
            if output is not None:
                return output
        with self.in_graphs():
            return self.model(*inputs, **options)

    def in_graphs(self) -> AbstractContextManager[None]:
        """Return a context manager in which the layers of `model` solve in compiled graphs.

        For calls of other methods than `forward`. It applies to the current thread.
        """
        return replaced_settings(
            {layer.identity: self._compiled(layer, graphs) for layer, graphs in self._layers}
        )

    def _compiled(self, layer: EquilibriumLayer, graphs: GraphStore) -> Solving:
        """Return the current settings of a layer with the compiled solver and gradient rule."""
        settings = solving_of(layer)
        kept = self._settings.get(layer.identity)
        if kept is None or kept[0] is not settings:
            gradient = CompiledImplicit.of(settings.gradient, settings.solver, graphs)
            solver = CompiledSolver.of(settings.solver, graphs)
            kept = settings, replace(settings, solver=solver, gradient=gradient)
            self._settings[layer.identity] = kept
        return kept[1]

    def _fits_one_graph(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether to try the graph of the whole model."""
        if torch.is_grad_enabled() or self._whole.is_training or in_block():
            return False
        for x in inputs:
            if not (isinstance(x, Tensor) and x.dtype in FLOATS and x.dim() > 1):
                return False
            if not len(x) == len(inputs[0]) > 0 or is_wrapped(x):
                return False
            if torch.is_autocast_enabled(x.device.type):
                return False
        return len(inputs) > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        return CompiledModel(copy.deepcopy(self.model, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledModel, (self.model,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state_dict of the model."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state_dict of the model."""
        return self.model.load_state_dict(state_dict, *args, **kwargs)
