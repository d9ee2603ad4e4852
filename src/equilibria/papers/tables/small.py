"""Small models for the quick settings: the papers' families and shapes at a fraction of the size.

Images of 32×32 become features of 8×8; resolutions, numbers of branches and layers, and what is
wider than what, are those of the papers' models.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import quick_training, recipe
from equilibria.papers.table import RecipeData

CIFAR_EPOCHS = 8
CHARACTER_EPOCHS = 10
ALPHABET_EPOCHS = 8

_BRANCHES: dict[str, Any] = {"pool": 2, "norm": "estimate", "stem_depth": 2, "stem_strides": 2}
_PE: dict[str, Any] = {"pe": "train", "epsilon": 0.1}
_FOUR: dict[str, Any] = {**_BRANCHES, "scales": [1, 2, 4, 8]}
_SIX: dict[str, Any] = {**_BRANCHES, "scales": [1, 2, 4, 4, 8, 8]}
_MOPTEQS_SIX: dict[str, Any] = {
    **_SIX,
    "channels": 64,
    "widths": [16, 32, 32, 32, 64, 64],
    "diversity": 0.001,
}
_ONE_VIEW: dict[str, Any] = {**_BRANCHES, "channels": 16, "widths": [32, 64, 64]}
_ODE: dict[str, Any] = {"pool": 4, "adjoint": False, "rtol": 0.05, "atol": 0.05}
_EXTRACTOR: dict[str, Any] = {"extractor_channels": 8, "channels": 64, "head_widths": [128, 256]}

SMALL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "node": ("node-small", {"filters": 8, **_ODE}),
    "anode": ("anode-small", {"filters": 8, "augment": 2, **_ODE}),
    "mondeq": ("mondeq-small", {"channels": 20, "downsample": 4, "pool": 2}),
    "mondeq-large": ("mondeq-small", {"channels": 44, "downsample": 4, "pool": 2}),
    "mondeq-multi": ("mondeq-multi-small", {"channels": [8, 16], "downsample": 4, "pool": 2}),
    "deep-opteq": (
        "deep-opteq-small",
        {"channels": 16, "widths": [4, 8, 16, 32, 32], "downsample": 8, "norm": "estimate"},
    ),
    # W small at first but not bounded, as in the paper: the iteration takes its time.
    "deep-opteq-unbounded": (
        "deep-opteq-small",
        {
            "channels": 16,
            "widths": [4, 8, 16, 32, 32],
            "stem_depth": 2,
            "stem_strides": 2,
            "norm": None,
            "init_scale": 1.0,
        },
    ),
    "deep-opteq-large": (
        "deep-opteq-small",
        {"channels": 32, "widths": [12, 24, 48, 96, 96], "downsample": 8, "norm": "estimate"},
    ),
    "dnn": ("dnn-small", {"channels": 16, "widths": [4, 8, 16, 24, 24], "downsample": 8}),
    "popteq": ("popteq-small", _ONE_VIEW),
    "popteq-sum": ("popteq-small", {**_ONE_VIEW, "fusion": "sum"}),
    "popteq-conv": ("popteq-small", {**_ONE_VIEW, "fusion": "conv"}),
    "mopteq-1view-no-pe": ("mopteq-small", {**_ONE_VIEW, "diversity": 0.01}),
    "mopteq-1view": ("mopteq-small", {**_ONE_VIEW, "diversity": 0.01, **_PE}),
    "mopteq-4": (
        "mopteq-small",
        {**_FOUR, "channels": 32, "widths": [4, 8, 8, 16], "diversity": 0.001, **_PE},
    ),
    "mopteq-4-wide": (
        "mopteq-small",
        {**_FOUR, "channels": 64, "widths": [8, 16, 16, 32], "diversity": 0.001, **_PE},
    ),
    "mopteq-6": ("mopteq-small", {**_MOPTEQS_SIX, **_PE}),
    "mopteq-6-polynomial": ("mopteq-small", {**_MOPTEQS_SIX, "kernel": "polynomial"}),
    "mopteq-6-sigmoid": ("mopteq-small", {**_MOPTEQS_SIX, "kernel": "sigmoid"}),
    "mopteq-6-imagenet": (
        "mopteq-small",
        {**_MOPTEQS_SIX, "widths": [8, 16, 32, 32, 64, 64], **_PE, "stem_depth": 3},
    ),
    "geq": ("geq-small", {**_SIX, "channels": 48, "widths": [12, 24, 24, 24, 48, 48]}),
    "geq-wide": ("geq-small", {**_SIX, "channels": 64, "widths": [16, 32, 32, 32, 64, 64]}),
    "geq-imagenet": (
        "geq-small",
        {**_SIX, "channels": 40, "widths": [5, 10, 20, 20, 40, 40], "stem_depth": 3},
    ),
    "geq-imagenet-wide": (
        "geq-small",
        {**_SIX, "channels": 64, "widths": [8, 16, 32, 32, 64, 64], "stem_depth": 3},
    ),
    "mdeq": (
        "mdeq-small",
        {"channels": [4, 8, 16, 32], "downsample": 4, "head_channels": 2, "final_channels": 64},
    ),
    "mdeq-wide": (
        "mdeq-small",
        {"channels": [6, 12, 24, 48], "downsample": 4, "head_channels": 3, "final_channels": 96},
    ),
    "mdeq-single": (
        "mdeq-small",
        {"channels": [32], "downsample": 4, "head_channels": 16, "final_channels": 64},
    ),
    "mdeq-large": (
        "mdeq-small",
        {"channels": [8, 16, 32, 64], "downsample": 4, "head_channels": 4, "final_channels": 128},
    ),
    "resnet-18": ("resnet-small", {"channels": [32, 64, 128], "stem_depth": 2, "stem_strides": 2}),
    "resnet-50": (
        "resnet-small",
        {
            "channels": [32, 64, 128],
            "blocks": [2, 2, 2],
            "stem_depth": 2,
            "stem_strides": 2,
        },
    ),
    "opteq-imagenet": ("deep-opteq-imagenet-small", {**_EXTRACTOR, "widths": [64] * 5}),
    "opteq-imagenet-mid": (
        "deep-opteq-imagenet-mid",
        {**_EXTRACTOR, "widths": [128, 64] * 3},
    ),
    "extractor": ("resnet-50-extractor-imagenet", {"channels": 8, "head_widths": [128, 256]}),
    "wide-extractor": (
        "wide-resnet-50-extractor-imagenet",
        {"channels": 8, "head_widths": [128, 256]},
    ),
    "hrnet": (
        "hrnet-w18-imagenet",
        {
            "width": 6,
            "modules": [1, 1, 1],
            "blocks": 2,
            "stem_channels": 16,
            "head_width": 4,
            "features": 128,
        },
    ),
}


def small(
    model: str,
    data: RecipeData,
    epochs: int,
    *,
    training: RecipeData | None = None,
    **options: Any,
) -> RecipeData:
    """The quick recipe of a small model; `options` are the model's, over those above."""
    name, own = SMALL_MODELS[model]
    return recipe(name, data, quick_training(epochs, **(training or {})), **{**own, **options})
