"""Lemmas 1 and 2 by construction, and the numerical test of a proximal operator."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equilibria as eq
from equilibria.models import DeepOptEqCell, OptEqCell, UnitLayer
from equilibria.papers.theory import deep_opteq_of_network, is_proximal
from equilibria.papers.theory.opteq import universal_hidden_units

sizes = st.lists(st.integers(1, 5), min_size=3, max_size=6)


@given(sizes=sizes, extra=st.integers(0, 3), seed=st.integers(0, 2**16))
def test_lemma_1_unit_layers_compute_the_same_network(
    sizes: list[int], extra: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [random(b, a) for a, b in pairwise(sizes)]
    heights = sizes[1:]
    width = max([a + b for a, b in pairwise(heights)], default=heights[0])
    factors = universal_hidden_units(weights, width + extra)
    assert all(
        factor.shape == (w.shape[0], width + extra)
        for factor, w in zip(factors, weights, strict=True)
    )
    for factor, following, weight in zip(factors, factors[1:], weights[1:], strict=False):
        torch.testing.assert_close(following @ factor.mT, weight, rtol=1e-9, atol=1e-9)
    biases = [random(h) for h in heights]
    s = random(sizes[0])
    # z̄_1 with W̄_1 z̄_1 = W_1 s_0.
    z = torch.linalg.pinv(factors[0]) @ (weights[0] @ s)
    for weight, factor, bias in zip(weights[:-1], factors[:-1], biases, strict=False):
        s = (weight @ s + bias).relu()
        z = factor.mT @ (factor @ z + bias).relu()
    torch.testing.assert_close(factors[-1] @ z, weights[-1] @ s, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="at least"):
        universal_hidden_units(weights, width - 1)


@given(sizes=sizes, seed=st.integers(0, 2**16))
def test_lemma_2_a_deep_opteq_contains_the_network(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [random(b, a) for a, b in pairwise(sizes)]
    biases = [random(b) for b in sizes[1:-1]]
    x = random(3, sizes[0])
    s = x
    for weight, bias in zip(weights[:-1], biases, strict=True):
        s = (s @ weight.mT + bias).relu()
    expected = s @ weights[-1].mT
    cell, readout = deep_opteq_of_network(weights, biases)
    layer = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-9), strict=True)
    with torch.no_grad():
        z = layer(x)
    torch.testing.assert_close(z @ readout.mT, expected, rtol=1e-6, atol=1e-6)
    assert layer.last_solution is not None
    assert (layer.last_solution.iterations <= 2).all(), "the map is constant"


def test_inconsistent_networks_raise() -> None:
    with pytest.raises(ValueError, match="L \\+ 1 weights and L biases"):
        deep_opteq_of_network([torch.eye(2)], [torch.ones(2)])
    with pytest.raises(ValueError, match="L >= 1 layers"):
        deep_opteq_of_network([torch.eye(2)], [])
    with pytest.raises(ValueError, match="has 2 columns, but layer 1 has 3 outputs"):
        universal_hidden_units([torch.ones(3, 2), torch.ones(1, 2)])


def unit(norm: float, width: int = 5) -> UnitLayer:
    W = torch.randn(width, 4, dtype=torch.float64)
    W *= norm / torch.linalg.matrix_norm(W, 2)
    return UnitLayer(W, torch.randn(width, 3, dtype=torch.float64), bias=False, activation="tanh")


def test_is_proximal_reports_each_property() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.float64)
    assert is_proximal(DeepOptEqCell([unit(0.95)]), x)
    skip = unit(0.95)
    skip.raw_alpha = 0.4
    assert is_proximal(DeepOptEqCell([skip]), x)

    composed = is_proximal(DeepOptEqCell([unit(0.95), unit(0.95)]), x)
    assert not composed
    assert not composed.is_gradient
    assert composed.is_nonexpansive

    expanding = is_proximal(DeepOptEqCell([unit(2.5)]), x, scale=0.2)
    assert not expanding
    assert expanding.is_gradient
    assert expanding.is_monotone
    assert not expanding.is_nonexpansive

    # In y-space the Jacobian is symmetric in a weighted product only.
    layer = unit(0.95)
    y_space = OptEqCell(layer.W, layer.input.U, bias=False, activation="tanh")
    assert not is_proximal(y_space, x).is_gradient


def test_rotation_is_not_a_proximal_operator() -> None:
    class Rotation(eq.Cell):
        def inject(self, x: torch.Tensor) -> eq.Context:
            return eq.Context(sample={"x": x})

        def initial_state(self, x: torch.Tensor, context: eq.Context) -> torch.Tensor:
            return torch.zeros_like(x)

        def step(self, state: torch.Tensor, context: eq.Context) -> torch.Tensor:
            return torch.stack([-state[:, 1], state[:, 0]], dim=1)

    report = is_proximal(Rotation(), torch.zeros(1, 2, dtype=torch.float64))
    assert report.is_nonexpansive
    assert report.is_monotone
    assert not report.is_gradient
