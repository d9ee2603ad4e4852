"""A trained restorer applied to a problem: at once, or in overlapping tiles without a seam."""

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

USUAL_SIDE = 512
"""Of a piece, in pixels of the restored image."""
BLEND = 16
"""Pixels over which one piece fades into the next."""
EXACT = 1e-6
"""How much of what is out of reach may count where nothing is solved."""


def answer(model: nn.Module, seen: RestorationProblem) -> Tensor:
    """Apply a model that was trained to restore (G of JIIO's Eq. 23).

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.tiles import answer
        >>> restorer = deq_restorer(in_channels=1, channels=8)
        >>> seen = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 8, 8))
        >>> answer(restorer, seen).shape
        torch.Size([1, 1, 8, 8])
    """
    if getattr(model, "takes_measurement", False):
        restored: Tensor = model(seen.measured, seen.measurement)
    else:
        restored = model(_pictured(model, seen).measured)
    return restored


def _pictured(model: nn.Module, seen: RestorationProblem) -> RestorationProblem:
    """Return the picture of what was measured as a problem, for a model that takes only that."""
    picture = seen.picture(tuple(seen.measured.shape[2:]))
    if picture is None:
        raise ValueError(
            f"{type(model).__name__} restores pictures, but the measurement makes none: give it "
            "a measurement with a `picture` method, or use a generator"
        )
    return RestorationProblem(picture, Identity(), seen.noise)


def takes_any_size(model: nn.Module) -> bool:
    """Whether a restorer takes pictures of any size: it then says how far a pixel looks.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.tiles import takes_any_size
        >>> takes_any_size(deq_restorer(in_channels=1, channels=8))
        True
    """
    return callable(getattr(model, "reach", None))


def answer_in_tiles(
    model: nn.Module,
    seen: RestorationProblem,
    side: int | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Tensor:
    """What `answer` gives, in overlapping pieces where the picture is larger than one.

    A pixel is taken only from pieces whose cut edges are out of its reach (`model.reach`, at the
    tolerance of the model's solves), and fades from one piece into the next.

    side: of a piece, in pixels of the restored image; by default 512, or what the reach asks for.
    progress: goes through the pieces, to show how many are done.

    Examples:
        >>> restorer = eq.restoration.PhotoMinimizer(eq.models.photo_prior(), noise=0.1)
        >>> seen = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 40, 60))
        >>> eq.restoration.answer_in_tiles(restorer, seen).shape
        torch.Size([1, 1, 40, 60])
    """
    if not getattr(model, "takes_measurement", False):
        seen = _pictured(model, seen)
    scale = getattr(model, "factor", 1)
    height, width = seen.measured.shape[2:]
    layers = [layer for layer in model.modules() if isinstance(layer, EquilibriumLayer)]
    accuracy = min((layer.solver.tolerance for layer in layers), default=EXACT)
    margin = math.ceil(model.reach(accuracy) / scale)  # type: ignore[operator]
    overlap = 2 * margin + math.ceil(BLEND / scale)
    # So large that about half of what is computed is kept at least, in each direction.
    tile = max(USUAL_SIDE // scale, 2 * overlap) if side is None else side // scale
    if max(height, width) <= tile:
        return answer(model, seen)
    if tile <= overlap:
        raise ValueError(
            f"pieces of {tile * scale} pixels are too small, for a restored pixel looks "
            f"{margin * scale} pixels far: give them at least {2 * overlap * scale}"
        )
    total: Tensor | None = None
    weight = seen.measured.new_zeros(height * scale, width * scale)
    rows, columns = (_starts(size, tile, overlap) for size in (height, width))
    for top, left in progress([*product(rows, columns)]):
        bottom, right = min(top + tile, height), min(left + tile, width)
        part = answer(model, seen.part(slice(top, bottom), slice(left, right), scale))
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
    """Where pieces of one size begin that cover a side, evenly spread."""
    if size <= tile:
        return [0]
    count = math.ceil((size - overlap) / (tile - overlap))
    return [round(place * (size - tile) / (count - 1)) for place in range(count)]


def _fade(start: int, end: int, size: int, margin: int, like: Tensor) -> Tensor:
    """How much a piece counts along a side: nothing near a cut, and ever more farther from it."""
    place = torch.arange(start, end, device=like.device, dtype=like.dtype)
    from_cut = [place - start] * (start > 0) + [end - 1 - place] * (end < size)
    ramps = [((distance - margin + 1) / BLEND).clamp(0, 1) for distance in from_cut]
    return math.prod(ramps, start=torch.ones_like(place))
