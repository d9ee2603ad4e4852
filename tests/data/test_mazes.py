"""Generated mazes and their paths."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.data import DataSet
from equilibria.data.sets.mazes import grow_mazes

GENERATORS = ("backtracker", "prim", "kruskal")


def mazes(**options: object) -> DataSet:
    counts = {"count": 30, "test_count": 20, "validation_count": 10}
    return eq.data.load_dataset("mazes", **{**counts, **options})


def distances(is_open: Tensor, start: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Breadth-first search."""
    steps, queue = {start: 0}, deque([start])
    while queue:
        row, column = queue.popleft()
        for near in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if is_open[near] and near not in steps:
                steps[near] = steps[row, column] + 1
                queue.append(near)
    return steps


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("cells", [2, 5, 9])
def test_mazes_are_spanning_trees(generator: str, cells: int) -> None:
    grown = grow_mazes(8, cells, generator, np.random.default_rng(0))  # type: ignore[arg-type]
    for maze in torch.from_numpy(grown):
        assert maze.sum() == 2 * cells**2 - 1, "cells and the walls between them"
        assert len(distances(maze, (1, 1))) == maze.sum(), "connected, so without cycles"
        assert not torch.stack([maze[0], maze[-1], maze[:, 0], maze[:, -1]]).any()


@pytest.mark.parametrize("size", [7, 11, 19])
def test_labels_are_the_shortest_paths(size: int) -> None:
    data = mazes(size=size)
    for images, paths in (data.train.fetch(torch.arange(30)), data.test.fetch(torch.arange(20))):
        assert images.shape[1:] == (3, size, size)
        for image, path in zip(images, paths, strict=True):
            is_open = image.amax(dim=0) > 0
            start, goal = (
                tuple((image == torch.tensor(color)[:, None, None]).all(0).nonzero()[0].tolist())
                for color in ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
            )
            there, back = distances(is_open, start), distances(is_open, goal)
            length = there[goal]
            on_path = {place for place in there if there[place] + back[place] == length}
            assert on_path == set(map(tuple, path.nonzero().tolist()))


def test_parts_never_share_a_maze() -> None:
    """There are only 192 spanning trees of 3×3 cells, so that most of them occur."""
    parts: dict[str, set[bytes]] = {"train": set(), "validation": set(), "test": set()}
    for seed in range(2):
        data = mazes(size=7, count=400, test_count=300, validation_count=300, seed=seed)
        for name, mazes_of_part in parts.items():
            images = getattr(data, name).images
            mazes_of_part |= {image.amax(dim=0).numpy().tobytes() for image in images}
    assert sum(map(len, parts.values())) == len(set().union(*parts.values())) > 150


def test_mazes_follow_from_the_seed() -> None:
    first, same, other = mazes(seed=1), mazes(seed=1, test_size=15), mazes(seed=2)
    assert torch.equal(first.train.images, same.train.images)
    assert not torch.equal(first.train.images, other.train.images)
    assert same.test.images.shape[2:] == (15, 15)


def test_generators_make_different_mazes() -> None:
    """A backtracker has fewer dead ends, and Prim's algorithm more, than Kruskal's."""
    ends = {}
    for generator in GENERATORS:
        grown = grow_mazes(200, 8, generator, np.random.default_rng(0)).astype(int)  # type: ignore[arg-type]
        ways = grown[:, :-2, 1:-1] + grown[:, 2:, 1:-1] + grown[:, 1:-1, :-2] + grown[:, 1:-1, 2:]
        ends[generator] = ((ways == 1) & (grown[:, 1:-1, 1:-1] == 1)).sum() / 200
    assert ends["backtracker"] < 0.6 * ends["kruskal"]
    assert ends["prim"] > 1.05 * ends["kruskal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 10}, "odd number of pixels from 7 to 201, got 10"),
        ({"test_size": 5}, "odd number of pixels"),
        ({"count": -1}, "number of mazes"),
        ({"generators": "prims"}, "generators must be one of backtracker, prim, kruskal"),
        ({"generators": []}, "at least one"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mazes(**options)
