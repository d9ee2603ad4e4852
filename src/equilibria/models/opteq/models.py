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
    """Build a convolutional OptEq classifier.

    Its map is y ↦ σ(WWᵀy/μ + Ux + b) with the feature z = Wᵀy/μ, x the output of the stem.

    Args:
        channels: Channels of the feature z.
        width: Middle width, the channels of y.
        kernel_size: Side of W's kernel.
        input_kernel_size: Side of U's kernel.
        activation: σ.
        mu: The divisor μ of the map, positive.
        alpha: Weight of the new iterate in a step, in (0, 1].
        bias: Whether there is a bias b.
        space: Space of the state: "y", "z", or "auto" for the smaller one.
        norm: How ‖W‖ is controlled: "bound" (proven), "estimate", or None.
        zeta: Upper bound on ‖W‖.
        init_scale: Factor of W's initial weights.
        image: Options of `image_classifier`.

    Raises:
        ValueError: If mu is too small for OptEq's Theorem 1.

    Examples:
        >>> from equilibria.models.opteq.models import opteq
        >>> opteq(channels=8, width=8, in_channels=1)(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    check_choice(("auto", "y", "z"), space=space)
    if norm is not None and mu < get_activation(activation).lipschitz * zeta**2:
        raise ValueError(
            f"mu must be at least L‖W‖² = {get_activation(activation).lipschitz * zeta**2:.3g} "
            f"(Theorem 1), got {mu}; raise mu or lower zeta"
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
    """Build the cell of a Deep OptEq, whose layers are z ↦ αWᵀσ(Wz + Ux + b)/μ + (1 − α)z.

    Args:
        make: Makes W and U, like `Conv2d`.
        channels: Channels of z.
        input_channels: Channels of x.
        sizes: Per layer, its middle width and the sides of the kernels of W and U.
        alpha: Initial α of every layer.
        bias: Whether layers have a bias.
        norm: How ‖W‖ is controlled: "bound" (proven), "estimate", or None.
        zeta: Upper bound on ‖W‖.
        init_scale: Factor of W's initial weights.
        options: Options of `UnitLayer` and `DeepOptEqCell`.
    """
    layer_options = take_options(options, UnitLayer)
    layers = []
    for width, kernel_size, input_kernel_size in sizes:
        W = small(make(channels, width, kernel_size, norm=norm, zeta=zeta), init_scale)
        U = make(input_channels, width, input_kernel_size)
        offset = torch.zeros(width, 1, 1) if bias else False
        layers.append(UnitLayer(W, U, bias=offset, alpha=alpha, **layer_options))
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
    """Build a convolutional Deep OptEq classifier.

    Its layers are z ↦ αWᵀσ(Wz + Ux + b)/μ + (1 − α)z (`UnitLayer`), x the output of the stem.

    Args:
        channels: Channels of z.
        widths: Middle widths, one per layer.
        kernel_size: Side of W's kernels.
        input_kernel_size: Side of U's kernels.
        options: Options of `UnitLayer`, `DeepOptEqCell` and `image_classifier`, and alpha, bias,
            norm, zeta and init_scale.

    Examples:
        >>> from equilibria.models.opteq.models import deep_opteq
        >>> model = deep_opteq(channels=8, widths=(4, 8), in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    sizes = [(width, kernel_size, input_kernel_size) for width in widths]
    cell_options = take_options(options, deep_opteq_cell)
    cell = deep_opteq_cell(Conv2d, channels, channels, sizes, **cell_options)
    return image_classifier(cell, channels, **options)


def separable(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    norm: str | None = None,
    zeta: float = 0.95,
) -> LinearOperator:
    """Build a separable convolution with its spatial filters on the side with more channels.

    If out_channels > in_channels it is a transposed convolution. In this way "5×5×1, 1024,
    1×1×1024, 512" of Table 6 is a W from 512 channels of z to a middle width of 1024.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Side of the spatial filters.
        norm: How the norm is controlled: "bound", "estimate", or None.
        zeta: Upper bound on the norm.
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
    """Build a Deep OptEq classifier on the features of a truncated ResNet, for images of any size.

    The defaults are OptEq-Small. OptEq-Middle has extractor_widening=2, widths=(1024, 512) * 3 and
    kernel_sizes=(5, 3) * 3: each block of Table 6 is two unit layers, because its two pairs of
    kernels fit no single W. The paper trains with gradient=Unrolled(steps=5), placement="paper" and
    regularizer=Decorrelation(), whose gamma it does not state; a Decorrelation makes predictions
    depend on the batch.

    Notes:
        The parameter counts of the paper cannot be reproduced. The networks it describes have 8.8 M
        (not 18 M) and 13.7 M (not 40 M) parameters for 1000 classes, and their extractors 1.4 M
        (not 8 M) and 4.1 M (not 24 M).

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        extractor_depth: Depth of the ResNet.
        extractor_widening: Factor of the inner widths of the ResNet's bottlenecks.
        extractor_stages: Number of stages of the ResNet that are used.
        extractor_channels: Channels of the ResNet's first stage.
        extractor_form: Stem of the ResNet, "imagenet" or "cifar".
        channels: Channels of z.
        widths: Middle widths, one per layer.
        kernel_sizes: Sides of the kernels of W_l and U_l, one per layer.
        depthwise: Use depthwise-separable W_l and U_l; False is "w/o dw-conv" of Table 9.
        head_widths: Channels of the head's convolutions.
        learnable_alpha: Whether α is trained.
        norm: How ‖W_l‖ is controlled. The proven "bound" takes 7 s (3×3, 512 channels) or 12 s
            (5×5, 1024) per W_l on 28×28 maps after every parameter update, on one processor core;
            "estimate" takes 0.05 s or 0.1 s. `contraction_bound` always computes a proven bound.
        solving: How the layer solves.
        layers: Further options of `deep_opteq`'s layers.

    Raises:
        ValueError: If widths and kernel_sizes have different lengths.

    Examples:
        >>> small = {"extractor_channels": 4, "channels": 8, "widths": (8,), "kernel_sizes": (3,)}
        >>> from equilibria.models.opteq.models import opteq_imagenet
        >>> model = opteq_imagenet(num_classes=3, head_widths=(8,), **small)
        >>> model.eval()(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 3])
    """
    if len(widths) != len(kernel_sizes):
        raise ValueError(
            f"widths and kernel_sizes must have the same length, got {len(widths)} and "
            f"{len(kernel_sizes)}"
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
    """Segmentation network: an FCN with an equilibrium layer as its backbone.

    Images may have any size. The stem replicates their right and lower edges until the stride
    divides the sides, also in `features`, `solve`, `objective` and `contraction_bound`. The logits
    are cropped to the image.

    Args:
        stem: A `SegmentationStem`.
        layer: The equilibrium layer.
        head: From the feature z* to logits for each pixel, (B, classes, H, W).

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
    """Build a segmentation network around any cell, such as `mopteq(channels=32).layer.cell`.

    Args:
        cell: Cell of the equilibrium layer.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Channels of the cell's input.
        feature_channels: Channels of the cell's output; by default `channels`.
        multiple: Required divisor of the sides of the cell's maps, such as the largest of `scales`.
        stem_depth: Convolutions of the stem; by default one per halving of the resolution.
        stride: Factor from the maps of the cell to the image, a power of 2.
        head_width: Channels of the head.
        dropout: Dropout rate of the head.
        solving: How the layer solves.

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
    """Build a segmentation network with a Deep OptEq of three layers as its backbone.

    The defaults have an eighth or a sixteenth of the paper's widths and suit images of about 90×120
    on a laptop. The paper's widths are (256, 512, 512); the preset for Cityscapes adds
    channels=512, stride=8, head_width=128 and norm="estimate".

    Args:
        channels: Channels of z.
        widths: Middle widths, one per layer.
        options: Options of `deep_opteq` and `equilibrium_segmenter`.

    Examples:
        >>> from equilibria.models.opteq.models import deep_opteq_segmentation
        >>> model = deep_opteq_segmentation(num_classes=4, widths=(8, 8, 8)).eval()
        >>> model(torch.rand(1, 3, 32, 40)).shape
        torch.Size([1, 4, 32, 40])
    """
    segmenter = take_options(options, equilibrium_segmenter)
    cell = deep_opteq(channels=channels, widths=widths, **options).layer.cell
    return equilibrium_segmenter(cell, channels=channels, **segmenter)
