"""What a quasi-Newton method remembers of its steps: BFGS with a limited memory."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers.base import Memory
from equilibria.solvers.convergence import row_norms

PAIRS = 20
"""Steps that a quasi-Newton step remembers."""
DISAGREEMENT = 0.05
"""Of ⟨s, q'⟩ and ⟨s', q⟩, equal for a quadratic function, up to which one is taken for it."""
NEWS = 0.01
"""The share of its curvature that a step has to keep when those that followed are taken out."""
LEAST_CURVATURE = 1e-10


class Pairs(Memory):
    """The last steps s = Δy and the changes q of y − d along them, in a buffer allocated once.

    q is the change of the gradient of ½‖y‖² + E, of whose Hessian they make an approximation B by
    BFGS updates, the oldest first. On a quadratic function such updates forget, unless steps are
    conjugate: the update by one keeps what B says of another only if ⟨s, q'⟩ = 0. So each pair is
    made conjugate to those that followed it, which on a quadratic function are pairs as good as
    any: B is then exact on all of them whatever the lengths of the steps (Schnabel, 1983), and
    minimizing a quadratic function takes as many gradients as conjugate gradients need. Where pairs
    disagree on their common curvature the function is not quadratic: these and older ones enter as
    they are, as usual (Nocedal, 1980).
    """

    def __init__(self, like: Tensor) -> None:
        rows, size = like.shape
        self.basis = like.new_zeros(rows, 2, PAIRS, size)
        """Steps, and changes, both divided by the length of the step."""
        self.written = torch.zeros(rows, dtype=torch.int64, device=like.device)

    def add(self, rows: Tensor, step: Tensor, change: Tensor) -> None:
        """Remember a pair of these rows; one that is not finite, or no step, counts for nothing."""
        length = row_norms(step)
        sound = (length > 0) & torch.isfinite(length) & torch.isfinite(row_norms(change))
        scale = torch.where(sound, 1 / length, 0.0)[:, None]
        slot = self.written[rows] % PAIRS
        self.basis[rows, 0, slot] = torch.where(sound[:, None], step * scale, 0.0)
        self.basis[rows, 1, slot] = torch.where(sound[:, None], change * scale, 0.0)
        self.written[rows] += 1

    def forget(self, rows: Tensor) -> None:
        self.basis[rows] = 0.0

    def direction(
        self, rows: Tensor, gap: Tensor, weight: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return w with (I − S + BS) w = d − a for S = σ′(a), and the scale 1/γ of B.

        B = γI − UN⁻¹Uᵀ with U made of the pairs (Byrd, Nocedal and Schnabel, 1994), so that a
        system as large as the memory is solved. Units that are off go to d.
        length: 1/γ where a row has no pair.
        """
        everything = len(rows) == len(self.written)
        basis = (self.basis if everything else self.basis[rows]).flatten(1, 2)
        written = self.written if everything else self.written[rows]
        slots = torch.arange(PAIRS, device=rows.device)
        newest_first = (written[:, None] - 1 - slots) % PAIRS
        products = _in_order(torch.bmm(basis, basis.mT), newest_first)
        steps, cross = products[:, :PAIRS, :PAIRS], products[:, :PAIRS, PAIRS:]
        mixture, used = _conjugated(cross)
        inner, cross = (mixture @ m @ mixture.mT for m in (steps, cross))
        curvature = torch.diagonal(cross, dim1=1, dim2=2)
        changes = mixture @ products[:, PAIRS:, PAIRS:] @ mixture.mT
        scales = curvature / torch.diagonal(changes, dim1=1, dim2=2)
        first = used.to(torch.int8).argmax(dim=1, keepdim=True)
        scale = torch.where(used.any(dim=1), scales.gather(1, first)[:, 0], length)
        idle = (~used).to(gap.dtype)
        later = torch.triu(cross, diagonal=1) * scale[:, None, None]
        system = torch.cat(
            [
                torch.cat([-inner * scale[:, None, None] - torch.diag_embed(idle), -later], 2),
                torch.cat([-later.mT, torch.diag_embed(curvature + idle)], 2),
            ],
            1,
        )
        diagonal = (1 - weight).clamp_min(0.0) + weight / scale[:, None]
        free = weight / diagonal
        both = torch.zeros_like(system)
        both[:, :PAIRS, :PAIRS] = both[:, PAIRS:, PAIRS:] = mixture
        weighted = torch.bmm(basis * free[:, None], basis.mT)
        system = system + both @ _in_order(weighted, newest_first) @ both.mT
        pulled = torch.bmm(basis, (free * gap)[:, :, None])
        pulled = both @ _in_order(pulled, newest_first, columns=False)
        solved, _ = torch.linalg.solve_ex(system, pulled)
        shares = _in_order(both.mT @ solved, newest_first.argsort(dim=1), columns=False)
        found = (gap - torch.bmm(shares.mT, basis)[:, 0]) / diagonal
        sound = torch.isfinite(found).all(dim=1, keepdim=True) & (weight > 0)
        return torch.where(sound, found, gap), scale


def _in_order(products: Tensor, order: Tensor, *, columns: bool = True) -> Tensor:
    """Rows (and columns) of both halves of a matrix in this order."""
    both = torch.cat([order, order + PAIRS], dim=1)[:, :, None]
    products = products.gather(1, both.expand(-1, -1, products.shape[2]))
    if not columns:
        return products
    return products.gather(2, both.mT.expand(-1, products.shape[1], -1))


def _conjugated(cross: Tensor) -> tuple[Tensor, Tensor]:
    """How pairs, newest first, are mixed to be conjugate, and which have something to say.

    cross: ⟨sᵢ, qⱼ⟩, the newest first.
    """
    mixture = torch.zeros_like(cross)
    curvature = torch.zeros_like(cross[:, 0])
    """Of the mixed pairs; zero where a pair is not used."""
    quadratic = torch.ones_like(cross[:, 0, 0], dtype=torch.bool)
    for i in range(PAIRS):
        own = cross[:, i, i]
        used = curvature > 0
        theirs = torch.where(used, 1 / curvature, 0.0)
        along = (mixture @ cross[:, i, :, None])[:, :, 0]  # ⟨s, q'⟩ of this step s
        across = (mixture @ cross[:, :, i, None])[:, :, 0]  # ⟨s', q⟩
        apart = (along - across).square() * theirs
        positive = own > LEAST_CURVATURE
        quadratic = quadratic & ~(positive & (apart.amax(dim=1) > DISAGREEMENT**2 * own))
        mixed = -((along * theirs)[:, None] @ mixture)[:, 0]
        mixed = torch.where(quadratic[:, None], mixed, 0.0)
        mixed[:, i] += 1
        left = (mixed[:, None] @ cross @ mixed[:, :, None])[:, 0, 0]
        useful = positive & (left > NEWS * own)
        # Of about unit curvature, lest the system has entries of all sizes.
        unit = torch.where(useful, (own / left).sqrt(), 0.0)[:, None]
        mixture[:, i] = torch.where(useful[:, None], mixed * unit, 0.0)
        curvature[:, i] = torch.where(useful, own, 0.0)
    return mixture, curvature > 0
