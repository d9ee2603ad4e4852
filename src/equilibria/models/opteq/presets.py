"""The named OptEq models: small ones for quick work, and one for every size the paper reports.

`reported` is the paper's figure; the count that comes out stands beside it in docs/models.md.
"""

from __future__ import annotations

from equilibria.gradients import Unrolled
from equilibria.models.opteq.models import (
    deep_opteq,
    deep_opteq_segmentation,
    opteq,
    opteq_imagenet,
)
from equilibria.models.registry import ModelCard, register_models

register_models(
    opteq,
    {
        "opteq-small": ModelCard(
            "OptEq of width 32 on 32 channels, images of 8×8 to 32×32", "OptEq"
        ),
    },
)
register_models(
    deep_opteq,
    {
        "deep-opteq-small": ModelCard(
            "Deep OptEq of two layers (16, 32) on 32 channels, images of 8×8 to 32×32", "OptEq"
        ),
        # Section 7.1: widths 16, 32, 64, 128, 128. The paper does not state the number of channels
        # m; 48, a 1×1 U, no b and a stem of two convolutions give its 199 k.
        "deep-opteq-199k": ModelCard(
            "Deep OptEq of five layers (CIFAR-10)",
            "OptEq T3, T5, T8",
            "199 k",
            dict(channels=48, widths=(16, 32, 64, 128, 128), stem_depth=2, pool=1, bias=False),
        ),
        # Section 7.3.1: widths 16, 32, 64, 64, 128, one convolution as stem.
        "deep-opteq-162k": ModelCard(
            "Deep OptEq of five layers, one convolution as stem (CIFAR-10)",
            "OptEq T4",
            "162 k",
            dict(channels=52, widths=(16, 32, 64, 64, 128), stem_depth=1, pool=2, bias=True),
        ),
        # The layout of the 1.4 M model is left open: three times the widths, m = 128.
        "deep-opteq-1m": ModelCard(
            "Deep OptEq of five wide layers (CIFAR-10)",
            "OptEq T4",
            "1.4 M",
            dict(channels=128, widths=(48, 96, 192, 384, 384), stem_depth=1, pool=1, bias=False),
        ),
    },
)
register_models(
    opteq_imagenet,
    {
        "deep-opteq-imagenet-small": ModelCard(
            "Deep OptEq on two stages of ResNet-50, depthwise-separable layers",
            "OptEq T6, T7",
            "18 M",
            dict(num_classes=1000, gradient=Unrolled(steps=5)),
        ),
        "deep-opteq-imagenet-mid": ModelCard(
            "Deep OptEq on two stages of Wide-ResNet-50, depthwise-separable layers",
            "OptEq T6, T7",
            "40 M",
            dict(
                num_classes=1000,
                extractor_widening=2,
                widths=(1024, 512) * 3,
                kernel_sizes=(5, 3) * 3,
                gradient=Unrolled(steps=5),
            ),
        ),
    },
)
register_models(
    deep_opteq_segmentation,
    {
        "deep-opteq-segmentation": ModelCard(
            "Deep OptEq with an FCN head, small images (CamVid)",
            "OptEq T10",
            options=dict(num_classes=11),
        ),
        # The paper states the widths of the three layers only.
        "deep-opteq-segmentation-cityscapes": ModelCard(
            "Deep OptEq of three layers with an FCN head (Cityscapes)",
            "OptEq T10",
            options=dict(
                num_classes=19,
                channels=512,
                widths=(256, 512, 512),
                stride=8,
                head_width=128,
                norm="estimate",
            ),
        ),
    },
)
