"""Learning the prior of photographs: a denoiser of their patches, over a range of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.registry import check_values
from equilibria.tasks.base import Task
from equilibria.tasks.evaluation import Outcome
from equilibria.tasks.image_quality import picture_psnr

FLOOR = 1e-6
"""Of a mean squared error, so that a patch without contents does not outweigh all others."""


@dataclass(frozen=True, kw_only=True)
class PhotoPriorTask(Task):
    """maximize the mean PSNR of y*(x, σ) over patches y of photographs and x = y + noise of σ.

    The model takes (x, σ), or x alone. What is judged leaves out the `edge`, where a patch does not
    go on.

    patch: the side of a patch, one of each photograph, cut and turned on its side at random.
    zoom: patches are enlarged by 1 to `zoom`, drawn evenly in its logarithm: a photograph of full
        size is smoother than a small copy of it.
    zoomed: the share of patches that are.
    least, most: of σ, drawn evenly in its logarithm, and spread over a batch; equal for one level.
    judged: σ in evaluations, of the middle of each photograph.
    blind: the model is not told σ, as a plain network is not.

    Examples:
        >>> from equilibria.models.restorers.photo import photo_denoiser
        >>> model = photo_denoiser(in_channels=1, channels=4, kernel_size=5)
        >>> task = eq.tasks.PhotoPriorTask(patch=24, edge=4)
        >>> task.training_step(model, torch.rand(1, 1, 32, 32), torch.zeros(1)).loss.requires_grad
        True
    """

    score: ClassVar[str] = "psnr"
    draws_pictures: ClassVar[bool] = True

    patch: int = 64
    edge: int = 8
    zoom: float = 1.0
    zoomed: float = 0.5
    least: float = 5 / 255
    most: float = 100 / 255
    judged: float = 25 / 255
    blind: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_values(
            self, at_least_one=("patch", "zoom"), not_negative=("edge",), fraction=("zoomed",)
        )
        check_values(self, positive_pixels=("least", "most", "judged"))
        if self.patch <= 2 * self.edge or self.least > self.most:
            raise ValueError("a patch is wider than its two edges, and `least` is not above `most`")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        clean = torch.stack([self._cut(photograph) for photograph in inputs])
        spread = math.log(self.most / self.least)
        place = (torch.arange(len(clean)) + torch.rand(len(clean))) / len(clean)
        noise = self.least * torch.exp(spread * place).to(clean)
        restored = self._restored(model, clean, noise, torch.randn_like(clean))
        errors = self._inside(restored - clean).square().flatten(1).mean(dim=1)
        return Outcome({"loss": (errors + FLOOR).log()})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        top, left = (max(0, size - self.patch) // 2 for size in inputs.shape[2:])
        clean = inputs[..., top : top + self.patch, left : left + self.patch]
        noise = clean.new_full((len(clean),), self.judged)
        drawn = torch.randn(clean.shape, generator=generator).to(clean)
        restored = self._restored(model, clean, noise, drawn)
        restored, clean = self._inside(restored), self._inside(clean)
        errors = (restored - clean).square().flatten(1).mean(dim=1)
        return Outcome({"loss": (errors + FLOOR).log(), "psnr": picture_psnr(restored, clean)})

    def _cut(self, photograph: Tensor) -> Tensor:
        """A square of it, the same for photographs of all sizes that are at least as large."""
        is_zoomed = bool(torch.rand(()) < self.zoomed)
        zoom = math.exp(math.log(self.zoom) * float(torch.rand(()))) if is_zoomed else 1.0
        side = min(math.ceil(self.patch / zoom), *photograph.shape[1:])
        top, left = (int(torch.randint(size - side + 1, ())) for size in photograph.shape[1:])
        square = photograph[:, top : top + side, left : left + side]
        if side != self.patch:
            size = (self.patch, self.patch)
            square = F.interpolate(square[None], size=size, mode="bicubic")[0].clamp(0, 1)
        return square.transpose(1, 2) if bool(torch.rand(()) < 0.5) else square

    def _inside(self, images: Tensor) -> Tensor:
        """Without the edges; of a picture that is hardly wider than they are, its middle."""
        height, width = images.shape[2:]
        edge = min(self.edge, (min(height, width) - 1) // 2)
        return images[..., edge : height - edge, edge : width - edge]

    def figures(self, found: Outcome) -> dict[str, float | None]:
        return {"psnr": found.mean("psnr"), "median_psnr": found.median("psnr")}

    def _restored(self, model: nn.Module, clean: Tensor, noise: Tensor, drawn: Tensor) -> Tensor:
        noisy = clean + noise[:, None, None, None] * drawn
        restored: Tensor = model(noisy) if self.blind else model(noisy, noise)
        return restored
