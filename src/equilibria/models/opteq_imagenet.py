"""Deep OptEq for ImageNet: a truncated ResNet, separable unit layers, a convolutional head.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Section 7.3.2, Tables 6 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.energies import Regularizer
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import GradientRule
from equilibria.models.blocks import PooledLinearHead
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.deep_opteq import DeepOptEqCell, Placement, UnitLayer
from equilibria.models.options import initialize_small, solver_from_options
from equilibria.models.resnet import Form, ResNet, initialize_he, resnet_extractor
from equilibria.operators import LinearOperator, SeparableConv2d
from equilibria.solvers import Solver


class ConvolutionalHead(nn.Module):
    """Table 6's "cls. layer": 1×1 convolutions, each with ReLU and MaxPool; AvgPool; linear."""

    def __init__(self, channels: int, widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        sizes = [channels, *widths]
        self.layers = nn.Sequential()
        for before, width in pairwise(sizes):
            self.layers.append(nn.Conv2d(before, width, 1))
            self.layers.append(nn.ReLU(inplace=True))
            # ceil_mode: a map of one pixel stays one.
            self.layers.append(nn.MaxPool2d(2, ceil_mode=True))
        initialize_he(self.layers)
        self.classifier = PooledLinearHead(sizes[-1], num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layers(features))
        return logits


def separable(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    norm: str | None = None,
    zeta: float = 0.95,
) -> LinearOperator:
    """A separable convolution whose filters are on the wider side.

    Where it widens, it is the transpose of one that narrows: that is how Table 6's "5×5×1, 1024,
    1×1×1024, 512" is a W from 512 channels of z to a middle width of 1024.
    """
    if in_channels >= out_channels:
        return SeparableConv2d(in_channels, out_channels, kernel_size, norm=norm, zeta=zeta)
    return SeparableConv2d(out_channels, in_channels, kernel_size, norm=norm, zeta=zeta).T


def opteq_imagenet(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    extractor_depth: int = 50,
    extractor_widening: int = 1,
    extractor_stages: int = 2,
    extractor_channels: int = 64,
    extractor_form: Form = "imagenet",
    channels: int = 512,
    widths: Sequence[int] = (512,) * 5,
    kernel_sizes: Sequence[int] = (3,) * 5,
    head_widths: Sequence[int] = (1024, 2048),
    activation: str | Activation = "relu",
    mu: float = 1.0,
    alpha: float = 0.8,
    learnable_alpha: bool = True,
    bias: bool = True,
    regularizer: str | Mapping[str, Any] | Regularizer | None = None,
    gamma: float = 0.0,
    placement: Placement = "exact",
    norm: Literal["bound", "estimate"] | None = "estimate",
    zeta: float = 0.95,
    init_scale: float = 0.5,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumClassifier:
    """Deep OptEq with depthwise-separable W_l and U_l on the features of a truncated ResNet.

    The defaults are OptEq-Small: ResNet-50's first two stages, five layers of 3×3 filters. For
    OptEq-Middle: extractor_widening=2, widths=(1024, 512) * 3, kernel_sizes=(5, 3) * 3, which reads
    Table 6's block as two unit layers, because its two pairs of kernels fit no single W. "Two
    depthwise separable convolution kernels" a layer are W_l and U_l. The paper's setting is
    gradient=Unrolled(steps=5), regularizer=Decorrelation() with a gamma it does not state, and
    placement="paper"; a Decorrelation makes predictions depend on the batch.

    The paper's sizes cannot be met: what it describes has 8.8 M (not 18 M) and 13.7 M (not 40 M)
    parameters for 1000 classes, its extractors 1.4 M (not 8 M) and 4.1 M (not 24 M).

    `norm="estimate"`, because the rigorous bound takes, after every parameter update and for each
    W_l on 28×28 maps, 7 s (3×3, 512) or 12 s (5×5, 1024) of one processor core, the estimate 0.05 s
    or 0.1 s. `contraction_bound` computes the rigorous one on request. Images may have any size.
    """
    if len(widths) != len(kernel_sizes):
        raise ValueError(
            f"each layer needs a width and a kernel size, not {len(widths)} and {len(kernel_sizes)}"
        )
    stem = resnet_extractor(
        in_channels=in_channels,
        depth=extractor_depth,
        stages=extractor_stages,
        channels=extractor_channels,
        widening=extractor_widening,
        form=extractor_form,
    )
    layers = []
    for width, kernel_size in zip(widths, kernel_sizes, strict=True):
        W = separable(channels, width, kernel_size, norm=norm, zeta=zeta)
        initialize_small(W, init_scale)
        layers.append(
            UnitLayer(
                W,
                separable(stem.out_channels, width, kernel_size),
                bias=torch.zeros(width, 1, 1) if bias else False,
                activation=activation,
                mu=mu,
                alpha=alpha,
                learnable_alpha=learnable_alpha,
            )
        )
    return EquilibriumClassifier(
        stem=stem,
        layer=EquilibriumLayer(
            cell=DeepOptEqCell(layers, regularizer=regularizer, gamma=gamma, placement=placement),
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=ConvolutionalHead(channels, head_widths, num_classes),
    )


def resnet_extractor_classifier(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    depth: int = 50,
    widening: int = 1,
    stages: int = 2,
    channels: int = 64,
    form: Form = "imagenet",
    head_widths: Sequence[int] = (1024, 2048),
) -> ResNet:
    """Table 7's "Extr. + Cls.": the extractor of `opteq_imagenet` with its head, no equilibrium."""
    trunk = resnet_extractor(
        in_channels=in_channels,
        depth=depth,
        stages=stages,
        channels=channels,
        widening=widening,
        form=form,
    )
    return ResNet(trunk, ConvolutionalHead(trunk.out_channels, head_widths, num_classes))
