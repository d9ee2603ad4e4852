"""Proposition 2 and Remark 1 of GEQ, compared with closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.papers.theory import generalization_bounds
from equilibria.papers.theory.geq_generalization import PacBayes, margin_loss
from tests.papers.theory.geq_branches import images, small


def pac(**changes: float) -> PacBayes:
    numbers = {"mu": 0.95, "m": 0.9, "beta_max": 0.7, "radius": 2.0, "units": 10, "weights": 3.0}
    numbers |= {"samples": 1000, "margin": 1.0, "delta": 0.05} | changes
    return PacBayes(**numbers)  # type: ignore[arg-type]


def test_bound_for_zero_inputs_depends_on_the_weights_only() -> None:
    """With B = 0 the bracket (1 − βm)² cancels."""
    bound = pac(radius=0.0).printed()
    divergence = 16 * 10 * math.log(240) * 3.0
    assert bound == pytest.approx(math.sqrt((divergence + math.log(1000**1.5 / 0.05)) / 1000))
    assert pac(radius=0.0).printed(is_opteq=True) == pytest.approx(bound)


def test_bound_decreases_with_samples_and_margin() -> None:
    for form in ("printed", "by_proof"):
        value = getattr(pac(), form)()
        assert getattr(pac(samples=4000), form)() < 0.51 * value
        assert getattr(pac(margin=2.0), form)() < value
        assert getattr(pac(beta_max=0.8), form)() > value
    assert pac().by_proof() > pac().printed()
    assert pac(m=1.0).printed(is_opteq=True) == math.inf
    assert pac(m=1.0, mu=1.0).printed() < math.inf
    with pytest.raises(ValueError, match="need samples >= 2"):
        pac(delta=1.0)


@given(beta=st.floats(0.01, 0.799), mu=st.floats(0.95, 0.9999), share=st.floats(0.0, 1.0))
@settings(max_examples=200)
def test_remark_1(beta: float, mu: float, share: float) -> None:
    m = 0.9001 + share * (mu**2 - 0.9001)
    assert beta * mu / (1 - beta * m) < 1 / (1 - m)
    assert (2 * mu * beta + 1) / (1 - beta * m) <= 1 / (1 - m)
    numbers = pac(mu=mu, m=m, beta_max=beta)
    assert numbers.printed() < numbers.printed(is_opteq=True)


def test_bound_of_geq_can_be_larger_outside_of_remark_1() -> None:
    numbers = pac(beta_max=0.99, m=0.1, mu=0.9)
    assert numbers.printed() > numbers.printed(is_opteq=True)


def test_margin_loss_counts_samples_below_the_margin() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0], [0.0, 2.0, 1.5], [1.0, 1.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 2])
    assert margin_loss(logits, labels, 1.0) == 0.75
    assert margin_loss(logits, labels, 0.0) == 0.5
    assert margin_loss(logits, labels, 2.0) == 1.0


def test_bounds_of_a_classifier() -> None:
    model, labels = small(gamma=0.3).eval(), torch.tensor([0, 1, 2, 0, 1])
    bounds = generalization_bounds(model, images(), labels, margin=0.1)
    assert bounds.margin_loss == margin_loss(model(images()), labels, 0.1)
    assert 1 < bounds.printed < bounds.by_proof < math.inf
    assert bounds.conditions["m < 1"]
    wide = small(gamma=0.3, norm=None, init_scale=4.0)
    assert generalization_bounds(wide, images(), labels).printed_opteq == math.inf
