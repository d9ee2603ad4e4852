"""Heritage and diversity of the features of neighboring branches, as a function of the features.

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
"""zᵢ of every branch."""
Kept = Mapping[str, Entry]
"""What a solve keeps for every pair of branches: t (sign="smooth") or the signs ("freeze")."""

SIZE_FLOOR = 1.0
"""In t, the mean square of all channels is added to that of each, times this: a channel that is
weak at the first image may grow, and a tiny t would give it the kink back."""


def resampling(fine: int, coarse: int, directions: int = 2) -> LinearOperator:
    """P from a map of scale `coarse` to one of scale `fine` (1 = full resolution).

    Going down it is average pooling by s, going up Pᵀ: nearest upsampling divided by s² (in one
    direction by s). With this pair P_{j:i} = P_{i:j}ᵀ exactly, and ‖P‖ = 1/s (1/√s).
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
    """Branch i and its successor j = i + 1 (the last one's successor is the first)."""

    i: int
    j: int
    name: str
    resample: LinearOperator
    """P_{i:j}, from branch j to the shape of branch i."""
    is_upward: bool
    """Whether branch j is the coarser one."""

    def at_coarser(self, features: Features) -> tuple[Tensor, Tensor]:
        """Two maps of the coarser resolution whose products are those of Pz_j and z_i."""
        z, other = features[self.i], features[self.j]
        if self.is_upward:
            return other, self.resample.adjoint(z)
        return self.resample(other), z


class BranchCoupling(nn.Module):
    """½ Σᵢ (λ D(zᵢ, zᵢ₊₁) − H(zᵢ, zᵢ₊₁)) over the loop of branches, as a function of the features.

    With A = P_{i:i+1} zᵢ₊₁ and the C×C matrix M = A zᵢᵀ of inner products between channels,
    H = tr M (corresponding channels, to be similar) and D = Σ_{k≠l} |M_kl| (all others, to differ).
    M and its signs S = sign(M), without the diagonal, are computed once a pair, and serve both
    neighbors: with K = ½(I − λS) the pair sends KᵀA to branch i and P_{i:i+1}ᵀ K zᵢ to branch i+1.
    Mixing channels and resampling pixels commute, and ⟨Pa, z⟩ = ⟨a, Pᵀz⟩: all of it happens at the
    coarser of the two resolutions.

    D has kinks, and minimizing it drives M there, so that the plain iteration chatters. `sign`:

    - "smooth": √(M² + t²) − t in place of |M|. t = τ‖A_k‖‖z_l‖ (norms with a floor) is taken once a
      solve at its first image and stays in the graph. Converges, and gradients are exact.
    - "freeze": S is renewed in the first iterations and then kept; the energy is then quadratic,
      and its curvature bounded.
    - "hard": as printed. A solve may stop at a floor, which its status reports.

    heritage=False is the paper's ablation "−H": H is replaced by ‖zᵢ‖², so that without diversity
    (λ = 0) the branches are independent OptEqs. `directions`: 2 for images, 1 for sequences.

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
        """Return t of every pair."""
        entries: dict[str, Entry] = {}
        for pair in self.pairs():
            # Upsampling multiplies all norms alike, by its own.
            other = features[pair.j] if pair.is_upward else pair.resample(features[pair.j])
            scale = self.tau * (pair.resample.norm_limit or 1.0) if pair.is_upward else self.tau
            rows, columns = _sizes(other), _sizes(features[pair.i])
            entries[pair.name] = scale * rows[:, :, None] * columns[:, None]
        return entries

    @torch.no_grad()
    def signs(self, features: Features) -> dict[str, Tensor]:
        """S of every pair."""
        return {
            pair.name: off_diagonal(self._products(pair, features)).sign() for pair in self.pairs()
        }

    def value(self, features: Features, kept: Kept) -> Tensor:
        """The energy of each sample."""
        total = torch.zeros((), dtype=features[0].dtype, device=features[0].device)
        for pair in self.pairs():
            if self.diversity:
                M = self._products(pair, features)
                total = total + self.diversity * sum_per_sample(self._size(M, kept.get(pair.name)))
            z = features[pair.i]
            other = pair.resample(features[pair.j]) if self.heritage else z
            total = total - heritage(z, other)
        return 0.5 * total

    def messages(self, features: Features, kept: Kept) -> list[Tensor]:
        """hᵢ of Proposition 1: minus the gradient of `value` at every zᵢ."""
        scales = [kept.get(pair.name) for pair in self.pairs()]
        tensors = [one for one in (*features, *scales) if isinstance(one, Tensor)]
        if self.sign == "smooth" and self.diversity and _is_recorded(tensors):
            messages: tuple[Tensor, ...] = _Messages.apply(self, *tensors)  # type: ignore[no-untyped-call]
            return list(messages)
        return self.composed_messages(features, kept)

    def composed_messages(self, features: Features, kept: Kept) -> list[Tensor]:
        """The same, of operations that automatic differentiation knows."""
        mail = _Mail(len(features))
        for pair in self.pairs():
            z, other = features[pair.i], features[pair.j]
            if not self.heritage:
                mail.send(pair.i, z)
            if self.diversity:
                A, z = pair.at_coarser(features)
                K = self._mixing(_products(A, z), kept.get(pair.name))
                mail.send_mixed(pair, A, z, K)
            elif self.heritage:
                mail.send(pair.i, 0.5 * pair.resample(other))
                mail.send(pair.j, 0.5 * pair.resample.adjoint(z))
        return mail.messages()

    def curvature(self, channels: int) -> float | None:
        """A bound of the curvature in the features, or None where signs move with them."""
        if self.diversity and self.sign != "freeze":
            return None
        limits = [op.norm_limit or 1.0 for op in self.resample if isinstance(op, LinearOperator)]
        before = [limits[-1], *limits[:-1]]
        around = max(0.5 * (a + b) for a, b in zip(limits, before, strict=True))
        spread = self.diversity * (channels - 1)
        return around * (1 + spread) if self.heritage else 1 + around * spread

    def pairs(self) -> Iterator[_Pair]:
        """The branches around the loop, each with its successor."""
        count = len(self.resample)
        for i, resample in enumerate(self.resample):
            assert isinstance(resample, LinearOperator)
            j = (i + 1) % count
            yield _Pair(i, j, f"pair{i}", resample, self.sizes[j] > self.sizes[i])

    def _products(self, pair: _Pair, features: Features) -> Tensor:
        """M = A zᵢᵀ."""
        return _products(*pair.at_coarser(features))

    def _size(self, M: Tensor, kept: Entry | None) -> Tensor:
        """What D sums, with zeros on the diagonal."""
        if self.sign == "hard":
            return off_diagonal(M).abs()
        assert isinstance(kept, Tensor)
        if self.sign == "freeze":
            return kept * M
        return off_diagonal(torch.hypot(M, kept) - kept)

    def _mixing(self, M: Tensor, kept: Entry | None) -> Tensor:
        """K = ½(I − λS), without I in the ablation."""
        if self.sign == "hard":
            return self.mixing(M.sign())
        assert isinstance(kept, Tensor)
        # Not rsqrt(M² + t²), whose derivative holds t⁻³: too large for float32 where features
        # vanish, though that of S is 1/t.
        return self.mixing(kept if self.sign == "freeze" else M / torch.hypot(M, kept))

    def slopes(self, t: Tensor, K: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """∂K/∂M and ∂K/∂t, where S = M/length and length = √(M² + t²)."""
        # Step by step: t⁻³ would not fit into float32 where features vanish.
        share = t / length
        bend = off_diagonal(share / length)
        return share * bend * (-0.5 * self.diversity), -K * bend

    def mixing(self, S: Tensor) -> Tensor:
        """K of the signs S, whose diagonal does not matter."""
        diagonal = torch.eye(S.shape[1], dtype=S.dtype, device=S.device)
        # One operation for each pair, and one in its derivative.
        return torch.addcmul(
            diagonal * (0.5 * self.heritage), (diagonal - 1) * (0.5 * self.diversity), S
        )


class _Mail:
    """What every branch has received so far."""

    def __init__(self, branches: int) -> None:
        self._received: list[Tensor | None] = [None] * branches
        self._own: set[int] = set()
        """Branches whose mail is in memory of its own, so that it may be added to."""

    def send(self, branch: int, message: Tensor) -> None:
        present = self._received[branch]
        self._received[branch] = message if present is None else present + message
        self._own.discard(branch)

    def send_mixed(self, pair: _Pair, A: Tensor, z: Tensor, K: Tensor) -> None:
        """KᵀA to branch i and Kz to branch j, from the coarser resolution."""
        if pair.is_upward:
            self.send(pair.i, pair.resample(_mix(A, K)))
        else:
            self._add_mixed(pair.i, A, K)
        if pair.is_upward or isinstance(pair.resample, Identity):
            self._add_mixed(pair.j, z, K.mT)
        else:
            self.send(pair.j, pair.resample.adjoint(_mix(z, K.mT)))

    def _add_mixed(self, branch: int, A: Tensor, K: Tensor) -> None:
        present = self._received[branch]
        # Under autocast the types differ, and nothing in place is cast.
        in_place = branch in self._own and not torch.is_grad_enabled() and A.dtype == K.dtype
        if present is not None and in_place and present.dtype == K.dtype:
            _pixels(present).baddbmm_(_pixels(A), K)
        else:
            self._received[branch] = _mix(A, K, present)
            self._own.add(branch)

    def messages(self) -> list[Tensor]:
        return [message for message in self._received if message is not None]


class _Messages(torch.autograd.Function):
    """`BranchCoupling.composed_messages` with smooth signs, differentiated by hand.

    Messages are minus a gradient, so that their Jacobian is symmetric, and a product with it is
    made of messages too: with the directions a of A and ζ of zᵢ, dM = a zᵢᵀ + A ζᵀ and
    dK = ∂K/∂M ∘ dM, the pair sends Kᵀa + dKᵀA to branch i and Kζ + dK zᵢ to branch i+1. Nothing
    is added or rearranged in memory besides, which costs as much as the products of matrices.
    """

    @staticmethod
    def forward(ctx: Any, coupling: BranchCoupling, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(coupling.sizes)
        features, scales = tensors[:count], tensors[count:]
        mail = _Mail(count)
        mixings, lengths = [], []
        for pair, t in zip(coupling.pairs(), scales, strict=True):
            if not coupling.heritage:
                mail.send(pair.i, features[pair.i])
            A, z = pair.at_coarser(features)
            M = _products(A, z)
            lengths.append(torch.hypot(M, t))
            mixings.append(coupling.mixing(M.div_(lengths[-1])))
            mail.send_mixed(pair, A, z, mixings[-1])
        ctx.coupling = coupling
        ctx.save_for_backward(*tensors, *mixings, *lengths)
        return tuple(mail.messages())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        coupling: BranchCoupling = ctx.coupling
        count = len(coupling.sizes)
        saved = ctx.saved_tensors
        features, scales, mixings, lengths = (saved[k * count : (k + 1) * count] for k in range(4))
        if torch.is_grad_enabled():
            return None, *_differentiated(coupling, features, scales, gradients)
        if not hasattr(ctx, "slopes"):  # the same for every product of a backward solve
            ctx.slopes = [*map(coupling.slopes, scales, mixings, lengths)]
        mail = _Mail(count)
        of_scales = []
        for pair, K, (in_products, in_scale) in zip(
            coupling.pairs(), mixings, ctx.slopes, strict=True
        ):
            if not coupling.heritage:
                mail.send(pair.i, gradients[pair.i])
            (A, z), (a, zeta) = pair.at_coarser(features), pair.at_coarser(gradients)
            dM = _products(A, zeta, added_to=_products(a, z))
            of_scales.append(dM * in_scale)
            mail.send_mixed(pair, a, zeta, K)
            mail.send_mixed(pair, A, z, dM.mul_(in_products))
        return None, *mail.messages(), *of_scales


def _differentiated(
    coupling: BranchCoupling, features: Features, scales: Features, gradients: Features
) -> tuple[Tensor | None, ...]:
    """The derivatives of the messages in features and scales, to be differentiated again."""
    # New nodes: the scales may depend on the features, which is none of this derivative.
    inputs = [tensor.view_as(tensor) for tensor in (*features, *scales)]
    count = len(features)
    kept = {pair.name: t for pair, t in zip(coupling.pairs(), inputs[count:], strict=True)}
    messages = coupling.composed_messages(inputs[:count], kept)
    chosen = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(messages, chosen, gradients, create_graph=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)


def _is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether a graph is recorded, by nothing but automatic differentiation in reverse."""
    return (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and not is_wrapped(*tensors)
        and not any(map(has_tangent, tensors))
    )


def heritage(z: Tensor, other: Tensor) -> Tensor:
    """H(z, other) = ⟨z, other⟩ (Eq. 3) of each sample, for maps of one shape.

    Examples:
        >>> z = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> from equilibria.energies.branch_coupling import heritage
        >>> heritage(z, z)
        tensor([2.])
    """
    return sum_per_sample(z * other)


def diversity(z: Tensor, other: Tensor) -> Tensor:
    """D(z, other) (Eq. 4): Σ_{k≠l} |⟨z_k, other_l⟩| of each sample, for maps of one shape.

    Examples:
        >>> z = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # two channels that share nothing
        >>> from equilibria.energies.branch_coupling import diversity
        >>> diversity(z, z)
        tensor([0.])
    """
    return sum_per_sample(off_diagonal(_products(other, z)).abs())


def off_diagonal(M: Tensor) -> Tensor:
    """RD: the matrix with its diagonal removed."""
    keep = 1 - torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return M * keep


def _products(A: Tensor, z: Tensor, added_to: Tensor | None = None) -> Tensor:
    """M_kl = ⟨A_k, z_l⟩ of each sample."""
    if added_to is not None:
        return torch.baddbmm(added_to, A.flatten(2), z.flatten(2).mT)
    return A.flatten(2) @ z.flatten(2).mT


def _mix(A: Tensor, K: Tensor, added_to: Tensor | None = None) -> Tensor:
    """KᵀA: channel l of the result is Σ_k K_kl A_k."""
    # Pixel by pixel, which for channels_last is the order in memory: nothing is copied.
    mixed = _pixels(A) @ K if added_to is None else torch.baddbmm(_pixels(added_to), _pixels(A), K)
    return mixed.mT.reshape(A.shape)


def _pixels(z: Tensor) -> Tensor:
    """The channels of each pixel, a row each."""
    return z.flatten(2).mT


def _sizes(z: Tensor) -> Tensor:
    """‖z_k‖ of each channel, with a floor."""
    squares = z.flatten(2).square().sum(dim=2)
    mean = squares.mean(dim=1, keepdim=True)
    return (squares + SIZE_FLOOR * mean + torch.finfo(z.dtype).eps ** 2).sqrt()
