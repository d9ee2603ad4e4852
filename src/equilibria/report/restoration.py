"""Damaged images, restored by a trained model: files, or the test images of its own data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data import Framing, read_image, readable
from equilibria.inputs import (
    Corrupted,
    Corruption,
    Inpainting,
    SuperResolution,
    answer,
    entries,
    generator_of,
    get_corruption,
    is_generator,
    misfit,
    picture_of,
    restore,
)
from equilibria.operators import Mask
from equilibria.report.figures import drawn_files
from equilibria.report.sheets import (
    Sheet,
    SheetRow,
    compared,
    decibels,
    image_png,
)
from equilibria.solvers import Status
from equilibria.tasks import ImageRestoration, Reconstruction
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training import RecipeModel, write_atomically

BATCH = 64
LEAST_SIDE = 160
"""Pixels of the longer side of an image in the sheet of a file, at least."""
COLUMNS = 10
"""Test images in a row of their sheet."""


@dataclass(frozen=True)
class Solve:
    """How the solve or the search behind an image ended; as it is where there was none."""

    status: str = ""
    residual: float | None = None
    iterations: int | None = None
    message: str = ""


@dataclass(frozen=True)
class RestoredBatch:
    """A batch of measurements, restored."""

    generated: Tensor
    """The images as the model makes them."""
    images: Tensor
    """The same, with what was seen put back where it was seen without noise."""
    picture: Tensor | None
    """What was measured, as far as that is a picture."""
    solves: Sequence[Solve]


@dataclass(frozen=True, kw_only=True)
class RestoredImage(Solve):
    """One image file."""

    file: str
    restored: str
    """The restored image, in the size of the model's images."""
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
class RestoredTestImages:
    """Medians over the images, in decibel; PSNR is that of the pictures."""

    model: str
    data: str
    damage: str
    images: int
    unanswered: int
    """Those of which the model makes NaN or infinite pixels."""
    measured_psnr: float | None
    """None where what was measured is no picture."""
    model_psnr: float
    """Of the images as the model makes them."""
    restored_psnr: float
    """The same with what was seen put back, where it was seen without noise."""
    share_converged: float | None
    """None where nothing was solved."""
    mean_iterations: float | None
    message: str
    """On the first image whose solve did not converge, with the remedy; "" where all did."""
    sheet: str
    """Rows of originals, measurements, what the model made, and what was put back."""


def chosen_damage(run: RecipeModel, name: str | None, options: dict[str, Any]) -> Corruption:
    """What is undone: as asked for, or what the run was trained to undo."""
    task = run.task
    own = task.damage if isinstance(task, ImageRestoration) else None
    if name is None:
        if own is None:
            raise ValueError("name what is to be undone: --task inpaint, denoise, deblur, superres")
        if options:
            raise ValueError(f"{', '.join(options)} needs --task as well")
        return own
    chosen = get_corruption(name, **options)
    if own is not None and type(own) is not type(chosen) and not is_generator(run.model):
        raise ValueError(
            f"the run was trained to undo {own}, not {chosen}: only a generator can do what it was "
            "not trained for"
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class Restorer:
    """A trained model, and what it is to undo.

    search: options of `restore`: iterations, ridge, starts, engine, …
    stop_at_noise: end a search where noise explains what is left.
    seed: of the damage and of the searches.
    """

    run: RecipeModel
    damage: Corruption
    device: torch.device
    search: dict[str, Any] = field(default_factory=dict)
    stop_at_noise: bool = False
    seed: int = 0

    @torch.no_grad()
    def batch(self, seen: Corrupted) -> RestoredBatch:
        """Restore what was seen of a batch of images."""
        model, task = self.run.model, self.run.task
        if isinstance(task, ImageRestoration) and not is_generator(model):
            given = [*self.search, *["stop_at_noise"] * self.stop_at_noise]
            if given:
                raise ValueError(
                    f"{type(model).__name__} restores without a search: leave out "
                    f"{', '.join(given)}"
                )
            generated = answer(model, seen)
            solution = getattr(model, "last_solution", None)
            solves = (
                [Solve()] * len(generated)
                if solution is None
                else _solves(solution, solution.message)
            )
        else:
            own: dict[str, Any] = {}
            if isinstance(task, ImageRestoration):
                own = task.evaluation_options()
            elif isinstance(task, Reconstruction):
                own = {"ridge": task.ridge}
            if self.stop_at_noise:
                own = {**own, "ridge": 0.0, "noise": seen.noise}
            search = {**own, **self.search}
            found = restore(
                generator_of(model), seen.measured, seen.measurement, seed=self.seed, **search
            )
            generated, solves = found.images, _solves(found, lambda row: found.messages[row])
        images = generated
        if isinstance(seen.measurement, Mask) and not seen.noise:
            images = seen.measurement.fill(seen.measured, images)
        picture = picture_of(seen.measurement, seen.measured, images.shape[2:])
        return RestoredBatch(generated, images, picture, solves)

    @torch.no_grad()
    def files(
        self,
        files: Sequence[Path],
        output: Path,
        *,
        damaged: bool,
        mask: Path | None,
        overwrite: bool = False,
        on_unreadable: Callable[[Exception], None] | None = None,
    ) -> Iterator[RestoredImage]:
        """Restore the images in files, in batches, and draw them into the folder `output`.

        damaged: the images are measurements already; there is no original to compare with.
        mask: an image whose bright pixels are hidden, for inpainting.
        overwrite: replace pictures that are there.
        on_unreadable: is told of a file that cannot be read, which is then left out.
        """
        frame, hidden = self._frame(damaged, mask)
        is_gray = self.run.images.image_shape[0] == 1
        random = torch.Generator().manual_seed(self.seed)
        output.mkdir(parents=True, exist_ok=True)
        places = list(
            zip(
                files,
                drawn_files(files, output, "restored", "sheet", overwrite=overwrite),
                strict=True,
            )
        )

        def read(place: tuple[Path, tuple[Path, ...]]) -> Tensor:
            return read_image(place[0], frame, is_gray=is_gray)

        for start in range(0, len(files), BATCH):
            some = list(readable(places[start : start + BATCH], read, on_unreadable))
            if not some:
                continue
            pixels = torch.stack([image for _, image in some]).to(self.device).float() / 255
            originals, seen = self._measure(pixels, random, damaged, hidden)
            batch = self.batch(seen)
            count = entries(seen.measured, seen.measurement)
            left = (misfit(batch.generated, seen.measured, seen.measurement) / count).sqrt()
            is_filled = batch.images is not batch.generated
            shown = {
                "original": originals,
                "measured": batch.picture,
                "made by the model": batch.generated if is_filled else None,
                "seen pixels put back" if is_filled else "restored": batch.images,
            }
            ratios = {
                name: [None] * len(some)
                if originals is None or images is None or images is originals
                else picture_psnr(images, originals).tolist()
                for name, images in shown.items()
            }
            *_, restored_psnr = ratios.values()
            for row, ((file, (restored, sheet)), _) in enumerate(some):
                columns = {n: images[row] for n, images in shown.items() if images is not None}
                notes = [decibels(ratios[name][row]) for name in columns]
                line = SheetRow("", torch.stack([*columns.values()]), notes)
                drawn = Sheet([line], [*columns], file.name, least_side=LEAST_SIDE)
                write_atomically(restored, image_png(batch.images[row]))
                write_atomically(sheet, drawn.png())
                yield RestoredImage(
                    file=str(file),
                    restored=str(restored),
                    sheet=str(sheet),
                    measured_psnr=ratios["measured"][row],
                    restored_psnr=restored_psnr[row],
                    misfit=float(left[row]),
                    **vars(batch.solves[row]),
                )

    @torch.no_grad()
    def test_images(
        self,
        originals: Tensor,
        output: Path,
        progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
        titles: Sequence[str] = (),
    ) -> RestoredTestImages:
        """Damage test images, always in the same way, restore them, and draw the first ones.

        titles: their classes, to stand above them.
        progress: goes around the batches, to show how far they are.
        """
        random = torch.Generator().manual_seed(self.seed)
        originals = originals.to(self.device)
        batches = [
            self.batch(self.damage.corrupt(some, random))
            for some in progress(torch.split(originals, BATCH))
        ]
        generated = torch.cat([batch.generated for batch in batches])
        restored = torch.cat([batch.images for batch in batches])
        pictures = [batch.picture for batch in batches if batch.picture is not None]
        picture = torch.cat(pictures) if pictures else None
        solves = [solve for batch in batches for solve in batch.solves if solve.status]
        iterations = [solve.iterations for solve in solves if solve.iterations is not None]
        unfinished = [solve.message for solve in solves if solve.status != "converged"]
        sheet = output / "test-images.png"
        output.mkdir(parents=True, exist_ok=True)
        name, data = self.run.recipe.model.name, self.run.recipe.data.name
        first = originals[:COLUMNS]
        rows = [SheetRow("original", first)]
        if picture is not None:
            rows.append(compared("measured", picture, first))
        rows.append(compared("made by the model", generated, first))
        if any(batch.images is not batch.generated for batch in batches):
            rows.append(compared("seen pixels put back", restored, first))
        heading = f"{name} on test images of {data}: {self.damage.words}"
        write_atomically(sheet, Sheet(rows, titles, heading).png())

        def median_psnr(images: Tensor) -> float:
            return float(picture_psnr(images, originals).median())

        return RestoredTestImages(
            model=name,
            data=data,
            damage=str(self.damage),
            images=len(originals),
            unanswered=int((~generated.flatten(1).isfinite().all(dim=1)).sum()),
            measured_psnr=None if picture is None else median_psnr(picture),
            model_psnr=median_psnr(generated),
            restored_psnr=median_psnr(restored),
            share_converged=1 - len(unfinished) / len(solves) if solves else None,
            mean_iterations=sum(iterations) / len(iterations) if iterations else None,
            message=unfinished[0] if unfinished else "",
            sheet=str(sheet),
        )

    def _frame(self, damaged: bool, mask: Path | None) -> tuple[Framing, Tensor | None]:
        """The frame of image files, and which pixels a mask says are missing."""
        _, height, width = self.run.images.image_shape
        inpaints = isinstance(self.damage, Inpainting)
        if mask is not None and not inpaints:
            raise ValueError("--mask says which pixels are missing: it is for --task inpaint")
        if damaged and inpaints and mask is None:
            raise ValueError("which pixels of a damaged image are missing? Give --mask an image")
        if damaged and isinstance(self.damage, SuperResolution):
            height, width = height // self.damage.factor, width // self.damage.factor
        frame = Framing((height, width))
        if mask is None:
            return frame, None
        hidden = read_image(mask, frame, is_gray=True).to(self.device) >= 128
        if bool(hidden.all()) or not bool(hidden.any()):
            raise ValueError(
                f"{mask} hides every pixel, or none: what is missing is bright in a mask"
            )
        return frame, hidden

    def _measure(
        self, batch: Tensor, random: torch.Generator, damaged: bool, hidden: Tensor | None
    ) -> tuple[Tensor | None, Corrupted]:
        """The original images, if these are they, and what is seen of them."""
        if hidden is not None:
            known = Mask((~hidden).to(batch)[None])
            return None if damaged else batch, Corrupted(known(batch), known, 0.0)
        seen = self.damage.corrupt(batch, random)
        if not damaged:
            return batch, seen
        return None, Corrupted(batch, seen.measurement, seen.noise)


def _solves(found: Any, message: Callable[[int], str]) -> list[Solve]:
    """Of a solution or a search, image by image."""
    return [
        Solve(
            status=Status(int(found.status[row])).name.lower().replace("_", " "),
            residual=float(found.residual[row]),
            iterations=int(found.iterations[row]),
            message=message(row),
        )
        for row in range(len(found.status))
    ]
