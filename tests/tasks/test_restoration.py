"""Training to restore images: through the inner problem (Eq. 24), and directly (Eq. 23)."""

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
    """Return images of another decoder, which the small decoder does not generate exactly."""
    return SmallDecoder(seed=9).double()(latents(count, seed=2)).detach()


class Smoother(nn.Module):
    """Restorer of pictures without an equilibrium."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        smoothed: Tensor = self.convolution(images)
        return smoothed


class Backprojection(nn.Module):
    """Restorer whose second input is the measurement operator."""

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
    gradients = torch.autograd.grad(loss, parameters)
    return torch.cat([g.flatten() for g in gradients])


def outer_loss(model: nn.Module, task: ImageRestoration, images: Tensor) -> float:
    torch.manual_seed(4)
    return float(task.training_step(model, images, images).loss.detach())


def test_detached_gradient_treats_the_latent_as_constant() -> None:
    model, images = decoder(), photographs()
    task = ImageRestoration(corruption="inpaint", **SOFT)
    torch.manual_seed(4)
    problem = task.damage.corrupt(images)
    searched = task.run(
        model,
        problem.measured,
        problem.measurement,
        torch.zeros(6, 3).double(),
        check_tolerance=1e-3,
    )
    loss = F.mse_loss(model(searched.x), images)
    exact = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([g.flatten() for g in exact])
    torch.testing.assert_close(gradient(model, task, images), expected, rtol=1e-5, atol=1e-8)


def test_implicit_gradient_agrees_with_reoptimized_losses() -> None:
    model, images = decoder(), photographs(2)
    task = ImageRestoration(
        corruption={"denoise": {"noise": 0.1}},
        outer="implicit",
        iterations=200,
        ridge=0.3,
        tolerance=1e-8,
    )
    implicit = gradient(model, task, images)
    direction = torch.randn(len(implicit), generator=torch.Generator().manual_seed(0)).double()
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
    assert float(implicit @ direction) == pytest.approx(numeric, rel=1e-4)
    detached = gradient(model, replace(task, outer="detached"), images)
    assert (detached - implicit).norm() > 0.01 * implicit.norm()


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


def test_damage_is_the_same_in_every_evaluation() -> None:
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


def test_evaluation_reports_the_solves_of_the_inner_problems() -> None:
    model, images = decoder(), photographs(4)
    task = ImageRestoration(corruption="inpaint", evaluation_iterations=100, ridge=0.1)
    result = task.evaluate(model, [(images, torch.zeros(4))])
    assert result.solves.share_converged == 1
    assert result.solves.max_iterations is not None
    assert result.solves.max_iterations <= 100
    short = ImageRestoration(corruption="inpaint", evaluation_iterations=1, ridge=0.1)
    assert short.evaluate(model, [(images, torch.zeros(4))]).solves.share_converged == 0


def test_medians_of_several_processes_are_exact() -> None:
    model, images = Smoother().double(), photographs(8).sigmoid()
    task = ImageRestoration(corruption="inpaint")
    parts = [task.evaluate(model, [(images[i::2], torch.zeros(4))]) for i in range(2)]
    others = iter([*parts[1].values.values(), *[torch.zeros(0)] * 3])
    both = task.evaluate(
        model,
        [(images[::2], torch.zeros(4))],
        lambda local: torch.cat([local, next(others).to(local)]),
    )
    assert both.samples == 8
    for name in ("psnr", "measured_psnr"):
        together = torch.cat([part.values[name] for part in parts])
        assert torch.equal(both.values[name], together)
        figure = "median_psnr" if name == "psnr" else name
        assert both.figures[figure] == float(together.median())
    assert both.loss == pytest.approx((parts[0].loss + parts[1].loss) / 2)


def test_stop_at_noise_sets_the_noise_of_the_search() -> None:
    task = ImageRestoration(corruption={"denoise": {"noise": 0.25}}, stop_at_noise=True)
    assert task.evaluation_options()["noise"] == 0.25
    plain = ImageRestoration(corruption={"denoise": {"noise": 0.25}})
    assert plain.evaluation_options()["noise"] == 0


def test_corruption_selects_the_damage() -> None:
    assert ImageRestoration(corruption="inpaint").damage == Inpainting()
    assert ImageRestoration(corruption={"denoise": {"noise": 0.4}}).damage == Denoising(0.4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruption": "scratch"}, "unknown damage 'scratch'"),
        ({"corruption": {"denoise": {}, "inpaint": {}}}, "a mapping with one name"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"evaluation_iterations": 0}, "evaluation_iterations must be at least 1"),
        ({"outer": "unrolled"}, "outer must be one of"),
        ({"ridge": -0.1}, "ridge must not be negative"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageRestoration(**options)


def test_restorer_of_pictures_rejects_other_measurements() -> None:
    means = Measured(lambda x: x.mean(dim=(2, 3))).corrupt(torch.rand(2, 1, SIDE, SIDE))
    with pytest.raises(ValueError, match="restores pictures, but the measured values are not"):
        answer(Smoother(), means)


def test_evaluate_rejects_an_empty_data_set() -> None:
    with pytest.raises(ValueError, match="at least one sample, got none"):
        ImageRestoration().evaluate(Smoother(), [])


def test_loss_of_the_inner_problem_is_misfit_plus_ridge() -> None:
    model, images = decoder(), photographs(2)
    task = ImageRestoration(corruption="inpaint", **SOFT)
    torch.manual_seed(0)
    problem = task.damage.corrupt(images)
    searched = task.run(model, problem.measured, problem.measurement, torch.zeros(2, 3).double())
    error = misfit(model(searched.x), problem.measured, problem.measurement)
    ridge = 0.1 * searched.x.square().sum(dim=1)
    torch.testing.assert_close(searched.loss, (error + ridge).detach(), rtol=1e-6, atol=1e-8)
