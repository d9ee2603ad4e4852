"""POptEqs and MOptEqs as image classifiers, and what their paper measures on them.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import state_tensors
from equilibria.energies import (
    BranchCoupling,
    Energy,
    HeritageDiversity,
    Input,
    PolynomialKernel,
    SigmoidKernel,
)
from equilibria.equilibrium import Cell
from equilibria.models.base import EquilibriumClassifier, image_classifier
from equilibria.models.blocks import small
from equilibria.models.mopteq.branches import (
    BranchCell,
    FusedPOptEqCell,
    Fusion,
    POptEqCell,
    branch_head,
    branch_input,
    checked_branches,
)
from equilibria.models.mopteq.cells import (
    MOptEqCell,
    MOptEqFeatureCell,
    features_are_large,
    reconstructed_perturbations,
)
from equilibria.models.opteq.cells import UnitLayer
from equilibria.models.registry import take_options, with_options_of
from equilibria.operators import Conv2d, LinearOperator
from equilibria.registry import check_choice

INPUT_TERMS: dict[str, Callable[..., Energy]] = {
    "linear": Input,
    "polynomial": PolynomialKernel,
    "sigmoid": SigmoidKernel,
}
"""How g(x) enters a branch, by the name of its kernel."""
Direction = Literal["reconstructed", "binomial", "uniform"]


@with_options_of(image_classifier)
def branch_classifier(
    make_cell: Callable[[list[LinearOperator], list[LinearOperator], Fusion], Cell],
    *,
    channels: int = 32,
    widths: Sequence[int] = (16, 32, 32),
    scales: Sequence[int] = (1, 1, 1),
    kernel_size: int = 3,
    input_kernel_size: int = 3,
    fusion: Fusion | Literal["conv"] = "average",
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    **image: Any,
) -> EquilibriumClassifier:
    """A convolutional classifier of several branches: a middle width and a scale for each.

    fusion: "average" or "sum" of the branches; "conv", a 3×3 convolution over all of them; "none",
    the classifier sees them side by side.
    """
    checked_branches(widths, scales)
    W: list[LinearOperator] = []
    U: list[LinearOperator] = []
    for width, scale in zip(widths, scales, strict=True):
        W.append(small(Conv2d(channels, width, kernel_size, norm=norm, zeta=zeta), init_scale))
        U.append(branch_input(channels, width, input_kernel_size, scale))
    cell = make_cell(W, U, "none" if fusion == "conv" else fusion)
    head = partial(branch_head, fusion, len(widths))
    return image_classifier(cell, channels, head, **image)


@with_options_of(branch_classifier, POptEqCell)
def popteq(
    *, bias: bool = True, fused: Literal["output", "map"] = "output", **options: Any
) -> EquilibriumClassifier:
    """A convolutional POptEqs classifier; further options are those of its cell and branches.

    fused: where the `fusion` stands, which the paper leaves open. "output": of the equilibria
    (Appendix A.1). "map": inside the map, where HH&D stands in MOptEqs, single-view. Its Table 1
    has 276 K parameters with a convolution, 83 K more than without: that is one from 96 channels to
    96, as many as go in. Inside the map it has to be so; of the equilibria, 96 to 32 would do, and
    give 222 K. Both places with 96 to 96 have 278 K: the count fits either.

    Examples:
        >>> from equilibria.models.mopteq.models import popteq
        >>> model = popteq(channels=8, widths=(4, 4), scales=(1, 2), in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    check_choice(("output", "map"), fused=fused)
    branches = take_options(options, branch_classifier)
    if fused == "map":
        return _fused_popteq(bias=bias, branches=branches, **options)

    def cell(W: list[LinearOperator], U: list[LinearOperator], fusion: Fusion) -> Cell:
        return POptEqCell(W, U, bias=bias, fusion=fusion, **options)

    return branch_classifier(cell, **branches)


def _fused_popteq(*, bias: bool, branches: dict[str, Any], **options: Any) -> EquilibriumClassifier:
    """With the fusion inside the map."""
    defaults = inspect.signature(branch_classifier).parameters
    channels, fusion = (branches.get(n, defaults[n].default) for n in ("channels", "fusion"))
    scales = branches.get("scales", defaults["scales"].default)
    if any(scale != 1 for scale in scales):
        raise ValueError(f"fused='map' needs branches of one resolution, not scales {scales}")

    def cell(W: list[LinearOperator], U: list[LinearOperator], _: Fusion) -> Cell:
        layers = [UnitLayer(Wi, Ui, bias=bias, **options) for Wi, Ui in zip(W, U, strict=True)]
        return FusedPOptEqCell(layers, channels, fusion=fusion)

    return branch_classifier(cell, **{**branches, "fusion": "average"})


def perturbed_logits(
    model: EquilibriumClassifier,
    images: Tensor,
    epsilon: float,
    branch: int = 0,
    *,
    direction: Direction = "reconstructed",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The logits at g(x) − δ, ‖δ‖∞ ≤ ε (Figure 3a).

    δ is reconstructed from the equilibrium of one branch, ±ε by chance ("binomial"), or uniform.

    Examples:
        >>> model = eq.create_model("mopteq-small", in_channels=1)
        >>> from equilibria.models.mopteq.models import perturbed_logits
        >>> perturbed_logits(model, torch.rand(2, 1, 8, 8), epsilon=0.1).shape
        torch.Size([2, 10])
    """
    check_choice(get_args(Direction), direction=direction)
    feature = model.stem(images)
    if direction == "reconstructed":
        delta = _reconstructed(model, feature, epsilon)[branch]
    else:
        chance = torch.rand(feature.shape, generator=generator).to(feature)
        signed = 2 * chance - 1
        delta = epsilon * (signed if direction == "uniform" else signed.sign())
    logits: Tensor = model.head(model.layer(feature - delta))
    return logits


def _reconstructed(
    model: EquilibriumClassifier, feature: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    cell = model.layer.cell
    if not isinstance(cell, MOptEqCell | MOptEqFeatureCell):
        raise TypeError("reconstructed perturbations are those of a MOptEqs model")
    solution = model.layer.solve(feature)
    y = solution.state
    if isinstance(cell, MOptEqFeatureCell):
        y, cell = cell.lift(y, solution.context), cell.lifted
    return reconstructed_perturbations(cell, y, epsilon)


def branch_features(cell: Cell, state: State, context: Context) -> list[Tensor]:
    """zᵢ of every branch at an equilibrium, each at its own resolution.

    Examples:
        >>> model = eq.create_model("mopteq-small", in_channels=1)
        >>> found = model.solve(torch.rand(1, 1, 8, 8))
        >>> from equilibria.models.mopteq.models import branch_features
        >>> branches = branch_features(model.layer.cell, found.state, found.context)
        >>> [tuple(z.shape[2:]) for z in branches]
        [(8, 8), (8, 8), (8, 8)]
    """
    if isinstance(cell, MOptEqFeatureCell):
        return list(state_tensors(state))
    if isinstance(cell, BranchCell):
        return list(cell.features(state, context))
    raise TypeError(f"{type(cell).__name__} has no branches: take a POptEqs or MOptEqs model")


def heritage_diversity_loss(features: Sequence[Tensor], strength: float) -> Tensor:
    """λD − H over the loop of branches, per sample: the loss that may stand in for HH&D.

    Section 3.2 adds γ times it to the training loss of a model without HH&D, instead of putting it
    into the objective (the printed sign, γ(H − λD), would reward what it should penalize).
    `features` are those of the branches, as `branch_features` gives them.

    Examples:
        >>> features = [torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)]
        >>> eq.models.heritage_diversity_loss(features, strength=0.1).shape
        torch.Size([2])
    """
    finest = max(feature.shape[2] for feature in features)
    scales = [finest // feature.shape[2] for feature in features]
    return 2 * BranchCoupling(scales, diversity=strength, sign="hard").value(features, {})


@with_options_of(HeritageDiversity, MOptEqCell, branch_classifier)
def mopteq(
    *,
    channels: int = 32,
    widths: Sequence[int] = (16, 32, 32),
    scales: Sequence[int] = (1, 1, 1),
    bias: bool = True,
    kernel: Literal["linear", "polynomial", "sigmoid"] = "linear",
    diversity: float = 0.01,
    fusion: Fusion | Literal["conv"] = "average",
    space: Literal["auto", "y", "z"] = "auto",
    **options: Any,
) -> EquilibriumClassifier:
    """A convolutional MOptEqs classifier; further options are those of its cell and branches.

    scales=(1, 1, 1) is the single-view model; (1, 2, 4, 8) has branches of full to an eighth of the
    resolution (32/16/8/4 for CIFAR). `diversity` is λ, to be kept around 1/channels or below.
    Ablations: −D is diversity=0, −H is heritage=False. `space="auto"` iterates in z-space unless
    the features are much larger than the middle widths, or a kernel needs y.

    Examples:
        >>> from equilibria.models.mopteq.models import mopteq
        >>> model = mopteq(channels=8, widths=(4, 4), scales=(1, 2), in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    check_choice(("auto", "y", "z"), space=space)
    check_choice(INPUT_TERMS, kernel=kernel)
    coupling = take_options(options, HeritageDiversity)
    branches = take_options(options, branch_classifier)

    def cell(W: list[LinearOperator], U: list[LinearOperator], fused: Fusion) -> Cell:
        lifted = MOptEqCell(
            [INPUT_TERMS[kernel](operator, bias=bias) for operator in U],
            HeritageDiversity(W, diversity=diversity, scales=scales, **coupling),
            fusion=fused,
            **options,
        )
        in_y = kernel != "linear" or features_are_large(channels, widths, scales)
        if space == "y" or (space == "auto" and in_y):
            return lifted
        return MOptEqFeatureCell(lifted)

    return branch_classifier(
        cell, channels=channels, widths=widths, scales=scales, fusion=fusion, **branches
    )
