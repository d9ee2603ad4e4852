"""Training an autoencoder: plain, regularized or variational."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from equilibria.inputs import squared_error
from equilibria.models.autoencoders import Autoencoder
from equilibria.tasks.base import TrainingStep
from equilibria.tasks.image_evaluation import ImageEvaluation
from equilibria.tasks.image_quality import psnr
from equilibria.tasks.solve_statistics import SolveStatistics

Kind = Literal["auto", "ae", "rae", "vae"]


@dataclass(frozen=True)
class Autoencoding:
    """‖y − D(x)‖² with x from the encoder, plus what the kind asks for.

    kind: "vae" draws x and adds `kl_weight` · KL(q(x | y) ‖ N(0, I)) (Kingma and Welling, 2014);
        the weight is twice the variance of a pixel given x. "rae" adds `latent_weight` · ‖x‖²/2
        and `decoder_weight` times the squared norm of the decoder's weights (RAE-L2 of Ghosh et
        al., 2020). "ae" adds nothing. "auto": "vae" for a variational model, else "ae".
    """

    kind: Kind = "auto"
    kl_weight: float = 0.1
    latent_weight: float = 0.05
    decoder_weight: float = 1e-4

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        for name in ("kl_weight", "latent_weight", "decoder_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        autoencoder, kind = self._checked(model)
        latents, log_variance = autoencoder.posterior(inputs)
        extra = latents.new_zeros(())
        if kind == "vae":
            variance = log_variance.exp()
            divergence = (latents.square() + variance - 1 - log_variance).sum(dim=1) / 2
            extra = self.kl_weight * divergence.mean()
            latents = latents + variance.sqrt() * torch.randn_like(latents)
        elif kind == "rae":
            weights = [p.square().sum() for p in autoencoder.decoder.parameters() if p.dim() > 1]
            extra = self.latent_weight * latents.square().sum(dim=1).mean() / 2
            extra = extra + self.decoder_weight * torch.stack(weights).sum()
        errors = squared_error(autoencoder.decode(latents), inputs)
        samples = torch.full_like(errors.detach().sum(), len(inputs))
        return TrainingStep(loss=errors.mean() + extra, samples=samples)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> ImageEvaluation:
        """Reconstruct images from their encodings; of a VAE, from the means."""
        autoencoder, _ = self._checked(model)
        was_training = autoencoder.training
        device = next(autoencoder.parameters()).device
        solves = SolveStatistics()
        errors, ratios = [], []
        autoencoder.eval()
        try:
            for images, _ in batches:
                images = images.to(device)
                drawn = autoencoder(images)
                errors.append(squared_error(drawn, images).cpu())
                ratios.append(psnr(drawn, images).cpu())
                solves.observe(autoencoder)
        finally:
            autoencoder.train(was_training)
        return ImageEvaluation.of(errors, ratios, solves)

    def _checked(self, model: nn.Module) -> tuple[Autoencoder, Kind]:
        if not isinstance(model, Autoencoder):
            raise TypeError(
                f"{type(model).__name__} has no encoder: take an autoencoder (vae-conv, ae-conv, "
                "mdeq-vae, mdeq-ae), or train a decoder alone with task.name=generator"
            )
        if self.kind == "auto":
            return model, "vae" if model.variational else "ae"
        if (self.kind == "vae") != model.variational:
            wanted = "a variational" if self.kind == "vae" else "no variational"
            raise ValueError(
                f"kind={self.kind!r} takes {wanted} model: set model.options.variational to "
                f"{str(self.kind == 'vae').lower()}, or the kind to auto"
            )
        return model, self.kind
