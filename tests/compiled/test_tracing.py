"""Tracing: derivatives become operations, invariants leave the loop, failures name the line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

import equilibria as eq
from equilibria.compiled.store import Parts, padded_size
from equilibria.compiled.tracing import TraceError, lift_constants, split, trace


def operations(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_split_takes_out_what_does_not_depend_on_the_first_input() -> None:
    def function(y: Tensor, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        return torch.tanh(y @ A.T + x @ B.T)

    y, x, A, B = torch.randn(4, 3), torch.randn(4, 5), torch.randn(3, 3), torch.randn(3, 5)
    parts = split(trace(function, y, x, A, B))
    assert operations(parts.finish).count("aten.mm.default") == 1
    assert operations(parts.prepare).count("aten.mm.default") == 1
    result = parts.finish(y, *parts.prepare(x, A, B))
    torch.testing.assert_close(result, function(y, x, A, B))


def test_tensors_between_the_parts_share_no_memory() -> None:
    def function(y: Tensor, A: Tensor) -> Tensor:
        return y @ A.T @ A

    parts = split(trace(function, torch.randn(2, 3), torch.randn(3, 3)))
    A = torch.randn(3, 3)
    given = parts.prepare(A)
    assert len(given) == 1
    assert given[0] is A


def test_derivatives_become_operations() -> None:
    @eq.energy_term
    def quartic(y: Tensor, x: Tensor) -> Tensor:
        return (y**4).sum(dim=1) + (y * x).sum(dim=1)

    y, x = torch.randn(3, 2), torch.randn(3, 2)

    def descent(y: Tensor, x: Tensor) -> Tensor:
        result = quartic.descent(y, eq.Context(sample={"x": x}))
        assert isinstance(result, Tensor)
        return result

    graph = trace(descent, y, x)
    torch.testing.assert_close(graph(y, x), -(4 * y**3 + x))


def test_operations_in_place_are_replaced() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.relu_()
        return y + 1

    graph = trace(function, torch.ones(3))
    assert not any("relu_" in name for name in operations(graph))
    x = torch.tensor([-1.0, 0.0, 2.0])
    torch.testing.assert_close(graph(x), torch.tensor([1.0, 1.0, 5.0]))


def test_a_function_that_reads_values_is_refused_with_its_line() -> None:
    def function(x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x

    with pytest.raises(TraceError, match=r"test_tracing\.py:\d+: return x if float"):
        trace(function, torch.ones(2))


def test_captured_tensors_become_inputs() -> None:
    weight = torch.tensor([2.0])
    graph = trace(lambda x: x * weight, torch.ones(1))
    (constant,) = lift_constants(graph)
    assert constant.data_ptr() == weight.data_ptr()
    torch.testing.assert_close(graph(torch.ones(1), torch.tensor([5.0])), torch.tensor([5.0]))


def test_the_fingerprint_follows_numbers_and_captured_values() -> None:
    factor = 0.5
    cell = eq.equilibrium.FunctionCell(lambda z, x: factor * z + x)
    before = Parts(cell).fingerprint()
    assert Parts(cell).fingerprint() == before
    factor = 0.25
    assert Parts(cell).fingerprint() != before
    energy = eq.EnergyCell(eq.Input(torch.eye(2)))
    before = Parts(energy).fingerprint()
    energy.alpha = 0.5
    assert Parts(energy).fingerprint() != before


def test_padding_adds_at_most_a_quarter() -> None:
    for samples in range(1, 400):
        size = padded_size(samples)
        assert samples <= size <= 1.25 * samples
    assert len({padded_size(n) for n in range(64, 128)}) <= 5
