"""Augmentations of images with class labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equilibria.data.augment import (
    Augmentation,
    Chain,
    Cutout,
    GaussianNoise,
    RandAugment,
    RandomCrop,
    RandomFlip,
    RandomScaleCrop,
    RandomShift,
    build_augmentation,
)

RANDOM: list[Augmentation] = [
    RandomCrop(2),
    RandomCrop(2, "reflect"),
    RandomFlip(),
    RandomShift(2),
    Cutout(3),
    GaussianNoise(0.1),
    RandAugment(),
]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augmented(augmentation: Augmentation, images: Tensor, seed: int = 0) -> Tensor:
    """Return the augmented images; check that the labels are unchanged."""
    classes = torch.arange(len(images))
    changed, labels = augmentation(images, classes, generator(seed))
    assert labels is classes
    return changed


def crop_offsets(images: Tensor, cropped: Tensor, padded: Tensor) -> set[tuple[int, int]]:
    """Return the offsets of the crops in the padded images; each must match exactly once."""
    height, width = images.shape[2:]
    offsets = set()
    for index in range(len(images)):
        matches = [
            (row, column)
            for row in range(padded.shape[2] - height + 1)
            for column in range(padded.shape[3] - width + 1)
            if torch.equal(
                padded[index, :, row : row + height, column : column + width], cropped[index]
            )
        ]
        assert len(matches) == 1
        offsets.update(matches)
    return offsets


def test_shifted_images_are_crops_of_the_padded_ones() -> None:
    images = torch.rand(20, 2, 5, 6)
    offsets = crop_offsets(images, augmented(RandomShift(1), images), F.pad(images, (1, 1, 1, 1)))
    assert len(offsets) > 4


@pytest.mark.parametrize(("mode", "padding"), [("zero", "constant"), ("reflect", "reflect")])
def test_crops_have_all_offsets_in_the_padded_image(mode: str, padding: str) -> None:
    images = torch.rand(200, 3, 6, 5)
    cropped = augmented(RandomCrop(2, mode), images)  # type: ignore[arg-type]
    assert cropped.shape == images.shape
    assert cropped.is_contiguous()
    offsets = crop_offsets(images, cropped, F.pad(images, (2, 2, 2, 2), mode=padding))
    assert offsets == {(row, column) for row in range(5) for column in range(5)}


def test_flip_mirrors_half_of_the_images() -> None:
    images = torch.rand(400, 1, 3, 4)
    flipped = augmented(RandomFlip(), images)
    kept = (flipped == images).flatten(1).all(dim=1)
    mirrored = (flipped == images.flip(3)).flatten(1).all(dim=1)
    assert bool((kept ^ mirrored).all())
    assert 160 < int(mirrored.sum()) < 240
    assert torch.equal(augmented(RandomFlip(1.0), images), images.flip(3))
    assert torch.equal(augmented(RandomFlip(0.0), images), images)


def test_cutout_hides_one_square_around_a_random_pixel() -> None:
    images = torch.ones(300, 2, 8, 9)
    cut = augmented(Cutout(4), images)
    assert torch.equal(cut[:, 0], cut[:, 1])
    hidden = cut[:, 0] == 0
    rows, columns = hidden.any(dim=2), hidden.any(dim=1)
    assert torch.equal(hidden, rows[:, :, None] & columns[:, None, :])
    for sides, length in ((rows, 8), (columns, 9)):
        # A square around c covers [c − 2, c + 2), clipped at the border.
        expected = {len(range(max(c - 2, 0), min(c + 2, length))) for c in range(length)}
        assert set(sides.sum(dim=1).tolist()) == expected
    assert torch.equal(augmented(Cutout(0), images), images)


def test_noise_has_the_given_standard_deviation() -> None:
    noise = augmented(GaussianNoise(0.1), torch.zeros(50, 1, 20, 20))
    assert abs(float(noise.std()) - 0.1) < 0.005


@pytest.mark.parametrize("augmentation", RANDOM, ids=str)
def test_results_depend_only_on_the_seed(augmentation: Augmentation, device: torch.device) -> None:
    images = torch.rand(16, 3, 8, 8).to(device)
    kept = images.clone()
    torch.manual_seed(1)
    first = augmented(augmentation, images, 3)
    torch.manual_seed(2)
    assert torch.equal(augmented(augmentation, images, 3), first)
    assert not torch.equal(augmented(augmentation, images, 4), first)
    assert torch.equal(images, kept)
    assert first.device == images.device


@pytest.mark.parametrize("augmentation", RANDOM, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shape_and_dtype_are_kept(augmentation: Augmentation, dtype: torch.dtype) -> None:
    for samples in (0, 5):
        images = torch.rand(samples, 3, 8, 10).to(dtype)
        changed = augmented(augmentation, images)
        assert changed.shape == images.shape
        assert changed.dtype == dtype
        if not isinstance(augmentation, GaussianNoise):
            assert bool(((changed >= 0) & (changed <= 1)).all())


def test_a_chain_depends_only_on_the_seed() -> None:
    chain = Chain((RandomShift(1), GaussianNoise(0.1)))
    images = torch.rand(8, 1, 8, 8)
    assert torch.equal(augmented(chain, images, 3), augmented(chain, images, 3))
    assert not torch.equal(augmented(chain, images, 3), augmented(chain, images, 4))
    assert augmented(Chain(()), images) is images


def test_scale_crop_works_without_label_maps() -> None:
    images = torch.rand(4, 1, 8, 8)
    maps = torch.zeros(4, 8, 8, dtype=torch.long)
    crop = RandomScaleCrop((6, 10))
    assert torch.equal(augmented(crop, images, 3), crop(images, maps, generator(3))[0])


def test_augmentations_are_built_from_names_and_options() -> None:
    assert build_augmentation("flip") == RandomFlip()
    assert build_augmentation({"crop": {"padding": 2}}) == RandomCrop(2)
    assert build_augmentation({"randaugment": None}) == RandAugment()
    with pytest.raises(ValueError, match="one name to its options"):
        build_augmentation({"flip": {}, "crop": {}})
    with pytest.raises(TypeError, match="did you mean 'padding'"):
        build_augmentation({"crop": {"pading": 2}})


class CountOperations(TorchDispatchMode):
    """Counter of the tensor operations in a block."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("augmentation", RANDOM, ids=str)
def test_augmentation_is_vectorized_over_samples(augmentation: Augmentation) -> None:
    """Four times the samples take about the same number of operations."""

    def operations(samples: int) -> int:
        images = torch.rand(samples, 3, 8, 8)
        with CountOperations() as counted:
            augmented(augmentation, images)
        return counted.count

    assert operations(256) < 2 * operations(64)


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="padding"):
        RandomCrop(-1)
    with pytest.raises(ValueError, match="one of zero, reflect"):
        RandomCrop(1, "wrap")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="smaller padding"):
        augmented(RandomCrop(4, "reflect"), torch.rand(1, 1, 4, 4))
    with pytest.raises(ValueError, match="probability"):
        RandomFlip(1.5)
    with pytest.raises(ValueError, match="size"):
        Cutout(-1)
