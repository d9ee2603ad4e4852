"""OptEq: one layer z = (1/μ) Wᵀσ(Wz + Ux + b) whose fixed point minimizes a convex function.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Section 3.2.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from equilibria.activations import Activation, get_activation
from equilibria.context import Context, State
from equilibria.energies import Input, Quadratic, Scaled, Sum
from equilibria.equilibrium import Cell, EnergyCell, EquilibriumLayer
from equilibria.equilibrium.objective import EnergyObjective, Objective
from equilibria.gradients import GradientRule
from equilibria.models.blocks import ImageStem, PooledLinearHead
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.deep_opteq import DeepOptEqCell, UnitLayer
from equilibria.models.options import initialize_small, solver_from_options
from equilibria.operators import Conv2d, LinearOperator
from equilibria.solvers import Solver

Space = Literal["auto", "y", "z"]


class OptEqCell(EnergyCell):
    """OptEq in y-space: y = σ(WWᵀy/μ + Ux + b), with the feature z = Wᵀy/μ.

    y* minimizes G(y) = 1ᵀS*(y) − ⟨Ux + b, y⟩ − ‖Wᵀy‖²/2μ, and z* the convex φ of Theorem 1, with
    φ(z) = G(y)/μ at every output of the map: no inverse of W is needed, so W may be a convolution,
    rectangular or singular. `alpha` < 1 is the skip connection of Table 1, row 2, which leaves the
    fixed points where they are.
    """

    def __init__(
        self,
        W: LinearOperator | nn.Module | Tensor,
        U: LinearOperator | nn.Module | Tensor,
        *,
        bias: bool | Tensor | None = None,
        activation: str | Activation = "relu",
        mu: float = 1.0,
        alpha: float = 1.0,
    ) -> None:
        if not mu > 0:
            raise ValueError(f"mu must be positive, not {mu}")
        quadratic = Quadratic(W)
        energy = Input(U, bias) + (quadratic if mu == 1 else (1 / mu) * quadratic)
        super().__init__(energy, activation, alpha)
        self.mu = mu

    @property
    def W(self) -> LinearOperator:  # noqa: N802 - the paper's symbol
        assert isinstance(self.energy, Sum)
        term = self.energy["quadratic"]
        quadratic = term.term if isinstance(term, Scaled) else term
        assert isinstance(quadratic, Quadratic)
        return quadratic.W

    def output(self, state: State, context: Context) -> Tensor:
        """z = Wᵀy/μ."""
        assert isinstance(state, Tensor)
        return self.W.adjoint(state, context.parts["quadratic"].weights("W")) / self.mu

    def objective(self, context: Context) -> Objective:
        """φ = G/μ (Theorem 1)."""
        return EnergyObjective(
            self.energy, self.activation, context, scale=1 / self.mu, relaxed=self.alpha < 1
        )


def optimal_space(channels: int, width: int) -> Literal["y", "z"]:
    """The smaller of the two spaces: y has the middle width, z the channels of the feature."""
    return "z" if width > channels else "y"


def opteq_cell(
    W: LinearOperator,
    U: LinearOperator,
    *,
    bias: bool | Tensor | None = None,
    activation: str | Activation = "relu",
    mu: float = 1.0,
    alpha: float = 1.0,
    space: Literal["y", "z"] = "y",
) -> Cell:
    """OptEq's cell in the space where it is iterated; both have the same feature z*."""
    if space == "y":
        return OptEqCell(W, U, bias=bias, activation=activation, mu=mu, alpha=alpha)
    layer = UnitLayer(W, U, bias=bias, activation=activation, mu=mu, alpha=alpha)
    return DeepOptEqCell([layer])


def opteq(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: int = 32,
    width: int = 32,
    kernel_size: int = 3,
    input_kernel_size: int = 3,
    stem_depth: int = 1,
    stem_strides: int = 0,
    downsample: int = 1,
    pool: int = 2,
    activation: str | Activation = "relu",
    mu: float = 1.0,
    alpha: float = 1.0,
    bias: bool = True,
    space: Space = "auto",
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumClassifier:
    """A convolutional OptEq classifier; `width` is the middle width, the rows of W.

    `space="auto"` iterates in y-space, or in z-space where the middle width is the larger.
    """
    if space not in ("auto", "y", "z"):
        raise ValueError(f"space must be 'auto', 'y' or 'z', not {space!r}")
    if norm is not None and mu < get_activation(activation).lipschitz * zeta**2:
        raise ValueError(
            f"Theorem 1 needs mu >= L‖W‖² = {get_activation(activation).lipschitz * zeta**2:.3g}, "
            f"but mu = {mu}: raise mu or lower zeta"
        )
    W = Conv2d(channels, width, kernel_size, norm=norm, zeta=zeta)
    U = Conv2d(channels, width, input_kernel_size)
    initialize_small(W, init_scale)
    cell = opteq_cell(
        W,
        U,
        bias=bias,
        activation=activation,
        mu=mu,
        alpha=alpha,
        space=optimal_space(channels, width) if space == "auto" else space,
    )
    return EquilibriumClassifier(
        stem=ImageStem(
            in_channels, channels, depth=stem_depth, downsample=downsample, strides=stem_strides
        ),
        layer=EquilibriumLayer(
            cell=cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=PooledLinearHead(channels, num_classes, pool=pool),
    )
