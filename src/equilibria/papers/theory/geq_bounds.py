"""Lipschitz bounds of GEQ's branches: Proposition 3 and Remark 2.

A branch computes z = σ(Wᵀ diag(β)(Ux + b − Wz)). The projection W_h is counted as a part of W and
of U, which gives the same map: q_p = (Ux + b − Wz)_p W_h and β_p = e^{−γ‖q_p‖²} for patch p. The
input x is the input of the equilibrium layer, that is, the output of the stem.

Where a printed statement does not hold, the printed number and a corrected one are both given. The
proof of Proposition 3 uses ‖Wᵀ(Ux − Wz)‖ ≤ Bμ²; the correct bound is 2Bμ².
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.activations import get_activation
from equilibria.context.state import state_tensors
from equilibria.energies.gaussian import GaussianKernel, grid_dimensions
from equilibria.energies.kernel_scale import FixedScale, RunningScale
from equilibria.equilibrium import EquilibriumLayer
from equilibria.models.base import EquilibriumClassifier
from equilibria.models.geq.model import GEQCell

MAX_SLOPE = math.sqrt(2 / math.e)
"""Largest slope of e^{−t²}."""
MAX_CONCAVITY = 2 * math.exp(-1.5)
"""The eigenvalues of the kernel's Hessian in q are at least −MAX_CONCAVITY = −0.446 and at most 1,
for every γ."""
TIGHT: dict[str, Any] = {"tolerance": 1e-10, "max_iterations": 1000}


@dataclass(frozen=True)
class BranchFacts:
    """One branch of a GEQ with its equilibria at given inputs.

    `branch_facts` and `layer_facts` compute it.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> branch, _ = theory.branch_facts(model, torch.rand(3, 1, 8, 8))
        >>> len(branch.betas), 0 < branch.beta_max <= 1
        (3, True)
    """

    layer: EquilibriumLayer
    """Layer that contains only this branch."""
    kernel: GaussianKernel
    """Energy term of the branch."""
    inputs: Tensor
    """Inputs of the equilibrium layer."""
    states: Tensor
    """Equilibria of the branch, one per input."""
    injected: Tensor
    """Patches of Ux + b times W_h for every input, shape (inputs, entries)."""
    betas: Tensor
    """Attention weight β of every patch, shape (inputs, patches)."""
    gamma: float
    """Scale γ of the Gaussian kernel."""
    norm_w: float
    """Upper bound on the norm of the operator W, including W_h."""
    norm_u: float
    """Upper bound on the norm of the input operator U, including W_h."""

    @property
    def beta_max(self) -> float:
        """Largest attention weight β of all inputs and patches."""
        return float(self.betas.max())

    @property
    def radius(self) -> float:
        """Largest norm B of an input or an equilibrium."""
        norms = [part.flatten(1).norm(dim=1).max() for part in (self.inputs, self.states)]
        return float(max(norms))

    @property
    def mu(self) -> float:
        """Larger norm μ = max(‖W‖, ‖U‖) of the branch's operators."""
        return max(self.norm_w, self.norm_u)

    @property
    def largest_patch(self) -> float:
        """Largest norm of a patch q_p = (Ux + b − Wy)_p W_h, over all inputs.

        It is infinite if any attention weight is zero in floating point.
        """
        smallest = float(self.betas.min())
        return math.sqrt(-math.log(smallest) / self.gamma) if smallest > 0 else math.inf

    def apply_W(self, y: Tensor) -> Tensor:  # noqa: N802 - the paper's symbol
        """Apply the operator W of the branch, including W_h.

        Args:
            y: Batch of states of the branch.

        Returns:
            Wy, shape (B, entries).
        """
        mapped: Tensor = self.kernel.W(y, self.kernel.W.weights(tuple(y.shape[1:])))
        return projected(self.kernel, mapped)

    def apply_U(self, x: Tensor) -> Tensor:  # noqa: N802
        """Apply the input operator U of the branch, including W_h, without the bias.

        Args:
            x: Batch of inputs of the equilibrium layer.

        Returns:
            Ux, shape (B, entries).
        """
        mapped: Tensor = self.kernel.input.U(x)
        return projected(self.kernel, mapped)


def branch_facts(model: EquilibriumClassifier, images: Tensor) -> list[BranchFacts]:
    """Solve every branch of a GEQ at given images, in double precision.

    Args:
        model: A GEQ with ReLU, whose γ does not depend on the input. It is not modified.
        images: Batch of images, shape (B, C, H, W).

    Returns:
        One entry per branch.

    Raises:
        TypeError: If the cell of the model is not a `GEQCell`.
        ValueError: If the activation is not ReLU, or if γ depends on the input.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> len(theory.branch_facts(model, torch.rand(3, 1, 8, 8)))
        2
    """
    model = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        inputs = model.injected(images.double())
    assert isinstance(inputs, Tensor)
    return layer_facts(model.layer, inputs)


def layer_facts(layer: EquilibriumLayer, inputs: Tensor) -> list[BranchFacts]:
    """Solve every branch of a GEQ layer at given inputs. The branches are independent.

    Args:
        layer: Layer with a `GEQCell`, in evaluation mode and in double precision.
        inputs: Batch of inputs of the layer, in double precision.

    Returns:
        One entry per branch.

    Raises:
        TypeError: If the cell of the layer is not a `GEQCell`.
        ValueError: If the activation is not ReLU, or if γ depends on the input.

    Examples:
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> images = torch.rand(3, 1, 8, 8, dtype=torch.float64)
        >>> inputs = model.double().eval().injected(images).detach()
        >>> from equilibria.papers.theory.geq_bounds import layer_facts
        >>> branch, _ = layer_facts(model.layer, inputs)
        >>> len(branch.states)
        3
    """
    cell = layer.cell
    if not isinstance(cell, GEQCell):
        raise TypeError(f"expected a GEQCell, whose kernel is Gaussian, got {type(cell).__name__}")
    if cell.activation != get_activation("relu"):
        raise ValueError(f"the activation must be ReLU, as in the paper, got {cell.activation}")
    branches = []
    for kernel in cell.kernels():
        if not isinstance(kernel.scale, FixedScale | RunningScale):
            raise ValueError(
                "no bound is known, because γ depends on the input: train with "
                'gamma="running" or a number'
            )
        branch = GEQCell(kernel, cell.activation)
        single = EquilibriumLayer(branch, **TIGHT)
        solution = single.solve(inputs)
        (states,) = state_tensors(solution.state)
        with torch.no_grad():
            (betas,) = branch.attention(solution.state, solution.context)
            hidden = 1.0
            if kernel.W_h is not None:
                hidden = float(kernel.W_h.norm_bound((kernel.W_h.in_features,)))
            branches.append(
                BranchFacts(
                    layer=single,
                    kernel=kernel,
                    inputs=inputs,
                    states=states,
                    injected=projected(kernel, solution.context["c"]),
                    betas=betas.flatten(1),
                    gamma=float(solution.context["gamma"]),
                    norm_w=hidden * float(kernel.W.norm_bound(tuple(states.shape[1:]))),
                    norm_u=hidden * float(kernel.input.U.norm_bound(tuple(inputs.shape[1:]))),
                )
            )
    return branches


def projected(kernel: GaussianKernel, r: Tensor) -> Tensor:
    """Multiply the patches of a feature map by the matrix W_h of a Gaussian kernel.

    Args:
        kernel: Energy term of the branch. Patches are returned unchanged if it has no W_h.
        r: Batch of feature maps.

    Returns:
        The products, one row per sample, shape (B, entries).
    """
    patches = kernel.patches.split(r)
    if kernel.W_h is None:
        return patches.flatten(1)
    grid = patches.shape[: grid_dimensions(patches)]
    (weight,) = kernel.W_h.weights()
    return F.linear(patches.reshape(*grid, weight.shape[1]), weight).flatten(1)


@dataclass(frozen=True)
class LipschitzBounds:
    """Lipschitz bounds L of a GEQ branch: ‖z(x₁) − z(x₂)‖ ≤ L‖x₁ − x₂‖ for its equilibria z(x).

    A bound whose assumptions do not hold is infinite.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> branch, _ = theory.branch_facts(model, torch.rand(3, 1, 8, 8))
        >>> bounds = theory.lipschitz_bounds(branch)
        >>> bounds.measured <= bounds.certified
        True
    """

    printed: float
    """GEQ's Eq. 11, with μ = max(‖W‖, ‖U‖) and the values of β_max and B at the inputs."""
    opteq: float
    """GEQ's Eq. 12, for an OptEq with the same μ."""
    corrected: float
    """k‖W‖‖U‖/(1 − k‖W‖²) with k = min(1, β_max + 0.858 √γ max‖q_p‖). It holds for the given
    inputs."""
    certified: float
    """‖W‖‖U‖/(1 − 0.446‖W‖²). It holds for all inputs, by strong convexity, up to
    ‖W‖ = 1.497."""
    measured: float
    """Largest measured quotient ‖z(x₁) − z(x₂)‖/‖x₁ − x₂‖."""


def lipschitz_bounds(facts: BranchFacts, iterations: int = 8) -> LipschitzBounds:
    """Evaluate the Lipschitz bounds of GEQ's Proposition 3 for a branch, and search a lower bound.

    Args:
        facts: The branch with its equilibria, from `branch_facts` or `layer_facts`.
        iterations: Number of power iterations of the search.

    Returns:
        The bounds and the largest measured quotient.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> branch, _ = theory.branch_facts(model, torch.rand(3, 1, 8, 8))
        >>> 0 < theory.lipschitz_bounds(branch, iterations=4).measured
        True
    """
    W, U = facts.norm_w, facts.norm_u
    kernel = min(1.0, facts.beta_max + MAX_SLOPE * math.sqrt(facts.gamma) * facts.largest_patch)
    return LipschitzBounds(
        printed=printed_lipschitz(facts.mu, facts.beta_max, facts.gamma, facts.radius),
        opteq=opteq_lipschitz(facts.mu),
        corrected=quotient(kernel * W * U, 1 - kernel * W**2),
        certified=quotient(W * U, 1 - MAX_CONCAVITY * W**2),
        measured=measured_lipschitz(facts.layer, facts.inputs, iterations),
    )


def printed_lipschitz(mu: float, beta_max: float, gamma: float, radius: float) -> float:
    """Evaluate GEQ's Lipschitz bound as printed, Eq. 11: a/(1 − a), a = β_max μ² + √γ B μ³.

    It bounds the Lipschitz constant of a branch's equilibrium z(x) in the input x of the layer. The
    branch applies the operator W to the state and U to the input, and weights each patch q of
    Ux + b − Wz by β = e^{−γ‖q‖²}.

    Args:
        mu: μ, the larger of the operator norms ‖W‖ and ‖U‖.
        beta_max: Largest weight β of a patch.
        gamma: γ of the Gaussian kernel.
        radius: B, the largest norm of an input or an equilibrium.

    Returns:
        The bound. It is infinite if a ≥ 1.

    Examples:
        >>> from equilibria.papers.theory.geq_bounds import printed_lipschitz
        >>> printed_lipschitz(mu=0.5, beta_max=0.5, gamma=1.0, radius=1.0)  # a = 1/4
        0.3333333333333333
    """
    a = beta_max * mu**2 + math.sqrt(gamma) * radius * mu**3
    return quotient(a, 1 - a)


def opteq_lipschitz(mu: float) -> float:
    """Evaluate OptEq's Lipschitz bound as printed in GEQ, Eq. 12: μ/(1 − μ²).

    It bounds the Lipschitz constant of the equilibrium in the input of the layer.

    Args:
        mu: μ, the larger norm of the operators W (on the state) and U (on the input).

    Returns:
        The bound. It is infinite if μ ≥ 1.

    Examples:
        >>> from equilibria.papers.theory.geq_bounds import opteq_lipschitz
        >>> opteq_lipschitz(1.0)
        inf
    """
    return quotient(mu, 1 - mu**2)


def remark_2(beta_max: float, gamma: float, radius: float) -> bool:
    """Check GEQ's Remark 2: assumptions under which its bound (Eq. 11) is below OptEq's (Eq. 12).

    Args:
        beta_max: Largest attention weight β = e^{−γ‖q‖²} of a patch q.
        gamma: γ of the Gaussian kernel.
        radius: B, the largest norm of an input or an equilibrium.

    Returns:
        Whether β_max < 0.8, B < 1, and √γ < 0.2.

    Examples:
        >>> from equilibria.papers.theory.geq_bounds import remark_2
        >>> remark_2(beta_max=0.7, gamma=0.01, radius=0.5)
        True
    """
    return beta_max < 0.8 and radius < 1 and math.sqrt(gamma) < 0.2


def measured_lipschitz(
    layer: EquilibriumLayer, inputs: Tensor, iterations: int = 8, step: float = 1e-4
) -> float:
    """Search for the largest quotient ‖z(x₁) − z(x₂)‖/‖x₁ − x₂‖ of equilibria z at inputs x.

    The search covers all pairs of inputs and a neighborhood of every input. In the neighborhood,
    power iteration on JᵀJ improves the direction. Every quotient is computed from two equilibria.
    The result is therefore a lower bound on the Lipschitz constant, up to the solver's tolerance.

    Args:
        layer: Layer to search.
        inputs: Batch of inputs of the layer.
        iterations: Number of power iterations.
        step: Distance from an input at which its neighborhood is sampled.

    Returns:
        The largest measured quotient.

    Examples:
        >>> layer = eq.EquilibriumLayer(lambda z, x: 0.5 * z + x, tolerance=1e-10)  # z* = 2x
        >>> x = torch.rand(3, 4, dtype=torch.float64)
        >>> from equilibria.papers.theory.geq_bounds import measured_lipschitz
        >>> round(measured_lipschitz(layer, x), 4)
        2.0
    """

    def outputs(x: Tensor) -> Tensor:
        z: Tensor = layer(x)
        return z.flatten(1)

    x = inputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        here = outputs(x)
    z = here.detach()
    distances = torch.pdist(inputs.flatten(1))
    pairs = torch.pdist(z)[distances > 0] / distances[distances > 0]
    best = float(pairs.max()) if pairs.numel() else 0.0
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs)
    for _ in range(iterations):
        sizes = direction.flatten(1).norm(dim=1).clamp_min(torch.finfo(inputs.dtype).tiny)
        direction = direction / sizes.reshape(-1, *[1] * (inputs.dim() - 1))
        with torch.no_grad():
            moved = outputs(inputs + step * direction) - z
        length = (step * direction).flatten(1).norm(dim=1)
        best = max(best, float((moved.norm(dim=1) / length).nan_to_num(0).max()))
        (direction,) = torch.autograd.grad(here, x, moved / step, retain_graph=True)
    return best


def quotient(above: float, below: float) -> float:
    """Divide two numbers; return infinity if the denominator is not positive.

    Args:
        above: Numerator.
        below: Denominator.
    """
    return above / below if below > 0 else math.inf
