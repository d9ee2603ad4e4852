"""POptEqs: parallel OptEqs, one a branch, whose features are fused for the head.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models", Appendix A.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.context import Context, State, state_tensors
from equilibria.energies import Branches, Input, Quadratic
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import GradientRule
from equilibria.models.blocks import ImageStem
from equilibria.models.branches import (
    BranchCell,
    Fusion,
    branch_head,
    branch_operators,
)
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.options import solver_from_options
from equilibria.operators import LinearOperator, as_operator
from equilibria.solvers import Solver


class POptEqCell(BranchCell):
    """zᵢ = Wᵢᵀσ(Wᵢzᵢ + Uᵢg(x) + bᵢ) for each branch (Eq. 10), in the variables yᵢ, zᵢ = Wᵢᵀyᵢ.

    The branches together minimize Eq. 11, a sum of OptEq's objectives.
    """

    def __init__(
        self,
        W: Sequence[LinearOperator | nn.Module | Tensor],
        U: Sequence[LinearOperator | nn.Module | Tensor],
        *,
        bias: bool | None = None,
        activation: str | Activation = "relu",
        fusion: Fusion = "average",
        alpha: float = 1.0,
    ) -> None:
        operators = [as_operator(one) for one in W]
        pairs = zip(operators, U, strict=True)
        energy = Branches([Input(Ui, bias) + Quadratic(Wi) for Wi, Ui in pairs])
        super().__init__(energy, activation, fusion=fusion, alpha=alpha)

    @property
    def W(self) -> list[LinearOperator]:  # noqa: N802 - the paper's symbol
        return [term.W for term in self.energy.modules() if isinstance(term, Quadratic)]

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """zᵢ = Wᵢᵀyᵢ."""
        triples = zip(self.W, state_tensors(state), context.parts.values(), strict=True)
        return [W.adjoint(y, part.parts["quadratic"].weights("W")) for W, y, part in triples]


def popteq(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: int = 32,
    widths: Sequence[int] = (16, 32, 32),
    scales: Sequence[int] = (1, 1, 1),
    kernel_size: int = 3,
    input_kernel_size: int = 3,
    stem_depth: int = 1,
    stem_strides: int = 0,
    downsample: int = 1,
    pool: int = 2,
    activation: str | Activation = "relu",
    alpha: float = 1.0,
    bias: bool = True,
    fusion: Fusion | Literal["conv"] = "average",
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumClassifier:
    """A convolutional POptEqs classifier: a middle width and a scale for each branch.

    fusion: "average" or "sum" of the branches; "conv", a 3×3 convolution over all of them; "none",
    the classifier sees them side by side.
    """
    W, U = branch_operators(
        channels,
        widths,
        scales,
        kernel_size=kernel_size,
        input_kernel_size=input_kernel_size,
        norm=norm,
        zeta=zeta,
        init_scale=init_scale,
    )
    cell = POptEqCell(
        W,
        U,
        bias=bias,
        activation=activation,
        fusion="none" if fusion == "conv" else fusion,
        alpha=alpha,
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
        head=branch_head(fusion, channels, len(widths), num_classes, pool),
    )
