"""Count host synchronizations per solve: `python -m benchmarks.synchronization`.

On a GPU, every operation that hands a number to Python or C++ waits for the device. The operations
are counted on the CPU, with the code path of other devices, so that no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.solvers import _rows, anderson, convergence

SYNCHRONIZING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "item"}
"""Operations that synchronize the host with the device."""


class SynchronizationCounter(TorchDispatchMode):
    """Counts synchronizing operations; indexing with a mask calls `nonzero`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        self.count += masked or name in SYNCHRONIZING
        return func(*args, **(kwargs or {}))


@contextmanager
def expensive_reads() -> Iterator[None]:
    """Make solvers treat reads of values as host synchronizations, as on a GPU."""
    patches = [
        mock.patch.object(module, "is_cheap_to_read", return_value=False)
        for module in (_rows, anderson, convergence)
    ]
    with patches[0], patches[1], patches[2]:
        yield


def eager_synchronizations(run: Callable[[], Any]) -> int:
    """Return the number of synchronizing operations in a call."""
    with SynchronizationCounter() as counter:
        run()
    return counter.count


def compiled_synchronizations(run: Callable[[], Any]) -> int:
    """Return how often a call reads numbers, in compiled code and outside."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    names = {"aten::_local_scalar_dense", "aten::nonzero"}
    return sum(event.count for event in profiler.key_averages() if event.key in names)


def main() -> None:
    """Print synchronizations and iterations of eager and compiled solves."""
    torch.manual_seed(0)
    W = torch.randn(32, 32)
    W *= 0.9 / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(16, 32)

    def step(z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(z @ W.T + x)

    def row(name: str, model: nn.Module, layer: eq.EquilibriumLayer) -> str:
        count = eager_synchronizations if model is layer else compiled_synchronizations
        with torch.no_grad():
            model(x)
            number = count(lambda: model(x))
        assert layer.last_solution is not None
        return f"| {name} | {layer.last_solution.evaluations} | {number} |"

    print("| solve | evaluations | synchronizations |\n|---|---:|---:|")
    with expensive_reads():
        for solver in (eq.Picard, eq.Anderson):
            for check_every in (1, 4):
                options = {"tolerance": 1e-4, "check_every": check_every}
                layer = eq.EquilibriumLayer(step, solver=solver(**options)).eval()
                name = f"{solver.__name__}, check_every={check_every}"
                print(row(name, layer, layer), flush=True)
        for solver in (eq.Picard, eq.Anderson):
            layer = eq.EquilibriumLayer(step, solver=solver(tolerance=1e-4)).eval()
            print(row(f"{solver.__name__}, compiled", eq.compile(layer), layer), flush=True)


if __name__ == "__main__":
    main()
