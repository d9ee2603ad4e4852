"""`deq_restorer`: objective, minimizer, contraction, gradients and errors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from equilibria.energies import Energy
from equilibria.equilibrium import Solving
from equilibria.models.restorers.model import EquilibriumRestorer, RestoringCell, deq_restorer
from equilibria.operators import AveragePool, Blur, Mask
from equilibria.restoration import Damage, Denoising, Inpainting, SuperResolution
from equilibria.tasks import ImageRestoration
from tests.inputs.small_generator import chance

DAMAGE = [Denoising(0.2), Inpainting(0.4), SuperResolution(2)]


def restorer(*, factor: int = 1, weight: float = 3.0, channels: int = 2) -> EquilibriumRestorer:
    torch.manual_seed(0)
    model = deq_restorer(
        in_channels=channels,
        channels=5,
        kernel_size=3,
        weight=weight,
        factor=factor,
        solving=Solving(tolerance=1e-10, max_iterations=2000, gradient="implicit"),  # type: ignore[arg-type]
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance(1)))
    return model.double().eval()


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 2, 8, 8, generator=chance(2)).double()


def restorer_for(corruption: Damage) -> EquilibriumRestorer:
    return restorer(factor=getattr(corruption, "factor", 1))


@pytest.mark.parametrize("corruption", DAMAGE)
def test_descent_is_the_negative_gradient_of_the_value(corruption: Damage) -> None:
    model, corrupted = restorer_for(corruption), corruption.corrupt(images(), chance())
    cell = model.layer.cell
    assert isinstance(cell, RestoringCell)
    context = cell.inject(*model.stem(corrupted.measured, corrupted.measurement))
    state = torch.rand(3, 5, 8, 8, generator=chance(3)).double()
    descent = cell.energy.descent(state, context)
    assert isinstance(descent, Tensor)
    torch.testing.assert_close(descent, Energy.descent(cell.energy, state, context))


@pytest.mark.parametrize("corruption", DAMAGE)
def test_data_term_is_the_misfit_without_the_constant(corruption: Damage) -> None:
    model, corrupted = restorer_for(corruption), corruption.corrupt(images(), chance())
    cell = model.layer.cell
    assert isinstance(cell, RestoringCell)
    context = cell.inject(*model.stem(corrupted.measured, corrupted.measurement))
    state = torch.rand(3, 5, 8, 8, generator=chance(3)).double()
    z = cell.output(state, context)
    misfit = (corrupted.measurement(z) - corrupted.measured).square().flatten(1).sum(dim=1)
    constant = corrupted.measured.square().flatten(1).sum(dim=1)
    value = cell.data.value(state, context.parts["data_term"])
    torch.testing.assert_close(value, 1.5 * (misfit - constant))


@pytest.mark.parametrize("corruption", DAMAGE)
def test_restored_image_is_the_unique_minimizer(corruption: Damage) -> None:
    model, corrupted = restorer_for(corruption), corruption.corrupt(images(), chance())
    solution = model.solve(corrupted.measured, corrupted.measurement)
    assert solution.converged.all()
    objective = model.objective(corrupted.measured, corrupted.measurement)
    gradient = objective.gradient(solution.state)
    assert isinstance(gradient, Tensor)
    assert isinstance(solution.state, Tensor)
    assert float(gradient.detach().abs().max()) < 1e-7
    lowest = objective.value(solution.state)
    for seed in range(3):
        other = solution.state + 0.1 * torch.rand(solution.state.shape, generator=chance(seed))
        assert bool((objective.value(other) > lowest).all())
    second = model.layer.solve(
        model.stem(corrupted.measured, corrupted.measurement), torch.full_like(solution.state, 3.0)
    )
    torch.testing.assert_close(second.state, solution.state, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight", [0.5, 20.0])
def test_step_satisfies_the_contraction_limit(weight: float) -> None:
    model = restorer(weight=weight)
    cell = model.layer.cell
    context = cell.inject(*model.stem(images()))
    assert cell.limits.contraction is not None
    assert cell.limits.contraction == pytest.approx(weight / (1 + weight))
    for seed in range(5):
        first, second = torch.randn(2, 3, 5, 8, 8, generator=chance(seed)).double()
        moved = cell.step(first, context), cell.step(second, context)
        assert isinstance(moved[0], Tensor)
        assert isinstance(moved[1], Tensor)
        ratio = float((moved[0] - moved[1]).detach().norm() / (first - second).norm())
        assert ratio <= cell.limits.contraction + 1e-9


def test_output_does_not_depend_on_masked_pixels() -> None:
    model, corrupted = restorer(), Inpainting(0.4).corrupt(images(), chance())
    assert isinstance(corrupted.measurement, Mask)
    modified = corrupted.measured + 9 * (1 - corrupted.measurement.known)
    first, second = (model(m, corrupted.measurement) for m in (corrupted.measured, modified))
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, model(corrupted.measured))


def test_gradient_against_finite_differences() -> None:
    model, clean = restorer(channels=1), images()[:, :1]
    task = ImageRestoration(corruption={"denoise": {"noise": 0.2}})

    def loss() -> Tensor:
        torch.manual_seed(0)
        return task.training_step(model, clean, clean).loss

    parameter = next(p for p in model.parameters() if p.dim() == 4)
    (gradient,) = torch.autograd.grad(loss(), parameter)
    direction = torch.randn(parameter.shape, generator=chance(5)).double()
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            parameter += step * direction
        values.append(float(loss().detach()))
        with torch.no_grad():
            parameter -= step * direction
    numeric = (values[0] - values[1]) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(numeric, rel=1e-4)


def test_weights_are_saved_once() -> None:
    """Safetensors cannot store shared weights."""
    weights = restorer().state_dict()
    assert len(load(save(weights))) == len(weights) == 3


def test_unsupported_measurements_raise() -> None:
    with pytest.raises(ValueError, match="cannot remove blur"):
        restorer()(images(), Blur(1.0))
    with pytest.raises(ValueError, match="build the model with factor=2"):
        restorer()(images()[..., :4, :4], AveragePool(2))
    with pytest.raises(ValueError, match="must be positive"):
        deq_restorer(weight=0)
    with pytest.raises(ValueError, match="expected images"):
        restorer()(images()[:, :1])
