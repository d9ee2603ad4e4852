"""Models of the studies that decide claims, with about 9,500 parameters each."""

from __future__ import annotations

from typing import Any

from equilibria.papers.studies.family import Contestant

CHANNELS = 12
STEM: dict[str, Any] = {"stem_strides": 1}
"""The stem halves the images: features have 4×4 pixels (8×8 without --quick)."""
NORM: dict[str, Any] = {**STEM, "norm": "estimate"}
"""‖W‖ by power iteration, as in the papers' large models. A rigorous bound would cost a third of a
training step, because the kernels cover half of the feature map."""
BRANCHES: dict[str, Any] = {**NORM, "channels": CHANNELS, "widths": (CHANNELS,) * 3}
LAYERS: dict[str, Any] = {**NORM, "channels": CHANNELS, "widths": (CHANNELS,) * 5}
DIVERSITY = 0.03
"""λ. The papers use 0.01 to 0.02 with 32 channels; λ(C − 1) is the weight of D relative to H."""
COUPLED: dict[str, Any] = {**BRANCHES, "diversity": DIVERSITY}

POPTEQ = Contestant("popteq", "POptEqs", "popteq-small", BRANCHES)
MOPTEQ = Contestant("mopteq", "MOptEqs", "mopteq-small", COUPLED)
MOPTEQ_PE = Contestant("mopteq-pe", "MOptEqs + PE", "mopteq-small", {**COUPLED, "pe": "train"})
POLYNOMIAL = Contestant(
    "mopteq-polynomial", "Polynomial", "mopteq-small", {**COUPLED, "kernel": "polynomial"}
)
SIGMOID = Contestant("mopteq-sigmoid", "Sigmoid", "mopteq-small", {**COUPLED, "kernel": "sigmoid"})
GEQ = Contestant(
    "geq",
    "GEQ",
    "geq-small",
    {
        **NORM,
        "channels": CHANNELS,
        "widths": (12, 12, 8),
        "scales": (1, 1, 1),
        "channel_split": 4,
        "hidden": 32,
    },
)
DEEP_OPTEQ = Contestant("deep-opteq", "Deep OptEq", "deep-opteq-small", LAYERS)
PLAIN = Contestant(
    "plain", "Plain network", "dnn-small", {**STEM, "channels": CHANNELS, "widths": (13,) * 5}
)
MONDEQ = Contestant("mondeq", "monDEQ", "mondeq-small", {**STEM, "channels": 16})
REGULARIZED: dict[str, Any] = {**LAYERS, "gamma": 0.1, "placement": "paper"}
"""With γ = 0.1 a step of decorrelation changes z by 14 %, a step of HSIC by 0.9 % (initially)."""
DECORRELATED = Contestant(
    "deep-opteq-decorrelation",
    "Deep OptEq, decorrelation",
    "deep-opteq-small",
    {**REGULARIZED, "regularizer": {"name": "decorrelation"}},
)
INDEPENDENT = Contestant(
    "deep-opteq-hsic",
    "Deep OptEq, HSIC",
    "deep-opteq-small",
    {**REGULARIZED, "regularizer": {"name": "hsic"}},
)
