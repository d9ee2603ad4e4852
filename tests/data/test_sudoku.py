"""Generated Sudoku puzzles."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria.data import DataSet
from equilibria.data.sets.sudoku import BOXES, full_grid, remove_digits, solutions


def sudoku(**options: object) -> DataSet:
    counts = {"count": 40, "test_count": 20, "validation_count": 10}
    return eq.data.load_dataset("sudoku", **{**counts, **options})


def is_valid(grid: np.ndarray) -> bool:
    size = len(grid)
    height, width = BOXES[size]
    corners = product(range(0, size, height), range(0, size, width))
    boxes = [grid[r : r + height, c : c + width].ravel() for r, c in corners]
    digits = set(range(1, size + 1))
    return all(set(unit.tolist()) == digits for unit in (*grid, *grid.T, *boxes))


@pytest.mark.parametrize("size", [4, 6, 9])
def test_solutions_are_valid_and_unique(size: int) -> None:
    data = sudoku(size=size, count=10, test_count=5, validation_count=5)
    for part in (data.train, data.test, data.validation):
        assert part is not None
        images, labels = part.fetch(torch.arange(5))
        assert images.shape == (5, size + 3, size, size)
        for image, label in zip(images, labels, strict=True):
            given = (image[:size] * torch.arange(1, size + 1)[:, None, None]).sum(0).int().numpy()
            grid = label.numpy() + 1
            assert is_valid(grid)
            assert torch.equal(image[size] > 0, torch.from_numpy(given > 0))
            assert [np.array(cells).reshape(size, size).tolist() for cells in solutions(given)] == [
                grid.tolist()
            ]


def test_all_solutions_are_found() -> None:
    """There are 288 grids of 4×4; a contradiction has none."""
    grids = {tuple(cells) for cells in solutions(np.zeros((4, 4), int))}
    assert len(grids) == 288
    assert all(is_valid(np.array(cells).reshape(4, 4)) for cells in grids)
    twice = np.zeros((4, 4), int)
    twice[0, 0] = twice[0, 3] = 1
    assert not list(solutions(twice))


def test_digits_are_removed_up_to_the_number_of_clues() -> None:
    random = np.random.default_rng(0)
    solution = full_grid(6, random)
    assert is_valid(solution)
    assert (remove_digits(solution, 20, random) > 0).sum() == 20
    fewest = remove_digits(solution, 1, random)
    for place in zip(*fewest.nonzero(), strict=True):
        without = fewest.copy()
        without[place] = 0
        assert len(list(solutions(without))) > 1, "no other digit can be removed"


def test_parts_never_share_a_solution_and_follow_from_the_seed() -> None:
    parts: dict[str, set[bytes]] = {"train": set(), "validation": set(), "test": set()}
    for seed in range(2):
        data = sudoku(count=400, test_count=200, validation_count=200, seed=seed)
        for name, grids in parts.items():
            grids |= {label.numpy().tobytes() for label in getattr(data, name).labels}
    assert sum(map(len, parts.values())) == len(set().union(*parts.values())) > 200
    again = sudoku(seed=1)
    assert torch.equal(again.train.images, sudoku(seed=1).train.images)
    assert not torch.equal(again.train.images, sudoku(seed=2).train.images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 5}, "size must be one of 4, 6, 9, got 5"),
        ({"clues": [9, 3]}, "clues must be two ascending numbers"),
        ({"count": 1.5}, "number of puzzles"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sudoku(**options)
