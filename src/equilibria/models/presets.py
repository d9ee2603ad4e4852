"""The named models, with the papers' parameter counts where they can be met (SPEC section 6)."""

from __future__ import annotations

from equilibria.models.deep_opteq import deep_opteq
from equilibria.models.opteq import opteq
from equilibria.models.registry import register_model

register_model(
    "opteq-small",
    opteq,
    summary="OptEq of width 32 on 32 channels, images of 8×8 to 32×32",
)
register_model(
    "deep-opteq-small",
    deep_opteq,
    summary="Deep OptEq of two layers (16, 32) on 32 channels, images of 8×8 to 32×32",
)

# OptEq Section 7.1: widths 16, 32, 64, 128, 128. The paper does not state the number of channels m;
# 48, a 1×1 U, no b and a stem of two convolutions give its 199 k: 199 162 parameters.
register_model(
    "deep-opteq-199k",
    deep_opteq,
    summary="Deep OptEq of five layers, the 199 k model of OptEq Section 7.1 (CIFAR-10)",
    channels=48,
    widths=(16, 32, 64, 128, 128),
    stem_depth=2,
    pool=1,
    bias=False,
)

# OptEq Section 7.3.1: widths 16, 32, 64, 64, 128, one convolution as stem; 161 878 parameters.
register_model(
    "deep-opteq-162k",
    deep_opteq,
    summary="Deep OptEq of five layers, the 162 k model of OptEq Table 4 (CIFAR-10)",
    channels=52,
    widths=(16, 32, 64, 64, 128),
    stem_depth=1,
    pool=2,
    bias=True,
)

# OptEq Table 4's 1.4 M, whose layout the paper leaves open: three times the widths, m = 128.
register_model(
    "deep-opteq-1m",
    deep_opteq,
    summary="Deep OptEq of five wide layers, after the 1.4 M model of OptEq Table 4 (CIFAR-10)",
    channels=128,
    widths=(48, 96, 192, 384, 384),
    stem_depth=1,
    pool=1,
    bias=False,
)
