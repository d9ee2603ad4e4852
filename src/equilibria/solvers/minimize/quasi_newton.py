"""Limited-memory BFGS: the stored pairs and the quasi-Newton direction."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers.base import Memory
from equilibria.solvers.convergence import row_norms

PAIRS = 20
"""Number of stored steps."""
MAX_DISAGREEMENT = 0.05
"""Largest relative difference of ⟨s, q'⟩ and ⟨s', q⟩ at which the function counts as quadratic, for
which they are equal."""
MIN_NEW_CURVATURE = 0.01
"""Smallest share of its curvature that a step must keep after conjugation with newer steps."""
MIN_CURVATURE = 1e-10
"""Smallest curvature of a pair that is used."""


class Pairs(Memory):
    """The last steps s = Δy and the changes q of y − d along them, in a preallocated buffer.

    q is the change of the gradient of ½‖y‖² + E. BFGS updates, oldest pair first, give an
    approximation B of its Hessian. On a quadratic function, an update by one pair invalidates
    another unless the steps are conjugate, ⟨s, q'⟩ = 0. So each pair is made conjugate to the newer
    ones. On a quadratic function B is then exact on all steps, whatever their lengths (Schnabel,
    1983), and the minimization takes as many gradients as conjugate gradients. If ⟨s, q'⟩ and
    ⟨s', q⟩ differ, the function is not quadratic; that pair and older ones are then used unchanged,
    as in the standard method (Nocedal, 1980).
    """

    def __init__(self, like: Tensor) -> None:
        rows, size = like.shape
        self.basis = like.new_zeros(rows, 2, PAIRS, size)
        """Steps and changes, both divided by the length of the step."""
        self.written = torch.zeros(rows, dtype=torch.int64, device=like.device)

    def add(self, rows: Tensor, step: Tensor, change: Tensor) -> None:
        """Store a pair of these rows; zero steps and pairs that are not finite are ignored."""
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

        B = γI − UN⁻¹Uᵀ with U made of the pairs (Byrd, Nocedal and Schnabel, 1994), so the system
        to solve is as large as the number of pairs. Units with S = 0 get w = d − a.

        Args:
            rows: Indices of the rows.
            gap: d − a of these rows.
            weight: Diagonal of S.
            length: 1/γ for rows without a pair.
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
        direction = (gap - torch.bmm(shares.mT, basis)[:, 0]) / diagonal
        sound = torch.isfinite(direction).all(dim=1, keepdim=True) & (weight > 0)
        return torch.where(sound, direction, gap), scale


def _in_order(products: Tensor, order: Tensor, *, columns: bool = True) -> Tensor:
    """Permute the rows (and columns) of both halves of a matrix."""
    both = torch.cat([order, order + PAIRS], dim=1)[:, :, None]
    products = products.gather(1, both.expand(-1, -1, products.shape[2]))
    if not columns:
        return products
    return products.gather(2, both.mT.expand(-1, products.shape[1], -1))


def _conjugated(cross: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mixture of pairs that makes them conjugate, and which of the mixed pairs are used.

    Args:
        cross: ⟨sᵢ, qⱼ⟩, newest first.
    """
    mixture = torch.zeros_like(cross)
    curvature = torch.zeros_like(cross[:, 0])
    """Curvature of the mixed pairs; zero where a pair is not used."""
    quadratic = torch.ones_like(cross[:, 0, 0], dtype=torch.bool)
    for i in range(PAIRS):
        pair_curvature = cross[:, i, i]
        used = curvature > 0
        inverse = torch.where(used, 1 / curvature, 0.0)
        along = (mixture @ cross[:, i, :, None])[:, :, 0]  # ⟨s, q'⟩ of this step s
        across = (mixture @ cross[:, :, i, None])[:, :, 0]  # ⟨s', q⟩
        difference = (along - across).square() * inverse
        positive = pair_curvature > MIN_CURVATURE
        differs = positive & (difference.amax(dim=1) > MAX_DISAGREEMENT**2 * pair_curvature)
        quadratic = quadratic & ~differs
        mixed = -((along * inverse)[:, None] @ mixture)[:, 0]
        mixed = torch.where(quadratic[:, None], mixed, 0.0)
        mixed[:, i] += 1
        remaining = (mixed[:, None] @ cross @ mixed[:, :, None])[:, 0, 0]
        useful = positive & (remaining > MIN_NEW_CURVATURE * pair_curvature)
        # Scaled back to its original curvature, to keep the system well scaled.
        unit = torch.where(useful, (pair_curvature / remaining).sqrt(), 0.0)[:, None]
        mixture[:, i] = torch.where(useful[:, None], mixed * unit, 0.0)
        curvature[:, i] = torch.where(useful, pair_curvature, 0.0)
    return mixture, curvature > 0
