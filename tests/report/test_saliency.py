"""Colors of saliency maps."""

from __future__ import annotations

import torch

from equilibria.report.saliency import overlaid, signed


def test_signed_maps_are_red_and_blue() -> None:
    drawn = signed(torch.tensor([[2.0, 0.0], [-2.0, 1.0]]))
    assert drawn.shape == (3, 2, 2)
    assert torch.equal(drawn[:, 0, 1], torch.ones(3))
    assert drawn[0, 0, 0] > drawn[2, 0, 0]
    assert drawn[2, 1, 0] > drawn[0, 1, 0]


def test_overlaid_images_show_the_map_in_color() -> None:
    maps = torch.zeros(2, 2, 2)
    maps[0, 0, 0] = 3.0
    drawn = overlaid(torch.zeros(2, 1, 8, 8), maps)
    assert drawn.shape == (2, 3, 8, 8)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1
    corner, opposite = drawn[0, :, 0, 0], drawn[0, :, -1, -1]
    assert corner[0] > corner[2]  # red
    assert opposite[2] >= opposite[0]  # bluish
    assert torch.equal(drawn[1, :, 0, 0], drawn[1, :, 4, 5])  # a map of zeros has one color
