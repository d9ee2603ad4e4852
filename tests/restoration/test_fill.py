"""Holes filled without a seam: what the model is off by goes on as a membrane."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equilibria.operators import Mask
from equilibria.restoration import seamless_fill

SIDE = 12


def window(rows: slice = slice(3, 8), columns: slice = slice(4, 10)) -> Tensor:
    known = torch.ones(1, 1, SIDE, SIDE, dtype=torch.float64)
    known[..., rows, columns] = 0
    return known


def pictures(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)


def test_what_was_seen_stays_and_a_harmonic_error_is_undone() -> None:
    truth, known = pictures(), window()
    place = torch.linspace(-1, 1, SIDE, dtype=torch.float64)
    harmonic = place[:, None].square() - place.square() + 0.3 * place + 0.2
    filled = seamless_fill(Mask(known), known * truth, truth - harmonic)
    assert torch.equal(known * filled, known * truth)
    torch.testing.assert_close(filled, truth, rtol=0, atol=3e-3)  # the tolerance of the solve


def test_the_membrane_is_the_mean_of_its_neighbors_and_between_the_values_at_the_edge() -> None:
    drawn, known = pictures(), window()
    truth = drawn + 0.1 * pictures().flip(0)
    membrane = seamless_fill(Mask(known), known * truth, drawn) - drawn
    shifted = (membrane.roll(step, dim) for step in (1, -1) for dim in (2, 3))
    mean = torch.stack(list(shifted)).mean(dim=0)
    hidden = known.expand_as(drawn) == 0
    torch.testing.assert_close(membrane[hidden], mean[hidden], rtol=0, atol=1e-3)
    assert float(membrane[hidden].min()) >= 0
    assert float(membrane[hidden].max()) <= 0.1


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["nothing seen", "all seen"])
def test_without_an_edge_there_is_no_membrane(share: float) -> None:
    drawn, known = pictures(), torch.full((1, 1, SIDE, SIDE), share, dtype=torch.float64)
    seen = known * pictures().flip(0)
    assert torch.equal(seamless_fill(Mask(known), seen, drawn), Mask(known).fill(seen, drawn))


def test_each_image_has_its_own_hole_which_may_touch_the_border() -> None:
    drawn = pictures()
    known = torch.cat([window(), window(slice(0, 4), slice(8, 12))])
    truth = drawn + 0.25
    filled = seamless_fill(Mask(known), known * truth, drawn)
    torch.testing.assert_close(filled, truth, rtol=0, atol=1e-3)
