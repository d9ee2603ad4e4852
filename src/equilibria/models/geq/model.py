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
from equilibria.models.mopteq.branches import BranchCell, branch_input, check_branches
from equilibria.models.registry import with_options_of
from equilibria.operators import Conv2d, Dense
from equilibria.registry import check_choice

Kernel = Literal["gaussian", "polynomial", "sigmoid"]

KERNEL_OPTIONS = {
    "gaussian": ("hidden", "zeta_hidden", "channel_split", "patch", "gamma"),
    "polynomial": ("degree", "rho", "form"),
    "sigmoid": ("rho", "form"),
}
"""Options of `geq` that apply to some kernels only."""


class GEQCell(BranchCell):
    """GEQ's cell, in every branch y = σ(Wᵀm) with m_p = β_p (Ux + b − Wy)_p W_h W_hᵀ per patch p.

    β_p is the attention weight of the patch (GEQ, Eqs. 6 and 16). The feature is y.

    Args:
        energy: A `GaussianKernel`, or `Branches` of them.
        activation: σ.
        fusion: How features of branches are joined (see `BranchCell`).
        alpha: Weight of the new iterate in a step, in (0, 1].
        damping: Length of the proximal gradient step, in (0, 1].

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
        """Return the attention weight β of every patch.

        Args:
            state: State y.
            context: Result of the cell's `inject` for the input.

        Returns:
            One map per branch, shape (B, groups of channels, patch rows, patch columns).
        """
        kernels = self.kernels()
        parts = context.parts.values() if isinstance(self.energy, Branches) else (context,)
        triples = zip(kernels, state_tensors(state), parts, strict=True)
        return tuple(kernel.attention(y, part) for kernel, y, part in triples)

    def kernels(self) -> list[GaussianKernel]:
        """Return the kernel of each branch."""
        terms = self.energy.branches() if isinstance(self.energy, Branches) else [self.energy]
        kernels = [term for term in terms if isinstance(term, GaussianKernel)]
        if len(kernels) < len(terms):
            kinds = ", ".join(type(term).__name__ for term in terms)
            raise TypeError(f"GEQCell needs a GaussianKernel or Branches of them, got {kinds}")
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
    """Build a GEQ classifier: parallel branches at several scales, averaged.

    The hidden objective of a branch is ½‖y‖² plus a kernel energy of its state y and the input x,
    over y ≥ 0 for ReLU; by default that is the `GaussianKernel` of Ux + b − Wy.

    Args:
        channels: Channels of y.
        widths: Middle widths (rows of W), one per branch.
        scales: Pooling of the input, one per branch; image sides must be multiples of the largest.
        kernel: "gaussian"; "polynomial" and "sigmoid" are the other models of Table 4, whose
            energies also have the term −½‖Wy‖².
        hidden: Columns of W_h; None for no W_h.
        channel_split: Channels of a patch (see `GaussianKernel`).
        patch: Side of a patch (see `GaussianKernel`).
        gamma: Kernel scale γ, or how it is estimated (see `GaussianKernel`).
        degree: Degree of the polynomial kernel.
        rho: Option of `PolynomialKernel` and `SigmoidKernel`.
        form: Option of `PolynomialKernel` and `SigmoidKernel`.
        kernel_size: Side of W's convolution kernel.
        input_kernel_size: Side of U's convolution kernel.
        activation: σ.
        damping: Length of the proximal gradient step, in (0, 1].
        bias: Whether there is a bias b.
        norm: How norms are controlled: "bound" (proven), "estimate", or None.
        zeta: Upper bound on ‖W‖. With norm="bound" the map is a contraction if
            zeta · zeta_hidden < 1.
        zeta_hidden: Upper bound on ‖W_h‖.
        init_scale: Factor of W's initial weights.
        image: Options of `image_classifier`.

    Raises:
        ValueError: If an option belongs to another kernel, or sizes do not fit each other.

    Examples:
        >>> from equilibria.models.geq.model import geq
        >>> model = geq(channels=8, widths=(8,), scales=(1,), hidden=None, in_channels=1)
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    _check_kernel_options(kernel, locals())
    check_branches(widths, scales)

    if kernel == "gaussian" and hidden is not None and patch is None:
        raise ValueError(
            f"hidden={hidden} needs patches of a fixed size, got patch=None; set patch, or "
            "hidden=None"
        )

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
                gamma=copy.deepcopy(gamma),  # each branch has separate statistics
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


def _check_kernel_options(kernel: str, options: Mapping[str, object]) -> None:
    """Raise a ValueError for options of other kernels, which would have no effect."""
    check_choice(KERNEL_OPTIONS, kernel=kernel)
    defaults = inspect.signature(geq).parameters
    for name in itertools.chain(*KERNEL_OPTIONS.values()):
        if name not in KERNEL_OPTIONS[kernel] and options[name] != defaults[name].default:
            owners = [owner for owner, names in KERNEL_OPTIONS.items() if name in names]
            raise ValueError(
                f"{name} belongs to kernel={' or '.join(map(repr, owners))}, got kernel={kernel!r}"
            )
