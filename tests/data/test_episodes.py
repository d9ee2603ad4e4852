"""Few-shot episodes, and their disjoint training and test classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equilibria.data import Batches, DataFileError, Episodes, Selection, load_dataset
from tests.data.formats import write_image

CLASSES, DRAWINGS = 6, 5


def numbered_episodes(**options: Any) -> Episodes:
    """Return episodes of constant images, whose value is 10 · class + drawing."""
    values = 10 * torch.arange(CLASSES)[:, None] + torch.arange(DRAWINGS)
    images = values[..., None, None, None].expand(-1, -1, 1, 4, 4).to(torch.uint8)
    settings: dict[str, Any] = {"ways": 3, "shots": 2, "queries": 3, "episodes": 50, "seed": 0}
    return Episodes(images, **{**settings, **options})


def test_episodes_are_grouped_by_class_without_repeated_drawings() -> None:
    images, labels = numbered_episodes().fetch(torch.arange(50))
    assert images.shape == (50, 15, 1, 4, 4)
    assert labels[7].tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    values = (images[:, :, 0, 0, 0] * 255).round().long()
    for episode in values:
        assert len(set(episode.tolist())) == 15
        kinds = [set((episode[labels[0] == label] // 10).tolist()) for label in range(3)]
        assert all(len(kind) == 1 for kind in kinds)
        assert len(set.union(*kinds)) == 3
    assert set((values[:, 0] // 10).tolist()) == set(range(CLASSES))


def test_an_episode_depends_only_on_seed_and_index() -> None:
    first, same, other = (numbered_episodes(seed=seed) for seed in (0, 0, 1))
    alone = torch.cat([first.fetch(torch.tensor([index]))[0] for index in (7, 3)])
    torch.testing.assert_close(alone, same.fetch(torch.tensor([7, 3]))[0], rtol=0, atol=0)
    assert not torch.equal(alone, other.fetch(torch.tensor([7, 3]))[0])
    assert not torch.equal(alone[0], alone[1])
    chosen = Selection(first, torch.tensor([3, 7])).fetch(torch.tensor([1]))[0]
    assert torch.equal(chosen[0], alone[0])


def test_rotated_classes_count_as_classes() -> None:
    arrow = torch.zeros(2, DRAWINGS, 1, 4, 4, dtype=torch.uint8)
    arrow[:, :, :, 0] = 255
    drawn = Episodes(arrow, ways=2, shots=1, queries=1, episodes=40, seed=0, rotations=True)
    assert drawn.classes == 8
    images, _ = drawn.fetch(torch.arange(40))
    edges = (images[..., 0, :], images[..., 3, :], images[..., 0], images[..., 3])
    inked = torch.stack([(edge == 1).flatten(2).all(dim=2) for edge in edges])
    assert bool((inked.sum(dim=0) == 1).all()), "each image has ink on one edge"
    assert bool(inked.flatten(1).any(dim=1).all()), "every rotation occurs"
    # Support and query of a class have the same rotation.
    assert torch.equal(images[:, :2], images[:, 2:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": 1}, "ways must be at least 2"),
        ({"ways": 7}, "ways must be at most 6, the number of classes, got 7"),
        ({"shots": 0}, "shots must be at least 1"),
        ({"queries": 4}, r"shots \+ queries must be at most 5, .* got 2 \+ 4"),
        ({"episodes": 0}, "episodes must be at least 1"),
    ],
)
def test_invalid_options_raise(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbered_episodes(**options)


def test_an_empty_batch_has_the_shape_of_a_full_one() -> None:
    images, labels = numbered_episodes().fetch(torch.arange(0))
    assert (images.shape, labels.shape) == ((0, 15, 1, 4, 4), (0, 15))


def write_characters(folder: Path, drawings: int = 4) -> None:
    """Write white images, each with one black pixel whose position identifies the character."""
    parts = {"images_background": ["Greek", "Latin"], "images_evaluation": ["Tengwar"]}
    for part, alphabets in parts.items():
        for alphabet in alphabets:
            for number in range(3):
                for drawing in range(drawings):
                    pixels = np.full((8, 8), 255, dtype=np.uint8)
                    pixels[number, {"Greek": 0, "Latin": 1, "Tengwar": 2}[alphabet]] = 0
                    character = folder / "omniglot-py" / part / alphabet / f"character0{number}"
                    write_image(character / f"{drawing}.png", pixels)


def test_omniglot_episodes(tmp_path: Path) -> None:
    write_characters(tmp_path)
    options: dict[str, Any] = {"ways": 3, "queries": 2, "size": 8, "rotations": False}
    data = load_dataset("omniglot-episodes", tmp_path, episodes=30, test_episodes=20, **options)
    assert (len(data.train), len(data.test), data.num_classes) == (30, 20, 3)
    assert (data.kind, data.image_shape, data.channels) == ("episodes", (1, 8, 8), 1)
    for part, columns in ((data.train, {0, 1}), (data.test, {2})):
        images = torch.cat([images for images, _ in Batches(part, 7, workers=1)])
        assert set(images.unique().tolist()) == {0, 1}
        assert bool((images.sum(dim=(2, 3, 4)) == 1).all()), "ink is 1, paper 0"
        assert set(images.flatten(0, 2).nonzero()[:, 2].tolist()) == columns
    # The test episodes do not depend on the seed.
    other = load_dataset(
        "omniglot-episodes", tmp_path, episodes=30, test_episodes=20, seed=5, **options
    )
    first_20 = torch.arange(20)
    assert torch.equal(data.test.fetch(first_20)[0], other.test.fetch(first_20)[0])
    assert not torch.equal(data.train.fetch(first_20)[0], other.train.fetch(first_20)[0])


def test_characters_can_be_held_out_for_validation(tmp_path: Path) -> None:
    write_characters(tmp_path)
    data = load_dataset(
        "omniglot-episodes",
        tmp_path,
        ways=2,
        queries=1,
        size=8,
        rotations=False,
        validation_share=0.34,
    )
    assert data.validation is not None
    positions = [
        {tuple(position[-2:]) for position in part.fetch(torch.arange(100))[0].nonzero().tolist()}
        for part in (data.train, data.validation)
    ]
    assert (len(positions[0]), len(positions[1])) == (4, 2)
    assert not positions[0] & positions[1]
    with pytest.raises(ValueError, match=r"validation_share must be in \[0, 1\)"):
        load_dataset("omniglot-episodes", tmp_path, validation_share=1.0)


def test_an_incomplete_folder_raises(tmp_path: Path) -> None:
    write_characters(tmp_path)
    (tmp_path / "omniglot-py/images_background/Greek/character00/0.png").unlink()
    with pytest.raises(DataFileError, match="3 to 4 drawings"):
        load_dataset("omniglot-episodes", tmp_path)


def test_real_omniglot(real_data: Path) -> None:
    data = load_dataset("omniglot-episodes", real_data, episodes=10, test_episodes=10)
    images, labels = data.train.fetch(torch.arange(10))
    assert images.shape == (10, 30, 1, 28, 28)
    assert labels.shape == (10, 30)
    assert 0.02 < float(images.mean()) < 0.2, "a drawing is mostly paper"
