"""What a run tells, by name, and how a table prints it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PER_CENT = 100.0
MILLI = 1000.0
MEBI = 2.0**-20


@dataclass(frozen=True)
class Measure:
    """A number of a run.

    scale: from the number as it is kept to the one that is shown.
    """

    title: str
    scale: float = 1.0
    digits: str = ".2f"

    def show(self, values: Sequence[float]) -> str:
        """Mean ± standard deviation; one value alone has none."""
        shown = [self.scale * value for value in values]
        mean = f"{statistics.fmean(shown):{self.digits}}"
        return mean if len(shown) < 2 else f"{mean} ± {deviation(shown):{self.digits}}"


SEARCHES = ("pgd", "warm_pgd", "adam", "warm_adam", "jiio", "jiio_40", "jiio_100", "official")
"""Ways to search for an input, whose time and loss are measured."""

MEASURES: dict[str, Measure] = {
    **{f"{way}_seconds": Measure("time (ms a search)", MILLI, ".1f") for way in SEARCHES},
    **{f"{way}_loss": Measure("loss reached", digits=".3f") for way in SEARCHES},
    "accuracy": Measure("accuracy (%)", PER_CENT),
    "top5_accuracy": Measure("top-5 accuracy (%)", PER_CENT),
    "mean_iou": Measure("mIoU (%)", PER_CENT),
    "mean_accuracy": Measure("mAcc (%)", PER_CENT),
    "mean_residual": Measure("relative residual, test", digits=".2e"),
    "inference_seconds": Measure("inference (ms a batch)", MILLI, ".1f"),
    "backward_seconds": Measure("backward (ms a batch)", MILLI, ".1f"),
    "images_per_second": Measure("images a second, training", digits=".0f"),
    "peak_bytes": Measure("memory of a step (MiB)", MEBI, ".1f"),
    "training_minutes": Measure("training (CPU min)"),
    "pgd_accuracy": Measure("accuracy under PGD (%)", PER_CENT),
    "jiio_accuracy": Measure("accuracy under JIIO (%)", PER_CENT),
    "sample_fid": Measure("FID of samples"),
    "reconstruction_fid": Measure("FID of reconstructions"),
    "jiio_reconstruction_fid": Measure("FID of reconstructions"),
    "reconstruction_psnr": Measure("PSNR of reconstructions (dB)"),
    "jiio_reconstruction_psnr": Measure("PSNR of reconstructions (dB)"),
    "median_psnr": Measure("median PSNR (dB)"),
    "inpaint_psnr": Measure("median PSNR (dB)"),
    "denoise_02_psnr": Measure("median PSNR (dB)"),
    "denoise_04_psnr": Measure("median PSNR (dB)"),
    "feature_size": Measure("mean |z|", digits=".3f"),
    "feature_energy": Measure("mean z²", digits=".3f"),
}
"""By the names that columns use; a result holds some of them."""


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of the sample; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def collect(results: Sequence[dict[str, float | None]], measure: str) -> list[float]:
    """The values that are there."""
    found = (result.get(measure) for result in results)
    return [value for value in found if value is not None]
