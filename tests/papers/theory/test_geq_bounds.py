"""Proposition 3 and Remark 2 of GEQ, compared with searches and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equilibria as eq
from equilibria.energies.gaussian import GaussianKernel
from equilibria.equilibrium import EquilibriumLayer
from equilibria.models import GEQCell
from equilibria.operators import Dense
from equilibria.papers.theory import branch_facts, lipschitz_bounds
from equilibria.papers.theory.geq_bounds import (
    layer_facts,
    measured_lipschitz,
    opteq_lipschitz,
    printed_lipschitz,
    remark_2,
)
from tests.papers.theory.geq_branches import (
    facts_of,
    images,
    normal,
    of_norm,
    pixels,
    small,
    vectors,
    whole,
)


def test_measured_constant_is_the_norm_of_a_linear_map() -> None:
    """With γ → 0 and all units active, z = (I + WᵀW)⁻¹Wᵀ(Ux + b)."""
    W, U = 0.3 * normal(5, 4).abs(), 0.3 * normal(5, 3, seed=1).abs()
    layer = whole(W, U, 1e-12, bias=torch.full((5,), 9.0, dtype=torch.float64))
    inputs = 0.1 * vectors(2, 3)
    assert bool((layer(inputs) > 0).all())
    exact = torch.linalg.solve(torch.eye(4, dtype=torch.float64) + W.T @ W, W.T @ U)
    norm = float(torch.linalg.matrix_norm(exact, 2))
    assert measured_lipschitz(layer, inputs, iterations=40) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("norm", [0.5, 0.95, 1.3])
@pytest.mark.parametrize("gamma", [0.02, 0.5])
def test_measured_constant_is_below_the_bounds(seed: int, norm: float, gamma: float) -> None:
    facts = facts_of(seed, norm, gamma)
    bounds = lipschitz_bounds(facts, iterations=12)
    assert 0 < bounds.measured <= bounds.certified * (1 + 1e-6)
    # `corrected` holds at the given inputs; the search takes small steps away from them.
    assert bounds.measured <= bounds.corrected * (1 + 1e-3)
    assert facts.norm_w == pytest.approx(norm)
    assert math.isinf(bounds.corrected) or norm < 1 or facts.beta_max < 1


def test_bounds_hold_with_patches_and_a_projection() -> None:
    for facts in branch_facts(small(gamma=0.3), images()):
        bounds = lipschitz_bounds(facts)
        assert 0 < bounds.measured <= min(bounds.certified, bounds.corrected)


def test_facts_of_a_branch_agree_with_matrix_algebra() -> None:
    W, U, gamma = of_norm(normal(5, 4), 0.8), normal(5, 3, seed=1), 0.3
    inputs = vectors(4, 3)
    (facts,) = layer_facts(whole(W, U, gamma), inputs)
    x, z = inputs.flatten(1), facts.states.flatten(1)
    r = x @ U.T - z @ W.T
    beta = torch.exp(-gamma * r.square().sum(dim=1))
    torch.testing.assert_close(facts.betas[:, 0], beta)
    torch.testing.assert_close(z, (beta[:, None] * (r @ W)).relu(), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(facts.injected, x @ U.T)
    assert facts.largest_patch == pytest.approx(float(r.norm(dim=1).max()))
    assert facts.radius == pytest.approx(
        max(float(x.norm(dim=1).max()), float(z.norm(dim=1).max()))
    )
    assert facts.norm_u == pytest.approx(float(torch.linalg.matrix_norm(U, 2)))


@given(
    beta=st.floats(0.01, 0.799),
    root=st.floats(0.001, 0.199),
    radius=st.floats(0.01, 0.999),
    mu=st.floats(0.01, 0.999),
)
def test_remark_2(beta: float, root: float, radius: float, mu: float) -> None:
    assert remark_2(beta, root**2, radius)
    assert printed_lipschitz(mu, beta, root**2, radius) < opteq_lipschitz(mu)


def test_bounds_without_their_assumptions_are_infinite() -> None:
    assert printed_lipschitz(0.9, 0.9, 1.0, 1.0) == math.inf
    assert opteq_lipschitz(1.0) == math.inf
    assert not remark_2(math.exp(-0.2), 0.01, 0.5)  # the printed γ always gives this β_max


@pytest.mark.parametrize("gamma", ["per-sample", "paper"])
def test_scale_that_depends_on_the_input_raises(gamma: str) -> None:
    with pytest.raises(ValueError, match="no bound is known"):
        branch_facts(small(gamma=gamma), images())


def test_other_models_raise() -> None:
    model = eq.create_model("mopteq-small", in_channels=1)
    with pytest.raises(TypeError, match="whose kernel is Gaussian"):
        branch_facts(model, torch.rand(1, 1, 8, 8))
    with pytest.raises(ValueError, match="must be ReLU"):
        branch_facts(small(activation="tanh"), images())


def test_projection_is_part_of_the_norms() -> None:
    """Doubling W_h doubles the norms of W and U."""
    W, U, hidden = normal(4, 3), normal(4, 2, seed=1), normal(6, 4, seed=2)
    norms = []
    for factor in (1.0, 2.0):
        kernel = GaussianKernel(
            pixels(U), pixels(W), Dense.from_tensor(factor * hidden), channel_split=4, patch=1,
            gamma=0.1,
        )  # fmt: skip
        (facts,) = layer_facts(EquilibriumLayer(GEQCell(kernel)), vectors(2, 2))
        norms.append((facts.norm_w, facts.norm_u, float(facts.injected.norm())))
    assert norms[1] == pytest.approx(tuple(2 * norm for norm in norms[0]))
