"""Image files restored by the photo prior, each with a picture of before, after and the solve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data import AS_ON_DISK, BRIGHTEST, read_pixels, readable
from equilibria.data.image_files import check_detail
from equilibria.energies import OpponentPrior
from equilibria.inputs import (
    Corrupted,
    Corruption,
    Deblurring,
    Demosaicing,
    Denoising,
    PhotoSettings,
    Scattering,
    SuperResolution,
    bayer_mosaic,
    least_variation,
    noise_level,
    picture_of,
    proven,
    restore_photo,
)
from equilibria.inputs.photos import middle_of
from equilibria.models.restorers.photo import RestoredPhotos, first_picture
from equilibria.operators import AveragePool, Blur, Identity, LinearOperator, Mask
from equilibria.registry import (
    check_at_least,
    check_open_share,
    check_positive,
    check_positive_pixels,
)
from equilibria.report.figures import drawn_files
from equilibria.report.sheets import image_png
from equilibria.report.style import LIGHT, count_along, drawing, dress_axes, figure_png
from equilibria.solvers import Status
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training import write_atomically

TASKS = ("denoise", "deblur", "inpaint", "superres", "demosaic")
VARIATIONS = (0.3, 0.7, 1.0, 1.5, 3.0)
"""Weights of total variation to compare with, over the noise, of which the best counts."""
SHOWN = 256
"""Pixels a side of the middle that a sheet shows."""


@dataclass(frozen=True, kw_only=True)
class RestoredPhoto:
    """One image file."""

    file: str
    restored: str
    sheet: str
    noise: float
    """The deviation that was given or estimated."""
    strength: float
    """λ of the prior: the one given, or the one that the discrepancy principle found."""
    status: str
    iterations: int
    bound: float | None
    """Gray levels of 255 between the restored picture and the exact minimizer, proven, as a root
    mean square; None where nothing is proven."""
    proven: str
    measured_psnr: float | None
    restored_psnr: float | None
    variation_psnr: float | None
    """Of the best of several total variations; None without `compare`, or without an original."""


@dataclass(frozen=True)
class PhotoFiles:
    """How image files are restored.

    task: one of `TASKS`. noise: its deviation; None: estimated. blur: in pixels. factor: of a lower
    resolution. mask: an image whose bright pixels are missing. share: of missing pixels that
    `simulate` draws. compare: draw total variation beside it.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(torch.rand(1, 24, 24)).save("noisy.png")
        >>> restore = eq.report.PhotoFiles(eq.models.photo_prior(), "denoise", noise=0.1)
        >>> [found.status for found in restore.run([Path("noisy.png")], Path("restored"))]
        ['converged']
    """

    prior: OpponentPrior
    task: str = "denoise"
    settings: PhotoSettings = field(default_factory=PhotoSettings)
    noise: float | None = None
    blur: float = 1.5
    factor: int = 2
    mask: Path | None = None
    share: float = 0.7
    simulate: bool = False
    compare: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"the photo prior knows {', '.join(TASKS)}, not {self.task!r}")
        if self.noise == 0:
            raise ValueError(
                "a noise of zero leaves nothing to restore: give a positive --noise, in units of "
                "the brightest pixel, or none to have it estimated"
            )
        check_positive_pixels(noise=self.noise)
        check_positive(blur=self.blur)
        check_at_least(2, factor=self.factor)
        check_open_share(share=self.share)
        if self.mask is not None and self.task != "inpaint":
            raise ValueError("--mask says which pixels are missing: it is for --task inpaint")
        if self.task == "inpaint" and self.mask is None and not self.simulate:
            raise ValueError(
                "which pixels are missing? Give --mask an image in which they are bright; "
                "--simulate hides some, to show what is made of it"
            )

    @torch.no_grad()
    def run(
        self,
        files: Sequence[Path],
        output: Path,
        *,
        overwrite: bool = False,
        on_unreadable: Callable[[Exception], None] | None = None,
        progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    ) -> Iterator[RestoredPhoto]:
        """Restore the images in files, one by one, and draw them into the folder `output`."""
        drawn = drawn_files(files, output, "restored", "sheet", overwrite=overwrite)
        hidden = self._hidden()
        output.mkdir(parents=True, exist_ok=True)
        random = torch.Generator().manual_seed(self.seed)
        places = list(zip(files, drawn, strict=True))

        def restored(place: tuple[Path, tuple[Path, ...]]) -> RestoredPhoto:
            file, (answer, sheet) = place
            check_detail(file)
            pixels = read_pixels(file, AS_ON_DISK, is_gray=None)[None]
            original = self._original(pixels)
            seen = self._seen(pixels if original is None else original, hidden, random)
            found = restore_photo(self.prior, seen, self.settings, progress)
            variation = self._variation(seen, original) if self.compare else None
            write_atomically(answer, image_png(found.images[0]))
            write_atomically(sheet, self._sheet(file.name, seen, found, variation))
            picture = picture_of(seen.measurement, seen.measured, found.images.shape[2:])
            return RestoredPhoto(
                file=str(file),
                restored=str(answer),
                sheet=str(sheet),
                noise=seen.noise,
                strength=found.strength,
                status=Status(int(found.solution.status[0])).name.lower().replace("_", " "),
                iterations=int(found.solution.iterations[0]),
                bound=None if found.bound is None else float(found.bound[0]) * BRIGHTEST,
                proven=proven(found),
                measured_psnr=_psnr(picture, original),
                restored_psnr=_psnr(found.images, original),
                variation_psnr=_psnr(variation, original),
            )

        for _, photo in readable(places, restored, on_unreadable):
            yield photo

    def _original(self, pixels: Tensor) -> Tensor | None:
        """The picture that is damaged to compare with it, if that was asked for."""
        if not self.simulate:
            return None
        if self.task != "superres":
            return pixels
        height, width = (size // self.factor * self.factor for size in pixels.shape[2:])
        return pixels[..., :height, :width]

    def _seen(self, pixels: Tensor, hidden: Tensor | None, random: torch.Generator) -> Corrupted:
        if self.simulate and hidden is None:
            return self._damage().corrupt(pixels, random)
        height, width = pixels.shape[2:]
        measurement: LinearOperator = Identity()
        estimated = pixels
        if self.task == "inpaint":
            assert hidden is not None
            if hidden.shape[1:] != pixels.shape[2:]:
                raise ValueError(
                    f"the mask is {hidden.shape[2]}×{hidden.shape[1]} pixels and the picture "
                    f"{width}×{height}: a mask has the size of its picture"
                )
            measurement = Mask((~hidden).to(pixels)[None])
        elif self.task == "deblur":
            measurement = Blur(self.blur)
            if min(height, width) <= measurement.reach:
                raise ValueError(
                    f"a blur of {self.blur:g} pixels reaches {measurement.reach} far, beyond "
                    f"a picture of {width}×{height}"
                )
        elif self.task == "superres":
            measurement = AveragePool(self.factor)
        elif self.task == "demosaic":
            if pixels.shape[1] == 3 and not bool((pixels == pixels[:, :1]).all()):
                raise ValueError(
                    "a mosaic has one number a pixel, and this is a picture in colors: --simulate "
                    "makes a mosaic of it first"
                )
            estimated = pixels[..., ::2, ::2]
            pixels = pixels[:, :1].expand(-1, 3, -1, -1)
            measurement = bayer_mosaic(height, width, pixels)
        noise = noise_level(estimated) if self.noise is None else self.noise
        measured = measurement(pixels) if isinstance(measurement, Mask) else pixels
        return Corrupted(measured, measurement, noise)

    def _damage(self) -> Corruption:
        noise = {"denoise": 0.1, "deblur": 0.01}.get(self.task, 1 / BRIGHTEST)
        noise = noise if self.noise is None else self.noise
        kinds: dict[str, Corruption] = {
            "denoise": Denoising(noise),
            "deblur": Deblurring(self.blur, noise),
            "inpaint": Scattering(self.share, noise),
            "superres": SuperResolution(self.factor, noise),
            "demosaic": Demosaicing(noise),
        }
        return kinds[self.task]

    def _hidden(self) -> Tensor | None:
        if self.mask is None:
            return None
        hidden = read_pixels(self.mask, AS_ON_DISK, is_gray=True) >= 0.5
        if bool(hidden.all()) or not bool(hidden.any()):
            raise ValueError(
                f"{self.mask} hides every pixel, or none: what is missing is bright in a mask"
            )
        return hidden

    def _variation(self, seen: Corrupted, original: Tensor | None) -> Tensor:
        """The picture of least variation: of several weights the best, if one can tell."""
        assert isinstance(seen.measurement, LinearOperator)
        start = first_picture(seen.measured, seen.measurement)
        whole = isinstance(seen.measurement, Identity)
        scale = seen.noise if whole else seen.noise**2 * 10
        weights = VARIATIONS if original is not None else (1.0,)
        found = [
            least_variation(seen.measured, seen.measurement, weight * scale, start)
            for weight in weights
        ]
        if original is None:
            return found[0]
        return max(found, key=lambda images: float(picture_psnr(images, original)[0]))

    def _sheet(
        self, name: str, seen: Corrupted, found: RestoredPhotos, variation: Tensor | None
    ) -> bytes:
        """Before, after, and the objective along a solve of the middle of the picture.

        The objective need not fall in every iteration, since Anderson's method minimizes the
        residual. The line is the lowest value so far; the dots are the values of the iterates.
        """
        part = middle_of(seen, SHOWN // 2 if self.task == "superres" else SHOWN)
        followed = self.settings.restorer(self.prior, part, found.strength)
        values = followed.restore(part.measured, part.measurement, trace=True).objective[:, 0]
        is_cut = part.measured.shape != seen.measured.shape
        picture = picture_of(seen.measurement, seen.measured, found.images.shape[2:])
        pictures = {"measured": picture, "total variation": variation, "restored": found.images}
        shown = {title: some for title, some in pictures.items() if some is not None}
        with drawing():
            from matplotlib.figure import Figure

            figure = Figure(figsize=(3.3 * (len(shown) + 1), 3.6), layout="constrained")
            axes = figure.subplots(1, len(shown) + 1)
            for axis, (title, images) in zip(axes, shown.items(), strict=False):
                image = _center(images[0]).clamp(0, 1).permute(1, 2, 0)
                gray = {"cmap": "gray", "vmin": 0, "vmax": 1} if image.shape[2] == 1 else {}
                pixels = (image.squeeze(2) if gray else image).numpy()
                axis.imshow(pixels, interpolation="nearest", **gray)
                axis.set_title(title)
                axis.set_axis_off()
            curve = axes[-1]
            lowest = values.cummin(dim=0).values
            curve.plot(lowest.numpy(), color=LIGHT.first, label="lowest so far")
            dots = {"linestyle": "none", "marker": "o", "markersize": 3}
            curve.plot(values.numpy(), color=LIGHT.second, label="each iteration", **dots)
            where = " (middle)" if is_cut else ""
            weight = "" if found.strength == 1 else f", λ = {found.strength:.3g}"
            curve.set_title(f"objective{where}{weight}")
            curve.legend(frameon=False)
            count_along(curve, "iteration")
            dress_axes(curve)
            figure.suptitle(f"{name}: {proven(found)}", fontsize=10)
            return figure_png(figure)


def _center(image: Tensor) -> Tensor:
    top, left = (max(0, size - SHOWN) // 2 for size in image.shape[1:])
    return image[:, top : top + SHOWN, left : left + SHOWN]


def _psnr(images: Tensor | None, original: Tensor | None) -> float | None:
    if images is None or original is None or images.shape != original.shape:
        return None
    return float(picture_psnr(images, original)[0])
