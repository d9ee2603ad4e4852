"""The layers inside MDEQ's cell: they hold parameters and read all else from the context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context import Context
from equilibria.context.context import Entry
from equilibria.models.blocks import Norm, fitting_groups
from equilibria.registry import check_choice, check_positive

EPSILON = 1e-5
"""What all norms add to a variance."""


class CellConv2d(nn.Module):
    """A zero-padded convolution without bias, weight-normalized or not.

    With weight normalization the kernel is `length` · `direction`/‖direction‖, one length an output
    channel (Salimans and Kingma 2016). The kernel is computed once a solve, by `kernel()`, and
    read from the context by every step. It starts with standard deviation `init_gain`/√fan-in.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        weight_norm: bool = False,
        init_gain: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive(init_gain=init_gain)
        self.position = -1
        self.stride = stride
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        std = 1 / math.sqrt(math.prod(shape[1:]))
        self.direction = nn.Parameter(torch.empty(shape).normal_(std=std))
        self.length: nn.Parameter | None = None
        if weight_norm:
            self.length = nn.Parameter(init_gain * self._norms().detach())
        else:
            with torch.no_grad():
                self.direction.mul_(init_gain)

    def kernel(self) -> Tensor:
        if self.length is None:
            return self.direction
        return self.direction * (self.length / self._norms())

    def forward(self, z: Tensor, context: Context) -> Tensor:
        kernel = context.weights("kernels")[self.position]
        return F.conv2d(z, kernel, stride=self.stride, padding=kernel.shape[-1] // 2)

    def _norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.direction, dim=(1, 2, 3), keepdim=True)
        return norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def extra_repr(self) -> str:
        return f"{tuple(self.direction.shape)}, stride={self.stride}"


class CellNorm(nn.Module):
    """Group or batch normalization with a trainable gain and offset.

    A group norm treats each sample alone. A batch norm normalizes by the batch in training and by
    running statistics in evaluation; which of the two is for the context to say, so that a backward
    pass sees what its forward pass saw. Running statistics move where the context says "absorb".
    """

    mean: Tensor
    variance: Tensor

    def __init__(
        self, channels: int, norm: Norm, *, groups: int, gain: float = 1.0, momentum: float = 0.1
    ) -> None:
        super().__init__()
        check_choice(get_args(Norm), norm=norm)
        self.position = -1
        self.norm = norm
        self.groups = fitting_groups(channels, groups)
        self.momentum = momentum
        self.weight = nn.Parameter(torch.full((channels,), gain))
        self.bias = nn.Parameter(torch.zeros(channels))
        if norm == "batch":
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("variance", torch.ones(channels))

    def forward(self, z: Tensor, context: Context) -> Tensor:
        if self.norm == "group":
            return F.group_norm(z, self.groups, self.weight, self.bias, eps=EPSILON)
        if "statistics" in context.shared:
            statistics = context.weights("statistics")
            mean, variance = statistics[2 * self.position : 2 * self.position + 2]
            # Not F.batch_norm, which refuses statistics that are inputs of a differentiable step.
            scale = self.weight * torch.rsqrt(variance + EPSILON)
            return z * _by_channel(scale) + _by_channel(self.bias - mean * scale)
        if "absorb" in context.shared:
            self.absorb(z)
        return F.batch_norm(z, None, None, self.weight, self.bias, training=True, eps=EPSILON)

    @torch.no_grad()
    def absorb(self, z: Tensor) -> None:
        """Move the running statistics towards the mean and the (unbiased) variance of a batch."""
        variance, mean = torch.var_mean(z, dim=(0, 2, 3))
        self.mean.lerp_(mean.to(self.mean), self.momentum)
        self.variance.lerp_(variance.to(self.variance), self.momentum)

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.norm == "group" else ""
        return f"{len(self.weight)}, norm={self.norm!r}{groups}"


def prepared_layers(cell: nn.Module, *, training: bool) -> Mapping[str, Entry]:
    """What the layers of a cell find in the context, by their `position` in the order of modules.

    The kernels; in evaluation also mean and variance of each batch norm in turn, which in training
    the batch at hand gives.
    """
    convolutions = [m for m in cell.modules() if isinstance(m, CellConv2d)]
    norms = [m for m in cell.modules() if isinstance(m, CellNorm) and m.norm == "batch"]
    for position, convolution in enumerate(convolutions):
        convolution.position = position
    for position, norm in enumerate(norms):
        norm.position = position
    entries: dict[str, Entry] = {"kernels": tuple(one.kernel() for one in convolutions)}
    if norms and not training:
        # Copies: a later update of the buffers must not reach a graph that waits for its backward
        # pass.
        pairs = [(norm.mean.clone(), norm.variance.clone()) for norm in norms]
        entries["statistics"] = tuple(tensor for pair in pairs for tensor in pair)
    return entries


def _by_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
