"""Image files, restored by a trained model: as they are, or damaged first to show what it can do.

A model that takes pictures of any size restores each in its own; the others have one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import equilibria as eq
from equilibria.cli.restored import check_mask, hidden_pixels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from equilibria.data import Framing
    from equilibria.restoration import Damage, RestorationProblem
    from equilibria.restoration.learned import ModelRestorer
    from equilibria.training.experiment import RecipeModel

BATCH = 64


@dataclass(frozen=True, kw_only=True)
class RestoredImage:
    """One image file."""

    status: str
    """How the solve or the search ended; this and the next three are empty where there was none."""
    residual: float | None
    iterations: int | None
    message: str
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
    """Root mean square of the differences between what was measured and what would have been
    measured of the restored image."""


@dataclass(frozen=True, kw_only=True)
class FileRestoration:
    """How image files are restored by a run.

    Args:
        run: The trained model, with the size of its images.
        restorer: What restores with it.
        damage: What is undone.
        device: Where.
        seed: Of the damage.
        simulate: Damage the images first, to compare what is restored with them.
        mask: An image whose bright pixels are missing, for inpainting.
        resize: Restore copies in the size that the model was trained on.
    """

    run: RecipeModel
    restorer: ModelRestorer
    damage: Damage
    device: torch.device
    seed: int = 0
    simulate: bool = False
    mask: Path | None = None
    resize: bool = False

    def __post_init__(self) -> None:
        check_mask(self.damage, self.mask, simulate=self.simulate)

    def run_on(
        self,
        files: Sequence[Path],
        output: Path,
        *,
        overwrite: bool = False,
        on_unreadable: Callable[[Exception], None] | None = None,
    ) -> Iterator[RestoredImage]:
        """Restore the images in files, and draw them into the folder `output`.

        Args:
            files: The image files.
            output: Folder of the pictures.
            overwrite: Replace pictures that are there.
            on_unreadable: Called for a file that cannot be read, or does not fit; it is left out.
        """
        import torch

        from equilibria.data.image_files import readable
        from equilibria.report.figures import drawn_files

        hidden = hidden_pixels(self.mask, self._framing)
        hidden = None if hidden is None else hidden.to(self.device)
        random = torch.Generator().manual_seed(self.seed)
        drawn = drawn_files(files, output, "restored", "sheet", overwrite=overwrite)
        output.mkdir(parents=True, exist_ok=True)
        places = list(zip(files, drawn, strict=True))

        def read(place: tuple[Path, tuple[Path, ...]]) -> Tensor:
            return self._read(place[0], hidden)

        at_once = 1 if self._any_size else BATCH
        for start in range(0, len(files), at_once):
            some = list(readable(places[start : start + at_once], read, on_unreadable))
            if some:
                pixels = torch.stack([image for _, image in some]).to(self.device)
                problem = self._problem(pixels, random, hidden)
                yield from self._restore([place for place, _ in some], problem)

    @property
    def _any_size(self) -> bool:
        return self.restorer.any_size and not self.resize

    @property
    def _size(self) -> tuple[int, int]:
        """Height and width of the files that a model of one size takes."""
        _, height, width = self.run.images.image_shape
        factor = 1 if self.simulate else self.damage.scale
        return height // factor, width // factor

    @property
    def _framing(self) -> Framing:
        return eq.data.Framing(self._size) if self.resize else eq.images.AS_ON_DISK

    def _read(self, path: Path, hidden: Tensor | None) -> Tensor:
        from equilibria.data.image_files import check_detail

        is_gray = None if self._any_size else self.run.images.image_shape[0] == 1
        if self._any_size:
            check_detail(path)
        image = eq.data.read_pixels(path, self._framing, is_gray=is_gray)
        size = (image.shape[1], image.shape[2])
        if not self._any_size and size != self._size:
            name = self.run.recipe.model.name
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

    def _problem(
        self, pixels: Tensor, random: torch.Generator, hidden: Tensor | None
    ) -> RestorationProblem:
        """What is measured of images, with the originals if these are they."""
        truth = pixels if self.simulate else None
        if hidden is not None:
            known = eq.operators.Mask((~hidden).to(pixels)[None])
            return eq.restoration.RestorationProblem(known(pixels), known, 0.0, truth)
        if truth is None:
            measurement = self.damage.measurement_of(pixels, random)
            return eq.restoration.RestorationProblem(pixels, measurement, self.damage.noise)
        problem = self.damage.corrupt(self.damage.padded(pixels), random)
        return eq.restoration.RestorationProblem(
            problem.measured, problem.measurement, problem.noise, truth
        )

    def _restore(
        self, places: Sequence[tuple[Path, tuple[Path, ...]]], problem: RestorationProblem
    ) -> Iterator[RestoredImage]:
        from equilibria.inputs.latents import entries, misfit
        from equilibria.report.restoration import columns_sheet
        from equilibria.report.sheets import image_png
        from equilibria.tasks.image_quality import picture_psnr
        from equilibria.training.files import write_atomically

        restored, truth = self.restorer.restore(problem), problem.truth
        left = misfit(restored.generated, problem.measured, problem.measurement)
        left = (left / entries(problem.measured, problem.measurement)).sqrt()
        is_filled = restored.images is not restored.generated
        shown = {
            "measured": restored.picture,
            "made by the model": restored.generated if is_filled else None,
            "seen pixels put back" if is_filled else "restored": restored.images,
        }
        drawn = {name: some for name, some in shown.items() if some is not None}
        ratios: dict[str, list[float | None]] = {name: [None] * len(places) for name in shown}
        if truth is not None:
            height, width = truth.shape[2:]  # They may have been padded.
            drawn = {name: some[..., :height, :width] for name, some in drawn.items()}
            ratios |= {name: picture_psnr(some, truth).tolist() for name, some in drawn.items()}
            drawn = {"original": truth, **drawn}
            ratios["original"] = [None] * len(places)
        final = "seen pixels put back" if is_filled else "restored"
        for row, (file, (picture, sheet)) in enumerate(places):
            columns = {name: some[row] for name, some in drawn.items()}
            notes = {name: ratio[row] for name, ratio in ratios.items()}
            write_atomically(picture, image_png(columns[final]))
            write_atomically(sheet, columns_sheet(file.name, columns, notes))
            yield RestoredImage(
                file=str(file),
                restored=str(picture),
                sheet=str(sheet),
                measured_psnr=ratios["measured"][row],
                restored_psnr=ratios[final][row],
                misfit=float(left[row]),
                **vars(restored.solves[row]),
            )


def _sides(size: Sequence[int]) -> str:
    return f"{size[1]}×{size[0]}"
