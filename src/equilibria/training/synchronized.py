"""Synchronization of batch statistics between processes that each have a part of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.context.caller import warn_caller
from equilibria.energies.kernel_scale import RunningScale
from equilibria.equilibrium import EquilibriumLayer
from equilibria.training.processes import Processes


class SynchronizedNorm(_BatchNorm):
    """Batch norm whose training statistics cover the parts of all processes.

    Unlike `torch.nn.SyncBatchNorm` it also works on a CPU. Parts may be empty or differ in size.
    Derivatives of every order are exact. The forward and the backward pass exchange three numbers
    per channel and process each.
    """

    processes: Processes

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training:
            return super().forward(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, count = _statistics(values, self.processes)
        # Reading the count synchronizes with the device, so it is read only if this part is tiny.
        if values[:, :1].numel() < 2 and float(count) < 2:
            raise ValueError(
                "batch norm needs more than one value per channel in training, but a batch of all "
                f"{self.processes.count} processes had {float(count):.0f}: raise batch_size"
            )
        if self.running_mean is not None:
            self._update_running(mean.detach(), variance.detach(), count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = (1, -1, *[1] * (values.dim() - 2))
        return torch.addcmul(shift.view(shape), values, scale.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = (
            1 / self.num_batches_tracked.to(count)
            if self.momentum is None
            else torch.full_like(count, self.momentum)
        )
        unbiased = variance * (count / (count - 1))
        for running, current in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(current.to(running), share.to(running))


@contextmanager
def synchronized_norms(norms: Iterable[nn.Module], processes: Processes) -> Iterator[None]:
    """Synchronize batch norms in place for the duration of a block."""
    changed = [(norm, type(norm)) for norm in norms]
    try:
        for norm, kind in changed:
            norm.__class__ = type(f"Synchronized{kind.__name__}", (SynchronizedNorm, kind), {})
            norm.__dict__["processes"] = processes
        yield
    finally:
        for norm, kind in changed:
            norm.__class__ = kind
            norm.__dict__.pop("processes", None)


def _statistics(values: Tensor, processes: Processes) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values per channel over all parts.

    The parts are combined from their means and squared deviations (Chan et al., 1979), because sums
    of squares would suffer from cancellation.
    """
    channels = values.shape[1]
    over = [d for d in range(values.dim()) if d != 1]
    own_count = values[:, :1].numel()
    if own_count:
        variance, mean = torch.var_mean(values, dim=over, correction=0)
        own = torch.stack((mean, variance * own_count))
    else:
        own = values.sum(dim=over).expand(2, channels)  # Zeros that are in the autograd graph.
    counts = own.new_full((1, channels), own_count)
    rows = torch.cat((own, counts))[None]
    # Each process fills its own row, so that a sum over the processes gathers all rows.
    before, after = processes.rank, processes.count - processes.rank - 1
    rows = torch.cat(
        (rows.new_zeros(before, 3, channels), rows, rows.new_zeros(after, 3, channels))
    )
    means, deviations, counts = _Total.apply(rows, processes).unbind(dim=1)  # type: ignore[no-untyped-call]
    counts = counts.detach()
    count = counts[:, 0].sum()
    mean = (means * counts).sum(dim=0) / count.clamp_min(1)
    between = (counts * (means - mean).square()).sum(dim=0)
    return mean, (deviations.sum(dim=0) + between) / count.clamp_min(1), count


class _Total(torch.autograd.Function):
    """Sum over the processes; the derivative is again a sum over the processes."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, processes: Processes) -> Tensor:
        cast(Any, ctx).processes = processes
        return processes.total(values)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _Total.apply(gradients[0], cast(Any, ctx).processes)  # type: ignore[no-untyped-call]
        return summed, None


class SharedBatchWarning(UserWarning):
    """Part of a model uses statistics of only the process's part of a batch."""


@contextmanager
def synchronized_batches(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Synchronize batch norms and GEQ's kernel scale γ between processes; warn about the rest.

    Processes evaluate the map of a solve a different number of times, so that statistics inside a
    solve cannot be synchronized.
    """
    layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
    inside = {module for layer in layers for module in layer.cell.modules()}
    scales = [m for m in model.modules() if isinstance(m, RunningScale)]
    present = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    norms = [m for m in present if type(m).forward is _BatchNorm.forward and m not in inside]
    has_local_norms = any(m not in norms and not isinstance(m, nn.SyncBatchNorm) for m in present)
    was_training = model.training
    model.train()  # Some layers couple samples only in training mode.
    couples = any(layer.couples_batch for layer in layers)
    model.train(was_training)
    if has_local_norms or couples:
        warn_caller(
            "this model couples the samples of a batch inside a solve (batch norm, decorrelation, "
            "HSIC, γ per step), where processes cannot synchronize: each process uses only its "
            "part of a batch, so that results differ from those of a single process",
            SharedBatchWarning,
        )
    with ExitStack() as stack:
        stack.enter_context(synchronized_norms(norms, processes))
        for scale in scales:
            stack.enter_context(_pooled_scale(scale, model, processes))
        yield


@contextmanager
def _pooled_scale(scale: RunningScale, model: nn.Module, processes: Processes) -> Iterator[None]:
    """Compute γ from the patches of all processes, with one exchange per forward pass."""
    totals: list[Tensor] = []

    def pooled(sums: Tensor) -> Tensor:
        if not totals:
            totals.append(processes.total(sums))
        return totals[0]

    # A cell may inject the same input again (for a random iterate of the Jacobian penalty), but
    # only in processes that have samples: these must not wait for the others.
    hook = model.register_forward_pre_hook(lambda *_: totals.clear())
    scale.pooled = pooled
    try:
        yield
    finally:
        scale.pooled = None
        hook.remove()
