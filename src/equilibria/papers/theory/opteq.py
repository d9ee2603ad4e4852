"""Results of the OptEq paper: two layers of Table 1, Lemmas 1 and 2, and a proximal test.

The paper is Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022. Table 1
(Section 3.2) lists layers that result from modifying the underlying convex function φ:

- Row 1 is `equilibria.models.OptEqCell`.
- Row 2, the skip connection with penalty α M_φ^{1−α}, is the option `alpha` of that cell.
- Row 3, an affine change of variables, is `AffineOptEqCell`.
- Row 4, a multivariate linear activation, is `MultivariateOptEqCell`.
- Row 5, φ + γR, is `equilibria.energies.FeatureRegularizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.state import Layout, Packing, sum_per_sample
from equilibria.energies import Input
from equilibria.equilibrium import Cell, StepBounds
from equilibria.gradients import Symmetry
from equilibria.models.base import MapObjective
from equilibria.models.opteq.cells import DeepOptEqCell, DeepOptEqObjective, UnitLayer
from equilibria.operators import as_operator
from equilibria.operators.compose import OperatorLike


class AffineOptEqCell(Cell):
    """OptEq layer after an affine change of variables (OptEq, Table 1, row 3).

    With the OptEq layer f = prox_φ and A(z) = Rz + t, the iteration is z ← A⁻¹(f(A(z))):

        z ← R⁻¹(Wᵀσ(W(Rz + t) + Ux + b)/μ − t)

    The fixed point minimizes φ∘A for every invertible R. (The paper prints "invariable" for
    "invertible".) The layer is the proximal operator of φ∘A only if R is orthogonal. For any other
    R it is the proximal operator in the metric of RᵀR, argmin_u φ(Au) + ½‖R(u − z)‖². The
    iteration converges as fast as that of f.

    Args:
        layer: The OptEq layer f.
        R: Invertible matrix, shape (channels, channels). It acts on the channels of z and is
            trained if it is an `nn.Parameter`.
        t: Shift, shape (channels,); zero by default. It is trained if it is an `nn.Parameter`.

    Raises:
        ValueError: If R is not square or not invertible, or if the shape of t does not match R.

    Examples:
        >>> layer = eq.models.UnitLayer(0.5 * torch.eye(2), torch.eye(2), bias=False)
        >>> from equilibria.papers.theory.opteq import AffineOptEqCell
        >>> cell = AffineOptEqCell(layer, torch.eye(2), t=torch.tensor([0.0, 1.0]))
        >>> eq.EquilibriumLayer(cell=cell, tolerance=1e-6)(torch.ones(1, 2)).round(decimals=3)
        tensor([[ 0.6670, -0.3330]])
    """

    R: Tensor
    t: Tensor

    def __init__(self, layer: UnitLayer, R: Tensor, t: Tensor | None = None) -> None:
        super().__init__()
        if R.dim() != 2 or R.shape[0] != R.shape[1]:
            raise ValueError(f"R must be a square matrix, got shape {tuple(R.shape)}")
        if t is not None and t.shape != R.shape[:1]:
            raise ValueError(f"t must have shape {tuple(R.shape[:1])}, got {tuple(t.shape)}")
        if not R.is_meta and int(torch.linalg.matrix_rank(R.detach())) < R.shape[0]:
            raise ValueError("R must be invertible, because A⁻¹ is part of the layer")
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
        """Apply the affine map: return A(z) = Rz + t.

        Args:
            state: z, shape (B, channels, ...).
            context: Context that `inject` returned.

        Returns:
            A(z), with the shape of z.
        """
        assert isinstance(state, Tensor)
        moved = _mix(context["R"], state)
        return moved + _per_channel(context["t"], moved)

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        """Bound the Lipschitz constant in the Euclidean norm, by cond(R) times that of the layer.

        Args:
            context: Context that `inject` returned.
            layout: Shapes of the parts of the state, without the batch dimension.

        Returns:
            The bound, unknown if f has none.
        """
        bound = self.inner.bounds(context.parts["inner"], layout).contraction
        if bound is None:
            return StepBounds()
        return StepBounds(bound * torch.linalg.cond(context["R"], 2))

    def objective(self, context: Context) -> AffineObjective:
        return AffineObjective(self, context)


class AffineObjective(MapObjective[AffineOptEqCell]):
    """Hidden objective φ(A(z)) of `AffineOptEqCell`, with φ that of the OptEq layer inside it.

    With a skip connection (`alpha` below 1) the objective is α M_φ^{1−α}∘A.
    """

    def __init__(self, cell: AffineOptEqCell, context: Context) -> None:
        super().__init__(cell, context)
        self.inner = DeepOptEqObjective(cell.inner, context.parts["inner"])

    def value(self, state: State) -> Tensor:
        return self.inner.value(self.cell.transform(state, self.context))

    def gradient(self, state: State) -> Tensor:
        """Compute the gradient Rᵀ∇φ(A(z)) at a state z, for A(z) = Rz + t.

        Args:
            state: z, shape (B, channels, ...).

        Returns:
            The gradient, with the shape of the state.
        """
        (gradient,) = self.inner.gradient(self.cell.transform(state, self.context))
        return _mix(self.context["R"].mT, gradient)


class MultivariateOptEqCell(Cell):
    """OptEq layer with a linear activation that mixes channels (OptEq, Table 1, row 4).

    A symmetric positive semidefinite matrix S replaces the elementwise σ:

        z ← WᵀS(Wz + Ux + b)

    S = FFᵀ is stored as its factor F. S therefore remains symmetric and positive semidefinite
    while F is trained. If ‖WᵀSW‖ ≤ 1, the layer is the proximal operator of

        φ(z) = ½yᵀS⁻¹y − ⟨Ux + b, y⟩ − ½‖z‖²,    z = Wᵀy.

    The objective is evaluated without an inverse: at y = Sa the first term is ½‖Fᵀa‖².

    Args:
        W: Linear operator or matrix from z to y.
        U: Linear operator or matrix from the input x to y.
        factor: F, shape (channels of y, rank). It is trained if it is an `nn.Parameter`.
            `psd_factor` computes it from S.
        bias: b, or whether to create one. None leaves the choice to the default of
            `equilibria.energies.Input`.

    Raises:
        ValueError: If the factor is not a matrix, or if its rows do not match the channels of y.

    Examples:
        >>> from equilibria.papers import theory
        >>> S = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> from equilibria.papers.theory.opteq import MultivariateOptEqCell, psd_factor
        >>> W, U, F = 0.5 * torch.eye(2), torch.eye(2), psd_factor(S)
        >>> cell = MultivariateOptEqCell(W, U, F, bias=False)
        >>> bool(theory.is_proximal(cell, torch.ones(1, 2)))
        True
    """

    symmetry = Symmetry.PLAIN
    factor: Tensor

    def __init__(
        self, W: OperatorLike, U: OperatorLike, factor: Tensor, *, bias: bool | Tensor | None = None
    ) -> None:
        super().__init__()
        if factor.dim() != 2:
            raise ValueError(f"the factor of S must be a matrix, got shape {tuple(factor.shape)}")
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
        """Compute Fᵀa and the hidden activations y = Sa of the layer, for a = Wz + Ux + b.

        S = FFᵀ is the linear activation.

        Args:
            state: z, shape (B, channels of z, ...).
            context: Context that `inject` returned.

        Returns:
            Fᵀa, shape (B, rank, ...), and y, shape (B, channels of y, ...).
        """
        assert isinstance(state, Tensor)
        F = context["F"]
        half = _mix(F.mT, self.W(state, context.weights("W")) + context["c"])
        return half, _mix(F, half)

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        """Bound the Lipschitz constant ‖WᵀSW‖ by ‖F‖²‖W‖².

        Args:
            context: Context that `inject` returned.
            layout: Shapes of the parts of the state, without the batch dimension.

        Returns:
            The bound, a scalar tensor.
        """
        norm: Tensor = torch.linalg.matrix_norm(context["F"], 2)
        return StepBounds((norm * self.W.norm_bound(layout[0])).square())

    def objective(self, context: Context) -> MultivariateObjective:
        return MultivariateObjective(self, context)


class MultivariateObjective(MapObjective[MultivariateOptEqCell]):
    """Objective φ of `MultivariateOptEqCell`, evaluated at the image z = T(v) of a state v.

    Its gradient there is ∇φ(z) = v − z.
    """

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
    """Factor a symmetric positive semidefinite matrix as S = FFᵀ.

    Args:
        S: The matrix, shape (n, n). Eigenvalues that are negative by rounding count as zero.

    Returns:
        F, shape (n, n).

    Raises:
        ValueError: If S is not square, not symmetric, or has a negative eigenvalue.

    Examples:
        >>> S = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> from equilibria.papers.theory.opteq import psd_factor
        >>> F = psd_factor(S)
        >>> torch.allclose(F @ F.T, S)
        True
    """
    if S.dim() != 2 or S.shape[0] != S.shape[1]:
        raise ValueError(f"S must be a square matrix, got shape {tuple(S.shape)}")
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
    """Register `tensor` as a parameter if it is one, and as a buffer otherwise."""
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


def _mix(matrix: Tensor, z: Tensor) -> Tensor:
    """Apply the matrix to the channels of z."""
    return torch.einsum("ij,bj...->bi...", matrix, z)


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Reshape a vector so that it broadcasts over the batch and the pixels of `like`."""
    return vector.reshape(-1, *[1] * (like.dim() - 2))


def universal_hidden_units(weights: Sequence[Tensor], width: int | None = None) -> list[Tensor]:
    """Construct the matrices of OptEq's Lemma 1, which turn a network into a chain of unit layers.

    The network is s_{k+1} = σ(W_{k+1} s_k + …). The returned matrices W̄_k satisfy
    W̄_{k+1} W̄_kᵀ = W_{k+1}. The unit layers z̄_{k+1} = W̄_kᵀσ(W̄_k z̄_k + …) therefore compute the
    same function.

    Args:
        weights: Matrices W_1, …, W_L. W_k has shape (n_k, n_{k-1}).
        width: Number of columns of every W̄_k. The default is the smallest valid width, the
            largest n_k + n_{k+1}.

    Returns:
        W̄_1, …, W̄_L. W̄_k has shape (n_k, width).

    Raises:
        ValueError: If consecutive shapes do not match, or if the width is too small.

    Examples:
        >>> weights = [torch.randn(3, 2), torch.randn(4, 3)]
        >>> from equilibria.papers.theory.opteq import universal_hidden_units
        >>> first, second = universal_hidden_units(weights)
        >>> first.shape, torch.allclose(second @ first.T, weights[1], atol=1e-5)
        (torch.Size([3, 7]), True)
    """
    heights = [weight.shape[0] for weight in weights]
    for k in range(1, len(weights)):
        if weights[k].shape[1] != heights[k - 1]:
            raise ValueError(
                f"weight {k + 1} has {weights[k].shape[1]} columns, "
                f"but layer {k} has {heights[k - 1]} outputs"
            )
    smallest = max((a + b for a, b in pairwise(heights)), default=heights[0])
    width = smallest if width is None else width
    if width < smallest:
        raise ValueError(f"width must be at least {smallest}, got {width}")
    like = weights[0]
    factors = [torch.eye(width, dtype=like.dtype, device=like.device)[: heights[0]]]
    for k in range(1, len(weights)):
        previous = factors[-1]
        # W̄_{k+1} = W_{k+1} (W̄_kᵀ)⁺ + N with N W̄_kᵀ = 0. The first part gives the required product.
        # The orthonormal rows N, outside the span of W̄_k, give full rank for the next step.
        outside = torch.linalg.svd(previous, full_matrices=True).Vh[previous.shape[0] :]
        factors.append(weights[k] @ torch.linalg.pinv(previous.mT) + outside[: heights[k]])
    return factors


def deep_opteq_of_network(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str | Activation = "relu",
) -> tuple[DeepOptEqCell, Tensor]:
    """Construct a Deep OptEq whose equilibrium is the output of a network (OptEq, Lemma 2).

    The network is s_1 = σ(A_1 x + b_1), s_{k+1} = σ(A_{k+1} s_k + b_{k+1}), y = A_{L+1} s_L.

    The cell has one more layer than the network. This first layer has W_0 = 0 and so does not
    depend on z. The map is therefore constant in z and its equilibrium is unique, although the
    norms of the other layers are not bounded.

    Args:
        weights: Matrices A_1, …, A_{L+1}.
        biases: Vectors b_1, …, b_L.
        activation: σ, an activation or its name.

    Returns:
        The cell, and the readout matrix R with y = R z*.

    Raises:
        ValueError: If the number of weights is not one more than the number of biases, if there
            are no biases, or if consecutive shapes do not match.

    Examples:
        >>> from equilibria.papers import theory
        >>> A, b, B = torch.randn(4, 2), torch.randn(4), torch.randn(3, 4)
        >>> cell, readout = theory.deep_opteq_of_network([A, B], [b])
        >>> x = torch.ones(1, 2)
        >>> z = eq.EquilibriumLayer(cell=cell)(x)
        >>> torch.allclose(z @ readout.T, (x @ A.T + b).relu() @ B.T, atol=1e-4)
        True
    """
    if len(weights) != len(biases) + 1 or not biases:
        raise ValueError(
            f"a network of L >= 1 layers has L + 1 weights and L biases, "
            f"got {len(weights)} and {len(biases)}"
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
    """Result of `is_proximal`: the worst value of each quantity over all random states.

    The report is true if the map passed all three tests.

    Attributes:
        asymmetry: Largest |⟨Ju, v⟩ − ⟨u, Jv⟩| / (‖u‖‖v‖), with the Jacobian J; 0 for a gradient.
        monotonicity: Smallest ⟨T(a) − T(b), a − b⟩ / ‖a − b‖²; at least 0 for the gradient of a
            convex function.
        lipschitz: Largest ‖T(a) − T(b)‖ / ‖a − b‖; at most 1 for a proximal operator.
        tolerance: Tolerance of the three tests.

    Examples:
        >>> from equilibria.papers import theory
        >>> report = theory.ProximalReport(
        ...     asymmetry=0.2, monotonicity=0.1, lipschitz=0.9, tolerance=1e-4
        ... )
        >>> bool(report), report.is_gradient, report.is_nonexpansive
        (False, False, True)
    """

    asymmetry: float
    monotonicity: float
    lipschitz: float
    tolerance: float

    @property
    def is_gradient(self) -> bool:
        """Whether the Jacobian was symmetric at every state."""
        return self.asymmetry <= self.tolerance

    @property
    def is_monotone(self) -> bool:
        """Whether the map was monotone between all pairs of states."""
        return self.monotonicity >= -self.tolerance

    @property
    def is_nonexpansive(self) -> bool:
        """Whether the map increased no distance between states."""
        return self.lipschitz <= 1 + self.tolerance

    def __bool__(self) -> bool:
        return self.is_gradient and self.is_monotone and self.is_nonexpansive


def is_proximal(
    cell: Cell, x: Tensor, *, samples: int = 32, scale: float = 1.0, tolerance: float = 1e-4
) -> ProximalReport:
    """Test numerically whether the map of a cell is a proximal operator at an input.

    A map is the proximal operator of a convex function if and only if it is the gradient of a
    convex function and nonexpansive (Moreau). It is such a gradient if its Jacobian is symmetric
    and the map is monotone. The three properties are tested on random states. A failed test
    disproves the property; a passed test is evidence only.

    OptEq passes in z-space. In y-space its Jacobian is symmetric only in a weighted inner product.

    Args:
        cell: Cell whose step is tested.
        x: Batch of inputs of the cell.
        samples: Number of random pairs of states.
        scale: Standard deviation of the random states.
        tolerance: Largest violation that counts as rounding.

    Returns:
        A report that is true if all three tests pass, with the result of each test.

    Examples:
        >>> from equilibria.papers import theory
        >>> layer = eq.models.UnitLayer(0.5 * torch.eye(2), torch.eye(2), bias=False)
        >>> cell = eq.models.DeepOptEqCell([layer])
        >>> bool(theory.is_proximal(cell, torch.ones(1, 2)))
        True
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
        distance = torch.linalg.vector_norm(a - b, dim=1)
        inner = (moved * (a - b)).sum(dim=1)
        monotonicity = min(monotonicity, float((inner / distance.square()).min()))
        lipschitz = max(lipschitz, float((torch.linalg.vector_norm(moved, dim=1) / distance).max()))
        # ⟨Ju, v⟩ = ⟨u, Jᵀv⟩: two products with Jᵀ show whether J is symmetric.
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
