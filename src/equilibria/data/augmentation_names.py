"""Augmentations by the names that recipes use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equilibria.data.augment import (
    Augmentation,
    Cutout,
    GaussianNoise,
    Normalise,
    RandomCrop,
    RandomFlip,
    RandomShift,
)
from equilibria.data.randaugment import RandAugment
from equilibria.registry import Registry

_augmentations: Registry[Augmentation] = Registry("augmentation")
for _name, _factory in {
    "crop": RandomCrop,
    "cutout": Cutout,
    "flip": RandomFlip,
    "noise": GaussianNoise,
    "normalise": Normalise,
    "randaugment": RandAugment,
    "shift": RandomShift,
}.items():
    _augmentations.register(_name, _factory)


def list_augmentations() -> list[str]:
    return _augmentations.names()


def build_augmentation(step: str | Mapping[str, Any]) -> Augmentation:
    """An augmentation by its name, or by its name with options: `{"crop": {"padding": 4}}`."""
    if isinstance(step, str):
        return _augmentations.create(step)
    if len(step) != 1:
        raise ValueError(
            f"a step of augmentation is a name, or one name with options, not {dict(step)}"
        )
    ((name, options),) = step.items()
    return _augmentations.create(name, **(options or {}))
