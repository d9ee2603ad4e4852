"""The named models: small ones for quick work, and one for every size that the papers report.

`reported` is the paper's figure; the count that comes out stands beside it in docs/models.md.
"""

from __future__ import annotations

from typing import Any

from equilibria.gradients import Phantom, Unrolled
from equilibria.models.deep_opteq import deep_opteq
from equilibria.models.fcn import fcn
from equilibria.models.geq import geq
from equilibria.models.hrnet import hrnet
from equilibria.models.mdeq import mdeq
from equilibria.models.mondeq import mondeq
from equilibria.models.mopteq import mopteq
from equilibria.models.neural_ode import neural_ode
from equilibria.models.opteq import opteq
from equilibria.models.opteq_imagenet import opteq_imagenet, resnet_extractor_classifier
from equilibria.models.plain_network import plain_network
from equilibria.models.popteq import popteq
from equilibria.models.registry import register_model
from equilibria.models.resnet import resnet, resnet_small
from equilibria.models.segmentation import deep_opteq_segmentation

Options = dict[str, Any]

# --- OptEq and Deep OptEq -----------------------------------------------------------------------

register_model(
    "opteq-small",
    opteq,
    summary="OptEq of width 32 on 32 channels, images of 8×8 to 32×32",
    paper="OptEq",
)
register_model(
    "deep-opteq-small",
    deep_opteq,
    summary="Deep OptEq of two layers (16, 32) on 32 channels, images of 8×8 to 32×32",
    paper="OptEq",
)
# Section 7.1: widths 16, 32, 64, 128, 128. The paper does not state the number of channels m; 48, a
# 1×1 U, no b and a stem of two convolutions give its 199 k.
register_model(
    "deep-opteq-199k",
    deep_opteq,
    summary="Deep OptEq of five layers (CIFAR-10)",
    paper="OptEq T3, T5, T8",
    reported="199 k",
    channels=48,
    widths=(16, 32, 64, 128, 128),
    stem_depth=2,
    pool=1,
    bias=False,
)
# Section 7.3.1: widths 16, 32, 64, 64, 128, one convolution as stem.
register_model(
    "deep-opteq-162k",
    deep_opteq,
    summary="Deep OptEq of five layers, one convolution as stem (CIFAR-10)",
    paper="OptEq T4",
    reported="162 k",
    channels=52,
    widths=(16, 32, 64, 64, 128),
    stem_depth=1,
    pool=2,
    bias=True,
)
# The layout of the 1.4 M model is left open: three times the widths, m = 128.
register_model(
    "deep-opteq-1m",
    deep_opteq,
    summary="Deep OptEq of five wide layers (CIFAR-10)",
    paper="OptEq T4",
    reported="1.4 M",
    channels=128,
    widths=(48, 96, 192, 384, 384),
    stem_depth=1,
    pool=1,
    bias=False,
)
register_model(
    "deep-opteq-imagenet-small",
    opteq_imagenet,
    summary="Deep OptEq on two stages of ResNet-50, depthwise-separable layers",
    paper="OptEq T6, T7",
    reported="18 M",
    num_classes=1000,
    gradient=Unrolled(steps=5),
)
register_model(
    "deep-opteq-imagenet-mid",
    opteq_imagenet,
    summary="Deep OptEq on two stages of Wide-ResNet-50, depthwise-separable layers",
    paper="OptEq T6, T7",
    reported="40 M",
    num_classes=1000,
    extractor_widening=2,
    widths=(1024, 512) * 3,
    kernel_sizes=(5, 3) * 3,
    gradient=Unrolled(steps=5),
)
register_model(
    "deep-opteq-segmentation",
    deep_opteq_segmentation,
    summary="Deep OptEq with an FCN head, small images (CamVid)",
    paper="OptEq T10",
    num_classes=11,
)
register_model(
    "fcn-segmentation",
    fcn,
    summary="FCN of the size of deep-opteq-segmentation",
    paper="OptEq T10",
    num_classes=11,
    parameters=45_403,
)
# The paper states the widths of the three layers only.
_CITYSCAPES: Options = {
    "num_classes": 19,
    "channels": 512,
    "widths": (256, 512, 512),
    "stride": 8,
    "head_width": 128,
}
register_model(
    "deep-opteq-segmentation-cityscapes",
    deep_opteq_segmentation,
    summary="Deep OptEq of three layers with an FCN head (Cityscapes)",
    paper="OptEq T10",
    norm="estimate",
    **_CITYSCAPES,
)
register_model(
    "dnn-small",
    plain_network,
    summary="Plain network without shared weights, the counterpart of deep-opteq-small",
    paper="OptEq Eq. 1",
)
# Table 3's widths with 3×3 kernels between them have 285 k parameters; these have its 199 k.
register_model(
    "dnn-199k",
    plain_network,
    summary="Plain network without shared weights (CIFAR-10)",
    paper="OptEq T3",
    reported="199 k",
    channels=48,
    widths=(16, 32, 64, 96, 96),
    stem_depth=2,
    pool=1,
    bias=False,
)

# --- POptEqs and MOptEqs ------------------------------------------------------------------------

_SINGLE_VIEW: Options = {
    "channels": 32,
    "widths": (64, 128, 128),
    "scales": (1, 1, 1),
    "stem_depth": 2,
    "pool": 1,
    "bias": False,
}
_FOUR_SCALES: Options = {"scales": (1, 2, 4, 8), "stem_depth": 2, "pool": 1, "bias": False}
_SIX_BRANCHES: Options = {
    "channels": 320,
    "widths": (80, 160, 160, 160, 320, 320),
    "scales": (1, 2, 4, 4, 8, 8),
    "stem_depth": 2,
    "pool": 1,
    "bias": False,
}
# Many channels: the rigorous norm bound would cost more than the solve.
_WIDE: Options = {"norm": "estimate"}
_PE: Options = {"pe": "train", "epsilon": 0.1}

register_model(
    "popteq-small",
    popteq,
    summary="POptEqs of three branches on 32 channels, images of 8×8 to 32×32",
    paper="MOptEqs",
)
register_model(
    "mopteq-small",
    mopteq,
    summary="MOptEqs of three branches on 32 channels, images of 8×8 to 32×32",
    paper="MOptEqs",
)
register_model(
    "popteq-193k",
    popteq,
    summary="POptEqs of three branches, averaged (CIFAR-10)",
    paper="MOptEqs T1a",
    reported="193 k",
    **_SINGLE_VIEW,
)
register_model(
    "popteq-sum-193k",
    popteq,
    summary="POptEqs of three branches, summed (CIFAR-10)",
    paper="MOptEqs T1a",
    reported="193 k",
    fusion="sum",
    **_SINGLE_VIEW,
)
register_model(
    "popteq-conv-276k",
    popteq,
    summary="POptEqs of three branches, fused by a convolution (CIFAR-10)",
    paper="MOptEqs T1a",
    reported="276 k",
    fusion="conv",
    **_SINGLE_VIEW,
)
register_model(
    "mopteq-1view-193k",
    mopteq,
    summary="MOptEqs of three branches of one resolution (CIFAR-10)",
    paper="MOptEqs T1a",
    reported="193 k",
    diversity=0.01,
    **_SINGLE_VIEW,
    **_PE,
)
register_model(
    "mopteq-480k",
    mopteq,
    summary="MOptEqs of four resolutions, 128 channels (CIFAR-10)",
    paper="MOptEqs T1b",
    reported="0.48 M",
    channels=128,
    widths=(16, 32, 32, 64),
    diversity=0.001,
    **_FOUR_SCALES,
    **_WIDE,
    **_PE,
)
register_model(
    "mopteq-1.9m",
    mopteq,
    summary="MOptEqs of four resolutions, 256 channels (CIFAR)",
    paper="MOptEqs T1b, T2a",
    reported="1.9 M",
    channels=256,
    widths=(32, 64, 64, 128),
    diversity=0.001,
    **_FOUR_SCALES,
    **_WIDE,
    **_PE,
)
register_model(
    "mopteq-8m",
    mopteq,
    summary="MOptEqs of six branches, 320 channels (CIFAR)",
    paper="MOptEqs T1b; GEQ T1",
    reported="8.1 M",
    diversity=0.001,
    **_SIX_BRANCHES,
    **_WIDE,
    **_PE,
)
register_model(
    "mopteq-polynomial-8m",
    mopteq,
    summary="MOptEqs of six branches with a polynomial kernel (CIFAR-100)",
    paper="GEQ T5",
    reported="8 M",
    kernel="polynomial",
    diversity=0.001,
    **_SIX_BRANCHES,
    **_WIDE,
)
register_model(
    "mopteq-sigmoid-8m",
    mopteq,
    summary="MOptEqs of six branches with a sigmoid kernel (CIFAR-100)",
    paper="GEQ T5",
    reported="8 M",
    kernel="sigmoid",
    diversity=0.001,
    **_SIX_BRANCHES,
    **_WIDE,
)
# Images of 256 are brought to 64 by the stem's first two convolutions. The paper's "1.9 M" has the
# same two further convolutions and cannot have the size of the CIFAR model.
_IMAGENET_STEM: Options = {"stem_depth": 4, "stem_strides": 2}
register_model(
    "mopteq-imagenet-1.9m",
    mopteq,
    summary="MOptEqs of four resolutions for images of 256×256 (Imagenette)",
    paper="MOptEqs T2b",
    reported="1.9 M",
    channels=256,
    widths=(32, 64, 64, 128),
    diversity=0.001,
    **{**_FOUR_SCALES, **_IMAGENET_STEM},
    **_WIDE,
    **_PE,
)
register_model(
    "mopteq-imagenet-10m",
    mopteq,
    summary="MOptEqs of six branches for images of 256×256 (Imagenette)",
    paper="MOptEqs T2b; GEQ T2a",
    reported="10 M",
    diversity=0.001,
    **{**_SIX_BRANCHES, **_IMAGENET_STEM},
    **_WIDE,
    **_PE,
)
register_model(
    "mopteq-imagenet-13m",
    mopteq,
    summary="MOptEqs of six branches, 384 channels (ImageNet, ImageNet-100)",
    paper="MOptEqs T4; GEQ T2b",
    reported="13 M",
    diversity=0.001,
    **{
        **_SIX_BRANCHES,
        **_IMAGENET_STEM,
        "channels": 384,
        "widths": (48, 96, 192, 192, 384, 384),
        "num_classes": 1000,
    },
    **_WIDE,
    **_PE,
)

# --- GEQ ----------------------------------------------------------------------------------------

_GEQ: Options = {"scales": (1, 2, 4, 4, 8, 8), "pool": 1, "bias": False, "norm": "estimate"}
# Appendix A.7.2; the classes are those of ImageNet-100.
_GEQ_IMAGENET: Options = {"stem_depth": 4, "stem_strides": 2, "hidden": 128, "num_classes": 100}

register_model(
    "geq-small",
    geq,
    summary="GEQ of one branch on 32 channels, images of 8×8 to 32×32",
    paper="GEQ",
)
register_model(
    "geq-5m",
    geq,
    summary="GEQ of six branches, 256 channels (CIFAR)",
    paper="GEQ T1",
    reported="5 M",
    channels=256,
    widths=(64, 128, 128, 128, 256, 256),
    stem_depth=2,
    hidden=64,
    gradient=Phantom(),
    **_GEQ,
)
register_model(
    "geq-8m",
    geq,
    summary="GEQ of six branches, 320 channels (CIFAR)",
    paper="GEQ T1, T5",
    reported="8 M",
    channels=320,
    widths=(80, 160, 160, 160, 320, 320),
    stem_depth=2,
    hidden=64,
    gradient=Phantom(),
    **_GEQ,
)
register_model(
    "geq-imagenet-6m",
    geq,
    summary="GEQ of six branches, 256 channels (Imagenette, ImageNet-100)",
    paper="GEQ T2",
    reported="6 M",
    channels=256,
    widths=(32, 64, 128, 128, 256, 256),
    gradient=Phantom(),
    **_GEQ_IMAGENET,
    **_GEQ,
)
register_model(
    "geq-imagenet-13m",
    geq,
    summary="GEQ of six branches, 384 channels (Imagenette, ImageNet-100)",
    paper="GEQ T2",
    reported="13 M",
    channels=384,
    widths=(48, 96, 192, 192, 384, 384),
    gradient=Phantom(),
    **_GEQ_IMAGENET,
    **_GEQ,
)

# --- What the papers compare with ---------------------------------------------------------------

_MDEQ_IMAGENET: Options = {
    "num_classes": 1000,
    "downsample": 4,
    "final_channels": 2048,
    "outer_norm": "batch",
}
# The sizes that the papers report are met by fitted channels: no published configuration gives
# them. The authors' own for CIFAR is the 11 M.
register_model(
    "mdeq-small",
    mdeq,
    summary="MDEQ of two resolutions, images of 8×8 to 32×32",
    paper="Bai et al., 2020",
    outer_norm="batch",
)
register_model(
    "mdeq-2.5m",
    mdeq,
    summary="MDEQ of four resolutions (CIFAR-10)",
    paper="MOptEqs T1b, T2",
    reported="2.53 M",
    channels=(15, 30, 60, 120),
    head_channels=7,
    final_channels=840,
    outer_norm="batch",
)
register_model(
    "mdeq-10m",
    mdeq,
    summary="MDEQ of four resolutions (CIFAR-10)",
    paper="MOptEqs T1b; GEQ T1",
    reported="10 M",
    channels=(30, 60, 120, 240),
    head_channels=14,
    final_channels=1680,
    outer_norm="batch",
)
register_model(
    "mdeq-11m",
    mdeq,
    summary="MDEQ of four resolutions, its authors' configuration (CIFAR)",
    paper="MOptEqs T2a",
    reported="11 M",
    channels=(32, 64, 128, 256),
    head_channels=14,
    final_channels=1680,
    dropout=0.3,
    outer_norm="batch",
)
register_model(
    "mdeq-imagenet-single",
    mdeq,
    summary="MDEQ of one resolution (ImageNet)",
    paper="OptEq T7",
    reported="18 M",
    channels=(352,),
    head_channels=256,
    **_MDEQ_IMAGENET,
)
register_model(
    "mdeq-imagenet-small",
    mdeq,
    summary="MDEQ of four resolutions (ImageNet)",
    paper="OptEq T7",
    reported="18 M",
    channels=(32, 64, 128, 256),
    head_channels=28,
    **_MDEQ_IMAGENET,
)
register_model(
    "mdeq-imagenet-large",
    mdeq,
    summary="MDEQ of four wide resolutions (ImageNet)",
    paper="OptEq T7",
    reported="63 M",
    channels=(76, 152, 304, 608),
    head_channels=32,
    **_MDEQ_IMAGENET,
)
register_model(
    "mondeq-small",
    mondeq,
    summary="Monotone DEQ of one convolution, images of 8×8 to 32×32",
    paper="Winston & Kolter, 2020",
)
register_model(
    "mondeq-multi-small",
    mondeq,
    summary="Monotone DEQ of two tiers, images of 8×8 to 32×32",
    paper="Winston & Kolter, 2020",
    channels=(16, 32),
)
for _name, _channels, _paper, _reported in (
    ("172k", 81, "OptEq T4", "172 k"),
    ("854k", 200, "MOptEqs T1a", "854 k"),
    ("multi-1m", (64, 128, 128), "MOptEqs T1b", "1 M"),
):
    register_model(
        f"mondeq-{_name}",
        mondeq,
        summary="Monotone DEQ (CIFAR-10)",
        paper=_paper,
        reported=_reported,
        channels=_channels,
        stem_depth=0,
        pool=8,
    )
register_model(
    "node-small",
    neural_ode,
    summary="Neural ODE, images of 8×8 to 32×32",
    paper="Chen et al., 2018",
)
register_model(
    "anode-small",
    neural_ode,
    summary="Augmented Neural ODE, images of 8×8 to 32×32",
    paper="Dupont et al., 2019",
    augment=5,
)
register_model(
    "node-172k",
    neural_ode,
    summary="Neural ODE (CIFAR-10)",
    paper="OptEq T4; MOptEqs T1a",
    reported="172 k",
    filters=125,
    pool=32,
    time_dependent=False,
)
register_model(
    "anode-172k",
    neural_ode,
    summary="Augmented Neural ODE (CIFAR-10)",
    paper="OptEq T4; MOptEqs T1a",
    reported="172 k",
    filters=64,
    augment=10,
    pool=32,
    time_dependent=False,
)
register_model(
    "resnet-small",
    resnet_small,
    summary="Residual network of three stages, images of 8×8 to 32×32",
    paper="He et al., 2016",
)
for _depth, _reported in ((18, "10 M"), (50, "23 M")):
    register_model(
        f"resnet-{_depth}",
        resnet,
        summary=f"ResNet-{_depth} in the form for CIFAR",
        paper="GEQ T1; MOptEqs T1b" if _depth == 18 else "GEQ T1",
        reported=_reported,
        depth=_depth,
    )
for _depth, _reported in ((18, "13 M"), (34, "21 M"), (50, "26 M"), (101, "52 M")):
    register_model(
        f"resnet-{_depth}-imagenet",
        resnet,
        summary=f"ResNet-{_depth} in the form for ImageNet",
        paper="OptEq T7; GEQ T2" if _depth in (18, 50) else "OptEq T7",
        reported=_reported,
        num_classes=1000,
        depth=_depth,
        form="imagenet",
    )
register_model(
    "wide-resnet-50-imagenet",
    resnet,
    summary="Wide-ResNet-50-2",
    paper="OptEq T7",
    reported="69 M",
    num_classes=1000,
    depth=50,
    widening=2,
    form="imagenet",
)
register_model(
    "resnet-50-extractor-imagenet",
    resnet_extractor_classifier,
    summary="Two stages of ResNet-50 and the classifier of deep-opteq-imagenet-small",
    paper="OptEq T7",
    reported="11 M",
    num_classes=1000,
)
register_model(
    "wide-resnet-50-extractor-imagenet",
    resnet_extractor_classifier,
    summary="Two stages of Wide-ResNet-50 and the classifier of deep-opteq-imagenet-mid",
    paper="OptEq T7",
    reported="27 M",
    num_classes=1000,
    widening=2,
)
register_model(
    "hrnet-w18-imagenet",
    hrnet,
    summary="HRNet-W18",
    paper="OptEq T7",
    reported="21 M",
    num_classes=1000,
)
