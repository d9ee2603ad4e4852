"""Training of a decoder whose latents are evaluation by JIIO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria.data import Batches, Split
from equilibria.models.generators.autoencoders import convolutional_autoencoder, mdeq_autoencoder
from equilibria.models.generators.decoders import EquilibriumDecoder, opteq_decoder
from equilibria.tasks import Reconstruction
from equilibria.training import TrainingSettings, fit


def decoder(**options: Any) -> EquilibriumDecoder:
    torch.manual_seed(0)
    sizes = {"image_size": 8, "latent_dim": 4, "channels": 8, "width": 8, "kernel_size": 3}
    return opteq_decoder(**{**sizes, "head_channels": 8, **options})


def bars(count: int = 48) -> Split:
    """Return images of a bright bar at a random height."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 6, (count,), generator=generator)
    images = torch.zeros(count, 1, 8, 8)
    for image, row in zip(images, rows, strict=True):
        image[0, row : row + 2] = 1
    return Split(images, rows)


def settings(**options: Any) -> TrainingSettings:
    defaults = {"epochs": 8, "batch_size": 16, "learning_rate": 0.02, "clip_norm": 20.0}
    return TrainingSettings(**{**defaults, "weight_decay": 0.0, "warmup_epochs": 0.5, **options})


def test_training_raises_the_psnr() -> None:
    model, task, data = decoder(), Reconstruction(iterations=8, ridge=1e-2), bars()
    before = task.evaluate(model, Batches(data, 32))
    history = fit(model, task, data, settings())
    after = task.evaluate(model, Batches(data, 32))
    assert after.figures["psnr"] > before.figures["psnr"] + 4
    assert after.loss < 0.4 * before.loss
    assert history[-1].loss < history[0].loss
    assert history[-1].accuracy is None
    assert history[-1].share_converged is not None
    assert history[-1].mean_iterations is not None


def test_gradient_is_that_of_the_optimal_value() -> None:
    """The reference are finite differences of the re-optimized value (Eq. 19)."""
    model = decoder(activation="softplus", channels=4, width=4).double()
    images = bars(3).images.double()
    task = Reconstruction(iterations=60, ridge=1.0, tolerance=1e-7, check_tolerance=1e-10)
    task.training_step(model, images, images).loss.backward()
    for parameter in (model.stem.maps[0].bias, model.head.draw.bias):  # type: ignore[index, union-attr]
        assert isinstance(parameter, Tensor)
        assert parameter.grad is not None
        direction = torch.randn_like(parameter)
        exact = float((parameter.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-4 * direction)
            values.append(float(task.training_step(model, images, images).loss.detach()))
            with torch.no_grad():
                parameter.sub_(sign * 1e-4 * direction)
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(exact, rel=2e-3)


def test_training_uses_noisy_latents() -> None:
    model, images = decoder().double(), bars(4).images.double()
    task = Reconstruction(iterations=5, latent_noise=0.3, ridge=0.1)
    torch.manual_seed(3)
    loss = task.training_step(model, images, images).values["loss"]
    latents = task.find(model, images, training=True).x
    loss.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.manual_seed(3)
    noise = 0.3 * latents.square().mean().sqrt() * torch.randn_like(latents)
    expected = (model(latents + noise) - images).square().flatten(1).sum(dim=1)
    expected = expected + 0.1 * latents.square().sum(dim=1)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0.0)
    with pytest.raises(ValueError, match="latent_noise must not be negative"):
        Reconstruction(latent_noise=-1.0)


def test_evaluation_uses_evaluation_iterations() -> None:
    model, data = decoder(), bars(16)
    few = Reconstruction(evaluation_iterations=1).evaluate(model, Batches(data, 8))
    many = Reconstruction(evaluation_iterations=25).evaluate(model, Batches(data, 8))
    assert many.figures["psnr"] > few.figures["psnr"]
    assert many.samples == 16
    assert many.score == many.figures["psnr"] == many.figures["psnr"]
    assert set(many.figures) == {"psnr", "median_psnr", "latent_norm"}
    assert few.solves.max_iterations == 1


def test_jacobian_penalty_includes_the_equilibria_of_the_search() -> None:
    """A JIIO step has no forward pass of the layer, so the task must report the equilibria."""
    task, data = Reconstruction(iterations=3), bars(16)
    weights = []
    for weight in (0.0, 100.0):
        model = decoder()
        fit(model, task, data, settings(epochs=1, jacobian_weight=weight))
        weights.append(torch.cat([p.detach().flatten() for p in model.layer.parameters()]))
    assert not torch.allclose(*weights)


def test_decoder_of_an_autoencoder_can_be_evaluated() -> None:
    model = mdeq_autoencoder(image_size=8, latent_dim=4, channels=(4, 8), downsample=1)
    evaluation = Reconstruction(evaluation_iterations=3).evaluate(model, Batches(bars(4), 4))
    assert evaluation.figures["psnr"] > 0
    with pytest.raises(TypeError, match="no EquilibriumDecoder"):
        Reconstruction().evaluate(
            convolutional_autoencoder(image_size=8, width=2), Batches(bars(4), 4)
        )


def test_outcomes_of_processes_are_joined() -> None:
    """The median is that of all images, not of those of one process."""
    task, model, data = Reconstruction(evaluation_iterations=2), decoder(), bars(9)
    whole = task.evaluate(model, Batches(data, 9))
    shares = [data.subset(torch.arange(*share)) for share in ((0, 4), (4, 9))]
    gathered: list[list[torch.Tensor]] = [[], []]
    for share, sent in zip(shares, gathered, strict=True):
        task.evaluate(model, Batches(share, 9), lambda x, sent=sent: sent.append(x) or x)
    others = iter(gathered[1])
    both = task.evaluate(
        model, Batches(shares[0], 9), lambda local: torch.cat([local, next(others).to(local)])
    )
    assert both.samples == 9
    assert both.loss == pytest.approx(whole.loss, rel=1e-4)
    for name, value in whole.figures.items():
        assert both.figures[name] == pytest.approx(value, rel=1e-4)
    assert len(both.solves.iterations) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"ridge": -1.0}, "ridge must not be negative"),
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"tolerance": 0.0}, "tolerance must be in"),
        ({"engine": "newton"}, "unknown engine 'newton'"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reconstruction(**options)


def test_evaluate_rejects_an_empty_data_set() -> None:
    with pytest.raises(ValueError, match="at least one sample, got none"):
        Reconstruction().evaluate(decoder(), [])
