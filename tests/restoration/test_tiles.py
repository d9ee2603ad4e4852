"""Restoration in tiles agrees with restoration of the whole picture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equilibria.equilibrium import Solving
from equilibria.models import create_model
from equilibria.models.restorers.model import EquilibriumRestorer, RestoringCell, deq_restorer
from equilibria.operators import Conv2d, Identity
from equilibria.restoration import (
    Denoising,
    Inpainting,
    RestorationProblem,
    SuperResolution,
    answer_in_tiles,
)
from equilibria.restoration.tiles import BLEND, answer, takes_any_size
from tests.inputs.small_generator import chance

TOLERANCE = 1e-8


def picture(height: int, width: int, channels: int = 1) -> Tensor:
    """Return a picture of slow waves, an edge, and noise."""
    rows, columns = torch.arange(height).double()[:, None], torch.arange(width).double()[None]
    waves = 0.5 + 0.2 * torch.sin(rows / 9) + 0.2 * torch.cos((rows + columns) / 5)
    clean = waves.expand(1, channels, -1, -1) + 0.3 * (columns > width // 2)
    return (clean + 0.1 * torch.randn(clean.shape, generator=chance(1)).double()).clamp(0, 1)


def restorer(
    *, channels: int = 1, factor: int = 1, weight: float = 2.0, image_size: int | None = 16
) -> EquilibriumRestorer:
    """Return a restorer with weights so large that the bound on the norm is active."""
    model = deq_restorer(
        in_channels=channels,
        channels=6,
        kernel_size=3,
        weight=weight,
        factor=factor,
        image_size=image_size,
        solving=Solving(tolerance=TOLERANCE, max_iterations=500),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance(2)))
    return model.double().eval()


def scale_of_errors(model: EquilibriumRestorer, problem: RestorationProblem) -> float:
    """Return ‖Up + b‖ + L‖y*‖, an upper bound on what is cut off at the edge of a tile."""
    solution = model.solve(problem.measured, problem.measurement)
    cell = model.layer.cell
    assert isinstance(cell, RestoringCell)
    context = cell.inject(*model.stem(problem.measured, problem.measurement))
    at_zero = cell.energy.descent(torch.zeros_like(solution.state), context)  # type: ignore[arg-type]
    limit = cell.limit * cell.data.growth
    return float(at_zero.norm()) + limit * float(solution.state.norm())  # type: ignore[union-attr]


DAMAGE = [
    (Denoising(0.1), (61, 127), 1),
    (Denoising(0.1), (127, 40), 3),
    (Inpainting(0.2), (61, 127), 1),
    (SuperResolution(2), (62, 196), 1),
]


@pytest.mark.parametrize(("damage", "size", "channels"), DAMAGE)
@torch.no_grad()
def test_tiles_of_an_equilibrium_model_have_no_seam(
    damage: Denoising, size: tuple[int, int], channels: int
) -> None:
    model = restorer(channels=channels, factor=getattr(damage, "factor", 1))
    problem = damage.corrupt(picture(*size, channels), chance(3))
    whole = answer(model, problem)
    bound = (TOLERANCE + 3 * TOLERANCE) * scale_of_errors(model, problem)  # the cut, and the solves
    side = 2 * model.reach(TOLERANCE) + 2 * BLEND
    assert side < max(size)
    tiled = answer_in_tiles(model, problem, side)
    assert tiled.shape == whole.shape == (1, channels, *size)
    assert float((tiled - whole).abs().max()) <= bound < 1e-4
    assert not torch.equal(tiled, whole)


@torch.no_grad()
def test_smaller_overlap_causes_visible_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, problem = restorer(), Denoising(0.1).corrupt(picture(61, 97), chance(3))
    bound = 4 * TOLERANCE * scale_of_errors(model, problem)
    monkeypatch.setattr(model, "reach", lambda accuracy: 2)
    tiled = answer_in_tiles(model, problem, 4 + 2 * BLEND)
    assert float((tiled - answer(model, problem)).abs().max()) > 10 * bound


@torch.no_grad()
def test_tiles_of_a_convolutional_network_are_exact() -> None:
    torch.manual_seed(0)
    model = create_model("dncnn", in_channels=3, channels=4, depth=5).double().eval()
    problem = RestorationProblem(picture(50, 83, 3), Identity(), 0.1)
    tiled = answer_in_tiles(model, problem, 2 * model.reach(1.0) + BLEND + 3)
    torch.testing.assert_close(tiled, model(problem.measured), rtol=0, atol=1e-12)
    blurry = answer_in_tiles(model, SuperResolution(2).corrupt(picture(50, 82, 3)), 40)
    assert blurry.shape == (1, 3, 50, 82)


@torch.no_grad()
def test_small_picture_is_not_split() -> None:
    model, problem = restorer(), Denoising(0.1).corrupt(picture(40, 30), chance())
    assert torch.equal(answer_in_tiles(model, problem), answer(model, problem))


def test_small_tiles_are_rejected() -> None:
    model, problem = restorer(), Denoising(0.1).corrupt(picture(61, 97), chance())
    with pytest.raises(ValueError, match=r"tiles must have at least \d+ pixels per side.*got 20"):
        answer_in_tiles(model, problem, 20)


def test_takes_any_size_for_convolutional_restorers() -> None:
    assert takes_any_size(restorer())
    assert takes_any_size(create_model("dncnn", channels=4, depth=2))
    assert not takes_any_size(create_model("ae-conv", image_size=16))
    assert not takes_any_size(nn.Identity())


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("image_size", [4, 24])
@torch.no_grad()
def test_norm_bound_holds_for_all_sizes(kernel_size: int, image_size: int) -> None:
    for seed in range(3):
        model = deq_restorer(channels=5, kernel_size=kernel_size, image_size=image_size).double()
        data = model.layer.cell.data  # type: ignore[union-attr]
        data.W.kernel.copy_(torch.randn(data.W.kernel.shape, generator=chance(seed)))
        entry = data.prepare([(5, 70, 90)])["W"]
        W = Conv2d.from_tensor(entry[0])
        assert float(W.norm_bound((1, 70, 90))) ** 2 <= data.growth <= 2
        assert torch.equal(entry[0], data.prepare([(5, 8, 8)])["W"][0])


def test_reach_grows_with_the_accuracy() -> None:
    model = restorer(weight=2.0)
    reaches = [model.reach(10.0**-digits) for digits in (1, 3, 5, 9)]
    assert reaches == sorted(set(reaches))
    assert restorer(weight=20.0).reach(1e-3) > model.reach(1e-3)
    # In the Hessian a pixel reaches two pixels far, and an order of magnitude costs two steps.
    assert reaches[-1] - reaches[0] <= 8 * 2 * 2
