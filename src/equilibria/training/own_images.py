"""Choice of a recipe for images of the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equilibria.context.caller import warn_caller
from equilibria.data import DataSet
from equilibria.data.sets.own import TABLE_SUFFIXES, TEST_SHARE, Listing, list_own_images
from equilibria.data.source import known_labels
from equilibria.data.survey import Survey, mean_and_deviation, survey
from equilibria.models import list_models, model_options
from equilibria.training.own_certified import (
    CertifiedFacts,
    certified_choice,
    certified_side,
    check_counts,
    is_certified,
)

SMALL_SIDE, PHOTO_SIDE = 40, 64
"""Images with a shorter side of up to `SMALL_SIDE` pixels keep their size. The shorter side of
larger images is scaled to `PHOTO_SIDE`."""
MAP_SIDE = 8
"""Approximate shorter side of the feature maps on which the equilibrium is solved."""
MIN_OBLONG_ASPECT, MAX_ASPECT = 1.2, 2.0
"""Aspect from which images are not cropped to a square, and largest aspect after the crop."""
VALIDATION_SHARE, MIN_VALIDATION_SAMPLES = 0.1, 5
VIEWS, EPOCHS = 30_000, (15, 60)
"""Number of images in all epochs together, and range of the number of epochs."""
MAX_BYTES_IN_MEMORY = 2**29
"""Largest size of the training images that are kept in memory."""
BATCH_SIZES, MIN_STEPS_PER_EPOCH = (8, 64), 8
"""Range of the batch size, and number of steps per epoch that it should allow."""
MAX_LISTED = 3
"""Largest number of classes, or kinds of files, that a message lists."""


@dataclass(frozen=True)
class _Facts:
    """Properties of the data that determine the choice."""

    counts: Sequence[int]
    """Number of training images per class."""
    height: int
    width: int
    is_gray: bool
    mean: float = 0.5
    """Mean of all pixels."""


def is_own_images(source: str | Path) -> bool:
    """Whether the path is a folder, or a table of files and labels."""
    path = Path(source).expanduser()
    return path.is_dir() or (path.suffix.lower() in TABLE_SUFFIXES and path.is_file())


def recipe_for_path(source: str | Path, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Choose a recipe for a folder of images, or a table of files and labels.

    Classes with a single image cause a warning. Images that cannot be read are reported later, when
    they are read.

    Args:
        source: Folder with one folder per class, or table (CSV).
        requested: Keys of the recipe that the user has set.
    """
    path = Path(source).expanduser().absolute()
    if (path / "run.json").is_file():
        raise ValueError(
            f"{source} is a run: continue it with the recipe {Path(source) / 'config.yaml'} and "
            "--resume"
        )
    root, options = path, {}
    if path.is_file():
        root, options = path.parent, {"labels": path.name}
    listing = list_own_images(root, options.get("labels"))
    statistics = survey(listing.paths)
    counts = torch.bincount(listing.labels[listing.indices("train")]).tolist()
    _warn(listing, counts)
    if not listing.held_out:
        counts = [n - min(max(1, round(TEST_SHARE * n)), n - 1) for n in counts]
    if is_certified(requested):
        check_counts(counts, listing.class_names, path)
        shorter = min(statistics.height, statistics.width)
        height = width = certified_side(requested, shorter, statistics.is_gray, path)
    else:
        height, width = _size(requested, statistics)
    facts = _Facts(counts, height, width, statistics.is_gray, statistics.mean)
    recipe = _recipe(facts, requested)
    size: dict[str, Any] = {"size": height if height == width else [height, width]}
    gray = {"gray": True} if statistics.is_gray else {}
    recipe["data"] = {
        "name": "folder",
        "root": str(root),
        "options": {**options, **size, **gray},
        **recipe["data"],
    }
    if {"validation", "test"} <= set(listing.parts):
        recipe["data"]["validation"] = "own"
    recipe["about"] = " ".join([_description(listing, statistics, path.name), recipe["about"]])
    return recipe


def recipe_for_data(data: DataSet, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Choose a recipe for a loaded data set.

    Args:
        data: The data set.
        requested: Keys of the recipe that the user has set.
    """
    labels = known_labels(data.train)
    counts = [len(data.train)] if labels is None else torch.bincount(labels).tolist()
    channels, height, width = data.image_shape
    mean = 0.5
    if is_certified(requested):
        if height != width:
            raise ValueError(
                f"a certified network needs square images, got {height}×{width}: pass size= to "
                "eq.data.from_dataset"
            )
        mean = sum(mean_and_deviation(data.train)[0]) / channels
    recipe = _recipe(_Facts(counts, height, width, channels == 1, mean), requested)
    recipe["data"] = {**recipe["data"], "in_memory": False}
    if data.validation is not None:
        recipe["data"]["validation"] = "own"
    recipe["about"] = f"{sum(counts)} training images. {recipe['about']}"
    return recipe


def _recipe(facts: _Facts, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Choose model, augmentation and schedule; `about` gives the reasons."""
    images, side = sum(facts.counts), min(facts.height, facts.width)
    validation = sum(round(VALIDATION_SHARE * n) for n in facts.counts)
    batch_size = 2 ** int(math.log2(max(1, images // MIN_STEPS_PER_EPOCH)))
    size_in_bytes = images * facts.height * facts.width * (1 if facts.is_gray else 3)
    crop = {"padding": max(1, side // 8), "mode": "zero" if facts.is_gray else "reflect"}
    if is_certified(requested):
        choice = certified_choice(
            CertifiedFacts(side, facts.is_gray, facts.mean), images, requested
        )
    else:
        choice = _plain_choice(facts, images, requested)
    reasons = [choice["about"], "" if facts.is_gray else "Photos are mirrored at random."]
    return {
        **choice,
        "about": " ".join(filter(None, reasons)),
        "data": {
            "in_memory": size_in_bytes <= MAX_BYTES_IN_MEMORY,
            "augmentation": [{"crop": crop}, *([] if facts.is_gray else ["flip"])],
            "normalize": _normalizes(requested),
            "validation": VALIDATION_SHARE if validation >= MIN_VALIDATION_SAMPLES else 0.0,
        },
        "training": {
            "batch_size": min(max(batch_size, BATCH_SIZES[0]), BATCH_SIZES[1]),
            "tolerance": 1e-2,
            "evaluation_tolerance": 1e-4,
            **choice["training"],
        },
    }


def _normalizes(requested: Mapping[str, Any]) -> bool:
    """Return whether images are normalized: not if pixels are produced, or distances certified."""
    name = (requested.get("task") or {}).get("name")
    return name in (None, "classification", "adversarial")


def _plain_choice(facts: _Facts, images: int, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Choose model, schedule and task of a classifier without certificates."""
    strides = _strides(min(facts.height, facts.width))
    maps = [-(-length // 2**strides) for length in (facts.height, facts.width)]
    name, options = _model(requested, strides, maps)
    return {
        "about": f"{name} works on feature maps of {maps[0]}×{maps[1]}. The epochs ({EPOCHS[0]} to "
        f"{EPOCHS[1]}) have about {VIEWS:,} images in total.",
        "model": {"name": name, "options": options},
        "training": {
            "epochs": min(max(EPOCHS[0], round(VIEWS / images)), EPOCHS[1]),
            "learning_rate": 3e-3,
            "weight_decay": 0.05,
            "gradient": "one_step",
        },
        "task": {} if "task" in requested else {"label_smoothing": 0.1},
    }


def _model(
    requested: Mapping[str, Any], strides: int, maps: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """Choose a model, with options for `strides` halvings of the images to these maps."""
    name = (requested.get("model") or {}).get("name")
    stem = {"stem_depth": max(3, strides), "stem_strides": strides}
    if name is None:
        # One branch has half the resolution, if the maps can be halved.
        scales = [1, 1, 1 if any(length % 2 for length in maps) else 2]
        branches = {"channels": 64, "widths": [64, 64, 64], "scales": scales}
        return "geq-small", {**branches, **stem, "pool": 2}
    is_small = name in list_models() and name.endswith("-small")
    supported = model_options(name) if is_small else {}
    return name, {option: value for option, value in stem.items() if option in supported}


def _size(requested: Mapping[str, Any], statistics: Survey) -> tuple[int, int]:
    """Choose the height and width that images are scaled and cropped to."""
    size = ((requested.get("data") or {}).get("options") or {}).get("size")
    if isinstance(size, int):
        return size, size
    if isinstance(size, list) and len(size) == 2:
        return size[0], size[1]
    shorter = min(statistics.height, statistics.width)
    side = PHOTO_SIDE if shorter > SMALL_SIDE else _rounded(shorter)
    low, high = statistics.aspects
    if low >= MIN_OBLONG_ASPECT:
        aspect = min(statistics.width / statistics.height, MAX_ASPECT)
        return side, _rounded(side * aspect, side)
    if high <= 1 / MIN_OBLONG_ASPECT:
        aspect = min(statistics.height / statistics.width, MAX_ASPECT)
        return _rounded(side * aspect, side), side
    return side, side


def _strides(side: int) -> int:
    """Return how often a side is halved."""
    return max(0, round(math.log2(max(1, side) / MAP_SIDE)))


def _rounded(length: float, side: int = MAP_SIDE) -> int:
    """Round a length such that feature maps are even, for images with this shorter side."""
    step = max(MAP_SIDE, 2 << _strides(side))
    return max(1, round(length / step)) * step


def _description(listing: Listing, statistics: Survey, name: str) -> str:
    """Describe the images, and what is held out for tests."""
    kind = "gray" if statistics.is_gray else "color"
    images = (
        f"{name}: {len(listing.paths):,} {kind} images of {len(listing.class_names)} classes, "
        f"median size {statistics.height}×{statistics.width}"
    )
    ignored = ", ".join(f"{n} × {suffix}" for suffix, n in listing.others.most_common(MAX_LISTED))
    if ignored:
        images += f"; {listing.others.total()} other files ignored ({ignored})"
    held_out = {
        "test": "The test part is used for tests.",
        "validation": "The validation part is used for tests, because there is no test part.",
        "": "A fifth of every class is held out for tests, the same images in every run.",
    }
    return f"{images}. {held_out[listing.held_out]}"


def _warn(listing: Listing, counts: Sequence[int]) -> None:
    """Warn about classes with a single image."""
    single = [name for name, n in zip(listing.class_names, counts, strict=True) if n == 1]
    if single and not listing.held_out:
        more = f" and {len(single) - MAX_LISTED} others" if len(single) > MAX_LISTED else ""
        warn_caller(
            f"classes with only one image: {', '.join(single[:MAX_LISTED])}{more}. It is used for "
            "training, so that these classes are not tested; add images"
        )
