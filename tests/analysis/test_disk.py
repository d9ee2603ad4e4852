"""The certified disk of an image: no class changes inside it; the boundary is where one does."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.analysis.disk import REACH, SHAPE, certified_disk, disk_of_median
from equilibria.report.figures import disk_chart


class HalfSpace(nn.Module):
    """Two classes, divided by the plane at the distance 0.5 from the origin."""

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return torch.stack([torch.zeros(len(flat)), flat[:, 0] - 0.5], dim=1)


def test_boundary_of_a_half_space() -> None:
    images, radii = torch.zeros(1, 1, 3, 3), torch.tensor([0.25])
    disk = certified_disk(HalfSpace(), images, radii, 0)
    spacing = REACH * 0.25 / 24
    crossings = [
        (x, y) for x, y in disk.boundary if x > 0.5 and abs(y) < REACH * 0.25 * SHAPE - 1e-9
    ]
    assert crossings
    assert all(0.5 < x <= 0.5 + 2 * spacing for x, _ in crossings)
    assert all(math.isclose(math.hypot(*point), 0.25) for point in disk.circle)
    assert 0 < disk.changed < len(disk.boundary) - 1


def test_no_class_changes_within_the_certified_disk() -> None:
    model, images = eq.load("digits-certified"), eq.data.load_digits().test.images[:8]
    radii = eq.certify(model, images).radius
    disk = disk_of_median(model, images, radii)
    assert disk is not None
    assert disk.radius == float(radii.sort().values[4])
    assert disk.changed > 0
    assert all(math.hypot(*point) > disk.radius for point in disk.boundary)
    assert f"{disk.radius:.3g}" in disk_chart(disk).svg()
    assert disk_of_median(model, images, torch.zeros(8)) is None
