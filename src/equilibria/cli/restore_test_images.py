"""How well a trained model restores the test images of its own data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from equilibria.cli.restore_files import RestorationRequest, RestoredBatch, restored_batch
from equilibria.data import evenly_spread
from equilibria.inputs import Corruption
from equilibria.report.figures import image_grid_png
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training import Experiment, write_atomically

BATCH = 64
COLUMNS = 16
"""Images in a row of the sheet."""
SCALE = 2


@dataclass(frozen=True)
class RestoredTestImages:
    """Medians over the images, in decibel; PSNR is that of the pictures."""

    model: str
    data: str
    damage: str
    images: int
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
    """Rows of originals, measurements and restored images."""

    def rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.measured_psnr is not None:
            rows.append(("PSNR of what was measured, median (dB)", f"{self.measured_psnr:.2f}"))
        rows.append(("PSNR of the model's images, median (dB)", f"{self.model_psnr:.2f}"))
        if self.restored_psnr != self.model_psnr:
            put_back = "PSNR with what was seen put back, median (dB)"
            rows.append((put_back, f"{self.restored_psnr:.2f}"))
        if self.share_converged is not None and self.mean_iterations is not None:
            rows.append(("Share converged", f"{self.share_converged:.1%}"))
            rows.append(("Iterations, mean", f"{self.mean_iterations:.1f}"))
        return rows


@torch.no_grad()
def restored_test_images(
    request: RestorationRequest, experiment: Experiment, damage: Corruption, device: torch.device
) -> RestoredTestImages:
    """Damage test images, always in the same way, restore them, and draw the first ones."""
    assert request.test is not None
    chance = torch.Generator().manual_seed(request.seed)
    originals = experiment.test.fetch(evenly_spread(experiment.test, request.test))[0].to(device)
    errors = Console(stderr=True)
    parts = track(
        torch.split(originals, BATCH),
        description="restoring",
        console=errors,
        disable=not errors.is_terminal,
    )
    batches: list[RestoredBatch] = [
        restored_batch(request, experiment, damage.corrupt(some, chance)) for some in parts
    ]
    drawn = torch.cat([batch.answer.images for batch in batches])
    restored = torch.cat([batch.images for batch in batches])
    pictures = [batch.picture for batch in batches if batch.picture is not None]
    picture = torch.cat(pictures) if pictures else None
    iterations = [n for batch in batches for n in batch.answer.iterations if n is not None]
    solves = [
        pair
        for batch in batches
        for pair in zip(batch.answer.status, batch.answer.messages, strict=True)
        if pair[0]
    ]
    unfinished = [message for status, message in solves if status != "converged"]
    return RestoredTestImages(
        model=experiment.recipe.model.name,
        data=experiment.data.name,
        damage=str(damage),
        images=len(originals),
        measured_psnr=None if picture is None else _median_psnr(picture, originals),
        model_psnr=_median_psnr(drawn, originals),
        restored_psnr=_median_psnr(restored, originals),
        share_converged=1 - len(unfinished) / len(solves) if solves else None,
        mean_iterations=sum(iterations) / len(iterations) if iterations else None,
        message=unfinished[0] if unfinished else "",
        sheet=str(_draw(request.output, [originals, picture, restored])),
    )


def _median_psnr(images: Tensor, originals: Tensor) -> float:
    return float(picture_psnr(images, originals).median())


def _draw(folder: Path, rows: list[Tensor | None]) -> Path:
    path = folder / "test-images.png"
    folder.mkdir(parents=True, exist_ok=True)
    sheet = [row[:COLUMNS] for row in rows if row is not None]
    write_atomically(path, image_grid_png(sheet, scale=SCALE))
    return path
