"""POptEqs and MOptEqs as image classifiers, and the measurements of their paper.

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
    check_branches,
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
"""Term by which g(x) enters a branch, by the name of its kernel."""
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
    """Build a convolutional classifier with several branches of states yᵢ and features zᵢ = Wᵢᵀyᵢ.

    Args:
        make_cell: Called with the operators W and U of all branches and the fusion.
        channels: Channels of each zᵢ.
        widths: Middle widths (channels of yᵢ), one per branch.
        scales: Pooling of the input, one number per branch.
        kernel_size: Side of W's kernels.
        input_kernel_size: Side of U's kernels.
        fusion: How branches are joined: "average", "sum", "conv" (3×3 convolution over all
            branches) or "none" (concatenation).
        norm: How ‖Wᵢ‖ is controlled: "bound" (proven), "estimate", or None.
        zeta: Upper bound on ‖Wᵢ‖.
        init_scale: Factor of Wᵢ's initial weights.
        image: Options of `image_classifier`.
    """
    check_branches(widths, scales)
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
    """Build a convolutional POptEqs classifier.

    Notes:
        The paper leaves open where the fusion is. The 276 K parameters in Table 1 fit both places
        (278 K) with a convolution from 96 to 96 channels. A convolution of the equilibria from 96
        to 32 channels would have 222 K.

    Args:
        bias: Whether there are biases bᵢ.
        fused: Place of the fusion: "output" joins the equilibria (Appendix A.1); "map" is inside
            the map, in the place of heritage and diversity in MOptEqs, for branches of one
            resolution.
        options: Options of `branch_classifier`, `image_classifier` and `POptEqCell`, such as
            channels, widths, scales and fusion.

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
    """Build a POptEqs classifier with the fusion inside the map."""
    defaults = inspect.signature(branch_classifier).parameters
    names = ("channels", "fusion")
    channels, fusion = (branches.get(name, defaults[name].default) for name in names)
    scales = branches.get("scales", defaults["scales"].default)
    if any(scale != 1 for scale in scales):
        raise ValueError(f"fused='map' needs scales of 1 only, got {tuple(scales)}")

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
    """Compute logits for perturbed features g(x) − δ with ‖δ‖∞ ≤ ε (MOptEqs, Figure 3a).

    Args:
        model: MOptEqs classifier; for "binomial" and "uniform" any classifier.
        images: Images, shape (B, C, H, W).
        epsilon: ε.
        branch: Branch from whose equilibrium δ is reconstructed.
        direction: "reconstructed", or random: "binomial" (±ε) or "uniform".
        generator: Random generator.

    Returns:
        Logits, shape (B, classes).

    Raises:
        TypeError: If the direction is "reconstructed" and the model is not a MOptEqs.

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
        uniform = 2 * torch.rand(feature.shape, generator=generator).to(feature) - 1
        delta = epsilon * (uniform if direction == "uniform" else uniform.sign())
    logits: Tensor = model.head(model.layer(feature - delta))
    return logits


def _reconstructed(
    model: EquilibriumClassifier, feature: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    cell = model.layer.cell
    if not isinstance(cell, MOptEqCell | MOptEqFeatureCell):
        raise TypeError(
            f"direction='reconstructed' needs a MOptEqs model, got the cell {type(cell).__name__}"
        )
    solution = model.layer.solve(feature)
    y = solution.state
    if isinstance(cell, MOptEqFeatureCell):
        y, cell = cell.lift(y, solution.context), cell.lifted
    return reconstructed_perturbations(cell, y, epsilon)


def branch_features(cell: Cell, state: State, context: Context) -> list[Tensor]:
    """Return the feature zᵢ of every branch i, at the resolution of the branch.

    Args:
        cell: Cell of a POptEqs, MOptEqs or GEQ model.
        state: State of the cell.
        context: Result of the cell's `inject` for the input, such as `solution.context`.

    Returns:
        One tensor per branch, shape (B, channels, H/scale, W/scale).

    Raises:
        TypeError: If the cell has no branches.

    Examples:
        >>> model = eq.create_model("mopteq-small", in_channels=1)
        >>> from equilibria.models.mopteq.models import branch_features
        >>> solution = model.solve(torch.rand(1, 1, 8, 8))
        >>> branches = branch_features(model.layer.cell, solution.state, solution.context)
        >>> [tuple(z.shape[2:]) for z in branches]
        [(8, 8), (8, 8), (8, 8)]
    """
    if isinstance(cell, MOptEqFeatureCell):
        return list(state_tensors(state))
    if isinstance(cell, BranchCell):
        return list(cell.features(state, context))
    raise TypeError(f"{type(cell).__name__} has no branches; use a POptEqs, MOptEqs or GEQ model")


def heritage_diversity_loss(features: Sequence[Tensor], strength: float) -> Tensor:
    """Compute the training loss λD − H: λ times diversity minus heritage of all neighbors.

    Section 3.2 of MOptEqs adds γ times this loss to the training loss of a model, instead of
    including heritage and diversity (HH&D) in the hidden objective. The printed sign, γ(H − λD),
    would reward what it should penalize.

    Args:
        features: Features of the branches, as `branch_features` returns them.
        strength: λ, the weight of the diversity D.

    Returns:
        The loss per sample, shape (B,).

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
    """Build a convolutional MOptEqs classifier: branches coupled by heritage and diversity.

    Branch i has the state yᵢ and the feature zᵢ = Wᵢᵀyᵢ.

    Args:
        channels: Channels of each zᵢ.
        widths: Middle widths (channels of yᵢ), one per branch.
        scales: Pooling of the input, one number per branch. (1, 1, 1) is the single-view model;
            (1, 2, 4, 8) has maps of 32, 16, 8 and 4 pixels a side for CIFAR.
        bias: Whether there are biases bᵢ.
        kernel: How g(x) enters a branch: "linear", "polynomial" or "sigmoid".
        diversity: λ, the weight of the diversity, at most about 1/channels; 0 is the ablation −D.
        fusion: How branches are joined: "average", "sum", "conv" or "none".
        space: Space of the state: "y", "z", or "auto": z unless it is much larger than y or the
            kernel needs y.
        options: Options of `HeritageDiversity` (heritage=False is the ablation −H), `MOptEqCell`,
            `branch_classifier` and `image_classifier`.

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
