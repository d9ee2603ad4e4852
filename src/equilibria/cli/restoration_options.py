"""Shared parts of the two commands that restore images: masks, PSNR, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equilibria as eq
from equilibria.cli.console import print_table
from equilibria.cli.faults import warn

if TYPE_CHECKING:
    from torch import Tensor

    from equilibria.data import Framing
    from equilibria.restoration import Damage


def check_mask(damage: Damage, mask: Path | None, *, simulate: bool) -> None:
    """Raise a ValueError if a mask is missing, or given for damage that takes none."""
    if mask is not None and not damage.simulated_hole:
        raise ValueError("--mask is for --task inpaint")
    if damage.simulated_hole and mask is None and not simulate:
        raise ValueError(
            "inpaint needs --mask, an image that is white at missing pixels, or --simulate, which "
            f"hides {damage.simulated_hole}"
        )


def hidden_pixels(mask: Path | None, framing: Framing) -> Tensor | None:
    """Return whether each pixel is missing, shape (1, H, W); None without a mask."""
    if mask is None:
        return None
    hidden = eq.data.read_pixels(mask, framing, is_gray=True) >= 0.5
    if bool(hidden.all()) or not bool(hidden.any()):
        kind = "white" if bool(hidden.all()) else "black"
        raise ValueError(f"the mask {mask} is all {kind}; paint missing pixels white, others black")
    return hidden


def psnr_of(images: Tensor | None, truth: Tensor | None) -> float | None:
    """Return the PSNR of one image in decibels; None if there is no image of the same size."""
    if images is None or truth is None or images.shape != truth.shape:
        return None
    from equilibria.tasks.image_quality import picture_psnr

    return float(picture_psnr(images, truth)[0])


def warn_of_assumption(damage: Damage, *, simulate: bool) -> None:
    """Warn that a parameter of the damage, such as the width of a blur, is a default.

    Call it only if no option of the command set the parameter.

    Args:
        damage: The damage. No warning is issued if its `assumption` is empty.
        simulate: Whether the program damages clean images itself; the warning then starts with
            "simulating" instead of "assuming".
    """
    if damage.assumption:
        warn(f"{'simulating' if simulate else 'assuming'} {damage.assumption}")


def given(**options: Any) -> dict[str, Any]:
    """Return those of the keyword arguments that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def print_known(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of files without empty columns, such as PSNR without an original."""
    kept = [index for index in range(len(headings)) if any(row[index] for row in rows)]
    columns = [headings[index] for index in kept]
    cells = [[row[index] for index in kept] for row in rows]
    print_table(columns, cells, right=headings[2:])
