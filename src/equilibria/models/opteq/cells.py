"""The cells of OptEq and Deep OptEq: equilibria of proximal operators, z = f_L∘…∘f_1(z, x).

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Sections 3.2, 3.3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from equilibria.activations import Activation, ReLU, get_activation
from equilibria.context import Context, State
from equilibria.context.context import numbered
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies import Input, Quadratic, Regularizer, get_regularizer
from equilibria.energies.bounds import all_known
from equilibria.energies.rounding import Rounding
from equilibria.equilibrium import Cell, EnergyCell, Objective, StepBounds
from equilibria.equilibrium.capabilities import EnergyForm, OutputForm
from equilibria.equilibrium.objective import EnergyObjective
from equilibria.gradients import Symmetry
from equilibria.models.base import MapObjective
from equilibria.operators import LinearOperator, as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.operators.rounding import application_rounding, upper_norm
from equilibria.registry import check_choice, check_not_negative, check_positive, check_share

SMALLEST_ALPHA = 0.01

Placement = Literal["exact", "paper"]
FirstIterate = Literal["zero", "input"]


class OptEqCell(EnergyCell):
    """OptEq's cell: y = σ(WWᵀy/μ + Ux + b) with state y and the feature z = Wᵀy/μ.

    y* minimizes G(y) = 1ᵀS*(y) − ⟨Ux + b, y⟩ − ‖Wᵀy‖²/2μ, with S* the conjugate of the primitive of
    σ, and z* minimizes the convex φ of OptEq's Theorem 1. φ(z) = G(y)/μ at every output of the map,
    so no inverse of W is needed: W may be a convolution, rectangular or singular.

    Args:
        W: Operator from z to y.
        U: Operator from x to y.
        bias: The bias b, or whether there is a trainable one.
        activation: σ.
        mu: μ, positive.
        alpha: Weight of the new iterate. Below 1 it is the skip connection of Table 1, row 2, which
            has the same fixed points.

    Examples:
        >>> cell = eq.models.OptEqCell(eq.Dense(3, 4, norm="bound"), eq.Dense(2, 4))
        >>> eq.EquilibriumLayer(cell=cell)(torch.ones(1, 2)).shape  # the feature z = Wᵀy
        torch.Size([1, 3])
    """

    def __init__(
        self,
        W: OperatorLike,
        U: OperatorLike,
        *,
        bias: bool | Tensor | None = None,
        activation: str | Activation = "relu",
        mu: float = 1.0,
        alpha: float = 1.0,
    ) -> None:
        check_positive(mu=mu)
        quadratic = Quadratic(W)
        energy = Input(U, bias) + (quadratic if mu == 1 else (1 / mu) * quadratic)
        super().__init__(energy, activation, alpha)
        self.mu = mu

    @property
    def W(self) -> LinearOperator:  # noqa: N802 - the paper's symbol
        """The operator W of the quadratic term, from features z to states y."""
        return next(term.W for term in self.energy.modules() if isinstance(term, Quadratic))

    output_form = "linear"

    def output(self, state: State, context: Context) -> Tensor:
        """Return the feature z = Wᵀy/μ of a state y."""
        assert isinstance(state, Tensor)
        return self.W.adjoint(state, context.parts["quadratic"].weights("W")) / self.mu

    def objective(self, context: Context) -> Objective:
        """Return the hidden objective φ of OptEq's Theorem 1, at the input of `context`.

        It is G/μ, with G the objective in the variable y.
        """
        return EnergyObjective(
            self.energy, self.activation, context, scale=1 / self.mu, relaxed=self.alpha < 1
        )


class UnitLayer(nn.Module):
    """Unit layer f(z, x) = (α/μ) Wᵀσ(Wz + Ux + b) + (1 − α) z (Eq. 6) of a Deep OptEq.

    It is the proximal operator of α M_φ^{1−α}, the Moreau envelope of the function φ of Theorem 1.

    Args:
        W: Operator from z to y.
        U: Operator from x to y.
        bias: The bias b, or whether there is a trainable one.
        activation: σ.
        mu: μ, positive.
        alpha: α in (0, 1], the initial value if it is learnable.
        learnable_alpha: Whether α is trained. Reflection at both ends keeps it in [0.01, 1]. Unlike
            a sigmoid, reflection can reach 1; unlike clamping, its gradient is never zero.

    Examples:
        >>> layer = eq.models.UnitLayer(eq.Dense(3, 4, norm="bound"), eq.Dense(2, 4), alpha=0.8)
        >>> context = layer.inject(torch.ones(1, 2)).with_shared(layer.prepare(((3,),)))
        >>> layer(torch.zeros(1, 3), context).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        W: OperatorLike,
        U: OperatorLike,
        *,
        bias: bool | Tensor | None = None,
        activation: str | Activation = "relu",
        mu: float = 1.0,
        alpha: float = 1.0,
        learnable_alpha: bool = False,
    ) -> None:
        super().__init__()
        check_share(alpha=alpha)
        check_positive(mu=mu)
        self.W = as_operator(W)
        self.input = Input(U, bias)
        self.activation = get_activation(activation)
        self.mu = mu
        self.raw_alpha: nn.Parameter | float
        self.raw_alpha = nn.Parameter(torch.tensor(float(alpha))) if learnable_alpha else alpha

    @property
    def alpha(self) -> Tensor | float:
        """Weight α of the new value in the layer's output; a tensor if it is learnable."""
        raw = self.raw_alpha
        if not isinstance(raw, Tensor):
            return raw
        span = 1 - SMALLEST_ALPHA
        below_one = torch.remainder(1 - raw, 2 * span)
        return 1 - torch.where(below_one <= span, below_one, 2 * span - below_one)

    def inject(self, x: Tensor) -> Context:
        """Return a context with the layer's injected input c = Ux + b."""
        return self.input.inject(x)

    def prepare(self, layout: Layout) -> dict[str, Any]:
        """Return the shared context entries: the weights of W, and α if it is learnable."""
        alpha = self.alpha
        prepared: dict[str, Any] = {"W": self.W.weights(layout[0])}
        if isinstance(alpha, Tensor):
            prepared["alpha"] = alpha
        return prepared

    def lift(self, z: Tensor, context: Context) -> Tensor:
        """Return the layer's inner activations y = σ(Wz + Ux + b)."""
        return self.activation(self.W(z, context.weights("W")) + context["c"])

    def lower(self, y: Tensor, context: Context) -> Tensor:
        """Return p = Wᵀy/μ, the layer's output before the skip connection with α."""
        p = self.W.adjoint(y, context.weights("W"))
        return p if self.mu == 1 else p / self.mu

    def forward(self, z: Tensor, context: Context) -> Tensor:
        p = self.lower(self.lift(z, context), context)
        alpha = self.step_size(context)
        if isinstance(alpha, float | int) and alpha == 1:
            return p
        return z + alpha * (p - z)

    def step_size(self, context: Context) -> Tensor | float:
        """Return the weight α of the new value; from the context if it is learnable."""
        return context["alpha"] if "alpha" in context.shared else self.alpha

    def phi(self, y: Tensor, context: Context) -> Tensor:
        """Return the function φ of OptEq's Theorem 1 at p = Wᵀy/μ, per sample.

        It is exact for every output y of the activation.
        """
        z = self.W.adjoint(y, context.weights("W"))
        linear = sum_per_sample(self.activation.conjugate(y) - context["c"] * y)
        return linear / self.mu - sum_per_sample(z.square()) / (2 * self.mu**2)

    @property
    def lipschitz_limit(self) -> float | None:
        """Lipschitz bound of the layer that holds for all weights, because ‖W‖ is limited.

        It is None if ‖W‖ has no limit or α is learnable.
        """
        norm = self.W.norm_limit
        if norm is None or isinstance(self.raw_alpha, Tensor):
            return None
        return 1 - self.raw_alpha + self.raw_alpha * self.activation.lipschitz * norm**2 / self.mu

    def lipschitz_bound(self, context: Context, layout: Layout) -> Tensor:
        """Bound the Lipschitz constant of the layer in the state z, for the current weights.

        The layer is z ↦ (1 − α)z + (α/μ)Wᵀσ(Wz + Ux + b), and the bound 1 − α + α L_σ‖W‖²/μ, with
        L_σ the Lipschitz constant of the activation σ.

        Args:
            context: Result of `inject` and `prepare`; it contains α if α is trained.
            layout: Shape of z without the batch dimension, in a tuple of length one.
        """
        alpha = self.step_size(context)
        square = self.W.norm_bound(layout[0]).square()
        return 1 - alpha + alpha * self.activation.lipschitz * square / self.mu

    def slope_along(self, g: Tensor, context: Context, layout: Layout) -> Tensor:
        """Bound the Lipschitz constant of z ↦ ⟨g, f(z)⟩ for directions g, f this unit layer.

        Unlike ‖g‖ times the Lipschitz constant of f, a bound depends on the direction of g. The
        derivative of f is (1 − α)I + (α/μ)WᵀDW, where the diagonal matrix D of the activation's
        slopes lies between 0 and its Lipschitz constant L_σ. With M the mean of the two extreme
        derivatives, |⟨g, df⟩| ≤ (‖Mg‖ + ½(α/μ)L_σ‖Wg‖‖W‖)‖dz‖.

        Args:
            g: Directions, shape (N, ...) with the shape of z.
            context: Result of `inject` and `prepare`; it contains the weights of W.
            layout: Shape of z without the batch dimension, in a tuple of length one.

        Returns:
            Bounds, shape (N,).
        """
        alpha, slope = self.step_size(context), self.activation.lipschitz / self.mu
        lifted = self.W(g, context.weights("W"))
        mean = (1 - alpha) * g + 0.5 * alpha * slope * self.W.adjoint(lifted, context.weights("W"))
        radius = 0.5 * alpha * slope * self.W.norm_bound(layout[0])
        mean_norm, lifted_norm = (
            torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (mean, lifted)
        )
        bound: Tensor = mean_norm + radius * lifted_norm
        return bound


class DeepOptEqCell(Cell):
    """Deep OptEq's cell z = f_L∘…∘f_1(z, x) of unit layers f_l (OptEq, Eq. 5).

    With one layer it is OptEq in z-space.

    The Jacobian αWᵀDW/μ + (1−α)I of one layer is symmetric; that of several layers is not.

    A regularizer R enters by its step T_R, its proximal operator or a gradient step (Section 5.1):

        "exact":  z ← f_L(f_{L−1}∘…∘f_1(z) + T_R(z) − z), with the feature prox_{γR}(z*) if R has a
            proximal operator, and z* otherwise. The equilibrium is stationary for Φ + γR(z_L), with
            Φ of Theorem 2.
        "paper":  z ← f_L∘…∘f_1(T_R(z)) as printed, with the feature T_R(z*). For L = 1 this is the
            same (Theorem 4). For L ≥ 2 the equilibrium is not stationary: the gradient is off by
            γ∇R in two blocks.

    The feature of "paper" is the equilibrium w = T_R∘f_L∘…∘f_1(w) of the network with "one layer
    appended after deep OptEq" (Section 5.1). z* itself hardly depends on R, because the layers
    after T_R contract its effect: to (1 − α)^L = 3e-4 for small W at α = 0.8 and L = 5.

    Args:
        layers: Unit layers f_1, …, f_L.
        regularizer: R, its name, or a mapping with "name" and options.
        gamma: γ, the weight of R.
        placement: "exact" or "paper".
        z0: Initial state: "zero", or "input" for x (Algorithm 1). It matters if the iteration is
            truncated: after K Picard steps (1 − α)^(KL) of it remains, 37 % at α = 0.01, K = 20,
            L = 5.

    Examples:
        >>> W = [eq.Dense(3, 4, norm="bound") for _ in range(2)]
        >>> layers = [eq.models.UnitLayer(w, eq.Dense(2, 4), alpha=0.8) for w in W]
        >>> layer = eq.EquilibriumLayer(cell=eq.models.DeepOptEqCell(layers))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        layers: Sequence[UnitLayer],
        *,
        regularizer: str | Mapping[str, Any] | Regularizer | None = None,
        gamma: float = 0.0,
        placement: Placement = "exact",
        z0: FirstIterate = "zero",
    ) -> None:
        super().__init__()
        if not layers:
            raise ValueError("Deep OptEq needs at least one layer")
        check_choice(get_args(Placement), placement=placement)
        check_choice(get_args(FirstIterate), z0=z0)
        check_not_negative(gamma=gamma)
        self.layers = nn.ModuleList(layers)
        self.regularizer = None if regularizer is None else get_regularizer(regularizer)
        self.gamma = gamma
        self.placement = placement
        self.z0 = z0
        self.couples_batch = self.regularizer is not None and self.regularizer.couples_batch
        if self.couples_batch:
            self.remedy = (
                f"a gradient step on {type(self.regularizer).__name__} of length gamma = {gamma:g} "
                "overshoots if gamma exceeds the regularizer's epsilon: raise epsilon to gamma or "
                "lower gamma"
            )
        self._is_symmetric = len(layers) == 1 and regularizer is None

    @property
    def symmetry(self) -> Symmetry:  # type: ignore[override]
        return Symmetry.PLAIN if self._is_symmetric else Symmetry.NONE

    @property
    def monotone(self) -> bool:
        """Whether the Jacobian is symmetric without negative eigenvalues."""
        return self._is_symmetric

    def units(self) -> list[UnitLayer]:
        """Return the unit layers f_1, …, f_L."""
        return [layer for layer in self.layers if isinstance(layer, UnitLayer)]

    def inject(self, x: Tensor) -> Context:
        contexts = [layer.inject(x) for layer in self.units()]
        first = self.units()[0]
        layout = (first.W.input_shape(tuple(contexts[0]["c"].shape[1:])),)
        pairs = zip(self.units(), contexts, strict=True)
        return Context(parts=numbered(c.with_shared(layer.prepare(layout)) for layer, c in pairs))

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        injected = context.parts["0"]["c"]
        shape = self.units()[0].W.input_shape(tuple(injected.shape[1:]))
        if self.z0 == "zero":
            return injected.new_zeros(injected.shape[0], *shape)
        if x.shape[1:] != shape:
            raise ValueError(
                f"z0='input' needs an input of the shape {tuple(shape)} of z, got "
                f"{tuple(x.shape[1:])}; use z0='zero', or the same number of channels for both"
            )
        return x.to(injected.dtype).clone()

    def step(self, state: State, context: Context) -> State:
        assert isinstance(state, Tensor)
        z = state
        parts = context.parts.values()
        for layer, part, pull in zip(self.units(), parts, self.pulls(state), strict=True):
            z = layer(z if pull is None else z + pull, part)
        return z

    def pulls(self, z: Tensor) -> list[Tensor | None]:
        """Return what a regularizer adds to one layer's input, and None for the other layers.

        It adds T_R(z) − z, T_R its step.
        """
        count = len(self.layers)
        pulls: list[Tensor | None] = [None] * count
        if self.regularizer is not None:
            index = 0 if self.placement == "paper" else count - 1
            pulls[index] = self.regularizer.step(z, self.gamma) - z
        return pulls

    @property
    def output_form(self) -> OutputForm:
        """Form of the output map: "linear" without a regularizer."""
        return "linear" if self.regularizer is None else "other"

    def output(self, state: State, context: Context) -> Tensor:
        """Return the feature at a state z*; with a regularizer R it is prox_{γR}(z*) or T_R(z*).

        See the class for the two cases.
        """
        assert isinstance(state, Tensor)
        if self.regularizer is None:
            return state
        if self.placement == "paper":
            return self.regularizer.step(state, self.gamma)
        proximal = self.regularizer.proximal(state, self.gamma)
        return state if proximal is None else proximal

    @property
    def is_stationary(self) -> bool:
        """Whether the equilibrium is stationary for the objective with the regularizer.

        The objective is Φ + γR(z_L), with Φ of OptEq's Theorem 2.
        """
        regularized = self.regularizer is not None and self.gamma > 0
        return not (regularized and self.placement == "paper" and len(self.layers) > 1)

    @property
    def formula(self) -> str | None:
        """Objective of the cell as text; None without one."""
        if not self.is_stationary:
            return None
        count = len(self.layers)
        extra = "" if self.regularizer is None else f" + {self.gamma:g}·{self.regularizer}(z_L)"
        where = "   (M the Moreau envelope, prox_φ(v) = Wᵀσ(Wv + Ux + b)/μ)"
        if count == 1:
            return f"αM_φ^(1−α)(z){extra}{where}"
        if count == 2:
            return f"αM_φ₁^(1−α)(z₁) + αM_φ₂^(1−α)(z₂) + ½‖z₁ − z₂‖²{extra}{where}"
        return (
            f"0 ∈ ∇[Σᵢ αM_φᵢ^(1−α)(zᵢ){extra}] + (I − P)z̃, i = 1 … {count}, an inclusion rather "
            f"than a minimum{where}"
        )

    @property
    def limits(self) -> StepBounds[float]:
        known = all_known(layer.lipschitz_limit for layer in self.units())
        if self.regularizer is not None or known is None:
            return StepBounds()
        return StepBounds(math.prod(known))

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        """Return the product of the layers' Lipschitz bounds; unknown with a regularizer."""
        if self.regularizer is not None:
            return StepBounds()
        pairs = [*zip(self.units(), context.parts.values(), strict=True)]

        def contraction() -> Tensor:
            bounds = [layer.lipschitz_bound(part, layout) for layer, part in pairs]
            return torch.stack([torch.as_tensor(bound) for bound in bounds]).prod()

        def input_bound() -> Tensor | None:
            """Return Σ_l (Π_{m>l} q_m) α_l L_σ‖W_l‖‖U_l‖/μ_l."""
            total: Tensor | None = None
            for layer, part in pairs:
                input_norm = layer.input.bounds(part, layout).input
                assert input_norm is not None
                slope = layer.step_size(part) * layer.activation.lipschitz / layer.mu
                previous = 0.0 if total is None else total * layer.lipschitz_bound(part, layout)
                total = previous + slope * (input_norm * layer.W.norm_bound(layout[0]))
            return total

        return StepBounds(contraction, input_bound)

    def slopes_along(self, rows: Tensor, context: Context, layout: Layout) -> Tensor | None:
        """Bound the Lipschitz constant of z ↦ ⟨g, T(z)⟩, T the map, for differences g of rows.

        Args:
            rows: Rows of a linear head, shape (N, ...) with the shape of z.
            context: Result of the cell's `inject`; it contains the weights of the layers.
            layout: Shape of z without the batch dimension, in a tuple of length one.

        Returns:
            Bounds, shape (N, N), or None with a regularizer.
        """
        if self.regularizer is not None:
            return None
        *previous, last = zip(self.units(), context.parts.values(), strict=True)
        pairs = (rows[:, None] - rows[None]).flatten(0, 1)
        slopes = last[0].slope_along(pairs, last[1], layout)
        for layer, part in previous:
            slopes = slopes * layer.lipschitz_bound(part, layout)
        return slopes.view(len(rows), len(rows))

    def rounding(
        self, exact: Cell, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Return a bound on the rounding error, propagated through the layers.

        It is None unless every σ is ReLU and there is no regularizer.
        """
        assert isinstance(exact, DeepOptEqCell)
        if self.regularizer is not None or any(
            type(u.activation) is not ReLU for u in self.units()
        ):
            return None
        # Bounds on ‖z‖ and on the error of the computed z, layer by layer.
        size, error = Rounding(state=1.0), Rounding()
        triples = zip(self.units(), exact.units(), context.parts.values(), strict=True)
        for layer, exact_layer, part in triples:
            applied = application_rounding(layer.W, exact_layer.W, layout[0], unit)
            injected = layer.input.rounding(exact_layer.input, part, layout, unit)
            if applied is None or injected is None:
                return None
            norm = upper_norm(exact_layer.W, layout[0])
            alpha = float(exact_layer.step_size(part))
            y_size = size * norm + Rounding(injected=1.0)
            y_error = error * norm + size * (applied + 4 * unit * norm) + injected
            p_size = y_size * (norm / layer.mu)
            p_error = y_error * (norm + applied) + y_size * (applied + 4 * unit * norm)
            p_error = p_error * (1 / layer.mu)
            error = error * (1 - alpha) + p_error * alpha + (size + p_size) * (8 * unit)
            size = size * (1 - alpha) + p_size * alpha
        return error

    def energy_form(self, state: State, context: Context) -> EnergyForm | None:
        """Return the objective in the variable y for one layer without a regularizer, else None."""
        if len(self.layers) > 1 or self.regularizer is not None:
            return None
        (layer,), (part,) = self.units(), context.parts.values()
        assert isinstance(state, Tensor)
        term = layer.input
        bias = False if term.bias is None else term.bias
        cell = OptEqCell(layer.W, term.U, bias=bias, activation=layer.activation, mu=layer.mu)
        injected = Context(sample={"c": part["c"]})
        quadratic = Context(shared={"W": part.shared["W"]})
        lifted = Context(parts={"input": injected, "quadratic": quadratic})
        return EnergyForm(cell, lifted, layer.lift(state, part))

    def objective(self, context: Context) -> DeepOptEqObjective:
        return DeepOptEqObjective(self, context)


class UnitBlock(NamedTuple):
    """Input v and output z of a layer: z = αp + (1−α)v with p = Wᵀσ(Wv + c)/μ = prox_φ(v).

    Attributes:
        v: Input.
        z: Output.
        envelope: Moreau envelope α M_φ^{1−α}(z) of φ per sample.
    """

    v: Tensor
    z: Tensor
    envelope: Tensor


class DeepOptEqObjective(MapObjective[DeepOptEqCell]):
    """Objective of a Deep OptEq's equilibrium; for L > 2 layers the inclusion that it solves.

    All is evaluated at the blocks z_1 = f_1(z_0), …, z_L = f_L(z_{L−1}) of one application of the
    map to a state z_0. At outputs of a layer the Moreau envelopes are exact:
    M_φ^{1−α}(z) = φ(p) + (1−α)/2 ‖v − p‖² and ∇(α M)(z) = v − z.

        L = 1:  α M_φ^{1−α}(z), which has the same minimizers as φ (Theorem 1, Table 1).
        L = 2:  α M₁(z_1) + α M₂(z_2) + ½‖z_1 − z_2‖² (Corollary 1), which decreases in every Picard
            step.
        L > 2:  There is no objective. `value` is Φ(z̃) = Σ α M_i(z_i), which may increase.
            `gradient` and `residual` are those of the inclusion 0 = ∇Φ(z̃) + (I − P) z̃,
            (P z̃)_i = z_{i−1}, of Theorem 2 (Eq. 8, with Eq. 7 corrected: P is inside σ, and W̃ has
            no identity block).

    A regularizer adds γR(z_L), or γ times its Moreau envelope if its proximal operator is used.
    """

    @property
    def is_minimized(self) -> bool:
        return self.cell.is_stationary and len(self.cell.units()) <= 2

    def blocks(self, state: State) -> list[UnitBlock]:
        """Apply the map to a state, and return the input and output of each layer."""
        assert isinstance(state, Tensor)
        blocks = []
        z = state
        pulls = self.cell.pulls(state)
        parts = self.context.parts.values()
        for layer, context, pull in zip(self.cell.units(), parts, pulls, strict=True):
            v = z if pull is None else z + pull
            y = layer.lift(v, context)
            p = layer.lower(y, context)
            alpha = layer.step_size(context)
            z = v + alpha * (p - v)
            distance = sum_per_sample((v - p).square())
            envelope = alpha * (layer.phi(y, context) + 0.5 * (1 - alpha) * distance)
            blocks.append(UnitBlock(v, z, envelope))
        return blocks

    def value(self, state: State) -> Tensor:
        blocks = self.blocks(state)
        total = torch.stack([block.envelope for block in blocks]).sum(dim=0)
        if len(blocks) == 2:
            total = total + 0.5 * sum_per_sample((blocks[0].z - blocks[1].z).square())
        regularizer, gamma = self.cell.regularizer, self.cell.gamma
        if regularizer is None:
            return total
        if regularizer.couples_batch:
            total = total.sum()
        last = blocks[-1].z
        proximal = regularizer.proximal(last, gamma)
        if proximal is None:
            return total + gamma * regularizer.value(last)
        distance = sum_per_sample((last - proximal).square())
        return total + gamma * regularizer.value(proximal) + 0.5 * distance

    def gradient(self, state: State) -> tuple[Tensor, ...]:
        """Return the residual ∇Φ(z̃) + (I − P) z̃ of Theorem 2's inclusion, one tensor per block.

        With a regularizer R, γ∇R is added at z_L. For L ≤ 2 layers it is the gradient of `value`.
        """
        blocks = self.blocks(state)
        shifted = [blocks[-1], *blocks[:-1]]
        gradients = [
            (block.v - block.z) + (block.z - previous.z)
            for block, previous in zip(blocks, shifted, strict=True)
        ]
        regularizer = self.cell.regularizer
        if regularizer is not None:
            last = blocks[-1].z
            gradients[-1] = gradients[-1] + last - regularizer.step(last, self.cell.gamma)
        return tuple(gradients)

    def residual(self, state: State) -> Tensor:
        squares = [sum_per_sample(block.square()) for block in self.gradient(state)]
        return torch.stack(squares).sum(dim=0).sqrt()
