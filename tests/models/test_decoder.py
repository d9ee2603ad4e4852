"""Equilibrium decoders: from a latent vector to an image, and back by JIIO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context.state import state_tensors
from equilibria.inputs import optimal_value, optimize_input
from equilibria.models.generators.decoders import EquilibriumDecoder, mdeq_decoder, opteq_decoder
from tests.models.small import with_solving

FACTORIES: dict[str, Any] = {"mdeq": mdeq_decoder, "opteq": opteq_decoder}
SMALL: dict[str, dict[str, Any]] = {
    "mdeq": {"channels": (4, 8), "head_channels": 8},
    "opteq": {"channels": 6, "width": 6, "kernel_size": 3, "head_channels": 8},
}


def small_decoder(kind: str, **options: Any) -> EquilibriumDecoder:
    torch.manual_seed(0)
    given = {"image_size": 16, "latent_dim": 5, "tolerance": 1e-5, "max_iterations": 300}
    decoder = FACTORIES[kind](**with_solving({**SMALL[kind], **given, **options}))
    assert isinstance(decoder, EquilibriumDecoder)
    return decoder


@pytest.mark.parametrize("kind", list(FACTORIES))
@pytest.mark.parametrize(("size", "channels"), [(16, 3), (28, 1), (32, 3), (64, 3)])
def test_draws_images_of_the_size_asked_for(kind: str, size: int, channels: int) -> None:
    decoder = small_decoder(kind, image_size=size, in_channels=channels).eval()
    assert decoder.latent_dim == 5
    with torch.no_grad():
        images = decoder(torch.randn(3, 5))
    assert images.shape == (3, channels, size, size)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    assert decoder(torch.zeros(0, 5)).shape == (0, channels, size, size)
    assert decoder.last_solution is not None


@pytest.mark.parametrize("kind", list(FACTORIES))
def test_a_fresh_decoder_converges_and_every_parameter_learns(kind: str) -> None:
    decoder = small_decoder(kind)
    latents = torch.randn(4, 5)
    assert decoder.solve(latents).converged.all()
    decoder(latents).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


@pytest.mark.parametrize("kind", list(FACTORIES))
def test_jiio_finds_the_latent_of_an_image_that_the_decoder_drew(kind: str) -> None:
    decoder = small_decoder(kind).eval()
    with torch.no_grad():
        decoder.head.draw.weight.mul_(5)  # type: ignore[union-attr, operator]
        images = decoder(torch.randn(4, 5))

    def loss(outputs: Tensor) -> Tensor:
        return (outputs - images).square().flatten(1).sum(dim=1)

    found = optimize_input(decoder, loss, torch.zeros(4, 5), iterations=60)
    assert (found.loss < 0.5 * found.initial_loss).all()
    assert found.loss.median() < 0.2 * found.initial_loss.median()
    optimal_value(found).mean().backward()
    assert all(p.grad is not None for p in decoder.parameters())


def test_every_branch_has_an_injection_of_its_own() -> None:
    """Without the finest injection the latent still reaches the image through the coarser one."""
    decoder = small_decoder("mdeq").eval()
    with torch.no_grad():
        decoder.stem.maps[0].weight.zero_()  # type: ignore[index, union-attr, operator]
        first, second = (
            decoder.solve(torch.randn(2, 5)).state,
            decoder.solve(torch.zeros(2, 5)).state,
        )
    fine, coarse = (
        float((a - b).abs().max())
        for a, b in zip(state_tensors(first), state_tensors(second), strict=True)
    )
    assert coarse > 0.1
    assert fine > 1e-3


def test_an_opteq_decoder_contracts_whatever_its_weights() -> None:
    decoder = small_decoder("opteq").eval()
    with torch.no_grad():
        for parameter in decoder.layer.cell.parameters():
            parameter.mul_(30)
    bound = decoder.layer.contraction_bound(decoder.stem(torch.randn(2, 5)))
    assert bound is not None
    assert bool((bound <= 0.9**2 + 1e-6).all())
    assert decoder.solve(torch.randn(2, 5)).converged.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 30}, "divisible by 4"),
        ({"downsample": 3}, "downsample must be 1, 2 or 4"),
        ({"latent_dim": 0}, "latent_dim must be at least 1"),
    ],
)
def test_wrong_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_decoder("mdeq", **options)


def test_wrong_latents_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected latents of shape \(batch, 5\)"):
        small_decoder("opteq")(torch.zeros(2, 1, 16, 16))


@pytest.mark.parametrize("name", ["mdeq-decoder", "opteq-decoder"])
def test_decoders_by_name(name: str) -> None:
    decoder = eq.create_model(name, image_size=16, in_channels=3, latent_dim=7)
    assert decoder(torch.zeros(1, 7)).shape == (1, 3, 16, 16)


@pytest.mark.parametrize("kind", list(FACTORIES))
@pytest.mark.parametrize("downsample", [2, 4])
def test_transposed_convolutions_draw_the_image_too(kind: str, downsample: int) -> None:
    options = {"downsample": downsample, "in_channels": 3, "readout": "deconvolution"}
    decoder = small_decoder(kind, **options)
    images = decoder(torch.randn(2, 5))
    assert images.shape == (2, 3, 16, 16)
    shown = images.detach()
    assert 0 <= float(shown.min()) <= float(shown.max()) <= 1
    images.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


def test_a_readout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="readout='deconvolution' raises the resolution"):
        small_decoder("opteq", downsample=1, readout="deconvolution")
    with pytest.raises(ValueError, match="readout must be one of shuffle, deconvolution"):
        small_decoder("opteq", readout="bilinear")


@pytest.mark.parametrize("readout", ["shuffle", "deconvolution"])
@pytest.mark.parametrize("kind", list(FACTORIES))
def test_a_gain_multiplies_what_the_sigmoid_sees(kind: str, readout: str) -> None:
    """logit(image) = gain · (Wh) + b: affine in the gain, whatever the latent."""
    latents = torch.randn(2, 5)
    logits = []
    for gain in (1.0, 2.0, 3.0):
        torch.manual_seed(0)
        decoder = small_decoder(kind, readout=readout, downsample=2, head_gain=gain)
        logits.append(torch.logit(decoder(latents)).detach())
    assert float((logits[1] - logits[0]).abs().max()) > 0.1
    torch.testing.assert_close(logits[2] - logits[1], logits[1] - logits[0], rtol=1e-4, atol=1e-4)


def test_a_gain_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="head_gain must be positive"):
        small_decoder("opteq", head_gain=0.0)
