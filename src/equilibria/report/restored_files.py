"""Image files, restored by a trained model: as they are, or damaged first to show what it can do.

A model that takes pictures of any size restores each in its own; the others have one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.data import AS_ON_DISK, Framing, read_pixels, readable
from equilibria.data.image_files import check_detail
from equilibria.inputs import Corrupted, Inpainting, SuperResolution, entries, misfit
from equilibria.operators import Mask
from equilibria.report.figures import drawn_files
from equilibria.report.restoration import BATCH, RestoredBatch, Restorer, Solve, worst
from equilibria.report.sheets import MOST_SIDE, Sheet, SheetRow, decibels, image_png
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training import write_atomically

LEAST_SIDE = 160
"""Pixels of the longer side of an image in a sheet; of a large one the middle is shown, for noise
is not to be seen in a reduced picture."""


@dataclass(frozen=True, kw_only=True)
class RestoredImage(Solve):
    """One image file."""

    file: str
    restored: str
    """The restored image, in the size of the file, or `factor` times that size."""
    sheet: str
    """Side by side: the original, if there is one, what was measured, what the model made of it,
    and, where it differs, the restored image."""
    measured_psnr: float | None
    restored_psnr: float | None
    """None where there is no original."""
    misfit: float
    """The root of the mean squared difference between what was measured of an entry and what the
    restored image would have given."""


@dataclass(frozen=True)
class FileRestoration:
    """How image files are restored.

    simulate: damage the images first, to compare what is restored with them; otherwise they are
        what was measured.
    mask: an image whose bright pixels are missing, for inpainting.
    resize: restore copies in the size that the model was trained on.
    """

    restorer: Restorer
    simulate: bool = False
    mask: Path | None = None
    resize: bool = False

    def __post_init__(self) -> None:
        inpaints = isinstance(self.restorer.damage, Inpainting)
        if self.mask is not None and not inpaints:
            raise ValueError("--mask says which pixels are missing: it is for --task inpaint")
        if inpaints and self.mask is None and not self.simulate:
            raise ValueError(
                "which pixels are missing? Give --mask an image in which they are bright; "
                "--simulate hides a window, to show what is made of it"
            )

    @torch.no_grad()
    def run(
        self,
        files: Sequence[Path],
        output: Path,
        *,
        overwrite: bool = False,
        on_unreadable: Callable[[Exception], None] | None = None,
    ) -> Iterator[RestoredImage]:
        """Restore the images in files, and draw them into the folder `output`.

        overwrite: replace pictures that are there.
        on_unreadable: is told of a file that cannot be read, or does not fit, and is left out.
        """
        hidden = self._hidden()
        random = torch.Generator().manual_seed(self.restorer.seed)
        drawn = drawn_files(files, output, "restored", "sheet", overwrite=overwrite)
        output.mkdir(parents=True, exist_ok=True)
        places = list(zip(files, drawn, strict=True))

        def read(place: tuple[Path, tuple[Path, ...]]) -> Tensor:
            return self._read(place[0], hidden)

        at_once = 1 if self._any_size else BATCH
        for start in range(0, len(files), at_once):
            some = list(readable(places[start : start + at_once], read, on_unreadable))
            if some:
                pixels = torch.stack([image for _, image in some]).to(self.restorer.device)
                yield from self._restore([place for place, _ in some], pixels, hidden, random)

    @property
    def _any_size(self) -> bool:
        return self.restorer.takes_any_size and not self.resize

    @property
    def _channels(self) -> int:
        return self.restorer.run.images.image_shape[0]

    @property
    def _size(self) -> tuple[int, int]:
        """Height and width of the files that a model of one size takes."""
        _, height, width = self.restorer.run.images.image_shape
        damage = self.restorer.damage
        factor = 1
        if isinstance(damage, SuperResolution) and not self.simulate:
            factor = damage.factor
        return height // factor, width // factor

    def _read(self, path: Path, hidden: Tensor | None) -> Tensor:
        is_gray = None if self._any_size else self._channels == 1
        framing = Framing(self._size) if self.resize else AS_ON_DISK
        if self._any_size:
            check_detail(path)
        image = read_pixels(path, framing, is_gray=is_gray)
        size = (image.shape[1], image.shape[2])
        if not self._any_size and size != self._size:
            name = self.restorer.run.recipe.model.name
            raise ValueError(
                f"{path} is {_sides(size)} pixels, and {name} was trained for {_sides(self._size)} "
                "alone: --resize restores a framed copy of that size"
            )
        if hidden is not None and hidden.shape[1:] != image.shape[1:]:
            raise ValueError(
                f"{self.mask} is {_sides(hidden.shape[1:])} pixels, and {path} is {_sides(size)}: "
                "a mask has the size of its picture"
            )
        return image

    def _hidden(self) -> Tensor | None:
        """Which pixels the mask says are missing."""
        if self.mask is None:
            return None
        framing = Framing(self._size) if self.resize else AS_ON_DISK
        hidden = read_pixels(self.mask, framing, is_gray=True).to(self.restorer.device) >= 0.5
        if bool(hidden.all()) or not bool(hidden.any()):
            raise ValueError(
                f"{self.mask} hides every pixel, or none: what is missing is bright in a mask"
            )
        return hidden

    def _restore(
        self,
        places: Sequence[tuple[Path, tuple[Path, ...]]],
        pixels: Tensor,
        hidden: Tensor | None,
        random: torch.Generator,
    ) -> Iterator[RestoredImage]:
        originals, seen = self._measure(pixels, random, hidden)
        batch = self._batch(seen)
        count = entries(seen.measured, seen.measurement)
        left = (misfit(batch.generated, seen.measured, seen.measurement) / count).sqrt()
        drawn = [batch.picture, batch.generated, batch.images]
        if originals is not None:  # They may have been padded.
            height, width = originals.shape[2:]
            drawn = [None if some is None else some[..., :height, :width] for some in drawn]
        picture, generated, images = drawn
        assert images is not None
        is_filled = batch.images is not batch.generated
        shown = {
            "original": originals,
            "measured": picture,
            "made by the model": generated if is_filled else None,
            "seen pixels put back" if is_filled else "restored": images,
        }
        ratios = {
            name: [None] * len(places)
            if originals is None or some is None or some is originals
            else picture_psnr(some, originals).tolist()
            for name, some in shown.items()
        }
        *_, restored_psnr = ratios.values()
        for row, (file, (restored, sheet)) in enumerate(places):
            columns = {name: _middle(some[row]) for name, some in shown.items() if some is not None}
            notes = [decibels(ratios[name][row]) for name in columns]
            line = SheetRow("", torch.stack([*columns.values()]), notes)
            is_cut = max(images.shape[2:]) > MOST_SIDE
            heading = f"{file.name}, its middle" if is_cut else file.name
            drawn_sheet = Sheet([line], [*columns], heading, least_side=LEAST_SIDE)
            write_atomically(restored, image_png(images[row]))
            write_atomically(sheet, drawn_sheet.png())
            yield RestoredImage(
                file=str(file),
                restored=str(restored),
                sheet=str(sheet),
                measured_psnr=ratios["measured"][row],
                restored_psnr=restored_psnr[row],
                misfit=float(left[row]),
                **vars(batch.solves[row]),
            )

    def _measure(
        self, pixels: Tensor, random: torch.Generator, hidden: Tensor | None
    ) -> tuple[Tensor | None, Corrupted]:
        """The original images, if these are they, and what is seen of them."""
        damage = self.restorer.damage
        originals = pixels if self.simulate else None
        if hidden is not None:
            known = Mask((~hidden).to(pixels)[None])
            return originals, Corrupted(known(pixels), known, 0.0)
        if not self.simulate:
            return None, Corrupted(pixels, damage.measurement_of(pixels, random), damage.noise)
        if isinstance(damage, SuperResolution):
            right, below = (-size % damage.factor for size in (pixels.shape[3], pixels.shape[2]))
            pixels = F.pad(pixels, (0, right, 0, below), mode="replicate")
        return originals, damage.corrupt(pixels, random)

    def _batch(self, seen: Corrupted) -> RestoredBatch:
        """The images restored in their own channels, whatever the model was trained on.

        A model of gray images restores color by color; a gray image is three equal colors.
        """
        channels, own = seen.measured.shape[1], self._channels
        if channels == own:
            return self.restorer.batch(seen)
        # One image at a time has channels of its own: they can take the place of the samples.
        measured = seen.measured.transpose(0, 1)
        if own > 1:
            measured = seen.measured.expand(-1, own, -1, -1)
        batch = self.restorer.batch(Corrupted(measured, seen.measurement, seen.noise))

        def back(images: Tensor) -> Tensor:
            return images.transpose(0, 1) if own == 1 else images.mean(dim=1, keepdim=True)

        generated = back(batch.generated)
        return RestoredBatch(
            generated,
            generated if batch.images is batch.generated else back(batch.images),
            None if batch.picture is None else back(batch.picture),
            [worst(batch.solves)],
        )


def _middle(image: Tensor) -> Tensor:
    """The middle of an image that is too large for a sheet."""
    starts = [max(0, size - MOST_SIDE) // 2 for size in image.shape[1:]]
    top, left = starts
    return image[:, top : top + MOST_SIDE, left : left + MOST_SIDE]


def _sides(size: Sequence[int]) -> str:
    return f"{size[1]}×{size[0]}"
