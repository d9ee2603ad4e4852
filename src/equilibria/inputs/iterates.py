"""The iterate of a search over inputs: z, μ and x together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.groups import Groups


@dataclass
class JointIterate:
    """Iterate of a search: states z and adjoints μ, one row per sample, and inputs x.

    Inputs have one row per problem.
    """

    z: Tensor
    mu: Tensor
    x: Tensor

    def where(self, rows: Tensor, other: JointIterate, groups: Groups) -> JointIterate:
        """Return this iterate in the problems `rows`, and `other` elsewhere."""
        # The mask usually holds all rows or none, and `torch.where` copies everything.
        if bool(rows.all()):
            return self
        if not bool(rows.any()):
            return other
        samples = groups.to_samples(rows)[:, None]
        return JointIterate(
            torch.where(samples, self.z, other.z),
            torch.where(samples, self.mu, other.mu),
            torch.where(rows[:, None], self.x, other.x),
        )
