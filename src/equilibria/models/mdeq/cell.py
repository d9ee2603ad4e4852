"""MDEQ: the joint equilibrium of features at several resolutions.

Bai, Koltun, Kolter, "Multiscale Deep Equilibrium Models", NeurIPS 2020; details that the paper
leaves open follow the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.activations import Activation, IdentityActivation, get_activation
from equilibria.context import Context, State
from equilibria.context.state import in_format_of, state_tensors, unflatten_state
from equilibria.equilibrium import Cell
from equilibria.models.blocks import Norm, channels_of, check_halvings
from equilibria.models.mdeq.layers import CellConv2d, CellNorm, prepared_layers
from equilibria.registry import check_at_least_one, check_below_one, check_positive

MakeNorm = Callable[..., CellNorm]
"""Makes a norm from its channels and its initial gain."""


class MDEQBlock(nn.Module):
    """MDEQ's residual block of two convolutions, with the layer's input injected after the second.

    It computes norm(σ(norm(conv(σ(norm(conv z))) · mask + injection) + z)) (Figure 2 of MDEQ),
    where the mask is that of variational dropout.

    Args:
        channels: Channels of the block's state z.
        expansion: Ratio of the inner width to `channels`.
        activation: The activation σ.
        norm: Function that makes a norm for a number of channels.
        weight_norm: Whether the convolutions are weight-normalized.
        init_gain: Scale of the second convolution's initial weights.
        gain: Initial gain of the last norm.
    """

    def __init__(
        self,
        channels: int,
        *,
        expansion: int,
        activation: Activation,
        norm: MakeNorm,
        weight_norm: bool,
        init_gain: float,
        gain: float,
    ) -> None:
        super().__init__()
        wide = expansion * channels
        self.activation = activation
        self.widen = CellConv2d(channels, wide, 3, weight_norm=weight_norm)
        self.inner_norm = norm(wide)
        self.narrow = CellConv2d(wide, channels, 3, weight_norm=weight_norm, init_gain=init_gain)
        self.injection_norm = norm(channels)
        self.output_norm = norm(channels, gain=gain)

    def forward(
        self, z: Tensor, injection: Tensor | None, mask: Tensor | None, context: Context
    ) -> Tensor:
        out = self.activation(self.inner_norm(self.widen(z, context), context))
        out = self.narrow(out, context)
        if mask is not None:
            out = out * mask
        if injection is not None:
            out = out + injection
        out = self.activation(self.injection_norm(out, context) + z)
        normed: Tensor = self.output_norm(out, context)
        return normed


class Down(nn.Module):
    """From a finer branch to a coarser one: a strided 3×3 convolution and a norm per halving.

    Args:
        in_channels: Channels of the finer branch.
        out_channels: Channels of the coarser branch.
        halvings: Number of levels between the branches.
        activation: Activation between the convolutions.
        norm: Makes a norm.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        halvings: int,
        *,
        activation: Activation,
        norm: MakeNorm,
    ) -> None:
        super().__init__()
        self.activation = activation
        widths = [in_channels] * halvings + [out_channels]
        self.convolutions = nn.ModuleList(
            CellConv2d(before, after, 3, stride=2) for before, after in pairwise(widths)
        )
        self.norms = nn.ModuleList(norm(width) for width in widths[1:])

    def forward(self, z: Tensor, context: Context) -> Tensor:
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            z = norm(convolution(z if i == 0 else self.activation(z), context), context)
        return z


class Projection(nn.Module):
    """A 1×1 convolution and a norm after an activation, norm(conv1×1(σ(z))), then upsampling.

    Upsampling by `scale` takes the nearest pixel. The map leads from a coarser branch to a finer
    one (with σ the identity), and follows the sum over the branches (with scale 1).

    Args:
        in_channels: Channels of z.
        out_channels: Channels of the output.
        activation: σ.
        norm: Makes a norm.
        gain: Initial gain of the norm.
        weight_norm: Whether the convolution is weight-normalized.
        scale: Factor of the upsampling.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        activation: Activation,
        norm: MakeNorm,
        gain: float,
        weight_norm: bool = False,
        scale: int = 1,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.convolution = CellConv2d(in_channels, out_channels, 1, weight_norm=weight_norm)
        self.norm = norm(out_channels, gain=gain)
        self.scale = scale

    def forward(self, z: Tensor, context: Context) -> Tensor:
        out: Tensor = self.norm(self.convolution(self.activation(z), context), context)
        if self.scale == 1:
            return out
        return F.interpolate(out, scale_factor=self.scale, mode="nearest")


class MDEQCell(Cell):
    """MDEQ's cell: a residual block per branch, then a fusion into each branch (MDEQ, Section 3.1).

    Branch i has 1/2ⁱ of the resolution. A cell with one branch has no fusion, as in the authors'
    code. The cell has no hidden objective and no known Lipschitz bound.

    Args:
        channels: Channels of each branch, the finest first.
        inject_all: Inject one input into each branch. By default there is one input, for the finest
            branch, and it reaches the others by the fusion.
        expansion: Ratio of the inner width of a residual block to its channels.
        activation: σ.
        norm: "group", or "batch", which couples the samples in training. Running statistics are
            updated once per solve, at the equilibrium.
        groups: Largest number of groups of a group norm (see `fitting_groups`).
        weight_norm: Weight-normalize the residual blocks and the 1×1 convolutions after the fusion.
        dropout: Rate of variational dropout in training: one mask per sample and channel, constant
            during a solve.
        init_gain: Initial scale of the branch that the injection is added to. Like `feedback`, it
            makes an untrained model a contraction and does not constrain training.
        feedback: Initial gain of the norms on feedback paths (from coarse to fine, and within a
            branch). The norms on the path of the injection start at 1.

    Examples:
        >>> layer = eq.EquilibriumLayer(cell=eq.models.MDEQCell((8, 16), expansion=1))
        >>> layer(torch.rand(1, 8, 4, 4)).shape  # both branches, in one tensor
        torch.Size([1, 48, 2, 2])
    """

    remedy = (
        "raise max_iterations or the tolerance, or train with a penalty on the Jacobian "
        "(equilibria.equilibrium.jacobian_penalty)"
    )

    def __init__(
        self,
        channels: int | Sequence[int],
        inject_all: bool = False,
        *,
        expansion: int = 5,
        activation: str | Activation = "relu",
        norm: Norm = "group",
        groups: int = 8,
        weight_norm: bool = True,
        dropout: float = 0.0,
        init_gain: float = 0.05,
        feedback: float = 0.1,
    ) -> None:
        super().__init__()
        self.channels = channels_of(channels, "branch")
        check_below_one(dropout=dropout)
        check_at_least_one(expansion=expansion)
        check_positive(feedback=feedback)
        self.norm = norm
        self.dropout = dropout
        self.inject_all = inject_all
        sigma = get_activation(activation)
        make_norm = partial(CellNorm, norm=norm, groups=groups)
        make_mixer_norm = partial(CellNorm, norm=norm, groups=max(1, groups // 2))
        count = len(self.channels)
        self.blocks = nn.ModuleList(
            MDEQBlock(
                width,
                expansion=expansion,
                activation=sigma,
                norm=make_norm,
                weight_norm=weight_norm,
                init_gain=init_gain,
                # 1 on the path of the injection; a single branch has feedback only.
                gain=1.0 if (branch == 0 or inject_all) and count > 1 else feedback,
            )
            for branch, width in enumerate(self.channels)
        )
        self.paths = nn.ModuleList()
        self.mixers = nn.ModuleList()
        if count == 1:
            return
        up = partial(Projection, norm=make_norm, gain=feedback, activation=IdentityActivation())
        for target, width in enumerate(self.channels):
            incoming = nn.ModuleList()
            for source, other in enumerate(self.channels):
                if source < target:
                    incoming.append(
                        Down(other, width, target - source, activation=sigma, norm=make_norm)
                    )
                elif source > target:
                    incoming.append(up(other, width, scale=2 ** (source - target)))
            self.paths.append(incoming)
            self.mixers.append(
                Projection(
                    width,
                    width,
                    activation=sigma,
                    norm=make_mixer_norm,
                    weight_norm=weight_norm,
                    gain=feedback,
                )
            )

    @property
    def couples_batch(self) -> bool:  # type: ignore[override]
        return self.norm == "batch" and self.training

    def inject(self, x: Tensor, *coarser: Tensor) -> Context:
        check_halvings(x, self.channels[0], len(self.channels), "branch")
        if self.inject_all != bool(coarser) and len(self.channels) > 1:
            raise ValueError(
                f"expected {f'{len(self.channels)} inputs' if self.inject_all else '1 input'} "
                f"for {len(self.channels)} branches with inject_all={self.inject_all}, got "
                f"{1 + len(coarser)}"
            )
        injections = (x, *coarser)
        shared = prepared_layers(self, training=self.training)
        context = Context({"injections": injections}, shared)
        if not (self.training and self.dropout):
            return context
        keep = 1 - self.dropout
        masks = (
            x.new_empty(len(x), width, 1, 1).bernoulli_(keep) / keep for width in self.channels
        )
        return context.with_sample(masks=tuple(masks))

    def initial_state(self, x: Tensor, *others_and_context: Any) -> State:
        states = []
        for branch, channels in enumerate(self.channels):
            height, width = (side // 2**branch for side in x.shape[2:])
            states.append(in_format_of(x, x.new_zeros(len(x), channels, height, width)))
        return states[0] if len(states) == 1 else tuple(states)

    def step(self, state: State, context: Context) -> State:
        branches = state_tensors(state)
        masks = context.sample.get("masks", (None,) * len(branches))
        inputs = context.sample["injections"]
        injections = (*inputs, *(None,) * (len(branches) - len(inputs)))
        arguments = zip(self.blocks, branches, injections, masks, strict=True)
        blocks = [block(z, injection, mask, context) for block, z, injection, mask in arguments]
        if len(blocks) > 1:
            blocks = [
                mixer(self._fused(target, blocks, context), context)
                for target, mixer in enumerate(self.mixers)
            ]
        return unflatten_state(state, blocks)

    def output(self, state: State, context: Context) -> Tensor:
        """Return all branches in one tensor (see `pack_branches`)."""
        if self.norm == "batch" and "statistics" not in context.shared:
            with torch.no_grad():
                self.step(state, context.with_shared({"absorb": torch.ones(())}))
        return pack_branches(state_tensors(state))

    def _fused(self, target: int, blocks: Sequence[Tensor], context: Context) -> Tensor:
        """Return the sum of all branches at the resolution of branch `target`."""
        others = [z for source, z in enumerate(blocks) if source != target]
        paths = self.paths[target]
        assert isinstance(paths, nn.ModuleList)
        total = blocks[target]
        for path, z in zip(paths, others, strict=True):
            total = total + path(z, context)
        return total

    def extra_repr(self) -> str:
        return f"channels={self.channels}, norm={self.norm!r}, dropout={self.dropout}"


def pack_branches(branches: Sequence[Tensor]) -> Tensor:
    """Pack branches into one tensor of the coarsest resolution, pixels of a block as channels.

    Args:
        branches: Maps, each with half the sides of the previous one, shapes (B, Cᵢ, H/2ⁱ, W/2ⁱ).
    """
    if len(branches) == 1:
        return branches[0]
    coarsest = len(branches) - 1
    return torch.cat([_to_channels(z, 2 ** (coarsest - i)) for i, z in enumerate(branches)], dim=1)


def unpack_branches(packed: Tensor, channels: Sequence[int]) -> tuple[Tensor, ...]:
    """Undo `pack_branches`.

    Args:
        packed: Packed branches.
        channels: Channels of each branch, the finest first.
    """
    scales = [2 ** (len(channels) - 1 - i) for i in range(len(channels))]
    pieces = torch.split(packed, [c * s**2 for c, s in zip(channels, scales, strict=True)], dim=1)
    return tuple(_to_pixels(z, s) for z, s in zip(pieces, scales, strict=True))


def _to_channels(z: Tensor, scale: int) -> Tensor:
    """`pixel_unshuffle`, with the correct shape for an empty batch too."""
    batch, channels, height, width = z.shape
    height, width = height // scale, width // scale
    blocks = z.reshape(batch, channels, height, scale, width, scale).permute(0, 1, 3, 5, 2, 4)
    return blocks.reshape(batch, channels * scale**2, height, width)


def _to_pixels(z: Tensor, scale: int) -> Tensor:
    """Undo `_to_channels`."""
    batch, channels, height, width = z.shape
    channels //= scale**2
    blocks = z.reshape(batch, channels, scale, scale, height, width).permute(0, 1, 4, 2, 5, 3)
    return blocks.reshape(batch, channels, height * scale, width * scale)
