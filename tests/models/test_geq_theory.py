"""Propositions 2 to 4 and Remarks 1 to 3 of GEQ, against searches, samples and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.energies.gaussian import GaussianKernel
from equilibria.equilibrium import EquilibriumLayer
from equilibria.models import EquilibriumClassifier, GEQCell, geq
from equilibria.models.geq import linear_maps
from equilibria.models.geq.bounds import (
    BranchFacts,
    branch_facts,
    layer_facts,
    lipschitz_bounds,
    measured_lipschitz,
    opteq_lipschitz,
    printed_lipschitz,
    remark_2,
)
from equilibria.models.geq.generalization import (
    PacBayes,
    generalization_bounds,
    margin_loss,
)
from equilibria.models.geq.similarity import (
    arc_cosine,
    expected_opteq_similarity,
    remark_3,
    similarity_bounds,
)
from equilibria.operators import Conv2d, Dense


def normal(*shape: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=chance, dtype=torch.float64)


def pixels(matrix: Tensor) -> Conv2d:
    """A matrix on the channels of images of one pixel."""
    return Conv2d.from_tensor(matrix[:, :, None, None])


def whole(W: Tensor, U: Tensor, gamma: float, bias: Tensor | None = None) -> EquilibriumLayer:
    """A branch of vectors, as the paper's theory has it: one patch, no W_h."""
    given = None if bias is None else bias[:, None, None]
    kernel = GaussianKernel(pixels(U), pixels(W), patch=None, gamma=gamma, bias=given)
    return EquilibriumLayer(GEQCell(kernel), tolerance=1e-12, max_iterations=2000)


def of_norm(matrix: Tensor, norm: float) -> Tensor:
    return matrix * norm / torch.linalg.matrix_norm(matrix, 2)


def vectors(count: int, size: int, seed: int = 3) -> Tensor:
    return normal(count, size, 1, 1, seed=seed)


def facts_of(seed: int, norm: float, gamma: float) -> BranchFacts:
    W, U = of_norm(normal(5, 4, seed=seed), norm), normal(5, 3, seed=seed + 100)
    (facts,) = layer_facts(whole(W, U, gamma), 1.5 * vectors(6, 3, seed + 200))
    return facts


def small(**options: object) -> EquilibriumClassifier:
    torch.manual_seed(0)
    made = geq(
        num_classes=3,
        in_channels=1,
        channels=6,
        widths=(4, 6),
        channel_split=2,
        hidden=7,
        **options,
    )
    return made.double()


def images(count: int = 5) -> Tensor:
    return normal(count, 1, 4, 4, seed=9).sigmoid()


# --- Proposition 3 ------------------------------------------------------------------------------


def test_what_is_measured_is_the_norm_of_a_linear_map() -> None:
    """γ → 0 and no unit cut off: z = (I + WᵀW)⁻¹Wᵀ(Ux + b)."""
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
def test_no_search_finds_more_than_the_bounds(seed: int, norm: float, gamma: float) -> None:
    facts = facts_of(seed, norm, gamma)
    found = lipschitz_bounds(facts, iterations=12)
    assert 0 < found.measured <= found.certified * (1 + 1e-6)
    # That of the inputs alone is left by the small steps of the search.
    assert found.measured <= found.corrected * (1 + 1e-3)
    assert facts.norm_w == pytest.approx(norm)
    assert math.isinf(found.corrected) or norm < 1 or facts.beta_max < 1


def test_patches_and_a_projection_are_within_the_bounds_too() -> None:
    for facts in branch_facts(small(gamma=0.3), images()):
        found = lipschitz_bounds(facts)
        assert 0 < found.measured <= min(found.certified, found.corrected)


def test_facts_of_a_branch_by_hand() -> None:
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


def test_bounds_that_do_not_hold_are_infinite() -> None:
    assert printed_lipschitz(0.9, 0.9, 1.0, 1.0) == math.inf
    assert opteq_lipschitz(1.0) == math.inf
    assert not remark_2(math.exp(-0.2), 0.01, 0.5)  # the printed γ has this β_max always


@pytest.mark.parametrize("gamma", ["per-sample", "paper"])
def test_a_scale_that_follows_the_input_has_no_bounds(gamma: str) -> None:
    with pytest.raises(ValueError, match="then no bound is known"):
        branch_facts(small(gamma=gamma), images())


def test_other_models_have_other_bounds() -> None:
    model = eq.create_model("mopteq-small", in_channels=1)
    with pytest.raises(TypeError, match="Gaussian kernel, not of"):
        branch_facts(model, torch.rand(1, 1, 8, 8))
    with pytest.raises(ValueError, match="those of ReLU"):
        branch_facts(small(activation="tanh"), images())


# --- Proposition 4 ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0.02, 0.3])
def test_sampled_pairs_are_no_more_alike_than_the_bounds(seed: int, gamma: float) -> None:
    found = similarity_bounds(facts_of(seed, 0.9, gamma))
    assert bool((found.measured <= found.bound * (1 + 1e-9)).all())
    assert found.decaying is not None
    assert bool((found.bound <= found.decaying * (1 + 1e-9)).all())
    assert float(found.measured.max()) > 0


def test_with_patches_and_a_projection_they_are_not_either() -> None:
    for facts in branch_facts(small(gamma=0.3), images()):
        found = similarity_bounds(facts)
        assert found.decaying is None
        assert bool((found.measured <= found.bound).all())
        assert float((found.measured / found.bound).max()) > 0.1


def test_as_printed_the_proposition_does_not_hold() -> None:
    """An expectation of one unit cannot bound the sum of forty."""
    W, U = of_norm(normal(40, 40), 0.5), normal(40, 3, seed=1)
    (facts,) = layer_facts(whole(W, U, 0.001), 0.3 * vectors(5, 3))
    found = similarity_bounds(facts)
    assert bool((found.measured.diagonal() > found.printed.diagonal()).all())
    assert bool((found.measured <= found.bound).all())


def test_lemma_3_in_closed_form_and_by_sampling() -> None:
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


def test_the_expected_similarity_of_opteqs_is_below_its_bound() -> None:
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


def test_long_inputs_have_bounds_too() -> None:
    """D = e^{2γB²‖W‖²} is not a number here; it was an error."""
    W, U = of_norm(normal(5, 4), 0.9), 0.01 * normal(5, 3, seed=1)
    (facts,) = layer_facts(whole(W, U, 1.0), 100 * vectors(3, 3))
    found = similarity_bounds(facts)
    assert bool((found.measured <= found.bound * (1 + 1e-9)).all())
    assert math.isfinite(found.remark_3)


# --- Proposition 2 ------------------------------------------------------------------------------


def pac(**changes: float) -> PacBayes:
    numbers = {"mu": 0.95, "m": 0.9, "beta_max": 0.7, "radius": 2.0, "units": 10, "weights": 3.0}
    numbers |= {"samples": 1000, "margin": 1.0, "delta": 0.05} | changes
    return PacBayes(**numbers)  # type: ignore[arg-type]


def test_without_inputs_the_bound_is_that_of_the_weights() -> None:
    """B = 0: the bracket is (1 − βm)², and cancels."""
    found = pac(radius=0.0).printed()
    divergence = 16 * 10 * math.log(240) * 3.0
    assert found == pytest.approx(math.sqrt((divergence + math.log(1000**1.5 / 0.05)) / 1000))
    assert pac(radius=0.0).printed(is_opteq=True) == pytest.approx(found)


def test_more_samples_or_a_larger_margin_make_it_smaller() -> None:
    for form in ("printed", "by_proof"):
        value = getattr(pac(), form)()
        assert getattr(pac(samples=4000), form)() < 0.51 * value
        assert getattr(pac(margin=2.0), form)() < value
        assert getattr(pac(beta_max=0.8), form)() > value
    assert pac().by_proof() > pac().printed()
    assert pac(m=1.0).printed(is_opteq=True) == math.inf
    assert pac(m=1.0, mu=1.0).printed() < math.inf
    with pytest.raises(ValueError, match="delta between 0 and 1"):
        pac(delta=1.0)


@given(beta=st.floats(0.01, 0.799), mu=st.floats(0.95, 0.9999), share=st.floats(0.0, 1.0))
@settings(max_examples=200)
def test_remark_1(beta: float, mu: float, share: float) -> None:
    m = 0.9001 + share * (mu**2 - 0.9001)
    assert beta * mu / (1 - beta * m) < 1 / (1 - m)
    assert (2 * mu * beta + 1) / (1 - beta * m) <= 1 / (1 - m)
    numbers = pac(mu=mu, m=m, beta_max=beta)
    assert numbers.printed() < numbers.printed(is_opteq=True)


def test_outside_of_remark_1_geqs_bound_may_be_the_larger() -> None:
    numbers = pac(beta_max=0.99, m=0.1, mu=0.9)
    assert numbers.printed() > numbers.printed(is_opteq=True)


def test_the_margin_loss_counts_who_is_not_ahead_by_the_margin() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0], [0.0, 2.0, 1.5], [1.0, 1.0, 1.0]])
    labels = torch.tensor([0, 1, 1, 2])
    assert margin_loss(logits, labels, 1.0) == 0.75
    assert margin_loss(logits, labels, 0.0) == 0.5
    assert margin_loss(logits, labels, 2.0) == 1.0


def test_the_bounds_of_a_classifier() -> None:
    model, labels = small(gamma=0.3).eval(), torch.tensor([0, 1, 2, 0, 1])
    found = generalization_bounds(model, images(), labels, margin=0.1)
    assert found.margin_loss == margin_loss(model(images()), labels, 0.1)
    assert 1 < found.printed < found.by_proof < math.inf
    assert found.conditions["m < 1"]
    wide = small(gamma=0.3, norm=None, init_scale=4.0)
    assert generalization_bounds(wide, images(), labels).printed_opteq == math.inf


# --- Linear maps --------------------------------------------------------------------------------


def test_norms_of_linear_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(9, 6)

    def mapped(v: Tensor) -> Tensor:
        return v.flatten(1) @ matrix.T

    squares = float(matrix.square().sum())
    gram = float((matrix.T @ matrix).square().sum())
    assert linear_maps.frobenius(mapped, (2, 3)) == pytest.approx(squares)
    assert linear_maps.gram_frobenius(mapped, (2, 3)) == pytest.approx(gram)
    least = float(torch.linalg.svdvals(matrix)[-1])
    assert linear_maps.least_singular(mapped, (2, 3)) == pytest.approx(least)
    monkeypatch.setattr(linear_maps, "MOST_COLUMNS", 5)
    assert linear_maps.frobenius(mapped, (2, 3)) == pytest.approx(squares, rel=0.2)
    assert linear_maps.gram_frobenius(mapped, (2, 3)) == pytest.approx(gram, rel=0.3)
    assert linear_maps.least_singular(mapped, (2, 3)) == 0


def test_a_projection_is_part_of_the_norms() -> None:
    """W_h twice as large makes W and U twice as large."""
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
