"""Augmentations by the names that recipes use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from equilibria.data.augment import (
    Augmentation,
    Cutout,
    GaussianNoise,
    RandomCrop,
    RandomFlip,
    RandomShift,
)
from equilibria.data.paired import (
    ImagesOnly,
    PairedAugmentation,
    RandomPairFlip,
    RandomScaleCrop,
)
from equilibria.data.randaugment import RandAugment
from equilibria.registry import Registry

T = TypeVar("T")


def _noise_beside_labels(deviation: float) -> PairedAugmentation:
    return ImagesOnly(GaussianNoise(deviation))


def _registry(kind: str, factories: Mapping[str, Callable[..., T]]) -> Registry[T]:
    registry: Registry[T] = Registry(kind)
    for name, factory in factories.items():
        registry.register(name, factory)
    return registry


_augmentations: Registry[Augmentation] = _registry(
    "augmentation",
    {
        "crop": RandomCrop,
        "cutout": Cutout,
        "flip": RandomFlip,
        "noise": GaussianNoise,
        "randaugment": RandAugment,
        "shift": RandomShift,
    },
)
_paired: Registry[PairedAugmentation] = _registry(
    "augmentation for segmentation",
    {"flip": RandomPairFlip, "noise": _noise_beside_labels, "scale_crop": RandomScaleCrop},
)


def list_augmentations() -> list[str]:
    return _augmentations.names()


def list_paired_augmentations() -> list[str]:
    return _paired.names()


def build_augmentation(step: str | Mapping[str, Any]) -> Augmentation:
    """An augmentation by its name, or by its name with options: `{"crop": {"padding": 4}}`."""
    return _build(_augmentations, step)


def build_paired_augmentation(step: str | Mapping[str, Any]) -> PairedAugmentation:
    """One for images with label maps, named alike: `{"scale_crop": {"size": [64, 64]}}`."""
    return _build(_paired, step)


def _build(registry: Registry[T], step: str | Mapping[str, Any]) -> T:
    if isinstance(step, str):
        return registry.create(step)
    if len(step) != 1:
        raise ValueError(
            f"a step of augmentation is a name, or one name with options, not {dict(step)}"
        )
    ((name, options),) = step.items()
    return registry.create(name, **(options or {}))
