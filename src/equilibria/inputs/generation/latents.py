"""The latent vectors of images: found by JIIO, or given by an encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equilibria.inputs.joint import Engine, InputResult, optimize_input
from equilibria.models.autoencoders import Autoencoder
from equilibria.models.decoder import EquilibriumDecoder


def find_latents(
    decoder: EquilibriumDecoder,
    images: Tensor,
    *,
    start: Tensor | None = None,
    ridge: float = 0.0,
    iterations: int = 40,
    sweeps: int = 3,
    engine: str | Engine = "secant",
    step_size: float | None = None,
    tolerance: float = 1e-3,
    check_tolerance: float | None = None,
) -> InputResult:
    """x_i = argmin ‖y_i − D(x)‖² + ridge ‖x‖² for each image (the inner problem of Eq. 20).

    start: where the search begins; None: at zero, as in the paper.
    """
    if start is None:
        start = images.new_zeros(len(images), decoder.latent_dim)

    def penalty(latents: Tensor) -> Tensor:
        return ridge * latents.square().sum(dim=1)

    return optimize_input(
        decoder,
        squared_error_to(images),
        start,
        penalty=penalty if ridge else None,
        engine=engine,
        sweeps=sweeps,
        iterations=iterations,
        step_size=step_size,
        tolerance=tolerance,
        check_tolerance=check_tolerance,
    )


def squared_error_to(images: Tensor) -> Callable[[Tensor], Tensor]:
    """ŷ ↦ ‖y − ŷ‖² of each image, the sum over its pixels."""

    def loss(outputs: Tensor) -> Tensor:
        return squared_error(outputs, images)

    return loss


def squared_error(outputs: Tensor, images: Tensor) -> Tensor:
    """‖y − ŷ‖² of each image, the sum over its pixels."""
    if outputs.shape != images.shape:
        raise ValueError(
            f"the model draws images of shape {tuple(outputs.shape)}, but these have "
            f"{tuple(images.shape)}: set in_channels and image_size to those of the images"
        )
    return (outputs - images).square().flatten(1).sum(dim=1)


def decoder_of(model: nn.Module) -> EquilibriumDecoder:
    """The equilibrium decoder of a generator or of an autoencoder, or an error."""
    decoder = model.decoder if isinstance(model, Autoencoder) else model
    if isinstance(decoder, EquilibriumDecoder):
        return decoder
    raise TypeError(
        f"{type(decoder).__name__} is no EquilibriumDecoder: JIIO finds the latents of equilibrium "
        "decoders (mdeq-decoder, opteq-decoder) and of autoencoders that have one (mdeq-vae)"
    )


@torch.no_grad()
def decode(model: nn.Module, latents: Tensor, *, batch: int = 256) -> Tensor:
    """The images of latent vectors, in batches."""
    network = model.decoder if isinstance(model, Autoencoder) else model
    assert isinstance(network, nn.Module)
    parts: list[Tensor] = [network(some) for some in torch.split(latents, batch)]
    return torch.cat(parts)
