"""Reasoners."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.reasoner.model import ConvReasonerCell, conv_reasoner


def test_the_number_of_parameters() -> None:
    model = eq.create_model("conv-reasoner")
    convolutions = 2 * (32 * 32 * 9 + 32) + 3 * 32 * 9 + 32
    assert sum(p.numel() for p in model.parameters()) == convolutions + 2 * 33


@pytest.mark.parametrize("hidden", [None, 5])
def test_the_fixed_point_satisfies_its_equation(hidden: int | None) -> None:
    torch.manual_seed(0)
    cell = ConvReasonerCell(3, 4, hidden).double()
    for parameter in (cell.A.weight, cell.B.weight):
        parameter.data *= 0.3
    cell.B.bias.data += 1
    layer = eq.EquilibriumLayer(cell, solver="picard", tolerance=1e-10, max_iterations=5000).eval()
    for height, width in ((5, 7), (8, 8)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        solution = layer.solve(x)
        assert solution.converged.all()
        z = solution.state
        hidden_units = F.relu(
            F.conv2d(z, cell.A.weight, cell.A.bias, padding=1)
            + F.conv2d(x, cell.U.weight, cell.U.bias, padding=1)
        )
        image = torch.tanh(z + F.conv2d(hidden_units, cell.B.weight, cell.B.bias, padding=1))
        torch.testing.assert_close(image, z, rtol=0, atol=1e-8)


def test_phantom_steps_after_one_iteration_are_the_damped_iteration() -> None:
    torch.manual_seed(0)
    model = conv_reasoner(
        channels=4,
        solving=eq.Solving(
            eq.Picard(max_iterations=1, iterate="last"), eq.Phantom(steps=3, damping=0.9)
        ),
    ).double()
    x, start = (torch.randn(2, c, 5, 5, dtype=torch.float64) for c in (3, 4))
    cell = model.layer.cell
    context = cell.inject(x)
    z = cell.step(start, context)
    for _ in range(3):
        z = z + 0.9 * (cell.step(z, context) - z)
    torch.testing.assert_close(model(x, start=start), model.head(z))


def test_results_do_not_depend_on_the_batch_and_several_starts_are_reproducible() -> None:
    torch.manual_seed(0)
    model = eq.create_model("conv-reasoner", channels=4, max_iterations=30).double().eval()
    x = torch.rand(3, 3, 7, 7, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        for starts in (1, 3):
            whole = model.output(model.solve(x, starts=starts))
            parts = [model.output(model.solve(x[i : i + 1], starts=starts)) for i in range(3)]
            torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-11)


def test_invalid_sizes_raise() -> None:
    with pytest.raises(ValueError, match="kernel_size must be odd"):
        conv_reasoner(kernel_size=2)
    with pytest.raises(ValueError, match="channels must be at least 1"):
        conv_reasoner(channels=0)
