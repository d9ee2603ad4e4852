"""Heritage and diversity between the features of neighboring branches.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models", Section 2.1, Eqs. 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from equilibria.context.context import Entry
from equilibria.context.state import sum_per_sample
from equilibria.operators import AveragePool, Identity, LinearOperator
from equilibria.operators.norm_control import has_tangent, is_wrapped
from equilibria.registry import check_choice, check_not_negative, check_positive

Sign = Literal["smooth", "freeze", "hard"]
Features = Sequence[Tensor]
"""Features zᵢ, one tensor per branch."""
Constants = Mapping[str, Entry]
"""Constants of a solve per pair of branches: t (sign="smooth") or the signs (sign="freeze")."""

MEAN_SQUARE_WEIGHT = 1.0
"""Weight of the mean square of all channels, which is added to that of each channel in t.

A channel that is weak at the first image may grow, and a tiny t would restore its kink.
"""


def resampling(fine: int, coarse: int, directions: int = 2) -> LinearOperator:
    """Return the operator P that resamples feature maps of scale `coarse` to scale `fine`.

    Scale 1 is full resolution. P is average pooling by a factor s, or its adjoint: nearest-neighbor
    upsampling divided by s² (in one direction by s). Resampling from branch i to j is therefore
    exactly the transpose of that from j to i, and ‖P‖ is 1/s (1/√s).
    """
    if coarse == fine:
        return Identity()
    small, large = sorted((fine, coarse))
    if large % small:
        raise ValueError(
            f"scales {fine} and {coarse} of neighboring branches do not divide each other"
        )
    pool = AveragePool(large // small, directions)
    return pool.T if coarse > fine else pool


class _Pair(NamedTuple):
    """Branch i and its successor j = i + 1; the successor of the last branch is the first."""

    i: int
    j: int
    name: str
    resample: LinearOperator
    """P_{i:j}, from the shape of branch j to that of branch i."""
    is_upward: bool
    """Whether branch j is coarser than branch i."""

    def at_coarser(self, features: Features) -> tuple[Tensor, Tensor]:
        """Return two maps at the coarser resolution with the inner products of Pz_j and z_i."""
        z, other = features[self.i], features[self.j]
        if self.is_upward:
            return other, self.resample.adjoint(z)
        return self.resample(other), z


class BranchCoupling(nn.Module):
    """Heritage and diversity energy of a loop of branches, as a function of their features zᵢ.

    It is ½ Σᵢ (λ D(zᵢ, zᵢ₊₁) − H(zᵢ, zᵢ₊₁)) (MOptEqs, Eqs. 3–5). With A = P_{i:i+1} zᵢ₊₁, resampled
    to the resolution of branch i, and the C×C matrix M = A zᵢᵀ of inner products between channels,
    H = tr M rewards similarity of corresponding channels and D = Σ_{k≠l} |M_kl| penalizes
    similarity of all others.

    M and S = sign(M) without the diagonal are computed once per pair and serve both neighbors: with
    K = ½(I − λS) the pair sends the message KᵀA to branch i and P_{i:i+1}ᵀ K zᵢ to branch i+1.
    Mixing channels commutes with resampling pixels, and ⟨Pa, z⟩ = ⟨a, Pᵀz⟩, so everything is
    computed at the coarser of the two resolutions.

    D has kinks, and minimizing it drives M to them, where the plain iteration oscillates. `sign`
    selects a remedy:

    - "smooth": √(M² + t²) − t replaces |M|. t = τ‖A_k‖‖z_l‖ (norms with a floor) is computed once
      per solve at the first image and is part of the graph. Solves converge and gradients are
      exact.
    - "freeze": S is updated in the first iterations and then constant, which makes the energy
      quadratic and bounds its curvature.
    - "hard": |M| as in the paper. A solve may stall above the tolerance, which its status reports.

    Args:
        scales: Downsampling factor of each branch; 1 is full resolution.
        diversity: λ, the weight of D.
        heritage: False is the paper's ablation "−H", which replaces H by ‖zᵢ‖²; without diversity
            (λ = 0) the branches are then independent OptEqs.
        sign: "smooth", "freeze" or "hard", see above.
        tau: τ of the smooth sign.
        directions: Number of spatial dimensions: 2 for images, 1 for sequences.

    Examples:
        >>> coupling = eq.energies.BranchCoupling([1, 1], diversity=0.0)
        >>> coupling.value([torch.ones(1, 2, 4, 4)] * 2, {})  # −½ H, for both pairs of the loop
        tensor([-32.])
    """

    def __init__(
        self,
        scales: Sequence[int],
        *,
        diversity: float,
        heritage: bool = True,
        sign: Sign = "smooth",
        tau: float = 0.1,
        directions: int = 2,
    ) -> None:
        super().__init__()
        check_not_negative(diversity=diversity)
        check_choice(get_args(Sign), sign=sign)
        check_positive(tau=tau)
        pairs = zip(scales, (*scales[1:], scales[0]), strict=True)
        self.resample = nn.ModuleList(resampling(*pair, directions) for pair in pairs)
        self.sizes = tuple(scales)
        self.diversity = diversity
        self.heritage = heritage
        self.sign = sign
        self.tau = tau

    def extra_repr(self) -> str:
        return f"diversity={self.diversity}, heritage={self.heritage}, sign={self.sign!r}"

    def scales(self, features: Features) -> dict[str, Entry]:
        """Return the widths t of the smooth absolute value, for each pair of neighbors."""
        entries: dict[str, Entry] = {}
        for pair in self.pairs():
            # Upsampling multiplies the norms of all channels by its own norm.
            other = features[pair.j] if pair.is_upward else pair.resample(features[pair.j])
            scale = self.tau * (pair.resample.norm_limit or 1.0) if pair.is_upward else self.tau
            rows, columns = _sizes(other), _sizes(features[pair.i])
            entries[pair.name] = scale * rows[:, :, None] * columns[:, None]
        return entries

    @torch.no_grad()
    def signs(self, features: Features) -> dict[str, Tensor]:
        """Return the signs of the inner products between channels, for each pair of branches.

        The diagonal, which belongs to corresponding channels, is zero.
        """
        return {
            pair.name: off_diagonal(self._products(pair, features)).sign() for pair in self.pairs()
        }

    def value(self, features: Features, constants: Constants) -> Tensor:
        """Return the energy of each sample."""
        total = torch.zeros((), dtype=features[0].dtype, device=features[0].device)
        for pair in self.pairs():
            if self.diversity:
                M = self._products(pair, features)
                size = self._size(M, constants.get(pair.name))
                total = total + self.diversity * sum_per_sample(size)
            z = features[pair.i]
            other = pair.resample(features[pair.j]) if self.heritage else z
            total = total - heritage(z, other)
        return 0.5 * total

    def messages(self, features: Features, constants: Constants) -> list[Tensor]:
        """Return for each branch minus the gradient of the energy in the features of the branch.

        It is hᵢ of MOptEqs' Proposition 1.
        """
        scales = [constants.get(pair.name) for pair in self.pairs()]
        tensors = [tensor for tensor in (*features, *scales) if isinstance(tensor, Tensor)]
        if self.sign == "smooth" and self.diversity and _is_recorded(tensors):
            messages: tuple[Tensor, ...] = _Messages.apply(self, *tensors)  # type: ignore[no-untyped-call]
            return list(messages)
        return self.composed_messages(features, constants)

    def composed_messages(self, features: Features, constants: Constants) -> list[Tensor]:
        """Return the same as `messages`, computed by differentiable torch operations."""
        inboxes = _Inboxes(len(features))
        for pair in self.pairs():
            z, other = features[pair.i], features[pair.j]
            if not self.heritage:
                inboxes.send(pair.i, z)
            if self.diversity:
                A, z = pair.at_coarser(features)
                K = self._mixing(_products(A, z), constants.get(pair.name))
                inboxes.send_mixed(pair, A, z, K)
            elif self.heritage:
                inboxes.send(pair.i, 0.5 * pair.resample(other))
                inboxes.send(pair.j, 0.5 * pair.resample.adjoint(z))
        return inboxes.messages()

    def curvature(self, channels: int) -> float | None:
        """Return a bound on the curvature in the features, or None if signs depend on them."""
        if self.diversity and self.sign != "freeze":
            return None
        limits = [op.norm_limit or 1.0 for op in self.resample if isinstance(op, LinearOperator)]
        previous = [limits[-1], *limits[:-1]]
        coupling = max(0.5 * (a + b) for a, b in zip(limits, previous, strict=True))
        spread = self.diversity * (channels - 1)
        return coupling * (1 + spread) if self.heritage else 1 + coupling * spread

    def pairs(self) -> Iterator[_Pair]:
        """Iterate over the branches around the loop, each with its successor."""
        count = len(self.resample)
        for i, resample in enumerate(self.resample):
            assert isinstance(resample, LinearOperator)
            j = (i + 1) % count
            yield _Pair(i, j, f"pair{i}", resample, self.sizes[j] > self.sizes[i])

    def _products(self, pair: _Pair, features: Features) -> Tensor:
        """Return M = A zᵢᵀ."""
        return _products(*pair.at_coarser(features))

    def _size(self, M: Tensor, constant: Entry | None) -> Tensor:
        """Return the summands of D, with zeros on the diagonal."""
        if self.sign == "hard":
            return off_diagonal(M).abs()
        assert isinstance(constant, Tensor)
        if self.sign == "freeze":
            return constant * M
        return off_diagonal(torch.hypot(M, constant) - constant)

    def _mixing(self, M: Tensor, constant: Entry | None) -> Tensor:
        """Return K = ½(I − λS), without I in the ablation."""
        if self.sign == "hard":
            return self.mixing(M.sign())
        assert isinstance(constant, Tensor)
        # The derivative of rsqrt(M² + t²) contains t⁻³, which overflows float32 for vanishing
        # features; that of M/√(M² + t²) only contains 1/t.
        return self.mixing(constant if self.sign == "freeze" else M / torch.hypot(M, constant))

    def slopes(self, t: Tensor, K: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of the mixing matrix K in the inner products M and the width t.

        Args:
            t: Width of the smooth absolute value √(M² + t²) − t.
            K: The mixing matrix ½(I − λM/length) of the channels.
            length: √(M² + t²).
        """
        # Dividing in steps avoids t⁻³, which overflows float32 for vanishing features.
        share = t / length
        bend = off_diagonal(share / length)
        return share * bend * (-0.5 * self.diversity), -K * bend

    def mixing(self, S: Tensor) -> Tensor:
        """Return the matrix K = ½(I − λS) that mixes channels, for signs S of their inner products.

        The diagonal of S is ignored. I is omitted if `heritage` is False.
        """
        diagonal = torch.eye(S.shape[1], dtype=S.dtype, device=S.device)
        # A fused operation: one per pair, and one in its derivative.
        return torch.addcmul(
            diagonal * (0.5 * self.heritage), (diagonal - 1) * (0.5 * self.diversity), S
        )


class _Inboxes:
    """Sums of the messages that the branches have received so far."""

    def __init__(self, branches: int) -> None:
        self._totals: list[Tensor | None] = [None] * branches
        self._writable: set[int] = set()
        """Branches whose total can be overwritten in place."""

    def send(self, branch: int, message: Tensor) -> None:
        total = self._totals[branch]
        self._totals[branch] = message if total is None else total + message
        self._writable.discard(branch)

    def send_mixed(self, pair: _Pair, A: Tensor, z: Tensor, K: Tensor) -> None:
        """Send KᵀA to branch i and Kz to branch j, from the coarser resolution."""
        if pair.is_upward:
            self.send(pair.i, pair.resample(_mix(A, K)))
        else:
            self._add_mixed(pair.i, A, K)
        if pair.is_upward or isinstance(pair.resample, Identity):
            self._add_mixed(pair.j, z, K.mT)
        else:
            self.send(pair.j, pair.resample.adjoint(_mix(z, K.mT)))

    def _add_mixed(self, branch: int, A: Tensor, K: Tensor) -> None:
        total = self._totals[branch]
        # Under autocast the types may differ, and in-place operations do not cast.
        in_place = branch in self._writable and not torch.is_grad_enabled() and A.dtype == K.dtype
        if total is not None and in_place and total.dtype == K.dtype:
            _pixels(total).baddbmm_(_pixels(A), K)
        else:
            self._totals[branch] = _mix(A, K, total)
            self._writable.add(branch)

    def messages(self) -> list[Tensor]:
        return [total for total in self._totals if total is not None]


class _Messages(torch.autograd.Function):
    """`BranchCoupling.composed_messages` for smooth signs, with a handwritten derivative.

    Messages are minus a gradient, so their Jacobian is symmetric and products with it consist of
    messages too. For directions a of A and ζ of zᵢ, dM = a zᵢᵀ + A ζᵀ and dK = ∂K/∂M ∘ dM, the
    pair sends Kᵀa + dKᵀA to branch i and Kζ + dK zᵢ to branch i+1. This avoids additions and copies
    in memory, which would cost as much as the matrix products.
    """

    @staticmethod
    def forward(ctx: Any, coupling: BranchCoupling, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(coupling.sizes)
        features, scales = tensors[:count], tensors[count:]
        inboxes = _Inboxes(count)
        mixings, lengths = [], []
        for pair, t in zip(coupling.pairs(), scales, strict=True):
            if not coupling.heritage:
                inboxes.send(pair.i, features[pair.i])
            A, z = pair.at_coarser(features)
            M = _products(A, z)
            lengths.append(torch.hypot(M, t))
            mixings.append(coupling.mixing(M.div_(lengths[-1])))
            inboxes.send_mixed(pair, A, z, mixings[-1])
        ctx.coupling = coupling
        ctx.save_for_backward(*tensors, *mixings, *lengths)
        return tuple(inboxes.messages())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        coupling: BranchCoupling = ctx.coupling
        count = len(coupling.sizes)
        saved = ctx.saved_tensors
        features, scales, mixings, lengths = (saved[k * count : (k + 1) * count] for k in range(4))
        if torch.is_grad_enabled():
            return None, *_differentiated(coupling, features, scales, gradients)
        if not hasattr(ctx, "slopes"):  # shared by all products of a backward solve
            ctx.slopes = [*map(coupling.slopes, scales, mixings, lengths)]
        inboxes = _Inboxes(count)
        scale_gradients = []
        for pair, K, (in_products, in_scale) in zip(
            coupling.pairs(), mixings, ctx.slopes, strict=True
        ):
            if not coupling.heritage:
                inboxes.send(pair.i, gradients[pair.i])
            (A, z), (a, zeta) = pair.at_coarser(features), pair.at_coarser(gradients)
            dM = _products(A, zeta, initial=_products(a, z))
            scale_gradients.append(dM * in_scale)
            inboxes.send_mixed(pair, a, zeta, K)
            inboxes.send_mixed(pair, A, z, dM.mul_(in_products))
        return None, *inboxes.messages(), *scale_gradients


def _differentiated(
    coupling: BranchCoupling, features: Features, scales: Features, gradients: Features
) -> tuple[Tensor | None, ...]:
    """Return differentiable derivatives of the messages in features and scales."""
    # View as new nodes: the scales may depend on the features, but this is a partial derivative.
    inputs = [tensor.view_as(tensor) for tensor in (*features, *scales)]
    count = len(features)
    constants = {pair.name: t for pair, t in zip(coupling.pairs(), inputs[count:], strict=True)}
    messages = coupling.composed_messages(inputs[:count], constants)
    differentiable = [tensor for tensor in inputs if tensor.requires_grad]
    derivatives = iter(torch.autograd.grad(messages, differentiable, gradients, create_graph=True))
    return tuple(next(derivatives) if tensor.requires_grad else None for tensor in inputs)


def _is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether plain reverse-mode autograd, and nothing else, records a graph."""
    return (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and not is_wrapped(*tensors)
        and not any(map(has_tangent, tensors))
    )


def heritage(z: Tensor, other: Tensor) -> Tensor:
    """Return the heritage H = ⟨z, other⟩ of two branches, for each sample (MOptEqs, Eq. 3).

    Args:
        z: Features of one branch, shape (B, C, ...).
        other: Features of its neighbor, same shape.

    Returns:
        Shape (B,).

    Examples:
        >>> z = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> from equilibria.energies.branch_coupling import heritage
        >>> heritage(z, z)
        tensor([2.])
    """
    return sum_per_sample(z * other)


def diversity(z: Tensor, other: Tensor) -> Tensor:
    """Return the diversity D = Σ_{k≠l} |⟨z_k, other_l⟩| of each sample (MOptEqs, Eq. 4).

    Args:
        z: Features of one branch, shape (B, C, ...).
        other: Features of its neighbor, same shape.

    Returns:
        Shape (B,).

    Examples:
        >>> from equilibria.energies.branch_coupling import diversity
        >>> z = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # two orthogonal channels
        >>> diversity(z, z)
        tensor([0.])
    """
    return sum_per_sample(off_diagonal(_products(other, z)).abs())


def off_diagonal(M: Tensor) -> Tensor:
    """Return a batch of matrices with zeros on their diagonals."""
    mask = 1 - torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return M * mask


def _products(A: Tensor, z: Tensor, initial: Tensor | None = None) -> Tensor:
    """Return M_kl = ⟨A_k, z_l⟩ of each sample, plus `initial`."""
    if initial is not None:
        return torch.baddbmm(initial, A.flatten(2), z.flatten(2).mT)
    return A.flatten(2) @ z.flatten(2).mT


def _mix(A: Tensor, K: Tensor, initial: Tensor | None = None) -> Tensor:
    """Return KᵀA, whose channel l is Σ_k K_kl A_k, plus `initial`."""
    # Pixels are rows, as in the channels_last memory format, so nothing is copied there.
    mixed = _pixels(A) @ K if initial is None else torch.baddbmm(_pixels(initial), _pixels(A), K)
    return mixed.mT.reshape(A.shape)


def _pixels(z: Tensor) -> Tensor:
    """Return z with one row of channels per pixel."""
    return z.flatten(2).mT


def _sizes(z: Tensor) -> Tensor:
    """Return ‖z_k‖ of each channel, with a floor."""
    squares = z.flatten(2).square().sum(dim=2)
    mean = squares.mean(dim=1, keepdim=True)
    return (squares + MEAN_SQUARE_WEIGHT * mean + torch.finfo(z.dtype).eps ** 2).sqrt()
