"""Models of several branches: their cell, the fusion of their features, their head; POptEqs.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models", Appendix A.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.context import numbered
from equilibria.context.state import state_tensors
from equilibria.energies import Branches, Energy, Input, Quadratic
from equilibria.equilibrium import Cell, EnergyCell
from equilibria.models.blocks import PooledLinearHead
from equilibria.models.opteq.cells import UnitLayer
from equilibria.operators import AveragePool, Conv2d, LinearOperator, as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.registry import check_choice

Fusion = Literal["average", "sum", "none"]


class BranchCell(EnergyCell):
    """The joint equilibrium of several branches, and the one feature that they give the head.

    Features are upsampled (nearest neighbor) to the finest resolution and averaged, summed, or,
    with fusion="none", concatenated.
    """

    def __init__(
        self,
        energy: Energy,
        activation: str | Activation = "relu",
        *,
        fusion: Fusion = "average",
        alpha: float = 1.0,
        damping: float = 1.0,
    ) -> None:
        super().__init__(energy, activation, alpha, damping)
        check_choice(get_args(Fusion), fusion=fusion)
        self.fusion = fusion

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """The feature of each branch, at its own resolution: the state itself unless overridden."""
        return state_tensors(state)

    output_form = "linear"

    def output(self, state: State, context: Context) -> Tensor:
        return self.fuse(self.features(state, context))

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        finest = max(feature.shape[2] for feature in features)
        aligned = (upsample(feature, finest // feature.shape[2]) for feature in features)
        if self.fusion == "none":
            return torch.cat(list(aligned), dim=1)
        # One by one: all of them at the finest resolution are as large as a training step.
        total = reduce(torch.add, aligned)
        return total if self.fusion == "sum" else total / len(features)


class POptEqCell(BranchCell):
    """zᵢ = Wᵢᵀσ(Wᵢzᵢ + Uᵢg(x) + bᵢ) for each branch (Eq. 10), in the variables yᵢ, zᵢ = Wᵢᵀyᵢ.

    The branches together minimize Eq. 11, a sum of OptEq's objectives.

    Examples:
        >>> W = [eq.Dense(3, 4, norm="bound"), eq.Dense(3, 5, norm="bound")]
        >>> cell = eq.models.POptEqCell(W, [eq.Dense(2, 4), eq.Dense(2, 5)], fusion="sum")
        >>> [y.shape[1] for y in eq.EquilibriumLayer(cell=cell).solve(torch.ones(1, 2)).state]
        [4, 5]
    """

    def __init__(
        self,
        W: Sequence[OperatorLike],
        U: Sequence[OperatorLike],
        *,
        bias: bool | None = None,
        activation: str | Activation = "relu",
        fusion: Fusion = "average",
        alpha: float = 1.0,
    ) -> None:
        operators = [as_operator(one) for one in W]
        pairs = zip(operators, U, strict=True)
        energy = Branches([Input(Ui, bias) + Quadratic(Wi) for Wi, Ui in pairs])
        super().__init__(energy, activation, fusion=fusion, alpha=alpha)

    @property
    def W(self) -> list[LinearOperator]:  # noqa: N802 - the paper's symbol
        """The operators W of the branches."""
        return [term.W for term in self.energy.modules() if isinstance(term, Quadratic)]

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """zᵢ = Wᵢᵀyᵢ."""
        triples = zip(self.W, state_tensors(state), context.parts.values(), strict=True)
        return [W.adjoint(y, part.parts["quadratic"].weights("W")) for W, y, part in triples]


class FusedPOptEqCell(Cell):
    """zᵢ = Wᵢᵀσ(Wᵢhᵢ + Uᵢg(x) + bᵢ) with (h₁ … h_L) = F(z₁ … z_L): the fusion inside the map.

    It stands where HH&D stands in MOptEqs. F is the sum or the average of the branches, the same
    for all, or a 3×3 convolution over them side by side, of norm at most 1. The state holds the
    branches side by side, all of one resolution; the feature is their average. No objective is
    minimized, as F need not be symmetric. The map contracts with ‖F‖·max‖Wᵢ‖²; ‖F‖ is L for "sum".
    """

    def __init__(
        self,
        layers: Sequence[UnitLayer],
        channels: int,
        *,
        fusion: Literal["average", "sum", "conv"] = "average",
    ) -> None:
        super().__init__()
        check_choice(("average", "sum", "conv"), fusion=fusion)
        self.layers = nn.ModuleList(layers)
        self.channels = channels
        self.fusion = fusion
        width = channels * len(layers)
        self.mixing = Conv2d(width, width, 3, norm="bound", zeta=1.0) if fusion == "conv" else None

    def inject(self, x: Tensor) -> Context:
        contexts = [layer.inject(x) for layer in self.units()]
        size = tuple(contexts[0]["c"].shape[2:])
        layout = ((self.channels, *size),)
        pairs = zip(self.units(), contexts, strict=True)
        parts = numbered(c.with_shared(layer.prepare(layout)) for layer, c in pairs)
        context = Context(parts=parts)
        if self.mixing is None:
            return context
        shape = (self.channels * len(self.layers), *size)
        return context.with_shared({"F": self.mixing.weights(shape)})

    def units(self) -> list[UnitLayer]:
        return [layer for layer in self.layers if isinstance(layer, UnitLayer)]

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        like = context.parts["0"]["c"]
        return like.new_zeros(len(like), self.channels * len(self.layers), *like.shape[2:])

    def step(self, state: State, context: Context) -> State:
        assert isinstance(state, Tensor)
        fused = self._fused(state, context)
        triples = zip(self.units(), fused, context.parts.values(), strict=True)
        return torch.cat([layer(h, part) for layer, h, part in triples], dim=1)

    def _fused(self, z: Tensor, context: Context) -> Sequence[Tensor]:
        count = len(self.layers)
        if self.mixing is not None:
            mixed: Tensor = self.mixing(z, context.weights("F"))
            return mixed.chunk(count, dim=1)
        total = torch.stack(z.chunk(count, dim=1)).sum(dim=0)
        return [total if self.fusion == "sum" else total / count] * count

    def output(self, state: State, context: Context) -> Tensor:
        assert isinstance(state, Tensor)
        return torch.stack(state.chunk(len(self.layers), dim=1)).mean(dim=0)


class ConvolutionFusionHead(nn.Module):
    """Concatenated branches through a 3×3 convolution, averaged over branches, and classified."""

    def __init__(self, channels: int, branches: int, num_classes: int, *, pool: int = 1) -> None:
        super().__init__()
        self.branches = branches
        width = channels * branches
        self.fusion = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.head = PooledLinearHead(channels, num_classes, pool=pool)

    @property
    def classifier(self) -> nn.Linear:
        return self.head.classifier

    def forward(self, features: Tensor) -> Tensor:
        fused = self.fusion(features).unflatten(1, (self.branches, -1)).mean(dim=1)
        logits: Tensor = self.head(fused)
        return logits


def branch_head(
    fusion: Fusion | Literal["conv"],
    branches: int,
    channels: int,
    num_classes: int,
    *,
    pool: int = 1,
) -> nn.Module:
    """The classifier that belongs to a fusion."""
    if fusion == "conv":
        return ConvolutionFusionHead(channels, branches, num_classes, pool=pool)
    width = channels * branches if fusion == "none" else channels
    return PooledLinearHead(width, num_classes, pool=pool)


def branch_input(channels: int, width: int, kernel_size: int, scale: int) -> LinearOperator:
    """U of a branch: a convolution, after pooling the input to the branch's resolution."""
    convolution = Conv2d(channels, width, kernel_size)
    return convolution if scale == 1 else convolution @ AveragePool(scale)


def checked_branches(widths: Sequence[int], scales: Sequence[int]) -> None:
    """A clear error where widths and scales do not belong together."""
    if len(widths) != len(scales) or not widths:
        raise ValueError(
            f"give one scale a branch: there are {len(widths)} widths and {len(scales)} scales"
        )
    if min(scales) != 1:
        raise ValueError(f"scales are relative to the finest branch: one must be 1, not {scales}")


def upsample(feature: Tensor, scale: int) -> Tensor:
    """Nearest-neighbor upsampling."""
    return feature if scale == 1 else F.interpolate(feature, scale_factor=scale, mode="nearest")
