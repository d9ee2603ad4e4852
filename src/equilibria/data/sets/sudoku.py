"""Sudoku puzzles with one solution, generated from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count as counting

import numpy as np
import torch

from equilibria.data.sets.mazes import SHARES, Part
from equilibria.data.source import DataSet, Split

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
"""Height and width of the boxes, by side of the grid."""
VARIANTS = 20
"""Number of puzzles that are made from one by its symmetries."""


def load_sudoku(
    size: int = 4,
    count: int = 10_000,
    *,
    test_count: int = 1000,
    validation_count: int = 200,
    clues: Sequence[int] | None = None,
    seed: int = 0,
) -> DataSet:
    """Generate Sudoku puzzles of 4×4, 6×6 or 9×9 cells with exactly one solution.

    An image has one pixel per cell and `size` + 3 channels: one channel per digit, 1 in the cells
    where this digit is given, then 1 in all given cells, and the row and the column of the cell
    within its box, from 0 to 1. The label of a cell is its digit minus 1.

    Training, validation and test puzzles never have the same solution, whatever their seeds: a
    checksum of the solution decides which part a puzzle belongs to. Several puzzles are made from
    one by its symmetries.

    Args:
        size: Side of the grid: 4, 6 or 9.
        count: Number of training puzzles.
        test_count: Number of test puzzles.
        validation_count: Number of validation puzzles.
        clues: Smallest and largest number of given digits; by default a quarter and half of the
            cells. A puzzle has more if no other digit can be removed.
        seed: Seed of all parts.

    Examples:
        >>> data = eq.data.load_dataset("sudoku", count=4, test_count=1, validation_count=1)
        >>> images, digits = data.train.fetch(torch.tensor([0]))
        >>> images.shape, digits.shape
        (torch.Size([1, 7, 4, 4]), torch.Size([1, 4, 4]))
    """
    if size not in BOXES:
        raise ValueError(f"size must be one of {', '.join(map(str, BOXES))}, got {size!r}")
    lowest, highest = (size**2 // 4, size**2 // 2) if clues is None else tuple(clues)
    if not 0 < lowest <= highest <= size**2:
        raise ValueError(
            f"clues must be two ascending numbers from 1 to {size**2}, got {(lowest, highest)}"
        )
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")

    def part(name: Part, number: int) -> Split:
        return _part(name, size, number, (lowest, highest), seed)

    return DataSet(
        "sudoku",
        part("train", count),
        part("test", test_count),
        tuple(str(digit) for digit in range(1, size + 1)),
        kind="segmentation",
        validation=part("validation", validation_count),
    )


def _part(part: Part, size: int, count: int, clues: tuple[int, int], seed: int) -> Split:
    """Return `count` puzzles of one part."""
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"the number of puzzles must be an integer of at least 0, got {count!r}")
    given = np.zeros((count, size, size), np.uint8)
    solved = np.zeros((count, size, size), np.uint8)
    puzzles = _puzzles(part, size, clues, seed)
    for index in range(count):
        given[index], solved[index] = next(puzzles)
    return Split(torch.from_numpy(as_images(given)), torch.from_numpy(solved - (solved > 0)))


def _puzzles(
    part: Part, size: int, clues: tuple[int, int], seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield puzzles of one part, with 0 in empty cells, and their solutions."""
    for index in counting():
        random = np.random.default_rng([seed, list(SHARES).index(part), size, index])
        solution = full_grid(size, random)
        puzzle = remove_digits(solution, int(random.integers(clues[0], clues[1] + 1)), random)
        for _ in range(VARIANTS):
            rows, columns = (_shuffled_lines(size, side, random) for side in BOXES[size])
            digits = np.concatenate([[0], 1 + random.permutation(size)])
            variant = digits[solution[np.ix_(rows, columns)]].astype(np.uint8)
            if zlib.crc32(variant.tobytes()) % 4 in SHARES[part]:
                yield digits[puzzle[np.ix_(rows, columns)]].astype(np.uint8), variant


def _shuffled_lines(size: int, side: int, random: np.random.Generator) -> np.ndarray:
    """Return an order of rows or columns that keeps the boxes: bands, and lines within bands."""
    bands = random.permutation(size // side)
    return np.concatenate([side * band + random.permutation(side) for band in bands])


def as_images(given: np.ndarray) -> np.ndarray:
    """Return puzzles as images, uint8 of shape (B, size + 3, size, size).

    Args:
        given: Given digits, 0 for empty cells, shape (B, size, size).
    """
    size = given.shape[1]
    height, width = BOXES[size]
    row, column = np.indices((size, size))
    places = [row % height / (height - 1), column % width / (width - 1)]
    digits = [given == digit for digit in range(1, size + 1)]
    channels = [*digits, given > 0, *(np.broadcast_to(p, given.shape) for p in places)]
    images: np.ndarray = np.rint(255 * np.stack(channels, axis=1)).astype(np.uint8)
    return images


@cache
def _units(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the row, the column and the box of each cell, as three numbers below 3·size."""
    height, width = BOXES[size]
    boxes_per_band = size // width
    return tuple(
        (
            row,
            size + column,
            2 * size + row // height * boxes_per_band + column // width,
        )
        for row in range(size)
        for column in range(size)
    )


def solutions(puzzle: np.ndarray, random: np.random.Generator | None = None) -> Iterator[list[int]]:
    """Yield all solutions of a puzzle, cell by cell.

    Args:
        puzzle: Digits, 0 for empty cells, shape (size, size).
        random: Draws the order in which digits are tried; by default ascending.

    Examples:
        >>> import numpy as np
        >>> from equilibria.data.sets.sudoku import solutions
        >>> len(list(solutions(np.zeros((4, 4), int))))
        288
    """
    size = len(puzzle)
    units = _units(size)
    cells = [int(digit) for digit in puzzle.ravel()]
    used = [0] * (3 * size)
    for cell, digit in enumerate(cells):
        for unit in units[cell] if digit else ():
            if used[unit] >> digit & 1:
                return
            used[unit] |= 1 << digit
    empty = [cell for cell, digit in enumerate(cells) if not digit]
    everything = (1 << (size + 1)) - 2

    def search() -> Iterator[list[int]]:
        best, fewest, options = -1, size + 1, 0
        for place, cell in enumerate(empty):
            row, column, box = units[cell]
            free = everything & ~(used[row] | used[column] | used[box])
            if free.bit_count() < fewest:
                best, fewest, options = place, free.bit_count(), free
                if fewest < 2:
                    break
        if best < 0:
            yield list(cells)
            return
        cell = empty.pop(best)
        digits = [digit for digit in range(1, size + 1) if options >> digit & 1]
        if random is not None:
            random.shuffle(digits)
        for digit in digits:
            cells[cell] = digit
            for unit in units[cell]:
                used[unit] |= 1 << digit
            yield from search()
            for unit in units[cell]:
                used[unit] &= ~(1 << digit)
        cells[cell] = 0
        empty.insert(best, cell)

    yield from search()


def full_grid(size: int, random: np.random.Generator) -> np.ndarray:
    """Return a random filled grid.

    Args:
        size: Side of the grid.
        random: Source of random numbers.
    """
    cells = next(solutions(np.zeros((size, size), int), random))
    return np.array(cells, np.uint8).reshape(size, size)


def remove_digits(solution: np.ndarray, clues: int, random: np.random.Generator) -> np.ndarray:
    """Remove digits in random order as long as the puzzle has one solution.

    Args:
        solution: Filled grid, shape (size, size).
        clues: Number of digits at which to stop.
        random: Source of random numbers.
    """
    puzzle: np.ndarray = solution.copy()
    left = puzzle.size
    for cell in random.permutation(puzzle.size):
        if left <= clues:
            break
        place = np.unravel_index(cell, puzzle.shape)
        puzzle[place] = 0
        answers = solutions(puzzle)
        next(answers)
        if next(answers, None) is None:
            left -= 1
        else:
            puzzle[place] = solution[place]
    return puzzle
