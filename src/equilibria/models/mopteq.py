"""MOptEqs as an image classifier, and what its paper measures on it.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models". The equilibrium itself is in
`mopteq_cell`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.context import State
from equilibria.energies import (
    Energy,
    HeritageDiversity,
    Input,
    PolynomialKernel,
    SigmoidKernel,
    diversity,
    heritage,
)
from equilibria.energies.heritage_diversity import Sign
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import GradientRule
from equilibria.models.blocks import ImageStem
from equilibria.models.branches import (
    Fusion,
    branch_head,
    branch_operators,
)
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.mopteq_cell import MOptEqCell, Perturb, reconstructed_perturbations
from equilibria.models.mopteq_feature_space import MOptEqFeatureCell, features_are_large
from equilibria.models.options import solver_from_options
from equilibria.operators import LinearOperator
from equilibria.solvers import Solver


def perturbed_logits(
    model: EquilibriumClassifier, images: Tensor, epsilon: float, branch: int = 0
) -> Tensor:
    """The logits at g(x) − δ, δ reconstructed from the equilibrium of one branch (Figure 3a)."""
    cell = model.layer.cell
    if not isinstance(cell, MOptEqCell | MOptEqFeatureCell):
        raise TypeError("reconstructed perturbations are those of a MOptEqs model")
    feature = model.stem(images)
    solution = model.layer.solve(feature)
    if isinstance(cell, MOptEqFeatureCell):
        y: State = cell.lift(solution.state, solution.context)
        cell = cell.lifted
    else:
        y = solution.state
    delta = reconstructed_perturbations(cell, y, epsilon)[branch]
    logits: Tensor = model.head(model.layer(feature - delta))
    return logits


def heritage_diversity_loss(features: Tensor, branches: int, strength: float) -> Tensor:
    """λD − H over the loop of branches, per sample: the loss that may stand in for HH&D.

    Section 3.2 adds γ times it to the training loss of a model without HH&D, instead of putting it
    into the objective (the printed sign, γ(H − λD), would reward what it should penalize).
    `features` are those of single-view branches side by side, as fusion="none" gives them.
    """
    z = features.unflatten(1, (branches, -1)).unbind(dim=1)  # type: ignore[no-untyped-call]
    pairs = [(z[i], z[(i + 1) % branches]) for i in range(branches)]
    terms = [strength * diversity(one, two) - heritage(one, two) for one, two in pairs]
    return torch.stack(terms).sum(dim=0)


def mopteq(
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
    kernel: Literal["linear", "polynomial", "sigmoid"] = "linear",
    heritage: bool = True,
    diversity: float = 0.01,
    sign: Sign = "smooth",
    tau: float = 0.1,
    freeze_after: int = 10,
    pe: Perturb = "off",
    epsilon: float = 0.1,
    perturb_for: int = 5,
    space: Literal["auto", "y", "z"] = "auto",
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
    """A convolutional MOptEqs classifier: a middle width and a scale for each branch.

    scales=(1, 1, 1) is the single-view model; (1, 2, 4, 8) has branches of full to an eighth of the
    resolution (32/16/8/4 for CIFAR). `diversity` is λ, to be kept around 1/channels or below.
    Ablations: −D is diversity=0, −H is heritage=False. `space="auto"` iterates in z-space unless
    the features are much larger than the middle widths, or a kernel needs y.
    """
    if space not in ("auto", "y", "z"):
        raise ValueError(f"space must be 'auto', 'y' or 'z', not {space!r}")
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
    cell = MOptEqCell(
        [_input_term(kernel, operator, bias) for operator in U],
        HeritageDiversity(
            W,
            diversity=diversity,
            scales=scales,
            heritage=heritage,
            sign=sign,
            tau=tau,
            freeze_after=freeze_after,
        ),
        activation=activation,
        fusion="none" if fusion == "conv" else fusion,
        alpha=alpha,
        pe=pe,
        epsilon=epsilon,
        perturb_for=perturb_for,
    )
    if space == "auto":
        space = "y" if kernel != "linear" or features_are_large(channels, widths, scales) else "z"
    return EquilibriumClassifier(
        stem=ImageStem(
            in_channels, channels, depth=stem_depth, downsample=downsample, strides=stem_strides
        ),
        layer=EquilibriumLayer(
            cell=MOptEqFeatureCell(cell) if space == "z" else cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=branch_head(fusion, channels, len(widths), num_classes, pool),
    )


def _input_term(kernel: str, U: LinearOperator, bias: bool) -> Energy:
    terms: dict[str, type[nn.Module]] = {
        "linear": Input,
        "polynomial": PolynomialKernel,
        "sigmoid": SigmoidKernel,
    }
    if kernel not in terms:
        raise ValueError(f"kernel must be one of {', '.join(terms)}, not {kernel!r}")
    term = terms[kernel](U, bias=bias)
    assert isinstance(term, Energy)
    return term
