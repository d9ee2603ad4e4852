"""Damaged images, restored by a trained model: batches, and the test images of its data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.equilibrium import solving
from equilibria.inputs import (
    Corrupted,
    Corruption,
    Prior,
    answer,
    answer_in_tiles,
    generator_of,
    get_corruption,
    is_generator,
    picture_of,
    restore,
    seamless_fill,
    takes_any_size,
)
from equilibria.models.generators.densities import fit_density
from equilibria.operators import Mask
from equilibria.report.generation import known_latents
from equilibria.report.sheets import Sheet, SheetRow, compared
from equilibria.solvers import Status
from equilibria.tasks import ImageRestoration, Reconstruction
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training import RecipeModel, write_atomically

BATCH = 64
TEST_IMAGES = "test-images.png"
COLUMNS = 10
"""Test images in a row of their sheet."""
PRIOR_DENSITY = {"name": "gmm", "ridge": 0.01}
"""Wider than what samples are drawn from: a latent between two of training is no less likely."""


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
    """What is undone: as asked for, or what the run was trained to undo.

    Examples:
        >>> run = eq.training.trained_model("digits-opteq")
        >>> eq.report.chosen_damage(run, "denoise", {"noise": 0.1})
        Denoising(noise=0.1)
    """
    task = run.task
    own = task.damage if isinstance(task, ImageRestoration) else None
    if name is None:
        if own is None:
            raise ValueError("name what is to be undone: --task inpaint, denoise, deblur, superres")
        unknown = [option for option in options if not hasattr(own, option)]
        if unknown:
            raise ValueError(f"{own} has no {', '.join(unknown)}: name another --task for it")
        return replace(own, **options) if is_dataclass(own) else own
    chosen = get_corruption(name, **options)
    if own is not None and type(own) is not type(chosen) and not is_generator(run.model):
        raise ValueError(
            f"the run was trained to undo {own}, not {chosen}: only a generator can do what it was "
            "not trained for"
        )
    return chosen


def fitted_prior(folder: Path, weight: float, *, seed: int = 0) -> Prior:
    """A mixture of Gaussians on the latents that a run keeps of training images.

    Examples:
        >>> prior = eq.report.fitted_prior(eq.models.pretrained_file("mnist-generator"), weight=1.0)
        >>> prior(torch.zeros(2, 24)).shape
        torch.Size([2])
    """
    known = known_latents(folder)
    return Prior(fit_density(PRIOR_DENSITY, known, seed=seed).log_likelihood, weight)


@dataclass(frozen=True, kw_only=True)
class Restorer:
    """A trained model, and what it is to undo.

    search: options of `restore`: iterations, ridge, starts, engine, …
    stop_at_noise: end a search where noise explains what is left.
    seed: of the damage and of the searches.
    tile: the side of the pieces that large pictures are restored in (`answer_in_tiles`).
    prior: of the latents that are searched for, in the place of the run's ridge.
    """

    run: RecipeModel
    damage: Corruption
    device: torch.device
    search: dict[str, Any] = field(default_factory=dict)
    stop_at_noise: bool = False
    seed: int = 0
    tile: int | None = None
    prior: Prior | None = None

    @property
    def searches(self) -> bool:
        """Whether latents are searched for, and the model was not trained to answer at once."""
        return not isinstance(self.run.task, ImageRestoration) or is_generator(self.run.model)

    @property
    def takes_any_size(self) -> bool:
        return not self.searches and takes_any_size(self.run.model)

    @torch.no_grad()
    def batch(self, seen: Corrupted) -> RestoredBatch:
        """Restore what was seen of a batch of images."""
        model, task = self.run.model, self.run.task
        if not self.searches:
            given = [*self.search, *["stop_at_noise"] * self.stop_at_noise]
            given += ["prior"] * (self.prior is not None)
            if given:
                raise ValueError(
                    f"{type(model).__name__} restores without a search: leave out "
                    f"{', '.join(given)}"
                )
            with solving(model, record=True) as record:
                if takes_any_size(model):
                    generated = answer_in_tiles(model, seen, self.tile)
                else:
                    generated = answer(model, seen)
            pieces = [_solves(solution, solution.message) for solution in record.solutions]
            solves = [worst(row) for row in zip(*pieces, strict=True)] or [Solve()] * len(generated)
        else:
            own: dict[str, Any] = {}
            if isinstance(task, ImageRestoration):
                own = task.evaluation_options()
            elif isinstance(task, Reconstruction):
                own = {"ridge": task.ridge}
            if self.stop_at_noise:
                own = {**own, "ridge": 0.0, "noise": seen.noise}
            if self.prior is not None:
                own = {**own, "ridge": 0.0, "prior": self.prior}
            search = {**own, **self.search}
            found = restore(
                generator_of(model), seen.measured, seen.measurement, seed=self.seed, **search
            )
            generated, solves = found.images, _solves(found, lambda row: found.messages[row])
        images = generated
        if isinstance(seen.measurement, Mask) and not seen.noise:
            images = seamless_fill(seen.measurement, seen.measured, images)
        picture = picture_of(seen.measurement, seen.measured, images.shape[2:])
        return RestoredBatch(generated, images, picture, solves)

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
        sheet = output / TEST_IMAGES
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


def worst(solves: Sequence[Solve]) -> Solve:
    """Of several, one that did not converge if there is any; else that with most iterations."""
    return max(solves, key=lambda solve: (solve.status != "converged", solve.iterations or 0))


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
