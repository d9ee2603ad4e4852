"""Choice of a certified network for images of the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria.data import DataFileError

MIN_SIDE, MAX_SIDE = 8, 32
"""Range of the side of the images; larger images are scaled down. The side of color images is a
multiple of the smallest."""
MIN_IMAGES = 5
"""Smallest number of training images per class."""
GRAY_LEVELS, GRAY_LEVELS_OF_GRAY = 0.65, 3.0
"""Radius that is judged, as a change of every pixel in gray levels of 255; for color and for gray
images. For images of 32×32 in color this is the usual radius of 36/255 in L2."""
EPS_FACTOR = 1.75
"""Distance ε of training, as a multiple of the radius that is judged."""
VIEWS, EPOCHS = 100_000, (20, 100)
"""Number of images in all epochs together, and range of the number of epochs."""
UNITS, PATCH, ROWS, DEPTH = 256, 4, (96, 192), 4
"""Rows of a reflection of the whole image, side of the patches, rows in the first and the second
stage, and reflections per stage; for gray images, number of reflections of the whole image."""
BATCH_SIZES, STEPS_PER_EPOCH = (8, 256), 8
"""Range of the batch size, and number of steps per epoch that it should allow."""


@dataclass(frozen=True)
class CertifiedFacts:
    """Properties of the images that determine the network.

    Attributes:
        side: Side of the images.
        is_gray: Whether the images are gray.
        mean: Mean of all pixels.
    """

    side: int
    is_gray: bool
    mean: float


def is_certified(requested: Mapping[str, Any]) -> bool:
    """Return whether the user has asked for the task `certified`."""
    return bool((requested.get("task") or {}).get("name") == "certified")


def certified_side(requested: Mapping[str, Any], shorter: int, is_gray: bool, place: Path) -> int:
    """Choose the side of the images, which are cropped to squares.

    Args:
        requested: Keys of the recipe that the user has set.
        shorter: Median length of the shorter side.
        is_gray: Whether the images are gray. Others are cut into patches.
        place: Folder or table of the images, for messages.

    Raises:
        DataFileError: If the images are too small.
        ValueError: If the user has set a size that is not that of a square.
    """
    size = ((requested.get("data") or {}).get("options") or {}).get("size")
    if size is not None:
        if not isinstance(size, int):
            raise ValueError(
                f"a certified network needs square images, got data.options.size={size}: set one "
                "number, the side"
            )
        return size
    if shorter < MIN_SIDE:
        raise DataFileError(
            place,
            f"the images are too small: the median of the shorter side is {shorter} pixels",
            f"a certified network needs at least {MIN_SIDE}; use larger images, or enlarge these "
            f"by data.options.size={MIN_SIDE}",
        )
    return min(shorter if is_gray else round(shorter / MIN_SIDE) * MIN_SIDE, MAX_SIDE)


def check_counts(counts: Sequence[int], class_names: Sequence[str], place: Path) -> None:
    """Raise if a class has too few training images.

    Args:
        counts: Number of training images per class.
        class_names: Names of the classes.
        place: Folder or table of the images, for messages.

    Raises:
        DataFileError: If a class has fewer than `MIN_IMAGES`.
    """
    fewest = min(range(len(counts)), key=lambda label: counts[label])
    if counts[fewest] < MIN_IMAGES:
        raise DataFileError(
            place,
            f"the class {class_names[fewest]!r} has {counts[fewest]} training images",
            f"a certified network needs at least {MIN_IMAGES} per class, and others to certify "
            "them on; add images",
        )


def certified_choice(
    facts: CertifiedFacts, images: int, requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the network, the radius and the schedule of a certified classifier.

    Args:
        facts: Properties of the images.
        images: Number of training images.
        requested: Keys of the recipe that the user has set.

    Returns:
        Parts of a recipe, with the reasons as `about`.
    """
    numbers = facts.side**2 * (1 if facts.is_gray else 3)
    levels = GRAY_LEVELS_OF_GRAY if facts.is_gray else GRAY_LEVELS
    radius = _rounded(levels / 255 * math.sqrt(numbers))
    epochs = min(max(EPOCHS[0], round(VIEWS / images)), EPOCHS[1])
    batch_size = 2 ** int(math.log2(max(1, images // STEPS_PER_EPOCH)))
    name, sizes = network(facts.side, facts.is_gray)
    options = {**sizes, "center": round(facts.mean, 2)}
    named = (requested.get("model") or {}).get("name")
    about = (
        f"{named or name} is 1-Lipschitz, so that a margin is a certified radius. Images become "
        f"squares of {facts.side}×{facts.side}, and radii (L2) are in their pixels. Certified "
        f"accuracy is judged at radius {radius:g}: change task.options.radius and task.options.eps "
        "together."
    )
    return {
        "about": about,
        "model": {"name": named or name, "options": options if named in (None, name) else {}},
        "task": {
            "options": {
                "eps": _rounded(EPS_FACTOR * radius),
                "radius": radius,
                "radii": [_rounded(radius / 2), _rounded(2 * radius)],
                "temperature": 2.0 if facts.is_gray else 4.0,
            }
        },
        "training": {
            "epochs": epochs,
            "batch_size": min(max(batch_size, BATCH_SIZES[0]), BATCH_SIZES[1]),
            "optimizer": "adam",
            "learning_rate": 5e-3,
            "weight_decay": 0.0,
            "schedule": "polynomial",
            "power": 1.0,
            "warmup_epochs": 0,
        },
    }


def network(side: int, is_gray: bool) -> tuple[str, dict[str, Any]]:
    """Choose orthonormal reflections for squares of this side.

    Args:
        side: Side of the images.
        is_gray: Whether they are gray. Others are cut into patches, if the side allows.

    Returns:
        Name of the model, and its sizes.
    """
    numbers = side**2 * (1 if is_gray else 3)
    stages: list[list[int]] = []
    while not is_gray and len(stages) < len(ROWS) and side % (2 * PATCH) == 0:
        side //= 2
        stages.append([PATCH, ROWS[len(stages)], DEPTH])
    if stages:
        return "reflection-patches", {"stages": stages, "units": [min(UNITS, numbers)]}
    return "reflection-vectors", {"units": [min(UNITS, -(-numbers // 2))] * DEPTH}


def _rounded(value: float) -> float:
    """Round to three digits."""
    return float(f"{value:.3g}")
