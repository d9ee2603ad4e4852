"""What a quasi-Newton method remembers of its steps: BFGS with a limited memory."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers.base import Memory

PAIRS = 12
"""Steps that a quasi-Newton step remembers."""


class Pairs(Memory):
    """The last steps Δa and the changes of a − d along them, in buffers allocated once."""

    def __init__(self, like: Tensor) -> None:
        rows, size = like.shape
        self.steps = like.new_zeros(rows, PAIRS, size)
        self.changes = like.new_zeros(rows, PAIRS, size)
        self.valid = torch.zeros(rows, PAIRS, dtype=torch.bool, device=like.device)
        self.written = 0

    def add(self, rows: Tensor, step: Tensor, change: Tensor) -> None:
        slot = self.written % PAIRS
        self.written += 1
        self.steps[rows, slot] = step
        self.changes[rows, slot] = change
        self.valid[rows, slot] = True

    def direction(self, rows: Tensor, gap: Tensor, weight: Tensor, length: Tensor) -> Tensor:
        """B⁻¹(d − a) with B made of the pairs by BFGS in ⟨·,·⟩_S, by two loops (Nocedal, 1980).

        length: in the place of the curvature where a row has no pair.
        """
        everything = len(rows) == len(self.valid)
        steps, changes, valid = (
            t if everything else t[rows] for t in (self.steps, self.changes, self.valid)
        )
        last = min(self.written, PAIRS)
        order = [(self.written - 1 - i) % PAIRS for i in range(last)]
        weighted = changes * weight[:, None]
        curvature = (steps * weighted).sum(dim=2)
        enough = 1e-10 * (steps.square() * weight[:, None]).sum(dim=2)
        valid = valid & (curvature > enough)
        inverse = torch.where(valid, 1 / curvature, 0.0)
        scale = torch.where(valid, curvature / (changes * weighted).sum(dim=2), 0.0)
        found, newest = gap, torch.zeros_like(length)
        shares: dict[int, Tensor] = {}
        for slot in order:
            shares[slot] = inverse[:, slot] * torch.linalg.vecdot(weight * steps[:, slot], found)
            found = found - shares[slot][:, None] * changes[:, slot]
            newest = torch.where(newest > 0, newest, scale[:, slot])
        found = torch.where(newest > 0, newest, length)[:, None] * found
        for slot in reversed(order):
            back = inverse[:, slot] * torch.linalg.vecdot(weighted[:, slot], found)
            found = found + (shares[slot] - back)[:, None] * steps[:, slot]
        return torch.where(weight > 0, found, gap)
