"""What OptEq's paper proves, as code: Table 1's layers, Lemmas 1 and 2, and what a map is.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022. Table 1 (Section 3.2) has
layers that come from modifying the underlying convex function φ. Row 1 is `OptEqCell`, row 2 (the
skip connection, α M_φ^{1−α}) its `alpha`, row 5 (φ + γR) `FeatureRegularizer`. Here are row 3, an
affine change of variables, and row 4, a multivariate linear activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.context import Context, Layout, Packing, State, sum_per_sample
from equilibria.energies import Input
from equilibria.equilibrium import Cell
from equilibria.gradients import Symmetry
from equilibria.models.base import MapObjective
from equilibria.models.opteq.cells import DeepOptEqCell, DeepOptEqObjective, UnitLayer
from equilibria.operators import OperatorLike, as_operator


class AffineOptEqCell(Cell):
    """z = A⁻¹(f(A(z))), A(z) = Rz + t: the OptEq layer f = prox_φ in other coordinates (row 3).

        z ← R⁻¹(Wᵀσ(W(Rz + t) + Ux + b)/μ − t)

    The fixed point minimizes φ∘A for every invertible R (printed "invariable"). The layer is
    prox_{φ∘A} only where R is orthogonal; otherwise it is so in the metric of RᵀR,
    argmin_u φ(Au) + ½‖R(u − z)‖², and converges as fast as f does. R and t act on the channels of
    an image, and are trained if they are parameters.
    """

    R: Tensor
    t: Tensor

    def __init__(self, layer: UnitLayer, R: Tensor, t: Tensor | None = None) -> None:
        super().__init__()
        if R.dim() != 2 or R.shape[0] != R.shape[1]:
            raise ValueError(f"R must be a square matrix, not of shape {tuple(R.shape)}")
        if t is not None and t.shape != R.shape[:1]:
            raise ValueError(f"t must have shape {tuple(R.shape[:1])}, not {tuple(t.shape)}")
        if not R.is_meta and int(torch.linalg.matrix_rank(R.detach())) < R.shape[0]:
            raise ValueError("R must be invertible: A⁻¹ is part of the layer")
        self.inner = DeepOptEqCell([layer])
        _hold(self, "R", R)
        _hold(self, "t", torch.zeros_like(R[0]) if t is None else t)

    def inject(self, x: Tensor) -> Context:
        shared = {"R": self.R, "R_inverse": torch.linalg.inv(self.R), "t": self.t}
        return Context(shared=shared, parts={"inner": self.inner.inject(x)})

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        return self.inner.initial_state(x, context.parts["inner"])

    def step(self, state: State, context: Context) -> State:
        image = self.inner.step(self.transform(state, context), context.parts["inner"])
        assert isinstance(image, Tensor)
        return _mix(context["R_inverse"], image - _per_channel(context["t"], image))

    def transform(self, state: State, context: Context) -> Tensor:
        """A(z) = Rz + t."""
        assert isinstance(state, Tensor)
        moved = _mix(context["R"], state)
        return moved + _per_channel(context["t"], moved)

    def contraction_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """cond(R) times that of f: a bound for the Euclidean norm."""
        bound = self.inner.contraction_bound(context.parts["inner"], layout)
        return None if bound is None else bound * torch.linalg.cond(context["R"], 2)

    def objective(self, context: Context) -> AffineObjective:
        return AffineObjective(self, context)


class AffineObjective(MapObjective[AffineOptEqCell]):
    """φ∘A (α M_φ^{1−α}∘A with a skip connection) at the image of a state."""

    def __init__(self, cell: AffineOptEqCell, context: Context) -> None:
        super().__init__(cell, context)
        self.inner = DeepOptEqObjective(cell.inner, context.parts["inner"])

    def value(self, state: State) -> Tensor:
        return self.inner.value(self.cell.transform(state, self.context))

    def gradient(self, state: State) -> Tensor:
        """Rᵀ∇φ(Az)."""
        (gradient,) = self.inner.gradient(self.cell.transform(state, self.context))
        return _mix(self.context["R"].mT, gradient)


class MultivariateOptEqCell(Cell):
    """z = WᵀS(Wz + Ux + b): the elementwise σ replaced by a symmetric S ⪰ 0 (row 4).

    S = FFᵀ is given by a factor F, which keeps it symmetric and positive semidefinite while it is
    trained (`psd_factor` makes one of S). Where ‖WᵀSW‖ ≤ 1 the layer is the proximal operator of

        φ(z) = ½yᵀS⁻¹y − ⟨Ux + b, y⟩ − ½‖z‖²,    z = Wᵀy,

    which is evaluated without an inverse: at y = Sa the first term is ½‖Fᵀa‖². S acts on the
    channels of an image.
    """

    symmetry = Symmetry.PLAIN
    factor: Tensor

    def __init__(
        self, W: OperatorLike, U: OperatorLike, factor: Tensor, *, bias: bool | Tensor | None = None
    ) -> None:
        super().__init__()
        if factor.dim() != 2:
            raise ValueError(f"the factor of S is a matrix, not of shape {tuple(factor.shape)}")
        self.W = as_operator(W)
        self.input = Input(U, bias)
        channels = self.W.bias_shape
        if channels is not None and channels[0] != factor.shape[0]:
            raise ValueError(f"W gives {channels[0]} channels, but S acts on {factor.shape[0]}")
        _hold(self, "factor", factor)

    def inject(self, x: Tensor) -> Context:
        context = self.input.inject(x)
        shape = self.W.input_shape(tuple(context["c"].shape[1:]))
        return context.with_shared({"W": self.W.weights(shape), "F": self.factor})

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        injected = context["c"]
        shape = self.W.input_shape(tuple(injected.shape[1:]))
        return injected.new_zeros(injected.shape[0], *shape)

    def step(self, state: State, context: Context) -> State:
        _, y = self.lift(state, context)
        return self.W.adjoint(y, context.weights("W"))

    def lift(self, state: State, context: Context) -> tuple[Tensor, Tensor]:
        """Fᵀa and y = Sa, a = Wz + Ux + b."""
        assert isinstance(state, Tensor)
        F = context["F"]
        half = _mix(F.mT, self.W(state, context.weights("W")) + context["c"])
        return half, _mix(F, half)

    def contraction_bound(self, context: Context, layout: Layout) -> Tensor:
        """‖F‖²‖W‖² ≥ ‖WᵀSW‖."""
        norm: Tensor = torch.linalg.matrix_norm(context["F"], 2)
        return (norm * self.W.norm_bound(layout[0])).square()

    def objective(self, context: Context) -> MultivariateObjective:
        return MultivariateObjective(self, context)


class MultivariateObjective(MapObjective[MultivariateOptEqCell]):
    """φ of a multivariate activation at the image z = T(v) of a state v, where ∇φ(z) = v − z."""

    def value(self, state: State) -> Tensor:
        half, y = self.cell.lift(state, self.context)
        z = self.cell.W.adjoint(y, self.context.weights("W"))
        conjugate = 0.5 * sum_per_sample(half.square())
        return conjugate - sum_per_sample(self.context["c"] * y) - 0.5 * sum_per_sample(z.square())

    def gradient(self, state: State) -> Tensor:
        image = self.cell.step(state, self.context)
        assert isinstance(state, Tensor)
        assert isinstance(image, Tensor)
        return state - image


def psd_factor(S: Tensor) -> Tensor:
    """F with S = FFᵀ, for a symmetric positive semidefinite S."""
    if S.dim() != 2 or S.shape[0] != S.shape[1]:
        raise ValueError(f"S must be a square matrix, not of shape {tuple(S.shape)}")
    eigenvalues, vectors = torch.linalg.eigh(S)
    rounding = 10 * len(S) * torch.finfo(S.dtype).eps * eigenvalues.abs().amax()
    if bool((S - S.mT).abs().amax() > rounding):
        raise ValueError("S must be symmetric")
    if bool(eigenvalues[0] < -rounding):
        raise ValueError(
            f"S must be positive semidefinite, but has an eigenvalue {float(eigenvalues[0]):.3g}"
        )
    factor: Tensor = vectors * eigenvalues.clamp_min(0).sqrt()
    return factor


def _hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    """`tensor` as a parameter if it is one, else as a constant that moves with the module."""
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


def _mix(matrix: Tensor, z: Tensor) -> Tensor:
    """The matrix applied to the channels of z."""
    return torch.einsum("ij,bj...->bi...", matrix, z)


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (like.dim() - 2))


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
    layers = [UnitLayer(factors[0].new_zeros(1, factors[0].shape[1]), nothing, bias=False)]
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
        with torch.enable_grad():
            image = step(a.requires_grad_())
        pulled_u, pulled_v = (
            torch.autograd.grad(image, a, c, retain_graph=True, materialize_grads=True)[0]
            for c in (u, v)
        )
        sizes = torch.linalg.vector_norm(u, dim=1) * torch.linalg.vector_norm(v, dim=1)
        gap = (pulled_u * v).sum(dim=1) - (u * pulled_v).sum(dim=1)
        asymmetry = max(asymmetry, float((gap.abs() / sizes).max()))
    return ProximalReport(asymmetry, monotonicity, lipschitz, tolerance)
