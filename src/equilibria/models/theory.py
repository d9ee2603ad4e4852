"""OptEq's constructive lemmas, and a numerical test of what a map is.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Lemmas 1 and 2, Theorem 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import Packing, State
from equilibria.equilibrium import Cell
from equilibria.models.deep_opteq import DeepOptEqCell, UnitLayer


def universal_hidden_units(weights: Sequence[Tensor], width: int | None = None) -> list[Tensor]:
    """Lemma 1: W̄_k of `width` columns with W̄_{k+1} W̄_kᵀ = W_{k+1}.

    `weights` are the matrices W_1, …, W_L of a network s_{k+1} = σ(W_{k+1} s_k + …). With the
    result z̄_{k+1} = W̄_kᵀσ(W̄_k z̄_k + …) computes the same: every layer is a unit layer. The width
    must be at least the largest n_k + n_{k+1}, which is the default.
    """
    heights = [weight.shape[0] for weight in weights]
    for k in range(1, len(weights)):
        if weights[k].shape[1] != heights[k - 1]:
            raise ValueError(
                f"weight {k + 1} takes {weights[k].shape[1]} numbers, "
                f"but layer {k} gives {heights[k - 1]}"
            )
    least = max((a + b for a, b in pairwise(heights)), default=heights[0])
    width = least if width is None else width
    if width < least:
        raise ValueError(f"the width must be at least {least} here, not {width}")
    like = weights[0]
    factors = [torch.eye(width, dtype=like.dtype, device=like.device)[: heights[0]]]
    for k in range(1, len(weights)):
        previous = factors[-1]
        # W̄_{k+1} = W_{k+1} (W̄_kᵀ)⁺ + N with N W̄_kᵀ = 0: the first part makes the product right,
        # orthonormal rows N outside the span of W̄_k make the rank full for the next one.
        outside = torch.linalg.svd(previous, full_matrices=True).Vh[previous.shape[0] :]
        factors.append(weights[k] @ torch.linalg.pinv(previous.mT) + outside[: heights[k]])
    return factors


def deep_opteq_of_network(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str | Activation = "relu",
) -> tuple[DeepOptEqCell, Tensor]:
    """Lemma 2: a Deep OptEq whose equilibrium is what a feed-forward network computes.

    The network is s_1 = σ(A_1 x + b_1), s_{k+1} = σ(A_{k+1} s_k + b_{k+1}), y = A_{L+1} s_L, given
    by `weights` A_1, …, A_{L+1} and `biases` b_1, …, b_L. Returned are the cell and the readout R
    with y = R z*. One layer more than the network has, with W_0 = 0, comes first: it forgets z, so
    that the map is constant and its equilibrium unique, though no other norm is bounded.
    """
    if len(weights) != len(biases) + 1 or not biases:
        raise ValueError(
            f"a network of L >= 1 layers has L + 1 weights and L biases, "
            f"not {len(weights)} and {len(biases)}"
        )
    first = weights[0]
    *factors, readout = universal_hidden_units(weights)
    nothing = first.new_zeros(1, first.shape[1])
    layers = [
        UnitLayer(factors[0].new_zeros(1, factors[0].shape[1]), nothing, bias=False),
    ]
    for k, (factor, bias) in enumerate(zip(factors, biases, strict=True)):
        inputs = first if k == 0 else nothing.expand(factor.shape[0], -1).clone()
        layers.append(UnitLayer(factor, inputs, bias=bias, activation=activation))
    return DeepOptEqCell(layers), readout


@dataclass(frozen=True)
class ProximalReport:
    """What a map showed on random states; each number is the worst that was seen."""

    asymmetry: float
    """|⟨Ju, v⟩ − ⟨u, Jv⟩| ÷ ‖u‖‖v‖: zero for a gradient."""
    monotonicity: float
    """⟨T(a) − T(b), a − b⟩ ÷ ‖a − b‖²: not negative for the gradient of a convex function."""
    lipschitz: float
    """‖T(a) − T(b)‖ ÷ ‖a − b‖: at most one for a proximal operator."""
    tolerance: float

    @property
    def is_gradient(self) -> bool:
        return self.asymmetry <= self.tolerance

    @property
    def is_monotone(self) -> bool:
        return self.monotonicity >= -self.tolerance

    @property
    def is_nonexpansive(self) -> bool:
        return self.lipschitz <= 1 + self.tolerance

    def __bool__(self) -> bool:
        return self.is_gradient and self.is_monotone and self.is_nonexpansive


def is_proximal(
    cell: Cell, x: Tensor, *, samples: int = 32, scale: float = 1.0, tolerance: float = 1e-4
) -> ProximalReport:
    """Whether the map of a cell behaves like a proximal operator at the input x.

    A map is the proximal operator of a convex function exactly if it is the gradient of a convex
    function (its Jacobian is symmetric, it is monotone) and does not expand (Moreau). All three are
    tested on random states: a failure is a proof, success is evidence. The report is true if all
    hold, and says which guarantees the map earns. OptEq passes in z-space; in y-space its Jacobian
    is symmetric in a weighted inner product only.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        context = cell.inject(x)
        start = cell.initial_state(x, context)
    packing = Packing.of(start, cell.couples_batch)
    like = packing.pack(start)

    def random() -> Tensor:
        return scale * torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like)

    def step(flat: Tensor) -> Tensor:
        image: State = cell.step(packing.unpack(flat), context)
        return packing.pack(image)

    asymmetry, monotonicity, lipschitz = 0.0, float("inf"), 0.0
    for _ in range(samples):
        a, b, u, v = (random() for _ in range(4))
        with torch.no_grad():
            moved = step(a) - step(b)
        apart = torch.linalg.vector_norm(a - b, dim=1)
        inner = (moved * (a - b)).sum(dim=1)
        monotonicity = min(monotonicity, float((inner / apart.square()).min()))
        lipschitz = max(lipschitz, float((torch.linalg.vector_norm(moved, dim=1) / apart).max()))
        # ⟨Ju, v⟩ = ⟨u, Jᵀv⟩, so that two products with Jᵀ show whether J is symmetric.
        _, (pulled_u, pulled_v) = _pull_back(step, a, (u, v))
        sizes = torch.linalg.vector_norm(u, dim=1) * torch.linalg.vector_norm(v, dim=1)
        gap = (pulled_u * v).sum(dim=1) - (u * pulled_v).sum(dim=1)
        asymmetry = max(asymmetry, float((gap.abs() / sizes).max()))
    return ProximalReport(asymmetry, monotonicity, lipschitz, tolerance)


def _pull_back(
    step: object, at: Tensor, cotangents: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """T at a point, and Jᵀ applied to vectors."""
    assert callable(step)
    with torch.enable_grad():
        point = at.detach().requires_grad_()
        image: Tensor = step(point)
        pulled = tuple(
            torch.autograd.grad(image, point, c, retain_graph=True, materialize_grads=True)[0]
            for c in cotangents
        )
    return image.detach(), pulled
