"""POptEqs, and the parts of all models with several branches: cell, fusion and head.

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
    """Joint equilibrium of several branches whose features are fused into one.

    Args:
        energy: Energy of the branches.
        activation: σ.
        fusion: How features, upsampled to the finest resolution (nearest neighbor), are joined:
            "average", "sum", or "none" (concatenated).
        alpha: Weight of the new iterate in a step, in (0, 1].
        damping: Length of the proximal gradient step, in (0, 1].
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
        """Return the feature of each branch at its resolution; by default the state."""
        return state_tensors(state)

    output_form = "linear"

    def output(self, state: State, context: Context) -> Tensor:
        return self.fuse(self.features(state, context))

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Upsample the features of all branches to the finest resolution and join them."""
        finest = max(feature.shape[2] for feature in features)
        aligned = (upsample(feature, finest // feature.shape[2]) for feature in features)
        if self.fusion == "none":
            return torch.cat(list(aligned), dim=1)
        # One at a time, because all maps at the finest resolution need as much memory as a step of
        # training.
        total = reduce(torch.add, aligned)
        return total if self.fusion == "sum" else total / len(features)


class POptEqCell(BranchCell):
    """POptEqs' cell of parallel branches: features zᵢ = Wᵢᵀσ(Wᵢzᵢ + Uᵢg(x) + bᵢ).

    This is Eq. 10 of the MOptEqs paper. The states are yᵢ with zᵢ = Wᵢᵀyᵢ. The equilibrium
    minimizes its Eq. 11, the sum of OptEq's objectives.

    Args:
        W: Operators Wᵢ, one per branch.
        U: Operators Uᵢ, one per branch.
        bias: Whether there are biases bᵢ.
        activation: σ.
        fusion: How features are joined (see `BranchCell`).
        alpha: Weight of the new iterate in a step, in (0, 1].

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
        operators = [as_operator(Wi) for Wi in W]
        pairs = zip(operators, U, strict=True)
        energy = Branches([Input(Ui, bias) + Quadratic(Wi) for Wi, Ui in pairs])
        super().__init__(energy, activation, fusion=fusion, alpha=alpha)

    @property
    def W(self) -> list[LinearOperator]:  # noqa: N802 - the paper's symbol
        """The operators Wᵢ from features to states, one per branch."""
        return [term.W for term in self.energy.modules() if isinstance(term, Quadratic)]

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """Return the feature zᵢ = Wᵢᵀyᵢ of each branch i, which the head reads.

        Args:
            state: The states yᵢ, one tensor per branch.
            context: Result of `inject`; it holds the weights Wᵢ.
        """
        triples = zip(self.W, state_tensors(state), context.parts.values(), strict=True)
        return [W.adjoint(y, part.parts["quadratic"].weights("W")) for W, y, part in triples]


class FusedPOptEqCell(Cell):
    """POptEqs' cell with the fusion F of the branches inside the map, instead of after it.

    F is in the place that Hierarchical Heritage and Diversity (HH&D) has in MOptEqs. The
    equilibrium is zᵢ = Wᵢᵀσ(Wᵢhᵢ + Uᵢg(x) + bᵢ) with (h₁ … h_L) = F(z₁ … z_L). The state is the
    concatenation of the branches, all of one resolution; the feature is their average. There is no
    objective, because F need not be symmetric. The contraction factor is at most ‖F‖·max‖Wᵢ‖², with
    ‖F‖ = L for "sum".

    Args:
        layers: Unit layers, one per branch.
        channels: Channels of each zᵢ.
        fusion: F: "average" or "sum" of the branches, or "conv", a 3×3 convolution of norm at most
            1 over their concatenation.
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
        """Return the unit layers, one per branch."""
        return [layer for layer in self.layers if isinstance(layer, UnitLayer)]

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        c = context.parts["0"]["c"]
        return c.new_zeros(len(c), self.channels * len(self.layers), *c.shape[2:])

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
    """Head for concatenated branches: a 3×3 convolution, the mean over branches, a classifier.

    Args:
        channels: Channels of each branch.
        branches: Number of branches.
        num_classes: Number of classes.
        pool: Side, in pixels, to which feature maps are average-pooled before the classifier.
    """

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
    """Build the classifier of a model with several branches, which reads their joined features.

    Args:
        fusion: How the features of the branches are joined before the classifier: "average", "sum",
            "none" (concatenated), or "conv". The last also expects concatenated features, and the
            head joins them by a trainable convolution.
        branches: Number of branches.
        channels: Channels of each branch.
        num_classes: Number of classes.
        pool: Side, in pixels, to which feature maps are average-pooled before the linear layer.

    Returns:
        A head from features (B, channels, H, W) to logits (B, num_classes); the features have
        `branches` times the channels if they are concatenated.
    """
    if fusion == "conv":
        return ConvolutionFusionHead(channels, branches, num_classes, pool=pool)
    width = channels * branches if fusion == "none" else channels
    return PooledLinearHead(width, num_classes, pool=pool)


def branch_input(channels: int, width: int, kernel_size: int, scale: int) -> LinearOperator:
    """Build the input operator U of a branch: average pooling, then a convolution.

    Args:
        channels: Channels of the input.
        width: Middle width of the branch.
        kernel_size: Side of the kernel.
        scale: Side of the pooling.
    """
    convolution = Conv2d(channels, width, kernel_size)
    return convolution if scale == 1 else convolution @ AveragePool(scale)


def check_branches(widths: Sequence[int], scales: Sequence[int]) -> None:
    """Check that there is one scale per width and that the smallest scale is 1.

    Args:
        widths: Middle widths, one per branch.
        scales: Pooling, one number per branch.

    Raises:
        ValueError: If they do not fit each other.
    """
    if len(widths) != len(scales) or not widths:
        raise ValueError(
            f"widths and scales need one number per branch each, got {len(widths)} widths and "
            f"{len(scales)} scales"
        )
    if min(scales) != 1:
        raise ValueError(f"the smallest of scales (the finest branch) must be 1, got {scales}")


def upsample(feature: Tensor, scale: int) -> Tensor:
    """Upsample by `scale` to the nearest neighbor."""
    return feature if scale == 1 else F.interpolate(feature, scale_factor=scale, mode="nearest")
