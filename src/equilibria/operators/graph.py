"""Operators on graphs: convolutions of node features, and differences along edges.

A graph is an `edge_index` as in PyTorch Geometric, integers of shape (2, E): edge e leads from node
edge_index[0, e] to edge_index[1, e]; undirected edges are listed in both directions. A sample
contains the features of all nodes, shape (N, F); a single graph is a batch of one, `x[None]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria.operators.base import Shape, Weights, shape_error
from equilibria.operators.compose import Compose
from equilibria.operators.dense import Dense
from equilibria.operators.sparse import Sparse


class Adjacency(Sparse):
    """Normalized adjacency matrix D_in^{−½} A D_out^{−½} of a graph; its norm is 1.

    A_ij is the weight of the edge from j to i; D_in and D_out contain the sums of its rows and
    columns. For non-negative weights Σ_ij A_ij u_i v_j/√(D_i D_j) ≤ ‖u‖‖v‖ by Cauchy-Schwarz.

    Args:
        edge_index: Edges, integers of shape (2, E).
        nodes: Number of nodes; by default the largest index in `edge_index` plus 1.
        edge_weight: Non-negative weight per edge, shape (E,); by default ones.
        self_loops: Whether to add an edge of weight 1 from every node to itself (Ã of Kipf and
            Welling).

    Examples:
        >>> edges = torch.tensor([[0, 1], [1, 2]])  # from 0 to 1 and from 1 to 2
        >>> A = eq.operators.Adjacency(edges, self_loops=False)
        >>> A(torch.tensor([[1.0, 10.0, 100.0]]))
        tensor([[ 0.0000,  1.0000, 10.0000]])
    """

    def __init__(
        self,
        edge_index: Tensor,
        *,
        nodes: int | None = None,
        edge_weight: Tensor | None = None,
        self_loops: bool = True,
    ) -> None:
        matrix = _matrix(edge_index, nodes, edge_weight)
        if self_loops:
            loops = torch.arange(len(matrix), device=matrix.device).expand(2, -1)
            ones = matrix.values().new_ones(len(matrix))
            matrix = (matrix + _sparse(loops, ones, tuple(matrix.shape))).coalesce()
        indices, values = matrix.indices(), matrix.values().double()
        incoming, outgoing = (_sums(side, values, len(matrix))[side] for side in indices)
        scaled = _rounded(values * _inverse_root(incoming) * _inverse_root(outgoing), matrix.dtype)
        super().__init__(_sparse(indices, scaled, tuple(matrix.shape)))

    @property
    def norm_limit(self) -> float:
        return 1.0

    def norm_bound(self, input_shape: Shape) -> Tensor:
        self.output_shape(input_shape)
        return self._constant(1.0)


class GraphConv(Compose):
    """Graph convolution Z ↦ Â Z Wᵀ of Kipf and Welling on node features (N, F), without bias.

    Â is the normalized `Adjacency`, W a `Dense` matrix. The norm is that of W: ‖Â ⊗ W‖ = ‖W‖. Also
    accepts the features (N, F) of a single graph, without a batch dimension.

    Args:
        edge_index: Edges, integers of shape (2, E).
        in_features, out_features: Number of features per node.
        nodes: Number of nodes; by default the largest index in `edge_index` plus 1.
        edge_weight: Non-negative weight per edge, shape (E,); by default ones.
        self_loops: Whether to add an edge of weight 1 from every node to itself.
        norm: Norm control of W: "bound" guarantees ‖W‖ ≤ ζ, "estimate" approximates it by power
            iteration, None disables it.
        zeta: Limit ζ on the norm.

    Examples:
        >>> edges = torch.tensor([[0, 1], [1, 2]])
        >>> eq.operators.GraphConv(edges, 4, 2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        edge_index: Tensor,
        in_features: int,
        out_features: int,
        *,
        nodes: int | None = None,
        edge_weight: Tensor | None = None,
        self_loops: bool = True,
        norm: str | None = None,
        zeta: float = 0.95,
    ) -> None:
        dense = Dense(in_features, out_features, norm=norm, zeta=zeta)
        adjacency = Adjacency(
            edge_index, nodes=nodes, edge_weight=edge_weight, self_loops=self_loops
        )
        # Both orders give the same result; it is cheaper to move the narrower features.
        narrow_first = in_features <= out_features
        super().__init__(*((dense, adjacency) if narrow_first else (adjacency, dense)))
        self.nodes = adjacency.in_size
        self.in_features, self.out_features = in_features, out_features

    def __repr__(self) -> str:
        return f"GraphConv({self.in_features}, {self.out_features}, nodes={self.nodes})"

    def _expected(self, features: int) -> str:
        return f"(B, {self.nodes}, {features}) (for a single graph, pass x[None])"

    def output_shape(self, input_shape: Shape) -> Shape:
        if tuple(input_shape) != (self.nodes, self.in_features):
            raise shape_error(self, "input", self._expected(self.in_features), input_shape)
        return (self.nodes, self.out_features)

    def input_shape(self, output_shape: Shape) -> Shape:
        if tuple(output_shape) != (self.nodes, self.out_features):
            raise shape_error(self, "output", self._expected(self.out_features), output_shape)
        return (self.nodes, self.in_features)

    def forward(self, z: Tensor, weights: Weights | None = None) -> Tensor:
        return super().forward(z[None], weights)[0] if z.dim() == 2 else super().forward(z, weights)

    def adjoint(self, y: Tensor, weights: Weights | None = None) -> Tensor:
        return super().adjoint(y[None], weights)[0] if y.dim() == 2 else super().adjoint(y, weights)


class Incidence(Sparse):
    """Gradient D on a graph: (Dy)_e = √w_e (y_i − y_j) for every edge e = {i, j}.

    DᵀD is the Laplacian, so `-Quadratic(D.T)` is the energy ½‖Dy‖² = ½ Σ_e w_e ‖y_i − y_j‖². An
    edge that is listed in both directions counts once, with the larger weight. Loops are ignored.

    Args:
        edge_index: Edges, integers of shape (2, E).
        nodes: Number of nodes; by default the largest index in `edge_index` plus 1.
        edge_weight: Non-negative weight per edge, shape (E,); by default ones.
        normalized: Whether to use y_i/√d_i instead of y_i, where d_i is the sum of the weights at
            node i. DᵀD is then the normalized Laplacian, and ‖D‖ ≤ √2.

    Examples:
        >>> edges = torch.tensor([[0, 1], [1, 2]])  # a path of three nodes
        >>> eq.operators.Incidence(edges)(torch.tensor([[1.0, 3.0, 6.0]])).abs()
        tensor([[2., 3.]])
    """

    def __init__(
        self,
        edge_index: Tensor,
        *,
        nodes: int | None = None,
        edge_weight: Tensor | None = None,
        normalized: bool = False,
    ) -> None:
        matrix = _matrix(edge_index, nodes, edge_weight)
        ends, weights = _undirected(matrix)
        if not len(weights):
            raise ValueError("edge_index must contain at least one edge between two nodes")
        slopes = weights.sqrt().expand(2, -1)
        if normalized:
            degrees = _sums(ends.flatten(), weights.double().repeat(2), len(matrix))[ends]
            slopes = _rounded(weights.double().sqrt() * _inverse_root(degrees), weights.dtype)
        rows = torch.arange(len(weights), device=ends.device).repeat(2)
        values = torch.cat([slopes[0], -slopes[1]])
        shape = (len(weights), len(matrix))
        super().__init__(_sparse(torch.stack([rows, ends.flatten()]), values, shape))
        self.normalized = normalized

    @property
    def norm_limit(self) -> float | None:
        return math.sqrt(2) if self.normalized else None

    def norm_bound(self, input_shape: Shape) -> Tensor:
        return super().norm_bound(input_shape).clamp(max=self.norm_limit or math.inf)


def _matrix(edge_index: Tensor, nodes: int | None, edge_weight: Tensor | None) -> Tensor:
    """Return A after checks; A_ij is the weight of the edge from j to i."""
    if edge_index.dim() != 2 or len(edge_index) != 2 or edge_index.is_floating_point():
        raise ValueError(
            "edge_index must contain integers of shape (2, edges), got "
            f"{edge_index.dtype} of shape {tuple(edge_index.shape)}"
        )
    required = int(edge_index.amax()) + 1 if edge_index.numel() else 0
    nodes = required if nodes is None else nodes
    if nodes < max(required, 1) or (edge_index.numel() and int(edge_index.amin()) < 0):
        raise ValueError(f"edge_index contains nodes outside of 0 … {nodes - 1}")
    count = edge_index.shape[1]
    if edge_weight is None:
        edge_weight = torch.ones(count, device=edge_index.device)
    if tuple(edge_weight.shape) != (count,) or not bool((edge_weight >= 0).all()):
        raise ValueError(f"edge_weight must contain {count} numbers that are not negative")
    return _sparse(edge_index.long().flip(0), edge_weight.detach(), (nodes, nodes)).coalesce()


def _undirected(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends i < j of every edge, shape (2, E), and its larger weight in any direction."""
    between = matrix.indices()[0] != matrix.indices()[1]
    ends, weights = matrix.indices()[:, between], matrix.values()[between]
    pairs, which = torch.unique(ends.sort(dim=0).values, dim=1, return_inverse=True)
    larger = weights.new_zeros(pairs.shape[1]).scatter_reduce(0, which, weights, "amax")
    return pairs, larger


def _sums(indices: Tensor, values: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add(0, indices, values)


def _inverse_root(sums: Tensor) -> Tensor:
    """Return 1/√s where s > 0, else 0."""
    return torch.where(sums > 0, sums, torch.inf).rsqrt()


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a type, towards zero, so that a norm of 1 is not exceeded by rounding."""
    return (values * (1 - torch.finfo(dtype).eps)).to(dtype)


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
