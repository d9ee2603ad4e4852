"""Equilibrium models that give every pixel a class.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Section 7.5, Table 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import State
from equilibria.energies import Regularizer
from equilibria.equilibrium import Cell, EquilibriumLayer
from equilibria.gradients import GradientRule
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.deep_opteq import Placement, deep_opteq
from equilibria.models.fcn import FCNHead, SegmentationStem, crop_to
from equilibria.models.options import solver_from_options
from equilibria.solvers import Solver


class EquilibriumSegmenter(EquilibriumClassifier):
    """logits = head(z*), one vector of logits a pixel: an equilibrium layer as an FCN's backbone.

    Images may have any size. The stem repeats their right and lower edges until they fit, and so
    for `features`, `solve`, `objective` and `contraction_bound`; the logits are cut back.
    """

    def forward(self, images: Tensor, start: State | None = None) -> Tensor:
        return crop_to(super().forward(images, start), images)


def equilibrium_segmenter(
    cell: Cell,
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: int = 32,
    feature_channels: int | None = None,
    multiple: int = 1,
    stem_depth: int | None = None,
    stride: int = 4,
    head_width: int = 32,
    dropout: float = 0.1,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumSegmenter:
    """Any cell as the backbone of a segmenter, e.g. `mopteq(channels=32).layer.cell`.

    channels: of the input that the cell takes; feature_channels: of its output, if different.
    multiple: what the sides of the cell's maps must be divisible by: the largest of its `scales`,
        where it has branches of several.
    """
    return EquilibriumSegmenter(
        stem=SegmentationStem(
            in_channels, channels, stride=stride, depth=stem_depth, multiple=multiple
        ),
        layer=EquilibriumLayer(
            cell=cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=FCNHead(
            channels if feature_channels is None else feature_channels,
            head_width,
            num_classes,
            stride=stride,
            dropout=dropout,
        ),
    )


def deep_opteq_segmentation(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: int = 32,
    widths: Sequence[int] = (16, 32, 32),
    kernel_size: int = 3,
    input_kernel_size: int = 1,
    stem_depth: int | None = None,
    stride: int = 4,
    head_width: int = 32,
    dropout: float = 0.1,
    activation: str | Activation = "relu",
    mu: float = 1.0,
    alpha: float = 0.8,
    learnable_alpha: bool = False,
    bias: bool = True,
    regularizer: str | Mapping[str, Any] | Regularizer | None = None,
    gamma: float = 0.0,
    placement: Placement = "exact",
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.95,
    init_scale: float = 0.5,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumSegmenter:
    """A Deep OptEq of three layers as the backbone of an FCN, at 1/`stride` of the resolution.

    The defaults are the paper's shape an eighth or a sixteenth as wide, for images of about 90×120
    on a laptop. Its size is widths=(256, 512, 512), with channels=512, stride=8, head_width=128 and
    norm="estimate"; it states the widths alone.
    """
    backbone = deep_opteq(
        channels=channels,
        widths=widths,
        kernel_size=kernel_size,
        input_kernel_size=input_kernel_size,
        activation=activation,
        mu=mu,
        alpha=alpha,
        learnable_alpha=learnable_alpha,
        bias=bias,
        regularizer=regularizer,
        gamma=gamma,
        placement=placement,
        norm=norm,
        zeta=zeta,
        init_scale=init_scale,
    )
    return equilibrium_segmenter(
        backbone.layer.cell,
        num_classes=num_classes,
        in_channels=in_channels,
        channels=channels,
        stem_depth=stem_depth,
        stride=stride,
        head_width=head_width,
        dropout=dropout,
        solver=solver,
        gradient=gradient,
        tolerance=tolerance,
        max_iterations=max_iterations,
        strict=strict,
    )
