"""MOptEqs: branches of one or several resolutions, joined by heritage and diversity.

Ma et al., "Multi-branch Optimization Induced Equilibrium Networks": the architecture (Section 2.1)
and the Perturbation Enhanced strategy, PE (Section 2.2, Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.adjoints import GradientRule
from equilibria.context import Context, State, state_tensors
from equilibria.energies import (
    Branches,
    Energy,
    HeritageDiversity,
    Input,
    PolynomialKernel,
    SigmoidKernel,
    Sum,
    diversity,
    heritage,
)
from equilibria.energies.heritage_diversity import Sign
from equilibria.equilibrium import EquilibriumLayer
from equilibria.models.blocks import ImageStem
from equilibria.models.branches import (
    BranchCell,
    Fusion,
    branch_head,
    branch_input,
    branch_recurrence,
    checked_branches,
)
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.options import solver_from_options
from equilibria.operators import LinearOperator
from equilibria.solvers import Solver

Perturb = Literal["train", "always", "off"]


class MOptEqCell(BranchCell):
    """z̃ = W̃ᵀσ(W̃h(z̃) + Ũg(x) + b̃) (Eq. 6), in the variables yᵢ, zᵢ = Wᵢᵀyᵢ.

    `inputs` is how g(x) enters each branch (`Input`, or a kernel of GEQ's Table 5), `coupling` the
    terms H and D between neighbours. An equilibrium is a stationary point of Eq. 5.

    PE: branch i sees g(x) − δᵢ₋₁, where δᵢ = ε sign(Uᵢᵀyᵢ) (δ₀ = 0) is the perturbation that raises
    the objective of branch i most. pe="train": in training only; "always"; "off". A δ that changed
    at every step would make the iteration chatter: it is renewed in the first `perturb_for`
    iterations and then kept, so that the solve converges.
    """

    def __init__(
        self,
        inputs: Sequence[Energy],
        coupling: HeritageDiversity,
        *,
        activation: str | Activation = "relu",
        fusion: Fusion = "average",
        alpha: float = 1.0,
        pe: Perturb = "off",
        epsilon: float = 0.1,
        perturb_for: int = 5,
    ) -> None:
        if pe not in ("train", "always", "off"):
            raise ValueError(f"pe must be 'train', 'always' or 'off', not {pe!r}")
        if not epsilon >= 0:
            raise ValueError(f"epsilon must not be negative, not {epsilon}")
        if perturb_for < 1:
            raise ValueError(f"perturb_for must be at least 1, not {perturb_for}")
        if pe != "off" and not all(isinstance(term, Input) for term in inputs):
            raise ValueError("PE perturbs −⟨Ux + b, y⟩: use kernel='linear', or pe='off'")
        super().__init__(Branches(inputs) + coupling, activation, fusion=fusion, alpha=alpha)
        self.pe = pe
        self.epsilon = epsilon
        self.perturb_for = perturb_for
        if coupling.diversity and coupling.sign == "hard":
            self.remedy = (
                "the signs of the diversity term chatter at its kinks: use sign='smooth' or "
                "'freeze', or a smaller diversity"
            )

    @property
    def perturbs(self) -> bool:
        return self.pe == "always" or (self.pe == "train" and self.training)

    @property
    def refresh_until(self) -> int:  # type: ignore[override]
        return max(self.energy.refresh_until, self.perturb_for if self.perturbs else 0)

    @property
    def coupling(self) -> HeritageDiversity:
        assert isinstance(self.energy, Sum)
        term = self.energy.summands()[1]
        assert isinstance(term, HeritageDiversity)
        return term

    def inputs(self) -> list[Input]:
        """The terms by which g(x) enters each branch (those for which PE is defined)."""
        assert isinstance(self.energy, Sum)
        branches = self.energy.summands()[0]
        assert isinstance(branches, Branches)
        return [term for term in branches.branches() if isinstance(term, Input)]

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """zᵢ = Wᵢᵀyᵢ."""
        return self.coupling.features(state, context.parts[1])

    def inject(self, x: Tensor) -> Context:
        context = super().inject(x)
        if not self.perturbs:
            return context
        branches, coupling = context.parts
        # What δ is subtracted from; `c` is what the branch sees.
        kept = tuple(part.with_sample(clean=part["c"]) for part in branches.parts)
        return Context(parts=(Context(parts=kept), coupling))

    def refresh(self, state: State, context: Context) -> Context:
        """Signs and perturbations at a state."""
        branches, coupling = super().refresh(state, context).parts
        if not self.perturbs:
            return Context(parts=(branches, coupling))
        deltas = reconstructed_perturbations(self, state, self.epsilon)
        first, *rest = branches.parts
        perturbed = [
            part.with_sample(c=part["clean"] - term.U(delta))
            for term, part, delta in zip(self.inputs()[1:], rest, deltas, strict=False)
        ]
        return Context(parts=(Context(parts=(first, *perturbed)), coupling))

    def sign_flips(self, state: State, context: Context) -> Tensor:
        """How many signs of M are not at rest, per sample.

        Those that differ between a state and its image or, with sign="freeze", between the kept
        ones and those of the state.
        """
        part = context.parts[1]
        if self.coupling.sign == "freeze" and self.coupling.diversity:
            return self.coupling.kept_signs_that_changed(state, part)
        return self.coupling.sign_changes(state, self.step(state, context), part)


@torch.no_grad()
def reconstructed_perturbations(
    cell: MOptEqCell, state: State, epsilon: float
) -> tuple[Tensor, ...]:
    """δᵢ = ε sign(Uᵢᵀyᵢ) of every branch, in the space of g(x).

    g(x) − δᵢ is the feature of this distance at which the objective of branch i is largest
    (Section 2.2). Uᵢᵀ includes the transpose of the branch's pooling.
    """
    pairs = zip(cell.inputs(), state_tensors(state), strict=True)
    return tuple(epsilon * term.U.adjoint(y).sign() for term, y in pairs)


def perturbed_logits(
    model: EquilibriumClassifier, images: Tensor, epsilon: float, branch: int = 0
) -> Tensor:
    """The logits at g(x) − δ, δ reconstructed from the equilibrium of one branch (Figure 3a)."""
    if not isinstance(model.layer.cell, MOptEqCell):
        raise TypeError("reconstructed perturbations are those of a MOptEqs model")
    feature = model.stem(images)
    state = model.layer.solve(feature).state
    delta = reconstructed_perturbations(model.layer.cell, state, epsilon)[branch]
    logits: Tensor = model.head(model.layer(feature - delta))
    return logits


def heritage_diversity_loss(features: Tensor, branches: int, strength: float) -> Tensor:
    """λD − H over the loop of branches, per sample: the loss that may stand in for HH&D.

    Section 3.2 adds γ times it to the training loss of a model without HH&D, instead of putting it
    into the objective (the printed sign, γ(H − λD), would reward what it should penalise).
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
    fusion: Fusion | Literal["conv"] = "average",
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 0.5,
    solver: str | Solver[Any] = "auto",
    adjoint: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumClassifier:
    """A convolutional MOptEqs classifier: a middle width and a scale for each branch.

    scales=(1, 1, 1) is the single-view model; (1, 2, 4, 8) has branches of full to an eighth of the
    resolution (32/16/8/4 for CIFAR). `diversity` is λ, to be kept around 1/channels or below.
    Ablations: −D is diversity=0, −H is heritage=False.
    """
    checked_branches(widths, scales)
    W = [
        branch_recurrence(channels, width, kernel_size, norm=norm, zeta=zeta, init_scale=init_scale)
        for width in widths
    ]
    pairs = zip(widths, scales, strict=True)
    U = [branch_input(channels, width, input_kernel_size, scale) for width, scale in pairs]
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
    return EquilibriumClassifier(
        stem=ImageStem(
            in_channels, channels, depth=stem_depth, downsample=downsample, strides=stem_strides
        ),
        layer=EquilibriumLayer(
            cell=cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            adjoint=adjoint,
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
