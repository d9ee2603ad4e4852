"""The restorer whose output minimizes an explicit objective."""

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


def made_for(corruption: Damage) -> EquilibriumRestorer:
    return restorer(factor=getattr(corruption, "factor", 1))


@pytest.mark.parametrize("corruption", DAMAGE)
def test_the_descent_is_that_of_the_value(corruption: Damage) -> None:
    model, seen = made_for(corruption), corruption.corrupt(images(), chance())
    cell = model.layer.cell
    assert isinstance(cell, RestoringCell)
    context = cell.inject(*model.stem(seen.measured, seen.measurement))
    state = torch.rand(3, 5, 8, 8, generator=chance(3)).double()
    found = cell.energy.descent(state, context)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, Energy.descent(cell.energy, state, context))


@pytest.mark.parametrize("corruption", DAMAGE)
def test_the_value_is_the_misfit_of_the_measurement(corruption: Damage) -> None:
    """Less the constant ‖ŷ‖², and less the prior."""
    model, seen = made_for(corruption), corruption.corrupt(images(), chance())
    cell = model.layer.cell
    assert isinstance(cell, RestoringCell)
    context = cell.inject(*model.stem(seen.measured, seen.measurement))
    state = torch.rand(3, 5, 8, 8, generator=chance(3)).double()
    z = cell.output(state, context)
    misfit = (seen.measurement(z) - seen.measured).square().flatten(1).sum(dim=1)
    constant = seen.measured.square().flatten(1).sum(dim=1)
    value = cell.data.value(state, context.parts["data_term"])
    torch.testing.assert_close(value, 1.5 * (misfit - constant))


@pytest.mark.parametrize("corruption", DAMAGE)
def test_the_restored_image_is_the_minimizer(corruption: Damage) -> None:
    model, seen = made_for(corruption), corruption.corrupt(images(), chance())
    solution = model.solve(seen.measured, seen.measurement)
    assert solution.converged.all()
    objective = model.objective(seen.measured, seen.measurement)
    gradient = objective.gradient(solution.state)
    assert isinstance(gradient, Tensor)
    assert isinstance(solution.state, Tensor)
    assert float(gradient.detach().abs().max()) < 1e-7
    lowest = objective.value(solution.state)
    for seed in range(3):
        other = solution.state + 0.1 * torch.rand(solution.state.shape, generator=chance(seed))
        assert bool((objective.value(other) > lowest).all())
    again = model.layer.solve(
        model.stem(seen.measured, seen.measurement), torch.full_like(solution.state, 3.0)
    )
    torch.testing.assert_close(again.state, solution.state, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight", [0.5, 20.0])
def test_the_step_contracts_as_promised(weight: float) -> None:
    model = restorer(weight=weight)
    cell = model.layer.cell
    context = cell.inject(*model.stem(images()))
    assert cell.limits.contraction is not None
    assert cell.limits.contraction == pytest.approx(weight / (1 + weight))
    for seed in range(5):
        one, other = torch.randn(2, 3, 5, 8, 8, generator=chance(seed)).double()
        moved = cell.step(one, context), cell.step(other, context)
        assert isinstance(moved[0], Tensor)
        assert isinstance(moved[1], Tensor)
        ratio = float((moved[0] - moved[1]).detach().norm() / (one - other).norm())
        assert ratio <= cell.limits.contraction + 1e-9


def test_hidden_pixels_count_for_nothing() -> None:
    model, seen = restorer(), Inpainting(0.4).corrupt(images(), chance())
    assert isinstance(seen.measurement, Mask)
    rubbish = seen.measured + 9 * (1 - seen.measurement.known)
    one, other = (model(m, seen.measurement) for m in (seen.measured, rubbish))
    torch.testing.assert_close(one, other)
    assert not torch.allclose(one, model(seen.measured))


def test_the_gradient_is_exact() -> None:
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
    """Two names for one weight cannot be written as safetensors."""
    weights = restorer().state_dict()
    assert len(load(save(weights))) == len(weights) == 3


def test_measurements_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="but no blur"):
        restorer()(images(), Blur(1.0))
    with pytest.raises(ValueError, match="set the model's option factor"):
        restorer()(images()[..., :4, :4], AveragePool(2))
    with pytest.raises(ValueError, match="must be positive"):
        deq_restorer(weight=0)
    with pytest.raises(ValueError, match="expected images"):
        restorer()(images()[:, :1])
