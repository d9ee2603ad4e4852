"""GEQ: equilibria whose input acts through a Gaussian kernel, an attention over patches.

"GEQ: Gaussian Kernel Inspired Equilibrium Models", Sections 3.1, 3.5 and 4.1, Appendices A.1, A.7.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.state import state_tensors
from equilibria.energies import Branches, Energy, Quadratic
from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.kernel_scale import KernelScale
from equilibria.energies.kernels import Form, PolynomialKernel, SigmoidKernel
from equilibria.models.base import EquilibriumClassifier, image_classifier
from equilibria.models.blocks import small
from equilibria.models.mopteq.branches import BranchCell, branch_input, checked_branches
from equilibria.models.registry import with_options_of
from equilibria.operators import Conv2d, Dense
from equilibria.registry import check_choice

Kernel = Literal["gaussian", "polynomial", "sigmoid"]

OWN_OPTIONS = {
    "gaussian": ("hidden", "zeta_hidden", "channel_split", "patch", "gamma"),
    "polynomial": ("degree", "rho", "form"),
    "sigmoid": ("rho", "form"),
}
"""The options that only some kernels have."""


class GEQCell(BranchCell):
    """y = σ(Wᵀm), m_p = β_p (Ux + b − Wy)_p W_h W_hᵀ, in every branch (Eqs. 6 and 16).

    The energy is a `GaussianKernel`, or `Branches` of them. The feature is y itself.

    Examples:
        >>> model = eq.create_model("geq-small", in_channels=1)
        >>> isinstance(model.layer.cell, eq.models.GEQCell)
        True
    """

    remedy = (
        "set damping to 1/(1 + (‖W‖‖W_h‖)²) or less, which lowers the objective at every step, or "
        "bound the norms with norm='bound' and zeta below 1"
    )

    def attention(self, state: State, context: Context) -> tuple[Tensor, ...]:
        """β of every patch: per branch a map (batch, groups of channels, rows, columns)."""
        kernels = self.kernels()
        parts = context.parts.values() if isinstance(self.energy, Branches) else (context,)
        triples = zip(kernels, state_tensors(state), parts, strict=True)
        return tuple(kernel.attention(y, part) for kernel, y, part in triples)

    def kernels(self) -> list[GaussianKernel]:
        """The kernel of each branch."""
        terms = self.energy.branches() if isinstance(self.energy, Branches) else [self.energy]
        kernels = [term for term in terms if isinstance(term, GaussianKernel)]
        if len(kernels) < len(terms):
            raise TypeError("GEQCell takes a GaussianKernel, or Branches of them")
        return kernels


@with_options_of(image_classifier)
def geq(
    *,
    channels: int = 32,
    widths: Sequence[int] = (32, 32),
    scales: Sequence[int] = (1, 2),
    kernel: Kernel = "gaussian",
    hidden: int | None = 64,
    channel_split: int = 8,
    patch: int | None = 2,
    gamma: str | float | KernelScale = "running",
    degree: int = 2,
    rho: float = 0.1,
    form: Form = "scaled",
    kernel_size: int = 3,
    input_kernel_size: int = 3,
    activation: str | Activation = "relu",
    damping: float = 1.0,
    bias: bool = True,
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    zeta_hidden: float = 1.0,
    init_scale: float = 0.5,
    **image: Any,
) -> EquilibriumClassifier:
    """Parallel GEQs at several scales, averaged; `widths` are the middle widths, one a branch.

    A branch of scale s works on the input pooled by s; images must be multiples of the largest.
    hidden: the columns of W_h; None for no W_h. norm="bound" keeps ‖W‖ ≤ zeta, ‖W_h‖ ≤
    zeta_hidden, and the map contracts where their product is below 1. `GaussianKernel` explains
    the patches and gamma.

    kernel="polynomial" (with `degree`) and "sigmoid" are the other models of Table 4, with
    −½‖Wy‖² beside the kernel; `rho` and `form` are those of `PolynomialKernel`, `SigmoidKernel`.

    Examples:
        >>> from equilibria.models.geq.model import geq
        >>> model = geq(channels=8, widths=(8,), scales=(1,), hidden=None, in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    _refuse_foreign_options(kernel, locals())
    checked_branches(widths, scales)

    if kernel == "gaussian" and hidden is not None and patch is None:
        raise ValueError("hidden needs patches of a known size: set patch, or hidden=None")

    def term(width: int, scale: int, W: Conv2d) -> Energy:
        if kernel == "gaussian":
            W_h = None
            if hidden is not None and patch is not None:
                W_h = Dense(channel_split * patch**2, hidden, norm=norm, zeta=zeta_hidden)
            return GaussianKernel(
                branch_input(channels, width, input_kernel_size, scale),
                W,
                W_h,
                bias=bias,
                channel_split=channel_split,
                patch=patch,
                gamma=copy.deepcopy(gamma),  # a statistic of its own in each branch
            )
        U = branch_input(channels, channels, input_kernel_size, scale)
        if kernel == "sigmoid":
            return SigmoidKernel(U, bias, rho=rho, form=form) + Quadratic(W.T)
        return PolynomialKernel(U, degree, bias, rho=rho, form=form) + Quadratic(W.T)

    terms: list[Energy] = []
    for width, scale in zip(widths, scales, strict=True):
        W = small(Conv2d(channels, width, kernel_size, norm=norm, zeta=zeta), init_scale)
        terms.append(term(width, scale, W))

    cell = GEQCell if kernel == "gaussian" else BranchCell
    energy = terms[0] if len(terms) == 1 else Branches(terms)
    return image_classifier(cell(energy, activation, damping=damping), channels, **image)


def _refuse_foreign_options(kernel: str, given: Mapping[str, object]) -> None:
    """An option of another kernel would be ignored in silence."""
    check_choice(OWN_OPTIONS, kernel=kernel)
    defaults = inspect.signature(geq).parameters
    for name in itertools.chain(*OWN_OPTIONS.values()):
        if name not in OWN_OPTIONS[kernel] and given[name] != defaults[name].default:
            owners = [owner for owner, names in OWN_OPTIONS.items() if name in names]
            raise ValueError(f"{name} belongs to kernel={' or '.join(map(repr, owners))}")
