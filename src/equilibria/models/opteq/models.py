"""OptEq's networks: classifiers of small images and of ImageNet, and segmenters.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Section 7.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from equilibria.activations import Activation, get_activation
from equilibria.context import State
from equilibria.equilibrium import Cell, EquilibriumLayer, Solving
from equilibria.models.base import EquilibriumClassifier, image_classifier
from equilibria.models.baselines.fcn import FCNHead, SegmentationStem, crop_to
from equilibria.models.baselines.resnet import ConvolutionalHead, Form, resnet_extractor
from equilibria.models.blocks import small
from equilibria.models.opteq.cells import DeepOptEqCell, UnitLayer
from equilibria.models.opteq.spaces import opteq_cell, optimal_space
from equilibria.models.registry import take_options, with_options_of
from equilibria.operators import Conv2d, LinearOperator, SeparableConv2d
from equilibria.registry import check_choice

Norm = Literal["bound", "estimate"]


@with_options_of(image_classifier)
def opteq(
    *,
    channels: int = 32,
    width: int = 32,
    kernel_size: int = 3,
    input_kernel_size: int = 3,
    activation: str | Activation = "relu",
    mu: float = 1.0,
    alpha: float = 1.0,
    bias: bool = True,
    space: Literal["auto", "y", "z"] = "auto",
    norm: Norm | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    **image: Any,
) -> EquilibriumClassifier:
    """A convolutional OptEq classifier; `width` is the middle width, the rows of W.

    `space="auto"` iterates in y-space, or in z-space where the middle width is the larger.

    Examples:
        >>> from equilibria.models.opteq.models import opteq
        >>> opteq(channels=8, width=8, in_channels=1)(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    check_choice(("auto", "y", "z"), space=space)
    if norm is not None and mu < get_activation(activation).lipschitz * zeta**2:
        raise ValueError(
            f"Theorem 1 needs mu >= L‖W‖² = {get_activation(activation).lipschitz * zeta**2:.3g}, "
            f"but mu = {mu}: raise mu or lower zeta"
        )
    W = small(Conv2d(channels, width, kernel_size, norm=norm, zeta=zeta), init_scale)
    U = Conv2d(channels, width, input_kernel_size)
    cell = opteq_cell(
        W,
        U,
        bias=bias,
        activation=activation,
        mu=mu,
        alpha=alpha,
        space=optimal_space(channels, width) if space == "auto" else space,
    )
    return image_classifier(cell, channels, **image)


@with_options_of(UnitLayer, DeepOptEqCell)
def deep_opteq_cell(
    make: Callable[..., LinearOperator],
    channels: int,
    input_channels: int,
    sizes: Iterable[tuple[int, int, int]],
    *,
    alpha: float = 0.8,
    bias: bool = True,
    norm: Norm | None = "bound",
    zeta: float = 0.95,
    init_scale: float = 0.5,
    **options: Any,
) -> DeepOptEqCell:
    """Layers whose W and U are made by `make`; sizes: of each, its width, W's kernel and U's."""
    own = take_options(options, UnitLayer)
    layers = []
    for width, kernel_size, input_kernel_size in sizes:
        W = small(make(channels, width, kernel_size, norm=norm, zeta=zeta), init_scale)
        U = make(input_channels, width, input_kernel_size)
        offset = torch.zeros(width, 1, 1) if bias else False
        layers.append(UnitLayer(W, U, bias=offset, alpha=alpha, **own))
    return DeepOptEqCell(layers, **options)


@with_options_of(deep_opteq_cell, image_classifier)
def deep_opteq(
    *,
    channels: int = 32,
    widths: Sequence[int] = (16, 32),
    kernel_size: int = 3,
    input_kernel_size: int = 1,
    **options: Any,
) -> EquilibriumClassifier:
    """A convolutional Deep OptEq classifier; `widths` are the middle widths of its layers.

    Examples:
        >>> from equilibria.models.opteq.models import deep_opteq
        >>> model = deep_opteq(channels=8, widths=(4, 8), in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    sizes = [(width, kernel_size, input_kernel_size) for width in widths]
    own = take_options(options, deep_opteq_cell)
    cell = deep_opteq_cell(Conv2d, channels, channels, sizes, **own)
    return image_classifier(cell, channels, **options)


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


@with_options_of(deep_opteq_cell)
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
    depthwise: bool = True,
    head_widths: Sequence[int] = (1024, 2048),
    learnable_alpha: bool = True,
    norm: Norm | None = "estimate",
    solving: Solving | None = None,
    **layers: Any,
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

    depthwise=False makes W_l and U_l plain convolutions ("w/o dw-conv" of Table 9).

    `norm="estimate"`, because the rigorous bound takes, after every parameter update and for each
    W_l on 28×28 maps, 7 s (3×3, 512) or 12 s (5×5, 1024) of one processor core, the estimate 0.05 s
    or 0.1 s. `contraction_bound` computes the rigorous one on request. Images may have any size.

    Examples:
        >>> small = {"extractor_channels": 4, "channels": 8, "widths": (8,), "kernel_sizes": (3,)}
        >>> from equilibria.models.opteq.models import opteq_imagenet
        >>> model = opteq_imagenet(num_classes=3, head_widths=(8,), **small)
        >>> model.eval()(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 3])
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
    sizes = zip(widths, kernel_sizes, kernel_sizes, strict=True)
    layers |= {"learnable_alpha": learnable_alpha, "norm": norm}
    make = separable if depthwise else Conv2d
    cell = deep_opteq_cell(make, channels, stem.out_channels, sizes, **layers)
    return EquilibriumClassifier(
        stem,
        EquilibriumLayer(cell, solving=solving),
        ConvolutionalHead(channels, head_widths, num_classes),
    )


class EquilibriumSegmenter(EquilibriumClassifier):
    """logits = head(z*), one vector of logits a pixel: an equilibrium layer as an FCN's backbone.

    Images may have any size. The stem repeats their right and lower edges until they fit, and so
    for `features`, `solve`, `objective` and `contraction_bound`; the logits are cut back.

    Examples:
        >>> from equilibria.models.opteq.models import EquilibriumSegmenter, deep_opteq_segmentation
        >>> model = deep_opteq_segmentation(num_classes=3, widths=(4, 4, 4)).eval()
        >>> isinstance(model, EquilibriumSegmenter)
        True
        >>> model(torch.rand(1, 3, 9, 13)).shape  # a size that does not fit the stride
        torch.Size([1, 3, 9, 13])
    """

    def forward(self, images: Tensor, *, start: State | None = None) -> Tensor:  # type: ignore[override]
        return crop_to(super().forward(images, start=start), images)


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
    solving: Solving | None = None,
) -> EquilibriumSegmenter:
    """Any cell as the backbone of a segmenter, e.g. `mopteq(channels=32).layer.cell`.

    channels: of the input that the cell takes; feature_channels: of its output, if different.
    multiple: what the sides of the cell's maps must be divisible by: the largest of its `scales`,
        where it has branches of several.

    Examples:
        >>> from equilibria.models.mopteq.models import mopteq
        >>> from equilibria.models.opteq.models import equilibrium_segmenter
        >>> cell = mopteq(channels=8).layer.cell
        >>> model = equilibrium_segmenter(cell, num_classes=3, channels=8, multiple=4)
        >>> model.eval()(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 3, 32, 32])
    """
    return EquilibriumSegmenter(
        stem=SegmentationStem(
            in_channels, channels, stride=stride, depth=stem_depth, multiple=multiple
        ),
        layer=EquilibriumLayer(cell, solving=solving),
        head=FCNHead(
            channels if feature_channels is None else feature_channels,
            head_width,
            num_classes,
            stride=stride,
            dropout=dropout,
        ),
    )


@with_options_of(deep_opteq, without=inspect.signature(image_classifier).parameters)
@with_options_of(equilibrium_segmenter, without=("feature_channels", "multiple"))
def deep_opteq_segmentation(
    *, channels: int = 32, widths: Sequence[int] = (16, 32, 32), **options: Any
) -> EquilibriumSegmenter:
    """A Deep OptEq of three layers as the backbone of an FCN, at 1/`stride` of the resolution.

    The defaults are the paper's shape an eighth or a sixteenth as wide, for images of about 90×120
    on a laptop. Its size is widths=(256, 512, 512), with channels=512, stride=8, head_width=128 and
    norm="estimate"; it states the widths alone. The other options are those of `deep_opteq`.

    Examples:
        >>> from equilibria.models.opteq.models import deep_opteq_segmentation
        >>> model = deep_opteq_segmentation(num_classes=4, widths=(8, 8, 8)).eval()
        >>> model(torch.rand(1, 3, 32, 40)).shape
        torch.Size([1, 4, 32, 40])
    """
    segmenter = take_options(options, equilibrium_segmenter)
    cell = deep_opteq(channels=channels, widths=widths, **options).layer.cell
    return equilibrium_segmenter(cell, channels=channels, **segmenter)
