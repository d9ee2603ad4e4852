"""Learning the prior of photographs: a denoiser of colored patches, over a range of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from equilibria.registry import check_values
from equilibria.tasks.base import Task
from equilibria.tasks.evaluation import Outcome
from equilibria.tasks.image_quality import picture_psnr

GROWTH = 1.3
"""About the power of σ that the mean squared error of a denoiser grows with: losses of all noise
levels are then of one size."""
TYPICAL = 0.01
"""About its size."""


@dataclass(frozen=True, kw_only=True)
class PhotoPriorTask(Task):
    """minimize Σ ‖y*(x, σ) − y‖²/σ^1.3 over patches y of photographs and x = y + noise of σ.

    The model takes (x, σ). Losses leave out the `edge`, where a patch does not go on.

    patch: the side of a patch, one of each photograph, cut and turned on its side at random.
    least, most: of σ, drawn evenly in its logarithm.
    judged: σ in evaluations, of the middle of each photograph.
    """

    score: ClassVar[str] = "psnr"
    draws_pictures: ClassVar[bool] = True

    patch: int = 64
    edge: int = 6
    least: float = 5 / 255
    most: float = 100 / 255
    judged: float = 25 / 255
    seed: int = 0

    def __post_init__(self) -> None:
        check_values(self, at_least_one=("patch",), positive=("least", "most", "judged"))
        if self.patch <= 2 * self.edge or self.least >= self.most:
            raise ValueError("a patch is wider than its two edges, and `least` is below `most`")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        clean = torch.stack([self._cut(photograph) for photograph in inputs])
        spread = math.log(self.most / self.least)
        noise = self.least * torch.exp(spread * torch.rand(len(clean))).to(clean)
        restored = self._restored(model, clean, noise, torch.randn_like(clean))
        error = (restored - clean)[..., self.edge : -self.edge, self.edge : -self.edge]
        losses = error.square().flatten(1).mean(dim=1) / (TYPICAL * noise**GROWTH)
        return Outcome({"loss": losses})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        top, left = (max(0, size - self.patch) // 2 for size in inputs.shape[2:])
        clean = inputs[..., top : top + self.patch, left : left + self.patch]
        noise = clean.new_full((len(clean),), self.judged)
        drawn = torch.randn(clean.shape, generator=generator).to(clean)
        restored = self._restored(model, clean, noise, drawn)
        errors = (restored - clean).square().flatten(1).mean(dim=1)
        return Outcome({"loss": errors, "psnr": picture_psnr(restored, clean)})

    def _cut(self, photograph: Tensor) -> Tensor:
        """A square of it, the same for photographs of all sizes that are at least as large."""
        top, left = (
            int(torch.randint(max(0, size - self.patch) + 1, ())) for size in photograph.shape[1:]
        )
        square = photograph[:, top : top + self.patch, left : left + self.patch]
        is_turned = square.shape[1] == square.shape[2] and bool(torch.rand(()) < 0.5)
        return square.transpose(1, 2) if is_turned else square

    def figures(self, found: Outcome) -> dict[str, float | None]:
        return {"psnr": found.mean("psnr"), "median_psnr": found.median("psnr")}

    def _restored(self, model: nn.Module, clean: Tensor, noise: Tensor, drawn: Tensor) -> Tensor:
        restored: Tensor = model(clean + noise[:, None, None, None] * drawn, noise)
        return restored
