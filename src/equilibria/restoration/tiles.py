"""Application of a trained restorer to a problem, in one piece or in overlapping tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.equilibrium import EquilibriumLayer
from equilibria.operators import Identity
from equilibria.restoration.problem import RestorationProblem

DEFAULT_SIDE = 512
"""Side of a tile, in pixels of the restored image."""
BLEND = 16
"""Pixels over which one tile fades into the next."""
EXACT_TOLERANCE = 1e-6
"""Tolerance of models without solves, for the influence of pixels beyond their reach."""


def answer(model: nn.Module, problem: RestorationProblem) -> Tensor:
    """Apply a model that was trained to restore images (G of JIIO's Eq. 23).

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.tiles import answer
        >>> restorer = deq_restorer(in_channels=1, channels=8)
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 8, 8))
        >>> answer(restorer, problem).shape
        torch.Size([1, 1, 8, 8])
    """
    if getattr(model, "takes_measurement", False):
        restored: Tensor = model(problem.measured, problem.measurement)
    else:
        restored = model(_as_picture(model, problem).measured)
    return restored


def _as_picture(model: nn.Module, problem: RestorationProblem) -> RestorationProblem:
    """Return the measured picture as a problem, for a model whose only input is a picture."""
    picture = problem.picture(tuple(problem.measured.shape[2:]))
    if picture is None:
        raise ValueError(
            f"{type(model).__name__} restores pictures, but the measured values are not a picture: "
            "use a measurement with a `picture` method, or a generator"
        )
    return RestorationProblem(picture, Identity(), problem.noise)


def takes_any_size(model: nn.Module) -> bool:
    """Whether a restorer accepts pictures of any size, and states its receptive field as `reach`.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.tiles import takes_any_size
        >>> takes_any_size(deq_restorer(in_channels=1, channels=8))
        True
    """
    return callable(getattr(model, "reach", None))


def answer_in_tiles(
    model: nn.Module,
    problem: RestorationProblem,
    side: int | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Tensor:
    """Apply a trained restorer, in overlapping tiles if the picture is larger than one.

    A pixel is taken only from tiles whose cut edges are beyond its reach (`model.reach`, at the
    tolerance of the model's solves). Tiles fade into each other.

    Args:
        model: Restorer for pictures of any size, with a method `reach`.
        problem: The problem, with a measured picture.
        side: Side of a tile, in pixels of the restored image; by default 512, or more if the reach
            of the model requires it.
        progress: Wraps the sequence of tiles, for example to show a progress bar.

    Returns:
        The restored images.

    Raises:
        ValueError: If the tiles are too small for the reach of the model.

    Examples:
        >>> restorer = eq.restoration.PhotoMinimizer(eq.models.photo_prior(), noise=0.1)
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 40, 60))
        >>> eq.restoration.answer_in_tiles(restorer, problem).shape
        torch.Size([1, 1, 40, 60])
    """
    if not getattr(model, "takes_measurement", False):
        problem = _as_picture(model, problem)
    scale = getattr(model, "factor", 1)
    height, width = problem.measured.shape[2:]
    layers = [layer for layer in model.modules() if isinstance(layer, EquilibriumLayer)]
    accuracy = min((layer.solver.tolerance for layer in layers), default=EXACT_TOLERANCE)
    margin = math.ceil(model.reach(accuracy) / scale)  # type: ignore[operator]
    overlap = 2 * margin + math.ceil(BLEND / scale)
    # Large enough that at least about half of each side is kept.
    tile = max(DEFAULT_SIDE // scale, 2 * overlap) if side is None else side // scale
    if max(height, width) <= tile:
        return answer(model, problem)
    if tile <= overlap:
        raise ValueError(
            f"tiles must have at least {2 * overlap * scale} pixels per side, because a restored "
            f"pixel depends on pixels at a distance of {margin * scale}, got {tile * scale}"
        )
    total: Tensor | None = None
    weight = problem.measured.new_zeros(height * scale, width * scale)
    rows, columns = (_starts(size, tile, overlap) for size in (height, width))
    for top, left in progress([*product(rows, columns)]):
        bottom, right = min(top + tile, height), min(left + tile, width)
        part = answer(model, problem.part(slice(top, bottom), slice(left, right), scale))
        fades = [
            _fade(start * scale, end * scale, size * scale, margin * scale, part)
            for start, end, size in ((top, bottom, height), (left, right, width))
        ]
        share = fades[0][:, None] * fades[1][None, :]
        if total is None:
            total = part.new_zeros(*part.shape[:2], *weight.shape)
        place = (..., slice(top * scale, bottom * scale), slice(left * scale, right * scale))
        total[place] += share * part
        weight[place] += share
    assert total is not None
    return total / weight


def _starts(size: int, tile: int, overlap: int) -> list[int]:
    """Return the starts of evenly spaced tiles that cover a side."""
    if size <= tile:
        return [0]
    count = math.ceil((size - overlap) / (tile - overlap))
    return [round(index * (size - tile) / (count - 1)) for index in range(count)]


def _fade(start: int, end: int, size: int, margin: int, like: Tensor) -> Tensor:
    """Return the weight of a tile along a side: zero near a cut, then a ramp up to one."""
    position = torch.arange(start, end, device=like.device, dtype=like.dtype)
    from_cut = [position - start] * (start > 0) + [end - 1 - position] * (end < size)
    ramps = [((distance - margin + 1) / BLEND).clamp(0, 1) for distance in from_cut]
    return math.prod(ramps, start=torch.ones_like(position))
