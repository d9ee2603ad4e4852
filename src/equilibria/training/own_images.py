"""A recipe for images of your own, chosen by what they are like."""

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
from equilibria.data.survey import Survey, survey
from equilibria.models import list_models, model_options

SMALL_SIDE, PHOTO_SIDE = 40, 64
"""Images up to the first keep their size; the shorter side of larger ones becomes the second."""
MAP = 8
"""The shorter side of the maps on which the equilibrium is solved, about."""
OBLONG, LONGEST = 1.2, 2.0
"""Aspects: from the first on images are not cut to a square, and the second is the longest."""
VALIDATION_SHARE, LEAST_VALIDATION = 0.1, 5
VIEWS, EPOCHS = 30_000, (15, 60)
"""Images that a training sees, all epochs together, and how many epochs that may be."""
MOST_IN_MEMORY = 2**29
"""Bytes of training images that are kept in memory."""
BATCH_SIZES, LEAST_STEPS = (8, 64), 8
"""Of a batch, and how many there are at least in an epoch, where the first allow it."""
NAMED = 3
"""Largest number of classes, or kinds of files, that are named."""


@dataclass(frozen=True)
class _Facts:
    """What the choice goes by."""

    counts: Sequence[int]
    """Training images of each class."""
    height: int
    width: int
    is_gray: bool


def is_own_images(source: str | Path) -> bool:
    """Whether that is a folder, or a table of files and labels."""
    path = Path(source).expanduser()
    return path.is_dir() or (path.suffix.lower() in TABLE_SUFFIXES and path.is_file())


def recipe_for_path(source: str | Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe for a folder of images, one folder a class, or a table of files and labels.

    asked: the keys that the user has set. A warning names classes with a single image. Images
    that cannot be read are reported when they are read.
    """
    path = Path(source).expanduser().absolute()
    if (path / "run.json").is_file():
        raise ValueError(f"{source} is a run: go on with {Path(source) / 'config.yaml'}, --resume")
    root, options = path, {}
    if path.is_file():
        root, options = path.parent, {"labels": path.name}
    listing = list_own_images(root, options.get("labels"))
    found = survey(listing.paths)
    counts = torch.bincount(listing.labels[listing.indices("train")]).tolist()
    _warn(listing, counts)
    if not listing.held_out:
        counts = [n - min(max(1, round(TEST_SHARE * n)), n - 1) for n in counts]
    height, width = _size(asked, found)
    recipe = _recipe(_Facts(counts, height, width, found.is_gray), asked)
    size: dict[str, Any] = {"size": height if height == width else [height, width]}
    gray = {"gray": True} if found.is_gray else {}
    recipe["data"] = {
        "name": "folder",
        "root": str(root),
        "options": {**options, **size, **gray},
        **recipe["data"],
    }
    if {"validation", "test"} <= set(listing.parts):
        recipe["data"]["validation"] = "own"
    recipe["about"] = " ".join([_told(listing, found, path.name), recipe["about"]])
    return recipe


def recipe_for_data(data: DataSet, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a data set that is there already."""
    labels = known_labels(data.train)
    counts = [len(data.train)] if labels is None else torch.bincount(labels).tolist()
    channels, height, width = data.image_shape
    recipe = _recipe(_Facts(counts, height, width, channels == 1), asked)
    recipe["data"] = {**recipe["data"], "in_memory": False}
    if data.validation is not None:
        recipe["data"]["validation"] = "own"
    recipe["about"] = f"{sum(counts)} images to train on. {recipe['about']}"
    return recipe


def _recipe(facts: _Facts, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Model, augmentation and schedule for these images, and why."""
    images, side = sum(facts.counts), min(facts.height, facts.width)
    strides = _strides(side)
    maps = [-(-length // 2**strides) for length in (facts.height, facts.width)]
    validation = sum(round(VALIDATION_SHARE * n) for n in facts.counts)
    epochs = min(max(EPOCHS[0], round(VIEWS / images)), EPOCHS[1])
    # Of other tasks some draw pictures, whose pixels are to stay as they are.
    classifies = (asked.get("task") or {}).get("name") in (None, "classification", "adversarial")
    batch_size = 2 ** int(math.log2(max(1, images // LEAST_STEPS)))
    size_in_bytes = images * facts.height * facts.width * (1 if facts.is_gray else 3)
    moves = {"padding": max(1, side // 8), "mode": "zero" if facts.is_gray else "reflect"}
    name, options = _model(asked, strides, maps)
    why = [
        f"{name} works on maps of {maps[0]}×{maps[1]}.",
        f"It is to see about {VIEWS:,} images, in {EPOCHS[0]} to {EPOCHS[1]} epochs.",
        "" if facts.is_gray else "Photos may be mirrored.",
    ]
    return {
        "about": " ".join(filter(None, why)),
        "model": {"name": name, "options": options},
        "data": {
            "in_memory": size_in_bytes <= MOST_IN_MEMORY,
            "augmentation": [{"crop": moves}, *([] if facts.is_gray else ["flip"])],
            "normalize": classifies,
            "validation": VALIDATION_SHARE if validation >= LEAST_VALIDATION else 0.0,
        },
        "training": {
            "epochs": epochs,
            "batch_size": min(max(batch_size, BATCH_SIZES[0]), BATCH_SIZES[1]),
            "learning_rate": 3e-3,
            "weight_decay": 0.05,
            "tolerance": 1e-2,
            "evaluation_tolerance": 1e-4,
            "gradient": "one_step",
        },
        "task": {} if "task" in asked else {"label_smoothing": 0.1},
    }


def _model(
    asked: Mapping[str, Any], strides: int, maps: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """A model, and options for images that are halved so many times, to these maps."""
    name = (asked.get("model") or {}).get("name")
    stem = {"stem_depth": max(3, strides), "stem_strides": strides}
    if name is None:
        # One branch sees the maps halved once more, where that can be done.
        scales = [1, 1, 1 if any(length % 2 for length in maps) else 2]
        branches = {"channels": 64, "widths": [64, 64, 64], "scales": scales}
        return "geq-small", {**branches, **stem, "pool": 2}
    known = model_options(name) if name in list_models() and name.endswith("-small") else {}
    return name, {option: value for option, value in stem.items() if option in known}


def _size(asked: Mapping[str, Any], found: Survey) -> tuple[int, int]:
    """Height and width that images are brought to."""
    size = ((asked.get("data") or {}).get("options") or {}).get("size")
    if isinstance(size, int):
        return size, size
    if isinstance(size, list) and len(size) == 2:
        return size[0], size[1]
    shorter = min(found.height, found.width)
    side = PHOTO_SIDE if shorter > SMALL_SIDE else _in_steps(shorter)
    low, high = found.aspects
    if low >= OBLONG:
        return side, _in_steps(side * min(found.width / found.height, LONGEST), side)
    if high <= 1 / OBLONG:
        return _in_steps(side * min(found.height / found.width, LONGEST), side), side
    return side, side


def _strides(side: int) -> int:
    """How often a side is halved."""
    return max(0, round(math.log2(max(1, side) / MAP)))


def _in_steps(length: float, side: int = MAP) -> int:
    """About that length, such that its map is even where images have this shorter side."""
    step = max(MAP, 2 << _strides(side))
    return max(1, round(length / step)) * step


def _told(listing: Listing, found: Survey, name: str) -> str:
    """What is there, and what of it is held out."""
    kind = "gray" if found.is_gray else "color"
    there = (
        f"{name}: {len(listing.paths):,} {kind} images of {len(listing.class_names)} classes, "
        f"{found.height}×{found.width} in the median"
    )
    passed = ", ".join(f"{count} × {kind}" for kind, count in listing.others.most_common(NAMED))
    if passed:
        there += f"; {listing.others.total()} other files passed over ({passed})"
    held_out = {
        "test": "Tested on its own part.",
        "validation": "Tested on the part for validation, as there is none for tests.",
        "": "A fifth of every class is to test on, always the same images.",
    }
    return f"{there}. {held_out[listing.held_out]}"


def _warn(listing: Listing, counts: Sequence[int]) -> None:
    """Warn about classes with a single image."""
    single = [name for name, n in zip(listing.class_names, counts, strict=True) if n == 1]
    if single and not listing.held_out:
        more = f" and {len(single) - NAMED} others" if len(single) > NAMED else ""
        warn_caller(
            f"a single image each have {', '.join(single[:NAMED])}{more}: it is trained on, and "
            "nothing tests how well the class is told apart; add images"
        )
