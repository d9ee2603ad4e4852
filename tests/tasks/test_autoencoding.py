"""Training of plain, regularized and variational autoencoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equilibria.data import Batches, Split
from equilibria.models.generators.autoencoders import Autoencoder, convolutional_autoencoder
from equilibria.models.generators.decoders import opteq_decoder
from equilibria.tasks import Autoencoding
from equilibria.training import TrainingSettings, fit


def autoencoder(*, variational: bool = False) -> Autoencoder:
    torch.manual_seed(0)
    return convolutional_autoencoder(image_size=8, latent_dim=4, width=8, variational=variational)


def bars(count: int = 64) -> Split:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 6, (count,), generator=generator)
    images = torch.zeros(count, 1, 8, 8)
    for image, row in zip(images, rows, strict=True):
        image[0, row : row + 2] = 1
    return Split(images, rows)


def trained(task: Autoencoding, model: Autoencoder, **options: Any) -> Autoencoder:
    defaults = {"epochs": 15, "batch_size": 16, "learning_rate": 0.01, "clip_norm": 20.0}
    fit(model, task, bars(), TrainingSettings(**{**defaults, "weight_decay": 0.0, **options}))
    return model


@pytest.mark.parametrize("kind", ["ae", "rae", "vae"])
def test_every_kind_learns_to_reconstruct(kind: str) -> None:
    model = autoencoder(variational=kind == "vae")
    task = Autoencoding(kind=kind)  # type: ignore[arg-type]
    before = task.evaluate(model, Batches(bars(), 32))
    after = task.evaluate(trained(task, model), Batches(bars(), 32))
    assert after.figures["psnr"] > before.figures["psnr"] + 6
    assert after.figures.keys() == {"psnr", "median_psnr"}
    assert after.accuracy is None
    assert after.solves.share_converged is None


def test_regularizers_shrink_latents_and_weights() -> None:
    images = bars().images
    free = trained(Autoencoding("rae", latent_weight=0.0, decoder_weight=0.0), autoencoder())
    shrunk = trained(Autoencoding("rae", latent_weight=5.0, decoder_weight=0.0), autoencoder())
    small = trained(Autoencoding("rae", latent_weight=0.0, decoder_weight=0.5), autoencoder())
    assert shrunk.encode(images).norm() < 0.6 * free.encode(images).norm()

    def size(model: Autoencoder) -> float:
        return sum(
            float(p.detach().square().sum()) for p in model.decoder.parameters() if p.dim() > 1
        )

    assert size(small) < 0.6 * size(free)


def test_large_kl_weight_makes_the_posterior_equal_the_prior() -> None:
    model = trained(Autoencoding("vae", kl_weight=50.0), autoencoder(variational=True))
    mean, log_variance = model.eval().posterior(bars().images)
    assert mean.abs().mean() < 0.2
    assert log_variance.abs().mean() < 0.4


def test_vae_loss_agrees_with_the_formula() -> None:
    model = autoencoder(variational=True).eval()
    images = bars(8).images
    torch.manual_seed(5)
    loss = Autoencoding("vae", kl_weight=0.3).training_step(model, images, images).loss
    mean, log_variance = model.posterior(images)
    posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
    prior = torch.distributions.Normal(0.0, 1.0)
    divergence = torch.distributions.kl_divergence(posterior, prior).sum(dim=1)
    torch.manual_seed(5)
    decoded = model.decode(mean + posterior.stddev * torch.randn_like(mean))
    errors = (decoded - images).square().flatten(1).sum(dim=1)
    torch.testing.assert_close(loss, (errors + 0.3 * divergence).mean())


def test_auto_kind_follows_from_the_model() -> None:
    images = bars(8).images
    for variational, kind in ((True, "vae"), (False, "ae")):
        model = autoencoder(variational=variational).eval()
        losses = []
        for option in ("auto", kind):
            torch.manual_seed(1)
            task = Autoencoding(kind=option)  # type: ignore[arg-type]
            losses.append(task.training_step(model, images, images).loss)
        torch.testing.assert_close(*losses)


def test_unsuitable_models_and_options_are_rejected() -> None:
    images = bars(2).images
    with pytest.raises(ValueError, match=r"model.options.variational to true"):
        Autoencoding("vae").training_step(autoencoder(), images, images)
    with pytest.raises(ValueError, match=r"model.options.variational to false"):
        Autoencoding("rae").training_step(autoencoder(variational=True), images, images)
    with pytest.raises(TypeError, match="has no encoder"):
        Autoencoding().training_step(opteq_decoder(image_size=8), images, images)
    with pytest.raises(ValueError, match="kind must be one of"):
        Autoencoding("gan")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kl_weight must not be negative"):
        Autoencoding(kl_weight=-1.0)
