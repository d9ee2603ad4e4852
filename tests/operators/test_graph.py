"""Sparse matrices and graphs: agreement with dense formulas, and norms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from equilibria.operators import Adjacency, GraphConv, Incidence, Sparse, spectral
from tests.operators.bank import dense, true_norm


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Edges with weights: directed or doubled, with loops and isolated nodes."""
    nodes = draw(st.integers(2, 8))
    ends = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    edges = [(0, 1), *draw(st.lists(ends, max_size=20))]
    numbers = st.floats(0, 5, allow_subnormal=False)
    weights = draw(st.lists(numbers, min_size=len(edges), max_size=len(edges)))
    return torch.tensor(edges).T, torch.tensor(weights, dtype=torch.float64), nodes


def adjacency_matrix(edges: Tensor, weights: Tensor, nodes: int) -> Tensor:
    """Return A, with A_ij the sum of the weights of the edges from j to i."""
    matrix = weights.new_zeros(nodes, nodes)
    return matrix.index_put((edges[1], edges[0]), weights, accumulate=True)


@given(graphs())
def test_the_adjacency_is_normalized_and_its_norm_at_most_one(
    graph: tuple[Tensor, Tensor, int],
) -> None:
    edges, weights, nodes = graph
    plain = adjacency_matrix(edges, weights, nodes)
    for self_loops in (True, False):
        operator = Adjacency(edges, nodes=nodes, edge_weight=weights, self_loops=self_loops)
        A = plain + torch.eye(nodes).double() if self_loops else plain
        scale = A.sum(1)[:, None].sqrt() * A.sum(0).sqrt()
        expected = torch.where(A > 0, A / torch.where(A > 0, scale, 1.0), 0.0)
        torch.testing.assert_close(dense(operator, (nodes,)), expected, rtol=1e-12, atol=0)
        assert true_norm(operator, (nodes,)) <= 1 + 1e-15
        if self_loops:
            assert true_norm(operator, (nodes,)) == pytest.approx(1, rel=1e-12)


def test_the_norm_is_at_most_one_in_float32() -> None:
    """With entries rounded to nearest, the norm would exceed 1 by about 1e-8."""
    torch.manual_seed(0)
    for _ in range(20):
        edges = torch.randint(30, (2, 90))
        edges = torch.cat([edges, edges.flip(0)], dim=1)
        assert true_norm(Adjacency(edges, nodes=30).double(), (30,)) <= 1
        gradient = Incidence(edges, nodes=30, normalized=True).double()
        assert true_norm(gradient, (30,)) <= 2**0.5


@given(graphs())
def test_the_incidence_matrix_gives_the_laplacian(graph: tuple[Tensor, Tensor, int]) -> None:
    edges, weights, nodes = graph
    A = adjacency_matrix(edges, weights, nodes)
    A = torch.maximum(A, A.T).fill_diagonal_(0)
    degrees = A.sum(1)
    laplacian = torch.diag(degrees) - A
    D = dense(Incidence(edges, nodes=nodes, edge_weight=weights), (nodes,))
    torch.testing.assert_close(D.T @ D, laplacian, rtol=1e-12, atol=1e-12)
    root = torch.where(degrees > 0, degrees, torch.inf).rsqrt()
    operator = Incidence(edges, nodes=nodes, edge_weight=weights, normalized=True)
    N = dense(operator, (nodes,))
    torch.testing.assert_close(N.T @ N, root[:, None] * laplacian * root, rtol=1e-12, atol=1e-12)
    assert operator.norm_limit == pytest.approx(2**0.5)


def test_an_edge_in_both_directions_counts_once() -> None:
    single, both = torch.tensor([[0], [1]]), torch.tensor([[0, 1, 1], [1, 0, 1]])
    assert dense(Incidence(single), (2,)).equal(dense(Incidence(both), (2,)))
    heavier = Incidence(both, edge_weight=torch.tensor([1.0, 4.0, 9.0]))
    assert dense(heavier, (2,)).equal(torch.tensor([[2.0, -2.0]]))


@pytest.mark.parametrize(("wide", "narrow"), [(4, 3), (3, 4)])
def test_a_graph_convolution_is_that_of_kipf_and_welling(wide: int, narrow: int) -> None:
    edges = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 0]])
    operator = GraphConv(edges, wide, narrow).double()
    A = dense(Adjacency(edges), (4,)).double()
    W = next(p for p in operator.parameters() if p.requires_grad)
    z = torch.randn(2, 4, wide, dtype=torch.float64)
    torch.testing.assert_close(operator(z), A @ z @ W.T)
    torch.testing.assert_close(operator(z[0]), A @ z[0] @ W.T)
    y = torch.randn(4, narrow, dtype=torch.float64)
    torch.testing.assert_close(operator.adjoint(y), A.T @ y @ W)
    norm = torch.linalg.matrix_norm(W.detach(), 2)
    assert true_norm(operator, (4, wide)) == pytest.approx(float(norm), rel=1e-6)
    assert float(operator.norm_bound((4, wide)).detach()) == pytest.approx(float(norm), rel=1e-12)
    assert operator.bias_shape == (narrow,)
    assert GraphConv(edges, 2, 3, norm="bound", zeta=0.7).norm_limit == 0.7
    assert operator.norm_limit is None


MATRIX = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, -3.0]])


def sparse_matrix(matrix: Tensor) -> Tensor:
    return matrix.to_sparse()


def test_duplicate_entries_are_added() -> None:
    matrix = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [1, 1, 2]]), torch.ones(3), (2, 3), check_invariants=True
    )
    assert dense(Sparse(matrix), (3,)).equal(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]))


def test_a_matrix_without_entries_is_zero() -> None:
    operator = Sparse(sparse_matrix(torch.zeros(2, 3)))
    assert not operator(torch.ones(1, 3)).any()
    assert float(operator.norm_bound((3,))) == 0


def test_entries_are_trainable_on_request() -> None:
    x = torch.randn(4, 3, 2)
    fixed, trained = Sparse(sparse_matrix(MATRIX)), Sparse(sparse_matrix(MATRIX), trainable=True)
    assert not fixed(x).requires_grad
    torch.testing.assert_close(fixed(x), trained(x))
    (gradient,) = torch.autograd.grad(trained(x).square().sum(), trained.kernel)
    full = MATRIX.clone().requires_grad_()
    (expected,) = torch.autograd.grad((full @ x).square().sum(), full)
    torch.testing.assert_close(gradient, expected[MATRIX != 0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch itself
@pytest.mark.parametrize("trainable", [True, False])
def test_derivatives_of_every_order(trainable: bool) -> None:
    operator = Sparse(sparse_matrix(MATRIX.double()), trainable=trainable)
    entries = operator.kernel.detach().clone().requires_grad_(trainable)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for apply in (lambda v, x: operator(x, (v,)), lambda v, x: operator.adjoint(x[:, :2], (v,))):
        inputs = (entries, x)
        assert torch.autograd.gradcheck(lambda *a, f=apply: f(*a).pow(3), inputs)
        assert torch.autograd.gradgradcheck(lambda *a, f=apply: f(*a).pow(3), inputs)
        with forward_ad.dual_level():
            image = apply(entries.detach(), forward_ad.make_dual(x.detach(), x.detach()))
            tangent = forward_ad.unpack_dual(image).tangent
        torch.testing.assert_close(tangent, apply(entries, x))


@settings(max_examples=60)
@given(st.integers(0, 1000), st.booleans())
def test_the_bound_of_large_matrices(seed: int, signed: bool) -> None:
    """It lies between the norm and √(‖A‖₁‖A‖_∞), and is tight without negative entries."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randint(2, 12, (2,), generator=generator).tolist()
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    matrix = torch.where(matrix > 0.7 if not signed else matrix.abs() > 0.7, matrix, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectral, "DENSE_LIMIT", 0)
        bound = float(Sparse(sparse_matrix(matrix)).norm_bound((columns,)))
    absolute = matrix.abs()
    schur = float((absolute.sum(0).max() * absolute.sum(1).max()).sqrt())
    true = float(torch.linalg.matrix_norm(matrix, 2))
    assert bound >= true * (1 - 1e-12)
    assert bound <= min(schur, float(matrix.norm())) * (1 + 1e-12)
    if not signed:
        assert bound <= 1.2 * true


def test_the_bound_of_a_large_graph_is_tight() -> None:
    """A ring of 400 nodes: its Laplacian and its signless Laplacian have norm 4."""
    ring = torch.arange(400)
    operator = Incidence(torch.stack([ring, ring.roll(1)])).double()
    assert float(operator.norm_bound((400,))) == pytest.approx(2, rel=1e-12)
    assert float(operator.norm_estimate((400,), iterations=300)) == pytest.approx(2, rel=1e-2)


def test_invalid_sparse_matrices_raise() -> None:
    with pytest.raises(ValueError, match=r"2-D sparse tensor \(COO or CSR\).*to_sparse"):
        Sparse(MATRIX)
    with pytest.raises(ValueError, match="2-D sparse tensor"):
        Sparse(torch.ones(2, 2, 2).to_sparse())
    with pytest.raises(ValueError, match="trainable=True"):
        Sparse(sparse_matrix(MATRIX).requires_grad_())
    with pytest.raises(ValueError, match="floating-point"):
        Sparse(sparse_matrix(MATRIX.long()))
    with pytest.raises(ValueError, match="must be positive"):
        Sparse(sparse_matrix(torch.zeros(0, 3)))
    outside = torch.sparse_coo_tensor(
        torch.tensor([[0], [7]]), torch.ones(1), (2, 3), check_invariants=False
    )
    with pytest.raises(ValueError, match=r"outside of its shape \(2, 3\)"):
        Sparse(outside)


def test_invalid_graphs_raise() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"integers of shape \(2, edges\), got torch.float32"):
        Adjacency(edges.float())
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        Incidence(torch.zeros(3, 2).long())
    with pytest.raises(ValueError, match="outside of 0 … 1"):
        GraphConv(edges, 2, 2, nodes=2)
    with pytest.raises(ValueError, match="contains nodes outside of"):
        Adjacency(-edges)
    with pytest.raises(ValueError, match="2 numbers that are not negative"):
        Adjacency(edges, edge_weight=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="2 numbers"):
        Adjacency(edges, edge_weight=torch.ones(3))
    with pytest.raises(ValueError, match="at least one edge"):
        Incidence(torch.zeros(2, 0).long(), nodes=3)
    with pytest.raises(
        ValueError, match=r"expected an input of shape \(B, 3, 2\) .*x\[None\]\), got \(B, 4, 2\)"
    ):
        GraphConv(edges, 2, 2)(torch.zeros(1, 4, 2))
