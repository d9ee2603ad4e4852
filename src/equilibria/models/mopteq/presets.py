"""The named POptEqs and MOptEqs models."""

from __future__ import annotations

from equilibria.models.mopteq.models import mopteq, popteq
from equilibria.models.registry import ModelCard, register_models

HEAD = dict(stem_depth=2, pool=1, bias=False)
SINGLE_VIEW = dict(channels=32, widths=(64, 128, 128), scales=(1, 1, 1), **HEAD)
PE = dict(pe="train", epsilon=0.1)
# Many channels: the rigorous norm bound would cost more than the solve.
WIDE = dict(diversity=0.001, norm="estimate", **HEAD)
FOUR_SCALES = dict(scales=(1, 2, 4, 8), **WIDE)
CHANNELS_256 = dict(channels=256, widths=(32, 64, 64, 128), **FOUR_SCALES)
SIX_BRANCHES = dict(
    channels=320, widths=(80, 160, 160, 160, 320, 320), scales=(1, 2, 4, 4, 8, 8), **WIDE
)
# Images of 256 are brought to 64 by the stem's first two convolutions. The paper's "1.9 M" has the
# same two further convolutions and cannot have the size of the CIFAR model.
IMAGENET_STEM = dict(stem_depth=4, stem_strides=2)

register_models(
    popteq,
    {
        "popteq-small": ModelCard(
            "POptEqs of three branches on 32 channels, images of 8×8 to 32×32", "MOptEqs"
        ),
        "popteq-193k": ModelCard(
            "POptEqs of three branches, averaged (CIFAR-10)", "MOptEqs T1a", "193 k", SINGLE_VIEW
        ),
        "popteq-sum-193k": ModelCard(
            "POptEqs of three branches, summed (CIFAR-10)",
            "MOptEqs T1a",
            "193 k",
            {**SINGLE_VIEW, "fusion": "sum"},
        ),
        "popteq-conv-276k": ModelCard(
            "POptEqs of three branches, fused by a convolution (CIFAR-10)",
            "MOptEqs T1a",
            "276 k",
            {**SINGLE_VIEW, "fusion": "conv"},
        ),
    },
)
register_models(
    mopteq,
    {
        "mopteq-small": ModelCard(
            "MOptEqs of three branches on 32 channels, images of 8×8 to 32×32", "MOptEqs"
        ),
        "mopteq-1view-193k": ModelCard(
            "MOptEqs of three branches of one resolution (CIFAR-10)",
            "MOptEqs T1a",
            "193 k",
            {**SINGLE_VIEW, **PE, "diversity": 0.01},
        ),
        "mopteq-480k": ModelCard(
            "MOptEqs of four resolutions, 128 channels (CIFAR-10)",
            "MOptEqs T1b",
            "0.48 M",
            {**FOUR_SCALES, **PE, "channels": 128, "widths": (16, 32, 32, 64)},
        ),
        "mopteq-1.9m": ModelCard(
            "MOptEqs of four resolutions, 256 channels (CIFAR)",
            "MOptEqs T1b, T2a",
            "1.9 M",
            {**CHANNELS_256, **PE},
        ),
        "mopteq-8m": ModelCard(
            "MOptEqs of six branches, 320 channels (CIFAR)",
            "MOptEqs T1b; GEQ T1",
            "8.1 M",
            {**SIX_BRANCHES, **PE},
        ),
        "mopteq-polynomial-8m": ModelCard(
            "MOptEqs of six branches with a polynomial kernel (CIFAR-100)",
            "GEQ T5",
            "8 M",
            {**SIX_BRANCHES, "kernel": "polynomial"},
        ),
        "mopteq-sigmoid-8m": ModelCard(
            "MOptEqs of six branches with a sigmoid kernel (CIFAR-100)",
            "GEQ T5",
            "8 M",
            {**SIX_BRANCHES, "kernel": "sigmoid"},
        ),
        "mopteq-imagenet-1.9m": ModelCard(
            "MOptEqs of four resolutions for images of 256×256 (Imagenette)",
            "MOptEqs T2b",
            "1.9 M",
            {**CHANNELS_256, **PE, **IMAGENET_STEM},
        ),
        "mopteq-imagenet-10m": ModelCard(
            "MOptEqs of six branches for images of 256×256 (Imagenette)",
            "MOptEqs T2b; GEQ T2a",
            "10 M",
            {**SIX_BRANCHES, **PE, **IMAGENET_STEM},
        ),
        "mopteq-imagenet-13m": ModelCard(
            "MOptEqs of six branches, 384 channels (ImageNet, ImageNet-100)",
            "MOptEqs T4; GEQ T2b",
            "13 M",
            {
                **SIX_BRANCHES,
                **PE,
                **IMAGENET_STEM,
                "channels": 384,
                "widths": (48, 96, 192, 192, 384, 384),
                "num_classes": 1000,
            },
        ),
    },
)
