"""Mazes with their shortest paths, generated from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import count as counting
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch

from equilibria.data.source import DataSet, Split
from equilibria.registry import check_choice

Generator: TypeAlias = Literal["backtracker", "prim", "kruskal"]
Part: TypeAlias = Literal["train", "validation", "test"]

SMALLEST, LARGEST = 7, 201
"""Smallest and largest side of a maze in pixels. With 5 pixels there are only four mazes, too few
for three parts."""
CELLS_AT_ONCE = 2**17
"""Number of cells that are grown together."""
SHARES: dict[Part, tuple[int, ...]] = {"train": (0, 1), "validation": (2,), "test": (3,)}
"""Which remainders of the checksum of a maze modulo 4 belong to each part."""
COLORS = {"wall": (0, 0, 0), "open": (255, 255, 255), "start": (0, 255, 0), "goal": (255, 0, 0)}
"""Colors of the pixels of a maze."""
NEIGHBORS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def load_mazes(
    size: int = 11,
    count: int = 20_000,
    *,
    test_size: int | None = None,
    test_count: int = 500,
    validation_size: int | None = None,
    validation_count: int = 200,
    generators: Sequence[Generator] = get_args(Generator),
    seed: int = 0,
) -> DataSet:
    """Generate perfect mazes: every two cells are connected by exactly one path.

    A maze of n×n pixels, n odd, has (n−1)/2 cells per side. Walls are black, and two random cells
    are the start (green) and the goal (red). The label of a pixel is 1 on the path between them,
    including both ends, and 0 elsewhere.

    Training, validation and test mazes never have the same walls, whatever their seeds and sizes:
    a checksum of the walls decides which part a maze belongs to.

    Args:
        size: Side of the training mazes in pixels, an odd number.
        count: Number of training mazes.
        test_size: Side of the test mazes; by default that of the training mazes.
        test_count: Number of test mazes.
        validation_size: Side of the validation mazes; by default that of the training mazes.
        validation_count: Number of validation mazes.
        generators: Algorithms that grow the mazes, used in turn. "backtracker" makes long winding
            corridors, "prim" short dead ends, "kruskal" is in between.
        seed: Seed of all parts.

    Examples:
        >>> mazes = eq.data.load_dataset("mazes", count=2, test_size=15, test_count=1)
        >>> images, paths = mazes.test.fetch(torch.tensor([0]))
        >>> images.shape, paths.shape
        (torch.Size([1, 3, 15, 15]), torch.Size([1, 15, 15]))
    """
    # In a recipe, a single name is a string.
    names: list[Generator] = [generators] if isinstance(generators, str) else list(generators)  # type: ignore[list-item]
    for name in names:
        check_choice(get_args(Generator), generators=name)
    if not names:
        raise ValueError(f"generators must name at least one of {', '.join(get_args(Generator))}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    return DataSet(
        "mazes",
        _part("train", size, count, names, seed),
        _part("test", test_size or size, test_count, names, seed),
        ("off the path", "path"),
        kind="segmentation",
        validation=_part("validation", validation_size or size, validation_count, names, seed),
    )


def _part(part: Part, side: int, count: int, generators: Sequence[Generator], seed: int) -> Split:
    """Return `count` mazes of one part."""
    if not isinstance(side, int) or not (SMALLEST <= side <= LARGEST and side % 2):
        raise ValueError(
            f"the side of a maze must be an odd number of pixels from {SMALLEST} to {LARGEST}, "
            f"got {side!r}"
        )
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"the number of mazes must be an integer of at least 0, got {count!r}")
    images, labels = [np.zeros((0, 3, side, side), np.uint8)], [np.zeros((0, side, side), np.uint8)]
    batches = _batches(part, side // 2, generators, seed)
    while (have := sum(map(len, images))) < count:
        is_open, ends = next(batches)
        is_open, ends = is_open[: count - have], ends[: count - have]
        images.append(draw_mazes(is_open, ends))
        labels.append(shortest_paths(is_open, ends).astype(np.uint8))
    return Split(*(torch.from_numpy(np.concatenate(arrays)) for arrays in (images, labels)))


def _batches(
    part: Part, cells: int, generators: Sequence[Generator], seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield mazes of one part, and the pixels of their starts and goals, shape (B, 2, 2)."""
    each = -(-max(8, min(2048, CELLS_AT_ONCE // cells**2)) // len(generators))
    for batch in counting():
        random = np.random.default_rng([seed, list(SHARES).index(part), cells, batch])
        grown = [grow_mazes(each, cells, name, random) for name in generators]
        is_open = np.stack(grown, axis=1).reshape(-1, *grown[0].shape[1:])
        ends = np.argsort(random.random((len(is_open), cells**2)), axis=1)[:, :2]
        ends = 1 + 2 * np.stack(np.divmod(ends, cells), axis=2)
        sums = [zlib.crc32(np.packbits(maze).tobytes()) % 4 for maze in is_open]
        chosen = np.isin(sums, SHARES[part])
        yield is_open[chosen], ends[chosen]


def grow_mazes(
    count: int, cells: int, generator: Generator, random: np.random.Generator
) -> np.ndarray:
    """Grow random spanning trees of a square grid of cells.

    All generators start at one cell and open walls between a reached and a new cell until all are
    reached. They differ in the wall that they choose: one of the cell that was reached last
    ("backtracker"), any ("prim"), or the one with the smallest of fixed random weights ("kruskal",
    whose tree is that of Kruskal's algorithm).

    Args:
        count: Number of mazes.
        cells: Number of cells per side.
        generator: Name of the generator.
        random: Source of random numbers.

    Returns:
        Which pixels are open, shape (count, 2·cells + 1, 2·cells + 1).

    Examples:
        >>> import numpy as np
        >>> from equilibria.data.sets.mazes import grow_mazes
        >>> int(grow_mazes(1, 2, "prim", np.random.default_rng(0)).sum())  # 4 cells, 3 walls
        7
    """
    walls = _Walls(cells)
    maze = np.arange(count)
    is_open = np.zeros((count, (2 * cells + 1) ** 2), bool)
    reached = np.zeros((count, cells**2), bool)
    # The time at which a cell was reached, or 0.
    time = np.zeros((count, cells**2), np.float32)
    first = random.integers(cells**2, size=count)
    reached[maze, first] = True
    fixed = random.random((count, len(walls.source)), np.float32)
    is_open[:, walls.cell_pixels] = True
    for step in range(1, cells**2):
        priority = fixed
        if generator == "prim":
            priority = random.random(fixed.shape, np.float32)
        elif generator == "backtracker":
            priority = fixed + time[:, walls.source]
        usable = reached[:, walls.source] & ~reached[:, walls.target]
        wall = np.argmax(np.where(usable, priority, -1), axis=1)
        is_open[maze, walls.pixel[wall]] = True
        reached[maze, walls.target[wall]] = True
        time[maze, walls.target[wall]] = step
    return is_open.reshape(count, 2 * cells + 1, 2 * cells + 1)


class _Walls:
    """Walls between neighboring cells of a grid, each in both directions.

    Attributes:
        source, target: Cells on the two sides, by index.
        pixel: Index of the pixel of the wall in the image.
        cell_pixels: Index of the pixel of each cell.
    """

    def __init__(self, cells: int) -> None:
        side = 2 * cells + 1
        row, column = (axis.ravel() for axis in np.indices((cells, cells)))
        self.cell_pixels = (2 * row + 1) * side + 2 * column + 1
        source, target, pixel = [], [], []
        for down, right in NEIGHBORS:
            inside = (row + down >= 0) & (row + down < cells)
            inside &= (column + right >= 0) & (column + right < cells)
            source.append((row * cells + column)[inside])
            target.append(((row + down) * cells + column + right)[inside])
            pixel.append((self.cell_pixels + down * side + right)[inside])
        self.source, self.target, self.pixel = map(np.concatenate, (source, target, pixel))


def draw_mazes(is_open: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return mazes as color images, uint8 of shape (B, 3, H, W).

    Args:
        is_open: Which pixels are open, shape (B, H, W).
        ends: Row and column of the start and the goal, shape (B, 2, 2).
    """
    colors = {name: np.array(color, np.uint8) for name, color in COLORS.items()}
    images = np.where(is_open[..., None], colors["open"], colors["wall"])
    maze = np.arange(len(is_open))
    for place, name in enumerate(("start", "goal")):
        images[maze, ends[:, place, 0], ends[:, place, 1]] = colors[name]
    return np.ascontiguousarray(np.moveaxis(images, 3, 1))


def shortest_paths(is_open: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the pixels on the path from start to goal of perfect mazes.

    Dead ends other than the start and the goal are closed until none is left.

    Args:
        is_open: Which pixels are open, shape (B, H, W).
        ends: Row and column of the start and the goal, shape (B, 2, 2).

    Examples:
        >>> import numpy as np
        >>> from equilibria.data.sets.mazes import shortest_paths
        >>> corridor = np.zeros((1, 3, 5), bool)
        >>> corridor[:, 1, 1:] = True
        >>> shortest_paths(corridor, np.array([[[1, 1], [1, 3]]]))[0, 1].astype(int)
        array([0, 1, 1, 1, 0])
    """
    path = np.pad(is_open, ((0, 0), (1, 1), (1, 1)))
    inner = path[:, 1:-1, 1:-1]
    is_end = np.zeros_like(is_open)
    maze = np.arange(len(is_open))
    for place in (0, 1):
        is_end[maze, ends[:, place, 0], ends[:, place, 1]] = True
    running = maze
    while len(running):
        part = path[running]
        ways = part[:, :-2, 1:-1].astype(np.int8) + part[:, 2:, 1:-1]
        ways += part[:, 1:-1, :-2]
        ways += part[:, 1:-1, 2:]
        dead = part[:, 1:-1, 1:-1] & (ways <= 1) & ~is_end[running]
        inner[running] &= ~dead
        running = running[dead.any(axis=(1, 2))]
    result: np.ndarray = inner.copy()
    return result
