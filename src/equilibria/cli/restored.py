"""What the two commands that restore images share: reading masks, printing, PSNR."""

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
        raise ValueError("--mask says which pixels are missing: it is for --task inpaint")
    if damage.simulated_hole and mask is None and not simulate:
        raise ValueError(
            "which pixels are missing? Give --mask an image in which they are bright; "
            f"--simulate hides {damage.simulated_hole}, to show what is made of it"
        )


def hidden_pixels(mask: Path | None, framing: Framing) -> Tensor | None:
    """Return which pixels (1, H, W) a mask says are missing; None if there is no mask."""
    if mask is None:
        return None
    hidden = eq.data.read_pixels(mask, framing, is_gray=True) >= 0.5
    if bool(hidden.all()) or not bool(hidden.any()):
        raise ValueError(f"{mask} hides every pixel, or none: what is missing is bright in a mask")
    return hidden


def psnr_of(images: Tensor | None, truth: Tensor | None) -> float | None:
    """Return the PSNR in decibel of one image; None where it cannot be compared."""
    if images is None or truth is None or images.shape != truth.shape:
        return None
    from equilibria.tasks.image_quality import picture_psnr

    return float(picture_psnr(images, truth)[0])


def warn_of_assumption(damage: Damage, *, simulate: bool) -> None:
    """Report on standard error what is assumed of the damage because no option says it."""
    if damage.assumption:
        warn(f"{'simulating' if simulate else 'assuming'} {damage.assumption}")


def given(**options: Any) -> dict[str, Any]:
    """Return those options that were not left out."""
    return {name: value for name, value in options.items() if value is not None}


def print_known(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of files without the columns that are empty for all of them.

    Without an original there is no PSNR.
    """
    kept = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    columns = [headings[place] for place in kept]
    cells = [[row[place] for place in kept] for row in rows]
    print_table(columns, cells, right=headings[2:])
