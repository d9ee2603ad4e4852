"""Training of the prior of photographs, as a denoiser of patches over a range of noise levels."""

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

ERROR_FLOOR = 0.02
"""Share of σ² that is added to mean squared errors, so that flat patches do not dominate the mean
logarithm."""
GRAY_WEIGHTS = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grayscale image, those of Pillow."""


@dataclass(frozen=True, kw_only=True)
class PhotoPriorTask(Task):
    """Training of a denoiser: maximize the mean PSNR of restored photographs.

    Noise of level σ is added to random patches of photographs. The model is called with the noisy
    patches and σ, or with the patches only.

    Args:
        patch: Side of a patch in pixels. One patch is cut from each photograph at a random
            position, and transposed with probability ½.
        edge: Pixels at each edge of a patch that do not count, because the model cannot use what
            is beyond.
        zoom: Largest magnification of patches, drawn log-uniformly between 1 and `zoom`, because a
            photograph of full size is smoother than a small copy.
        zoomed: Fraction of patches that are magnified.
        gray: Fraction of the batches in [0, 1] that are converted to grayscale, for a model that
            restores both. If it is positive, evaluations are in grayscale.
        least: Smallest noise level σ, as a fraction of the pixel range. Levels are drawn
            log-uniformly and stratified over a batch.
        most: Largest noise level σ.
        judged: Noise level σ of evaluations, on the middle of each photograph.
        blind: Call the model without σ.
        seed: Seed of the noise in evaluations.

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
    gray: float = 0.0
    least: float = 5 / 255
    most: float = 100 / 255
    judged: float = 25 / 255
    blind: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_values(
            self,
            at_least_one=("patch", "zoom"),
            not_negative=("edge",),
            fraction=("zoomed", "gray"),
        )
        check_values(self, positive_pixels=("least", "most", "judged"))
        if self.patch <= 2 * self.edge or self.least > self.most:
            raise ValueError(
                "patch must be larger than 2·edge, and least at most most, got "
                f"patch={self.patch}, edge={self.edge}, least={self.least:g}, most={self.most:g}"
            )

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        clean = torch.stack([self._cut(photograph) for photograph in inputs])
        if bool(torch.rand(()) < self.gray):
            clean = _in_gray(clean)
        spread = math.log(self.most / self.least)
        position = (torch.arange(len(clean)) + torch.rand(len(clean))) / len(clean)
        noise = self.least * torch.exp(spread * position).to(clean)
        restored = self._restored(model, clean, noise, torch.randn_like(clean))
        errors = self._inside(restored - clean).square().flatten(1).mean(dim=1)
        return Outcome({"loss": (errors + ERROR_FLOOR * noise.square()).log()})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        top, left = (max(0, size - self.patch) // 2 for size in inputs.shape[2:])
        clean = inputs[..., top : top + self.patch, left : left + self.patch]
        if self.gray:
            clean = _in_gray(clean)
        noise = clean.new_full((len(clean),), self.judged)
        normal = torch.randn(clean.shape, generator=generator).to(clean)
        restored = self._restored(model, clean, noise, normal)
        restored, clean = self._inside(restored), self._inside(clean)
        errors = (restored - clean).square().flatten(1).mean(dim=1)
        loss = (errors + ERROR_FLOOR * noise.square()).log()
        return Outcome({"loss": loss, "psnr": picture_psnr(restored, clean)})

    def _cut(self, photograph: Tensor) -> Tensor:
        """Return a random patch, of the same size for all photographs."""
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
        """Remove the edges; of a picture that is not larger, return the middle."""
        height, width = images.shape[2:]
        edge = min(self.edge, (min(height, width) - 1) // 2)
        return images[..., edge : height - edge, edge : width - edge]

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        return {"psnr": outcome.mean("psnr"), "median_psnr": outcome.median("psnr")}

    def _restored(self, model: nn.Module, clean: Tensor, noise: Tensor, normal: Tensor) -> Tensor:
        noisy = clean + noise[:, None, None, None] * normal
        restored: Tensor = model(noisy) if self.blind else model(noisy, noise)
        return restored


def _in_gray(images: Tensor) -> Tensor:
    """Return images with one channel."""
    if images.shape[1] == 1:
        return images
    return torch.einsum("nchw,c->nhw", images, images.new_tensor(GRAY_WEIGHTS))[:, None]
