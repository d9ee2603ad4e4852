"""Proposition 4 and Remark 3 of GEQ, compared with sampled pairs and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.papers.theory import branch_facts, similarity_bounds
from equilibria.papers.theory.geq_bounds import layer_facts
from equilibria.papers.theory.geq_similarity import arc_cosine, expected_opteq_similarity, remark_3
from tests.papers.theory.geq_branches import (
    facts_of,
    images,
    normal,
    of_norm,
    small,
    vectors,
    whole,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0.02, 0.3])
def test_measured_similarity_is_below_the_bounds(seed: int, gamma: float) -> None:
    bounds = similarity_bounds(facts_of(seed, 0.9, gamma))
    assert bool((bounds.measured <= bounds.bound * (1 + 1e-9)).all())
    assert bounds.decaying is not None
    assert bool((bounds.bound <= bounds.decaying * (1 + 1e-9)).all())
    assert float(bounds.measured.max()) > 0


def test_similarity_bound_holds_with_patches_and_a_projection() -> None:
    for facts in branch_facts(small(gamma=0.3), images()):
        bounds = similarity_bounds(facts)
        assert bounds.decaying is None
        assert bool((bounds.measured <= bounds.bound).all())
        assert float((bounds.measured / bounds.bound).max()) > 0.1


def test_printed_bound_does_not_hold() -> None:
    """The expectation for one unit does not bound the sum over forty units."""
    W, U = of_norm(normal(40, 40), 0.5), normal(40, 3, seed=1)
    (facts,) = layer_facts(whole(W, U, 0.001), 0.3 * vectors(5, 3))
    bounds = similarity_bounds(facts)
    assert bool((bounds.measured.diagonal() > bounds.printed.diagonal()).all())
    assert bool((bounds.measured <= bounds.bound).all())


def test_lemma_3_agrees_with_closed_forms_and_samples() -> None:
    a, b = torch.eye(2, dtype=torch.float64) * torch.tensor([2.0, 3.0])
    rows = torch.stack([a, b, -a])
    kernel = arc_cosine(rows, rows, variance=0.5)
    assert kernel[0, 0] == pytest.approx(0.5 * 4 / 2)
    assert kernel[0, 1] == pytest.approx(0.5 * 6 / (2 * math.pi))
    assert kernel[0, 2] == pytest.approx(0)
    x = normal(3, 4, seed=2)
    U = math.sqrt(0.5) * normal(100_000, 4, seed=3)
    active = (x @ U.T).relu()
    products = active[:, None] * active
    error = products.std(dim=2) / math.sqrt(len(U))
    assert bool(((products.mean(dim=2) - arc_cosine(x, x, 0.5)).abs() <= 5 * error).all())
    torch.testing.assert_close(arc_cosine(x, x, 0.5, units=7), 7 * arc_cosine(x, x, 0.5))


def test_expected_similarity_of_opteq_is_below_its_bound() -> None:
    mu, units, draws = 0.9, 6, 2000
    W = of_norm(normal(units, units), mu)
    x = normal(3, 4, seed=5)
    c = torch.einsum("dij,nj->dni", 0.7 * normal(draws, units, 4, seed=6), x)
    z = torch.zeros_like(c)
    for _ in range(300):
        z = (z @ (W.T @ W) + c).relu()
    kappa = torch.einsum("dni,dmi->nm", z, z) / draws
    bound = expected_opteq_similarity(x, x, 0.49, units, mu)
    assert bool((kappa <= bound).all())
    assert float((kappa / bound).max()) > 0.01


@given(log_d=st.floats(0.01, 50), gamma=st.floats(0.001, 10), smallest=st.floats(0.01, 10))
def test_remark_3(log_d: float, gamma: float, smallest: float) -> None:
    distance = remark_3(log_d, gamma, smallest)
    assert log_d - gamma / 4 * (smallest * distance) ** 2 == pytest.approx(0, abs=1e-6 * log_d)
    assert remark_3(2.0, 0.1, 0.0) == math.inf


def test_bounds_are_finite_for_inputs_with_large_norms() -> None:
    """Regression: D = e^{2γB²‖W‖²} overflows, so its logarithm must be used."""
    W, U = of_norm(normal(5, 4), 0.9), 0.01 * normal(5, 3, seed=1)
    (facts,) = layer_facts(whole(W, U, 1.0), 100 * vectors(3, 3))
    bounds = similarity_bounds(facts)
    assert bool((bounds.measured <= bounds.bound * (1 + 1e-9)).all())
    assert math.isfinite(bounds.remark_3)
