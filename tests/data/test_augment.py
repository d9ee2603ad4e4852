"""Augmentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from equilibria.data import Chain, GaussianNoise, RandomShift


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_shifted_image_is_a_crop_of_the_padded_one() -> None:
    images = torch.rand(20, 2, 5, 6)
    shifted = RandomShift(1)(images, chance())
    padded = F.pad(images, (1, 1, 1, 1))
    offsets = set()
    for index in range(len(images)):
        matches = [
            (row, column)
            for row in range(3)
            for column in range(3)
            if torch.equal(padded[index, :, row : row + 5, column : column + 6], shifted[index])
        ]
        assert len(matches) == 1
        offsets.update(matches)
    assert len(offsets) > 4


def test_noise_has_the_deviation_asked_for() -> None:
    noise = GaussianNoise(0.1)(torch.zeros(50, 1, 20, 20), chance())
    assert abs(float(noise.std()) - 0.1) < 0.005


def test_chain_follows_the_seed() -> None:
    chain = Chain((RandomShift(1), GaussianNoise(0.1)))
    images = torch.rand(8, 1, 8, 8)
    assert torch.equal(chain(images, chance(3)), chain(images, chance(3)))
    assert not torch.equal(chain(images, chance(3)), chain(images, chance(4)))
