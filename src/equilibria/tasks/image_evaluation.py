"""How near reconstructions are to their images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equilibria.tasks.solve_statistics import SolveStatistics


@dataclass(frozen=True)
class ImageEvaluation:
    """Squared errors and PSNR of reconstructed images, and how the solves went."""

    loss: float
    """The mean of ‖y − ŷ‖², the sum over the pixels of an image."""
    psnr: float
    """The mean over the images, in decibels."""
    samples: int
    solves: SolveStatistics
    median_psnr: float
    extra: dict[str, float | None] = field(default_factory=dict)
    """Further measures of the task."""

    @property
    def accuracy(self) -> None:
        """There is no right and wrong."""
        return None

    @property
    def score(self) -> float:
        """The PSNR."""
        return self.psnr

    @property
    def figures(self) -> dict[str, float | None]:
        return {"psnr": self.psnr, "median_psnr": self.median_psnr, **self.extra}

    def with_solves(self, solves: SolveStatistics) -> ImageEvaluation:
        return replace(self, solves=solves)

    def pooled(self, total: Callable[[Tensor], Tensor]) -> ImageEvaluation:
        """Loss and PSNR over all processes; all else stays that of this one."""
        sums = torch.tensor([self.loss, self.psnr, 1.0], dtype=torch.float64) * self.samples
        loss, ratio, samples = total(sums).tolist()
        return replace(self, loss=loss / samples, psnr=ratio / samples, samples=round(samples))

    @classmethod
    def of(
        cls,
        errors: list[Tensor],
        ratios: list[Tensor],
        solves: SolveStatistics,
        extra: dict[str, float | None] | None = None,
    ) -> ImageEvaluation:
        """From the squared error and the PSNR of every image, batch by batch."""
        if not errors:
            raise ValueError("there is nothing to evaluate: the batches hold no sample")
        all_errors, all_ratios = torch.cat(errors).double(), torch.cat(ratios).double()
        return cls(
            loss=float(all_errors.mean()),
            psnr=float(all_ratios.mean()),
            median_psnr=float(all_ratios.median()),
            samples=len(all_errors),
            solves=solves,
            extra=extra or {},
        )
