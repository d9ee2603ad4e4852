"""POptEqs with the fusion inside the map, beside the fusion of equilibria."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.models.registry import parameter_count


def model(fusion: str, **options: Any) -> eq.models.EquilibriumClassifier:
    torch.manual_seed(0)
    small = {"channels": 4, "widths": (3, 5, 6), "in_channels": 1, "pool": 2}
    made = eq.create_model("popteq-small", fused="map", fusion=fusion, **small, **options)
    return made.double().eval()


@pytest.mark.parametrize("fusion", ["average", "conv"])
def test_every_branch_sees_what_was_fused(fusion: str) -> None:
    network = model(fusion)
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    with eq.solving(network, tolerance=1e-10, strict=True):
        solution = network.solve(images)
        feature = network.features(images)
    z, cell = solution.state, network.layer.cell
    h = cell.mixing(z).chunk(3, dim=1) if fusion == "conv" else [sum(z.chunk(3, dim=1)) / 3] * 3
    x = network.injected(images)
    expected = []
    for layer, seen in zip(cell.layers, h, strict=True):
        c = layer.input.inject(x)["c"]
        expected.append(layer.W.adjoint(torch.relu(layer.W(seen) + c)))
    torch.testing.assert_close(z, torch.cat(expected, dim=1), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(feature, torch.stack(expected).mean(dim=0), rtol=1e-7, atol=1e-9)


def test_gradients_are_those_of_finite_differences() -> None:
    network = model("conv", tolerance=1e-12, gradient={"name": "implicit", "tolerance": 1e-12})
    images = torch.rand(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(network(images).square().sum(), images)
    direction = torch.randn_like(images)
    with torch.no_grad():
        up, down = (network(images + s * 1e-6 * direction).square().sum() for s in (1, -1))
    torch.testing.assert_close(
        (gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-5, atol=1e-8
    )


def test_the_counts_of_both_readings_are_the_papers() -> None:
    """276 K are printed: 96 → 96 channels, inside or outside; 96 → 32 would have 222 K."""
    outside = eq.create_model("popteq-conv-276k")
    inside = eq.create_model("popteq-conv-276k", fused="map")
    assert parameter_count(outside) == parameter_count(inside) == 277_674
    plain = parameter_count(eq.create_model("popteq-193k"))
    assert plain == 194_730
    assert plain + 9 * 96 * 32 == 222_378
    assert parameter_count(eq.create_model("popteq-sum-193k", fused="map")) == plain


def test_branches_of_several_resolutions_are_refused() -> None:
    with pytest.raises(ValueError, match="one resolution"):
        eq.create_model("popteq-small", fused="map", scales=(1, 2, 2))
