"""Hidden pixels are filled without a seam: the error of the model is continued harmonically."""

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


def test_known_pixels_are_kept_and_a_harmonic_error_is_corrected() -> None:
    truth, known = pictures(), window()
    axis = torch.linspace(-1, 1, SIDE, dtype=torch.float64)
    harmonic = axis[:, None].square() - axis.square() + 0.3 * axis + 0.2
    filled = seamless_fill(Mask(known), known * truth, truth - harmonic)
    assert torch.equal(known * filled, known * truth)
    torch.testing.assert_close(filled, truth, rtol=0, atol=3e-3)  # the tolerance of the solve


def test_correction_is_harmonic_and_satisfies_the_maximum_principle() -> None:
    generated, known = pictures(), window()
    truth = generated + 0.1 * pictures().flip(0)
    correction = seamless_fill(Mask(known), known * truth, generated) - generated
    shifted = (correction.roll(step, dim) for step in (1, -1) for dim in (2, 3))
    mean = torch.stack(list(shifted)).mean(dim=0)
    hidden = known.expand_as(generated) == 0
    torch.testing.assert_close(correction[hidden], mean[hidden], rtol=0, atol=1e-3)
    assert float(correction[hidden].min()) >= 0
    assert float(correction[hidden].max()) <= 0.1


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["nothing known", "all known"])
def test_without_an_edge_there_is_no_correction(share: float) -> None:
    generated, known = pictures(), torch.full((1, 1, SIDE, SIDE), share, dtype=torch.float64)
    measured, mask = known * pictures().flip(0), Mask(known)
    filled = seamless_fill(mask, measured, generated)
    assert torch.equal(filled, mask.fill(measured, generated))


def test_images_may_have_different_holes_at_the_border() -> None:
    generated = pictures()
    known = torch.cat([window(), window(slice(0, 4), slice(8, 12))])
    truth = generated + 0.25
    filled = seamless_fill(Mask(known), known * truth, generated)
    torch.testing.assert_close(filled, truth, rtol=0, atol=1e-3)
