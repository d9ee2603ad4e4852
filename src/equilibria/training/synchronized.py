"""What in a model looks at a whole batch, while several processes have a part of it each."""

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
    """In training a `BatchNorm` over the parts of a batch together, in evaluation the usual one.

    Torch's SyncBatchNorm refuses a CPU. A part may be empty, and parts may differ in size. Exact
    derivatives of every order, one exchange of 2 numbers a channel forward and one backward.
    """

    processes: Processes

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training:
            return super().forward(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, count = _statistics(values, self.processes)
        # Where this part alone has two values there is nothing to look at, and nobody waits.
        if values[:, :1].numel() < 2 and float(count) < 2:
            raise ValueError(
                "batch normalization needs more than one value a channel in training, but a batch "
                f"of all {self.processes.count} processes had {float(count):.0f}"
            )
        if self.running_mean is not None:
            self._follow(mean.detach(), variance.detach(), count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = (1, -1, *[1] * (values.dim() - 2))
        return torch.addcmul(shift.view(shape), values, scale.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of a batch."""
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
        for running, seen in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(seen.to(running), share.to(running))


@contextmanager
def synchronized_norms(norms: Iterable[nn.Module], processes: Processes) -> Iterator[None]:
    """Make batch norms synchronized ones, in place; afterwards they are what they were."""
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
    """Mean and (biased) variance of every channel over all parts, and how many values it has.

    The parts are joined by their own means and squared deviations (Chan et al., 1979): sums of
    squares would cancel.
    """
    channels = values.shape[1]
    over = [d for d in range(values.dim()) if d != 1]
    own_count = values[:, :1].numel()
    if own_count:
        variance, mean = torch.var_mean(values, dim=over, correction=0)
        own = torch.stack((mean, variance * own_count))
    else:
        own = values.sum(dim=over).expand(2, channels)  # zeros, in the graph
    counts = own.new_full((1, channels), own_count)
    rows = torch.cat((own, counts))[None]
    # A row for each process, of which each fills its own: then one sum tells all of them to all.
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
    """The sum over the processes; its derivative is the sum over the processes again."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, processes: Processes) -> Tensor:
        cast(Any, ctx).processes = processes
        return processes.total(values)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _Total.apply(gradients[0], cast(Any, ctx).processes)  # type: ignore[no-untyped-call]
        return summed, None


class SharedBatchWarning(UserWarning):
    """A term of a model sees only the part of a batch that its process has."""


@contextmanager
def synchronized_batches(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Batch norms and GEQ's γ by the statistics of all parts; a warning of what remains local.

    How often a solve evaluates its map differs between the processes: nothing inside one can wait
    for the others.
    """
    layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
    inside = {module for layer in layers for module in layer.cell.modules()}
    scales = [m for m in model.modules() if isinstance(m, RunningScale)]
    present = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    norms = [m for m in present if type(m).forward is _BatchNorm.forward and m not in inside]
    left_out = any(m not in norms and not isinstance(m, nn.SyncBatchNorm) for m in present)
    was_training = model.training
    model.train()  # Some layers couple the samples in training only.
    couples = any(layer.couples_batch for layer in layers)
    model.train(was_training)
    if left_out or couples:
        warn_caller(
            "this model couples the samples of a batch where no process can wait for the others "
            "(inside a solve: batch norm, decorrelation, HSIC, γ of each step): there each sees "
            "its own part of a batch only, and the numbers differ from those of one process",
            SharedBatchWarning,
        )
    with ExitStack() as stack:
        stack.enter_context(synchronized_norms(norms, processes))
        for scale in scales:
            stack.enter_context(_pooled_scale(scale, model, processes))
        yield


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
