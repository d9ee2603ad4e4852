"""Learning to restore: through the inner problem (Eq. 24), and directly (Eq. 23)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.inputs.latents import misfit
from equilibria.restoration import Denoising, Inpainting, Measured
from equilibria.restoration.tiles import answer
from equilibria.tasks import ImageRestoration
from tests.inputs.small_generator import SIDE, SmallDecoder, decoder, latents

SOFT: dict[str, Any] = {"iterations": 60, "ridge": 0.1}


def photographs(count: int = 6) -> Tensor:
    """Images that the small decoder does not make, but another one like it does."""
    return SmallDecoder(seed=9).double()(latents(count, seed=2)).detach()


class Smoother(nn.Module):
    """An explicit restorer of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        smoothed: Tensor = self.convolution(images)
        return smoothed


class Backprojection(nn.Module):
    """A restorer that is told how it was measured."""

    takes_measurement = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, measured: Tensor, measurement: Any) -> Tensor:
        restored: Tensor = self.scale * measurement.adjoint(measured)
        return restored


def gradient(model: nn.Module, task: ImageRestoration, images: Tensor) -> Tensor:
    torch.manual_seed(4)
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = task.training_step(model, images, images).loss
    found = torch.autograd.grad(loss, parameters)
    return torch.cat([g.flatten() for g in found])


def outer_loss(model: nn.Module, task: ImageRestoration, images: Tensor) -> float:
    torch.manual_seed(4)
    return float(task.training_step(model, images, images).loss.detach())


def test_the_detached_gradient_takes_the_latent_as_given() -> None:
    model, images = decoder(), photographs()
    task = ImageRestoration(corruption="inpaint", **SOFT)
    torch.manual_seed(4)
    seen = task.damage.corrupt(images)
    found = task.run(
        model, seen.measured, seen.measurement, torch.zeros(6, 3).double(), check_tolerance=1e-3
    )
    loss = F.mse_loss(model(found.x), images)
    exact = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([g.flatten() for g in exact])
    torch.testing.assert_close(gradient(model, task, images), expected, rtol=1e-5, atol=1e-8)


def test_the_implicit_gradient_is_that_of_the_reoptimized_loss() -> None:
    model, images = decoder(), photographs(2)
    task = ImageRestoration(
        corruption={"denoise": {"noise": 0.1}},
        outer="implicit",
        iterations=200,
        ridge=0.3,
        tolerance=1e-8,
    )
    found = gradient(model, task, images)
    direction = torch.randn(len(found), generator=torch.Generator().manual_seed(0)).double()
    step, parameters = 1e-4, list(model.parameters())
    values = []
    for sign in (1, -1):
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(parameters) + sign * step * direction, parameters
        )
        values.append(outer_loss(model, task, images))
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(parameters) - sign * step * direction, parameters
        )
    numeric = (values[0] - values[1]) / (2 * step)
    assert float(found @ direction) == pytest.approx(numeric, rel=1e-4)
    detached = gradient(model, replace(task, outer="detached"), images)
    assert (detached - found).norm() > 0.01 * found.norm()


@pytest.mark.parametrize("make", [decoder, Smoother, Backprojection])
def test_training_lowers_the_loss(make: Any) -> None:
    model, images = make().double(), photographs(12).sigmoid()
    task = ImageRestoration(
        corruption={"denoise": {"noise": 0.3}}, iterations=8, evaluation_iterations=20
    )
    before = task.evaluate(model, [(images, torch.zeros(12))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    for _ in range(8):
        optimizer.zero_grad()
        step = task.training_step(model, images, torch.zeros(12))
        assert step.correct is None
        assert int(step.samples) == 12
        step.loss.backward()
        optimizer.step()
    after = task.evaluate(model, [(images, torch.zeros(12))])
    assert after.loss < before.loss
    assert after.score > before.score


def test_an_evaluation_sees_the_same_damage_every_time() -> None:
    model, images = Smoother().double(), photographs(9).sigmoid()
    batches = [(images[:5], torch.zeros(5)), (images[5:], torch.zeros(4))]
    task = ImageRestoration(corruption={"denoise": {"noise": 0.2}})
    torch.manual_seed(0)
    one = task.evaluate(model, batches)
    torch.manual_seed(1)
    again = task.evaluate(model, batches)
    assert one.figures == again.figures
    other = ImageRestoration(corruption={"denoise": {"noise": 0.2}}, seed=1)
    assert other.evaluate(model, batches).figures != one.figures
    assert one.samples == 9
    assert one.accuracy is None
    assert one.figures["measured_psnr"] == pytest.approx(-20 * math.log10(0.2), abs=1.5)
    assert set(one.figures) == {"psnr", "median_psnr", "measured_psnr"}
    assert one.solves.share_converged is None
    assert model.training


def test_an_evaluation_tells_how_the_inner_problems_ended() -> None:
    model, images = decoder(), photographs(4)
    task = ImageRestoration(corruption="inpaint", evaluation_iterations=100, ridge=0.1)
    result = task.evaluate(model, [(images, torch.zeros(4))])
    assert result.solves.share_converged == 1
    assert result.solves.max_iterations is not None
    assert result.solves.max_iterations <= 100
    short = ImageRestoration(corruption="inpaint", evaluation_iterations=1, ridge=0.1)
    assert short.evaluate(model, [(images, torch.zeros(4))]).solves.share_converged == 0


def test_medians_over_processes_are_exact() -> None:
    """They were those of a histogram of hundredths of a decibel."""
    model, images = Smoother().double(), photographs(8).sigmoid()
    task = ImageRestoration(corruption="inpaint")
    parts = [task.evaluate(model, [(images[i::2], torch.zeros(4))]) for i in range(2)]
    others = iter([*parts[1].values.values(), *[torch.zeros(0)] * 3])
    both = task.evaluate(
        model,
        [(images[::2], torch.zeros(4))],
        lambda own: torch.cat([own, next(others).to(own)]),
    )
    assert both.samples == 8
    for name in ("psnr", "measured_psnr"):
        together = torch.cat([part.values[name] for part in parts])
        assert torch.equal(both.values[name], together)
        figure = "median_psnr" if name == "psnr" else name
        assert both.figures[figure] == float(together.median())
    assert both.loss == pytest.approx((parts[0].loss + parts[1].loss) / 2)


def test_the_inner_problem_may_end_at_the_noise_level() -> None:
    task = ImageRestoration(corruption={"denoise": {"noise": 0.25}}, stop_at_noise=True)
    assert task.evaluation_options()["noise"] == 0.25
    plain = ImageRestoration(corruption={"denoise": {"noise": 0.25}})
    assert plain.evaluation_options()["noise"] == 0


def test_options_name_the_damage() -> None:
    assert ImageRestoration(corruption="inpaint").damage == Inpainting()
    assert ImageRestoration(corruption={"denoise": {"noise": 0.4}}).damage == Denoising(0.4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"corruption": "scratch"}, "unknown damage 'scratch'"),
        ({"corruption": {"denoise": {}, "inpaint": {}}}, "one name with options"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"evaluation_iterations": 0}, "evaluation_iterations must be at least 1"),
        ({"outer": "unrolled"}, "outer must be one of"),
        ({"ridge": -0.1}, "ridge must not be negative"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ImageRestoration(**options)


def test_a_restorer_of_pictures_needs_a_picture() -> None:
    means = Measured(lambda x: x.mean(dim=(2, 3))).corrupt(torch.rand(2, 1, SIDE, SIDE))
    with pytest.raises(ValueError, match="restores pictures, but the measurement makes none"):
        answer(Smoother(), means)


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        ImageRestoration().evaluate(Smoother(), [])


def test_the_generator_of_the_task_is_that_of_a_search() -> None:
    """What training minimizes inside is what `restore` minimizes: the misfit."""
    model, images = decoder(), photographs(2)
    task = ImageRestoration(corruption="inpaint", **SOFT)
    torch.manual_seed(0)
    seen = task.damage.corrupt(images)
    found = task.run(model, seen.measured, seen.measurement, torch.zeros(2, 3).double())
    left = misfit(model(found.x), seen.measured, seen.measurement)
    ridge = 0.1 * found.x.square().sum(dim=1)
    torch.testing.assert_close(found.loss, (left + ridge).detach(), rtol=1e-6, atol=1e-8)
