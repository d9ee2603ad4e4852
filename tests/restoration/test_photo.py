"""The restorer of photographs: a unique minimizer, valid bounds, and quality of restoration."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor

import equilibria as eq
from equilibria.models import photo_prior
from equilibria.models.restorers.photo import load_prior, photo_denoiser, save_prior
from equilibria.operators import Blur, Identity, Mask
from equilibria.restoration import (
    Damage,
    Deblurring,
    Demosaicing,
    PhotoMinimizer,
    PhotoRestorer,
    RestorationProblem,
    Scattering,
    SuperResolution,
    noise_level,
)
from equilibria.restoration.total_variation import least_variation
from equilibria.tasks.image_quality import picture_psnr

NOISE = 25 / 255


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photograph(name: str = "flower.jpg", side: int = 48, top: int = 150, left: int = 250) -> Tensor:
    """Return a square of a photograph that the prior was not trained on, (1, 3, side, side)."""
    pixels = torch.from_numpy(np.array(load_sample_image(name)))
    return pixels[top : top + side, left : left + side].permute(2, 0, 1)[None].double() / 255


def gray(image: Tensor) -> Tensor:
    return image.mean(dim=1, keepdim=True)


def noisy(image: Tensor, noise: float = NOISE, seed: int = 0) -> Tensor:
    return image + noise * torch.randn(image.shape, generator=seeded(seed), dtype=image.dtype)


@pytest.fixture(scope="module")
def prior() -> eq.energies.OpponentPrior:
    return photo_prior().double()


def exact(prior: eq.energies.OpponentPrior, accuracy: float = 1e-10) -> PhotoMinimizer:
    return PhotoMinimizer(prior, NOISE, accuracy=accuracy, max_iterations=5000)


def test_minimizer_does_not_depend_on_start_and_solver(
    prior: eq.energies.OpponentPrior,
) -> None:
    x = noisy(gray(photograph(side=24)))
    restorer = exact(prior, 1e-6)
    expected = restorer.restore(x).images
    padded, operator = restorer.mirrored(x, None)
    stop = restorer.layer(padded, operator, padded)[0].solver.stop
    solvers = [
        eq.Anderson(stop=stop, max_iterations=5000),
        eq.Picard(stop=stop, max_iterations=5000),
        eq.Accelerated(stop=stop, max_iterations=5000),
    ]
    for seed in range(10):
        start = 2 * torch.rand(x.shape, generator=seeded(seed), dtype=x.dtype)
        restored = restorer.restore(x, start=start, solver=solvers[seed % 3])
        assert bool(restored.solution.converged.all())
        assert (restored.images - expected).abs().max() < 1e-4


def test_objective_agrees_with_scipy(prior: eq.energies.OpponentPrior) -> None:
    x = noisy(gray(photograph(side=12)))
    restorer = exact(prior)
    restored = restorer.restore(x)
    padded, operator = restorer.mirrored(x, None)
    layer, inputs = restorer.layer(padded, operator, padded)
    objective = layer.objective(inputs)

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.from_numpy(flat).reshape(padded.shape)
        gradient = objective.gradient(y)
        assert isinstance(gradient, Tensor)
        return float(objective.value(y)), gradient.flatten().numpy()

    outside = scipy.optimize.minimize(
        value,
        padded.flatten().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9},
    )
    assert float(restored.objective[-1, 0]) == pytest.approx(outside.fun, rel=1e-9)


@pytest.mark.parametrize("image", [("flower.jpg", 150, 250), ("china.jpg", 60, 300)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_error_bound_holds_and_is_at_most_a_gray_level(
    prior: eq.energies.OpponentPrior, image: tuple[str, int, int], channels: int
) -> None:
    name, top, left = image
    clean = photograph(name, 32, top, left)
    x = noisy(clean if channels == 3 else gray(clean))
    restorer = PhotoMinimizer(prior, NOISE)
    restored = restorer.restore(x)
    y, truth = restored.solution.state, exact(prior).restore(x).solution.state
    assert isinstance(y, Tensor)
    assert isinstance(truth, Tensor)
    distance = (y - truth).square().mean().sqrt()
    assert restored.bound is not None
    assert 0 < distance <= restored.bound[0] <= 1 / 255
    # All of the distance, which includes the mirrored edge, may be inside of the picture.
    cell = restored.cell
    gradient = cell.objective(restored.solution.context).gradient(y)
    assert isinstance(gradient, Tensor)
    proven = gradient.norm() / cell.convexity
    inside = restored.images.numel() ** 0.5 * restored.bound[0]
    torch.testing.assert_close(inside, proven)
    assert picture_psnr(restored.images, clean if channels == 3 else gray(clean)) > picture_psnr(
        x, clean if channels == 3 else gray(clean)
    )


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_objective_decreases_during_a_solve(prior: eq.energies.OpponentPrior) -> None:
    x = noisy(gray(photograph(side=24)))
    restorer = exact(prior, 1e-6)
    restored = restorer.restore(x, solver=eq.Picard(max_iterations=40, tolerance=1e-9), trace=True)
    assert restored.trace is not None
    assert restored.best_trace is not None
    assert len(restored.trace) > 10
    assert bool((restored.trace.diff(dim=0) <= 1e-12).all())
    torch.testing.assert_close(restored.best_trace, restored.trace)


DAMAGE: list[Damage] = [
    Deblurring(1.2, 0.01),
    Scattering(0.7, 1 / 255),
    SuperResolution(2, 1 / 255),
    Demosaicing(1 / 255),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: type(damage).__name__)
def test_prior_outperforms_total_variation_on_other_damage(
    prior: eq.energies.OpponentPrior, damage: Damage
) -> None:
    clean = photograph(side=48)
    problem = damage.corrupt(clean, seeded())
    restored = PhotoRestorer(prior, strength=1.0).restore(problem)
    assert restored.images.shape == clean.shape
    assert restored.bound is None  # There may be several minimizers.
    start = problem.about.first_picture(problem.measured)
    variations = [
        least_variation(problem.measured, problem.measurement, weight, start)  # type: ignore[arg-type]
        for weight in (3e-4, 1e-3, 3e-3)
    ]
    best = max(float(picture_psnr(images, clean)) for images in variations)
    assert float(picture_psnr(restored.images, clean)) > best


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: type(damage).__name__)
def test_improvement_by_nearby_pictures_is_within_the_bound(
    prior: eq.energies.OpponentPrior, damage: Damage
) -> None:
    """Checked along the negative gradient, a random direction, and a smooth random direction."""
    problem = damage.corrupt(photograph(side=24), seeded())
    restored = PhotoRestorer(prior, strength=1.0).restore(problem)
    y, cell, context = restored.solution.state, restored.cell, restored.solution.context
    assert isinstance(y, Tensor)
    objective = cell.objective(context)
    gradient = objective.gradient(y)
    assert isinstance(gradient, Tensor)
    random = torch.randn(y.shape, generator=seeded(1), dtype=y.dtype)
    smooth = torch.nn.functional.avg_pool2d(random, 3, stride=1, padding=1)
    for radius in (1 / 255, 0.1):
        gain = restored.gain_within(radius)
        assert gain is not None
        assert gain > 0
        for direction in (-gradient, random, smooth):
            moved = y + direction * radius / direction.square().mean().sqrt()
            assert objective.value(y) - objective.value(moved) <= gain
    near = restored.gain_within(1 / 255)
    assert near is not None
    assert near < 0.05 * restored.objective[-1]


def test_gain_bound_of_a_convex_objective_covers_the_minimizer(
    prior: eq.energies.OpponentPrior,
) -> None:
    x = noisy(gray(photograph(side=24)))
    restored, best = PhotoMinimizer(prior, NOISE).restore(x), exact(prior).restore(x)
    everywhere = restored.gain_within(1.0)
    assert everywhere is not None
    assert 0 < restored.objective[-1] - best.objective[-1] <= everywhere


class Sum(eq.LinearOperator):
    """A custom measurement: red, green and blue light on one sensor."""

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *input_shape[1:])

    def input_shape(self, output_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (3, *output_shape[1:])

    def norm_bound(self, input_shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(3.0).sqrt()

    def _map(self, z: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return z.sum(dim=1, keepdim=True)

    def _map_adjoint(self, y: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return y.expand(-1, 3, -1, -1)


def test_custom_measurement(prior: eq.energies.OpponentPrior) -> None:
    """A linear operator and a function give the same picture; bounds need a linear operator."""
    clean = photograph(side=24)
    x = noisy(clean.sum(dim=1, keepdim=True), 0.02)
    restorer = PhotoMinimizer(prior, 0.02, level=0.06)
    start = (x / 3).expand(-1, 3, -1, -1)
    linear = restorer.restore(x, Sum(), start=start)
    function = restorer.restore(x, lambda y: y.sum(dim=1, keepdim=True), start=start)
    assert bool(linear.solution.converged.all() & function.solution.converged.all())
    torch.testing.assert_close(linear.images, function.images, rtol=0, atol=0.02)
    assert linear.gain_within() is not None
    assert function.gain_within() is None
    assert function.bound is None
    luminance = linear.images.mean(dim=1), clean.mean(dim=1)
    assert (luminance[0] - luminance[1]).square().mean().sqrt() < 0.02 / 3


def test_nonlinear_measurement(prior: eq.energies.OpponentPrior) -> None:
    """The response curve of a camera, y^½, has a large slope in dark areas: its norm is not 1."""
    clean = gray(photograph(side=24)).clamp_min(0.02)
    x = noisy(clean.sqrt(), 0.02)
    restorer = PhotoMinimizer(prior, 0.02, level=0.06)
    restored = restorer.restore(
        x, lambda y: y.clamp_min(1e-3).sqrt(), start=x.clamp_min(0.1).square()
    )
    assert bool(restored.solution.converged.all())
    assert picture_psnr(restored.images, clean) > picture_psnr(x.clamp_min(0).square(), clean)


def test_quantized_picture_is_restored_within_its_steps(prior: eq.energies.OpponentPrior) -> None:
    """With 12 gray levels, the box lets the prior remove bands, which ‖Ay − x‖² would keep."""
    clean = gray(photograph(side=40))
    step = 1 / 12
    x = (clean / step).round() * step
    restorer = PhotoMinimizer(prior, 0.005, level=0.15, box=step)
    restored = restorer.restore(x)
    assert restored.bound is None  # x does not distinguish pictures within its steps.
    assert (restored.images - x).abs().max() < step / 2 + 0.02
    assert picture_psnr(restored.images, clean) > picture_psnr(x, clean) + 0.3
    steps = torch.full_like(x[:, :, :1, :1], step)
    again = PhotoMinimizer(prior, 0.005, level=0.15, box=steps).restore(x)
    torch.testing.assert_close(again.images, restored.images)


def test_tiles_agree_with_the_whole_picture(prior: eq.energies.OpponentPrior) -> None:
    x = noisy(gray(photograph(side=160)))
    problem = RestorationProblem(x, Identity(), NOISE)
    accuracy = 1e-5
    whole = PhotoRestorer(prior, accuracy=accuracy).restore(problem)
    tiled = PhotoRestorer(prior, accuracy=accuracy, tile=150).restore(problem)
    assert tiled.bound is not None
    assert float(tiled.bound) <= 1.5 * accuracy
    assert (whole.images - tiled.images).square().mean().sqrt() < 3 * accuracy


def test_a_minimizer_can_restore_several_pictures_in_tiles(
    prior: eq.energies.OpponentPrior,
) -> None:
    flat, rough = torch.full((1, 1, 120, 120), 0.5).double(), noisy(gray(photograph(side=120)), 0.3)
    problems = [RestorationProblem(x, Identity(), NOISE) for x in (flat, rough)]
    restorer = PhotoMinimizer(prior, NOISE)
    alone = restorer.restore_in_tiles(problems[0], 112)
    restorer.restore_in_tiles(problems[1], 112, trace=True)
    again = restorer.restore_in_tiles(problems[0], 112)
    assert torch.equal(again.iterations, alone.iterations)
    assert len(restorer.solutions) == 4
    assert again.trace is None


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_data_term_of_the_noise_is_that_of_the_problem(
    prior: eq.energies.OpponentPrior, strength: float
) -> None:
    x = noisy(gray(photograph(side=24)))
    denoised = PhotoRestorer(prior, strength=strength).restore(
        RestorationProblem(x, Identity(), NOISE)
    )
    assert denoised.noise_term is None  # the statement is a bound on the distance
    blurred = PhotoRestorer(prior, strength=strength, level=0.12).restore(
        RestorationProblem(x, eq.operators.Blur(1.0), NOISE)
    )
    assert blurred.noise_term is not None
    expected = 0.5 * max(NOISE, 0.12) ** 2 / strength * 40 * 40
    assert float(blurred.noise_term) == pytest.approx(expected)


def test_discrepancy_principle_matches_the_noise(prior: eq.energies.OpponentPrior) -> None:
    clean = gray(photograph(side=48))
    problem = Deblurring(1.2, 0.03).corrupt(clean, seeded())

    def misfit(strength: float) -> float:
        restored = PhotoRestorer(prior, strength=strength).restore(problem)
        return float(
            (problem.measurement(restored.images) - problem.measured).square().mean().sqrt()
        )

    strength = PhotoRestorer(prior).discrepancy(problem)
    assert misfit(0.1) < misfit(1.0) < misfit(10.0)
    assert misfit(strength) == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("noise", [5, 15, 25, 50])
def test_noise_level_of_a_photograph_is_estimated(noise: float) -> None:
    smooth, rough = photograph(side=200), photograph("china.jpg", 200, 100, 100)
    assert math.isclose(noise_level(noisy(smooth, noise / 255)), noise / 255, rel_tol=0.3)
    assert noise / 255 < noise_level(noisy(rough, noise / 255)) < (noise + 6) / 255
    assert noise_level(torch.zeros(1, 1, 8, 8)) == 1 / 255
    with pytest.raises(ValueError, match="one row or column"):
        noise_level(torch.zeros(1, 1, 1, 8))


def test_total_variation_agrees_with_the_known_minimizer() -> None:
    """The minimizer of ½(a − x)² + ½(b − y)² + w|a − b| is known."""
    x = torch.tensor([[[[0.0, 1.0]]]]).double()
    restored = least_variation(x, Identity(), 0.2, x, 2000)
    torch.testing.assert_close(restored, torch.tensor([[[[0.2, 0.8]]]]).double(), rtol=0, atol=1e-4)
    flat = least_variation(x, Identity(), 0.9, x, 2000)
    torch.testing.assert_close(flat, torch.full_like(x, 0.5), rtol=0, atol=1e-4)


def test_middle_keeps_the_pattern_of_a_mosaic() -> None:
    clean = photograph(side=60)
    problem = Demosaicing().corrupt(clean)
    part = problem.middle(20)
    assert isinstance(part.measurement, Mask)
    torch.testing.assert_close(part.measurement(part.measured), part.measured)
    assert part.measurement.known[0, 0, 0, 0] == 1


def test_invalid_pictures_are_rejected(prior: eq.energies.OpponentPrior) -> None:
    restorer = PhotoMinimizer(prior, NOISE)
    with pytest.raises(ValueError, match="more than 8 pixels per side, got 1×1"):
        restorer.restore(torch.zeros(1, 1, 1, 1).double())
    with pytest.raises(ValueError, match="NaN or infinite"):
        restorer.restore(torch.full((1, 1, 12, 12), torch.nan).double())
    with pytest.raises(ValueError, match="hides every pixel"):
        restorer.restore(torch.zeros(1, 1, 12, 12).double(), Mask(torch.zeros(1, 1, 12, 12)))
    with pytest.raises(ValueError, match="1 or 3 channels"):
        restorer.restore(torch.zeros(1, 2, 12, 12).double())
    with pytest.raises(ValueError, match="sides of more than"):
        restorer.restore(torch.zeros(1, 1, 12, 12).double(), Blur(5.0))
    with pytest.raises(ValueError, match="noise"):
        PhotoMinimizer(prior, 0.0)
    with pytest.raises(ValueError, match="box"):
        PhotoMinimizer(prior, NOISE, box=-0.1).restore(torch.zeros(1, 1, 12, 12).double())


def test_gray_picture_in_three_channels_is_restored_like_the_gray_one(
    prior: eq.energies.OpponentPrior,
) -> None:
    """Equal noise in three colors is larger in the luminance by a factor √3."""
    x = noisy(gray(photograph(side=24)))
    single = PhotoMinimizer(prior, NOISE, accuracy=1e-8, max_iterations=2000).restore(x)
    level = NOISE * math.sqrt(3)
    three = PhotoMinimizer(prior, level, accuracy=1e-8, max_iterations=2000).restore(
        x.expand(-1, 3, -1, -1)
    )
    torch.testing.assert_close(three.images[:, :1], single.images, rtol=0, atol=1e-6)


def test_prior_of_the_package_satisfies_its_bounds(prior: eq.energies.OpponentPrior) -> None:
    assert sum(p.numel() for p in prior.parameters()) <= 20_000
    for part in (prior.luminance, prior.colors):
        assert 0.9 <= part.concavity < 1
        spectrum = torch.fft.fft2(part.filters()[:, 0], s=(200, 200)).abs().square().sum(dim=0)
        assert spectrum.max() <= 1


def test_saved_prior_restores_like_the_original(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"channels": 10, "kernel_size": 5, "concavity": 0.4, "steepness": 3.0}
    original = photo_denoiser(**options).prior.eval()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_prior(original, tmp_path / "prior.safetensors")
    x = noisy(photograph(side=24)).float()
    loaded = PhotoMinimizer(load_prior(tmp_path / "prior.safetensors"), NOISE).restore(x)
    torch.testing.assert_close(loaded.images, PhotoMinimizer(original, NOISE).restore(x).images)


def test_standard_errors_agree_with_the_inverse_hessian(
    prior: eq.energies.OpponentPrior,
) -> None:
    x = noisy(gray(photograph(side=12)))
    restored = exact(prior).restore(x)
    state, context = restored.solution.state, restored.solution.context
    assert isinstance(state, Tensor)
    size = state.numel()
    identity = torch.eye(size, dtype=state.dtype)
    y = state.detach().requires_grad_()
    image = restored.cell.step(y, context)
    assert isinstance(image, Tensor)
    rows = [
        torch.autograd.grad(image, y, row.reshape(y.shape), retain_graph=True)[0].flatten()
        for row in identity
    ]
    hessian = (identity - torch.stack(rows)) / restored.cell.damping
    torch.testing.assert_close(hessian, hessian.T)
    expected = NOISE * torch.linalg.inv(hessian).diagonal().sqrt()
    errors = restored.standard_errors(NOISE, probes=100).flatten()
    assert float((errors / expected).log().abs().median()) < 0.1
    assert float(expected.min()) > 0.1 * NOISE
    assert float(expected.max()) < 2 * NOISE / math.sqrt(0.1)


def test_first_guess_has_less_noise_and_saves_iterations(prior: eq.energies.OpponentPrior) -> None:
    clean = gray(photograph(side=48))
    x = noisy(clean)
    restorer = PhotoMinimizer(prior, NOISE)
    guess = restorer.guess(x, Identity())
    assert (guess - clean).square().mean() < 0.5 * (x - clean).square().mean()
    flat = torch.full_like(clean, 0.3)
    torch.testing.assert_close(restorer.guess(flat, Identity()), flat)
    faint = PhotoMinimizer(prior, 1e-6).guess(x, Identity())
    torch.testing.assert_close(faint, x, rtol=0, atol=1e-4)
    # The minimizer is unique, so the start affects only the number of iterations.
    stop = restorer.layer(x, Identity(), x)[0].solver.stop
    plain = restorer.restore(x, start=x, solver=eq.Anderson(memory=8, stop=stop))
    restored = restorer.restore(x)
    assert int(restored.solution.iterations) < 0.8 * int(plain.solution.iterations)
    assert restored.bound is not None
    assert plain.bound is not None
    assert (restored.images - plain.images).square().mean().sqrt() <= restored.bound + plain.bound


def test_first_guess_of_super_resolution_is_smooth(prior: eq.energies.OpponentPrior) -> None:
    """Starting from blocks can end in a bad local minimum along an edge that is nearly level."""
    small = torch.linspace(0, 1, 12, dtype=torch.float64).expand(1, 1, 12, 12)
    restorer = PhotoMinimizer(prior, 1 / 255, level=0.12, factor=2)
    guess = restorer.guess(small, eq.AveragePool(2))
    assert guess.shape == (1, 1, 24, 24)
    slopes = guess.diff(dim=3)[..., 6:-6]
    assert (22 * slopes - 1).abs().max() < 0.25  # The slopes of blocks are 0 and 2.
    axis = torch.arange(48.0, dtype=torch.float64)
    edge = (axis[:, None] - axis[None, :] / 12 - 20).clamp(0, 1).expand(1, 1, 48, 48)
    problem = SuperResolution(2, 1 / 255).corrupt(edge, seeded())
    smooth, blocks = (
        restorer.restore(problem.measured, problem.measurement, start=start)
        for start in (None, problem.about.first_picture(problem.measured))
    )
    assert float(smooth.objective[-1, 0]) < 1.001 * float(blocks.objective[-1, 0])
    assert picture_psnr(smooth.images, edge) >= picture_psnr(blocks.images, edge) - 0.1


def test_trace_in_tiles_is_that_of_the_middle_tile(
    prior: eq.energies.OpponentPrior,
) -> None:
    problem = RestorationProblem(noisy(gray(photograph(side=160))), Identity(), NOISE)
    tiles = PhotoRestorer(prior, tile=150, trace=True).restore(problem)
    assert tiles.traces_tile
    assert tiles.trace is not None
    assert len(tiles.trace) > 10
    assert tiles.trace[-1] < 0.9 * tiles.trace[0]
    whole = PhotoRestorer(prior, trace=True).restore(problem)
    assert not whole.traces_tile
    assert whole.trace is not None
    assert len(whole.trace) == int(whole.iterations) + 1
    torch.testing.assert_close(whole.trace[[0, -1]], whole.objective)
    assert PhotoRestorer(prior).restore(problem).trace is None


def test_observer_gets_every_iterate_and_does_not_change_the_result(
    prior: eq.energies.OpponentPrior,
) -> None:
    problem = RestorationProblem(noisy(gray(photograph(side=32))), Identity(), NOISE)
    values: list[Tensor] = []
    observed = PhotoRestorer(prior, trace=True).restore(
        problem, observe=lambda step: values.append(step.objective())
    )
    assert observed.trace is not None
    torch.testing.assert_close(torch.stack(values), observed.trace[1:])
    assert torch.equal(observed.images, PhotoRestorer(prior).restore(problem).images)
