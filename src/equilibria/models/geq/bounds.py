"""What GEQ's paper proves of a branch, as numbers: Proposition 3 and Remark 2; and what it needs.

A branch z = σ(Wᵀ diag(β)(Ux + b − Wz)) is read with W_h in W and in U, which changes nothing:
q_p = (Ux + b − Wz)_p W_h, β_p = e^{−γ‖q_p‖²}. x is what the equilibrium layer takes, the image
behind the stem. Proposition 4 is in `similarity.py`, Proposition 2 in `generalization.py`. Where a
statement does not hold as it is printed, the printed number and a corrected one stand beside each
other; the proof of Proposition 3 takes ‖Wᵀ(Ux − Wz)‖ for at most Bμ², and it is 2Bμ².
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
from equilibria.context import state_tensors
from equilibria.energies.gaussian import GaussianKernel, grid_dimensions
from equilibria.energies.kernel_scale import FixedScale, RunningScale
from equilibria.equilibrium import EquilibriumLayer
from equilibria.models.base import EquilibriumClassifier
from equilibria.models.geq.model import GEQCell

STEEPEST = math.sqrt(2 / math.e)
"""The largest slope of e^{−t²}."""
LEAST_CURVATURE = 2 * math.exp(-1.5)
"""The Hessian of the kernel in q has eigenvalues in [−0.446, 1], for every γ."""
TIGHT: dict[str, Any] = {"tolerance": 1e-10, "max_iterations": 1000}


@dataclass(frozen=True)
class BranchFacts:
    """A branch with its equilibria at some inputs; norms include W_h."""

    layer: EquilibriumLayer
    kernel: GaussianKernel
    inputs: Tensor
    states: Tensor
    injected: Tensor
    """Ux + b of every input, its patches times W_h; shape (inputs, numbers)."""
    betas: Tensor
    """β of every patch, shape (inputs, patches)."""
    gamma: float
    norm_w: float
    norm_u: float

    @property
    def beta_max(self) -> float:
        return float(self.betas.max())

    @property
    def radius(self) -> float:
        """B: the largest norm of an input or of an equilibrium."""
        norms = [part.flatten(1).norm(dim=1).max() for part in (self.inputs, self.states)]
        return float(max(norms))

    @property
    def mu(self) -> float:
        return max(self.norm_w, self.norm_u)

    @property
    def largest_patch(self) -> float:
        """max ‖q_p‖; ∞ where a β is zero in floating point."""
        least = float(self.betas.min())
        return math.sqrt(-math.log(least) / self.gamma) if least > 0 else math.inf

    def apply_W(self, y: Tensor) -> Tensor:  # noqa: N802 - the paper's symbol
        mapped: Tensor = self.kernel.W(y, self.kernel.W.weights(tuple(y.shape[1:])))
        return projected(self.kernel, mapped)

    def apply_U(self, x: Tensor) -> Tensor:  # noqa: N802
        mapped: Tensor = self.kernel.input.U(x)
        return projected(self.kernel, mapped)


def branch_facts(model: EquilibriumClassifier, images: Tensor) -> list[BranchFacts]:
    """Every branch of a GEQ, in double precision, with its equilibria at some images."""
    model = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        inputs = model.injected(images.double())
    assert isinstance(inputs, Tensor)
    return layer_facts(model.layer, inputs)


def layer_facts(layer: EquilibriumLayer, inputs: Tensor) -> list[BranchFacts]:
    """The branches of a layer at some of its inputs. Branches do not see each other."""
    cell = layer.cell
    if not isinstance(cell, GEQCell):
        raise TypeError(f"these bounds are of GEQ's Gaussian kernel, not of {type(cell).__name__}")
    if cell.activation != get_activation("relu"):
        raise ValueError("these bounds are those of ReLU, which the paper's GEQ has")
    found = []
    for kernel in cell.kernels():
        if not isinstance(kernel.scale, FixedScale | RunningScale):
            raise ValueError(
                "γ depends on the input here, and then no bound is known: train with "
                'gamma="running" or with a number'
            )
        branch = GEQCell(kernel, cell.activation)
        one = EquilibriumLayer(branch, **TIGHT)
        solution = one.solve(inputs)
        (states,) = state_tensors(solution.state)
        with torch.no_grad():
            (betas,) = branch.attention(solution.state, solution.context)
            hidden = 1.0
            if kernel.W_h is not None:
                hidden = float(kernel.W_h.norm_bound((kernel.W_h.in_features,)))
            found.append(
                BranchFacts(
                    layer=one,
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
    return found


def projected(kernel: GaussianKernel, r: Tensor) -> Tensor:
    """The patches of a map times W_h, of each sample as one vector."""
    patches = kernel.patches.split(r)
    if kernel.W_h is None:
        return patches.flatten(1)
    grid = patches.shape[: grid_dimensions(patches)]
    (weight,) = kernel.W_h.weights()
    return F.linear(patches.reshape(*grid, weight.shape[1]), weight).flatten(1)


@dataclass(frozen=True)
class LipschitzBounds:
    """‖z(x₁) − z(x₂)‖ ≤ L‖x₁ − x₂‖ of a branch, by several L; ∞ where a bound does not hold."""

    printed: float
    """Eq. 11, with μ = max(‖W‖, ‖U‖) and what is measured at the inputs."""
    opteq: float
    """Eq. 12, of an OptEq with the same μ."""
    corrected: float
    """k‖W‖‖U‖/(1 − k‖W‖²), k = min(1, β_max + 0.858 √γ max‖q_p‖): for these inputs."""
    certified: float
    """‖W‖‖U‖/(1 − 0.446‖W‖²): for all inputs, by strong convexity, up to ‖W‖ = 1.497."""
    measured: float
    """The largest quotient that a search found."""


def lipschitz_bounds(facts: BranchFacts, iterations: int = 8) -> LipschitzBounds:
    """Proposition 3 of a branch, beside what a search measures."""
    W, U = facts.norm_w, facts.norm_u
    kernel = min(1.0, facts.beta_max + STEEPEST * math.sqrt(facts.gamma) * facts.largest_patch)
    return LipschitzBounds(
        printed=printed_lipschitz(facts.mu, facts.beta_max, facts.gamma, facts.radius),
        opteq=opteq_lipschitz(facts.mu),
        corrected=quotient(kernel * W * U, 1 - kernel * W**2),
        certified=quotient(W * U, 1 - LEAST_CURVATURE * W**2),
        measured=measured_lipschitz(facts.layer, facts.inputs, iterations),
    )


def printed_lipschitz(mu: float, beta_max: float, gamma: float, radius: float) -> float:
    """Eq. 11: a/(1 − a), a = β_max μ² + √γ B μ³."""
    a = beta_max * mu**2 + math.sqrt(gamma) * radius * mu**3
    return quotient(a, 1 - a)


def opteq_lipschitz(mu: float) -> float:
    """Eq. 12: μ/(1 − μ²)."""
    return quotient(mu, 1 - mu**2)


def remark_2(beta_max: float, gamma: float, radius: float) -> bool:
    """Whether Remark 2 speaks of these numbers: then Eq. 11 is below Eq. 12."""
    return beta_max < 0.8 and radius < 1 and math.sqrt(gamma) < 0.2


def measured_lipschitz(
    layer: EquilibriumLayer, inputs: Tensor, iterations: int = 8, step: float = 1e-4
) -> float:
    """The largest ‖z(x₁) − z(x₂)‖/‖x₁ − x₂‖ found: among all pairs of inputs, and near each.

    Near an input the direction is improved by power iteration on JᵀJ; every quotient is one of two
    equilibria, so that what is found is below the true constant, up to the tolerance of a solve.
    """

    def outputs(x: Tensor) -> Tensor:
        z: Tensor = layer(x)
        return z.flatten(1)

    x = inputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        here = outputs(x)
    z = here.detach()
    apart = torch.pdist(inputs.flatten(1))
    pairs = torch.pdist(z)[apart > 0] / apart[apart > 0]
    best = float(pairs.max()) if pairs.numel() else 0.0
    chance = torch.Generator().manual_seed(0)
    direction = torch.randn(inputs.shape, generator=chance, dtype=torch.float64).to(inputs)
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
    """∞ where what is below is not positive: a bound that does not hold."""
    return above / below if below > 0 else math.inf
