"""What in a model looks at a whole batch, while several processes have a part of it each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.energies.kernel_scale import RunningScale
from equilibria.equilibrium import EquilibriumLayer
from equilibria.training.processes import Processes
from equilibria.training.sync_norm import can_be_synchronized, synchronized_norms


class SharedBatchWarning(UserWarning):
    """A term of a model sees only the part of a batch that its process has."""


@contextmanager
def whole_batches(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Batch norms and GEQ's γ by the statistics of all parts; a warning of what remains local.

    How often a solve evaluates its map differs between the processes: nothing inside one can wait
    for the others.
    """
    inside = {
        module
        for layer in model.modules()
        if isinstance(layer, EquilibriumLayer)
        for module in layer.cell.modules()
    }
    norms = [m for m in model.modules() if can_be_synchronized(m) and m not in inside]
    scales = [m for m in model.modules() if isinstance(m, RunningScale)]
    synchronized = {*norms, *(m for m in model.modules() if isinstance(m, nn.SyncBatchNorm))}
    left_out = any(isinstance(m, _BatchNorm) and m not in synchronized for m in model.modules())
    if left_out or _couples_samples(model):
        warnings.warn(
            "this model couples the samples of a batch where no process can wait for the others "
            "(inside a solve: batch norm, decorrelation, HSIC, γ of each step): there each sees "
            "its own part of a batch only, and the numbers differ from those of one process",
            SharedBatchWarning,
            stacklevel=2,
        )
    with ExitStack() as stack:
        stack.enter_context(synchronized_norms(norms, processes))
        for scale in scales:
            stack.enter_context(_pooled_scale(scale, model, processes))
        yield


def _couples_samples(model: nn.Module) -> bool:
    was_training = model.training
    model.train()  # Some layers couple the samples in training only.
    found = any(isinstance(m, EquilibriumLayer) and m.couples_batch for m in model.modules())
    model.train(was_training)
    return found


@contextmanager
def _pooled_scale(scale: RunningScale, model: nn.Module, processes: Processes) -> Iterator[None]:
    """γ from the patches of all processes, which are asked once for every pass of the model."""
    answer: list[Tensor] = []

    def pooled(sums: Tensor) -> Tensor:
        if not answer:
            answer.append(processes.total(sums))
        return answer[0]

    # A cell that injects the same input a second time (a random iterate for the Jacobian) does so
    # where its process has samples, and must not wait for one that has none.
    hook = model.register_forward_pre_hook(lambda *_: answer.clear())
    scale.pooled = pooled
    try:
        yield
    finally:
        scale.pooled = None
        hook.remove()
