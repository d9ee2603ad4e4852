"""Which of its iterates an engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.inputs.groups import Groups
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import SMALL_RESIDUAL, JointEvaluation


@dataclass
class BestIterate:
    """The iterate of the lowest loss among those whose z is near its equilibrium.

    The last iterate is a candidate too. A problem that has converged returns its last iterate.

    Args:
        x: Inputs that the search starts from, one row per problem.
        z: States that the search starts from, one row per sample.
        groups: The samples of each problem.
        is_open: Whether iterates are candidates; False leaves the start and the last iterate.
    """

    x: Tensor
    z: Tensor
    groups: Groups
    is_open: bool = True
    loss: Tensor = field(init=False)
    """Loss of the best iterate of each problem; infinite before there is one."""

    def __post_init__(self) -> None:
        self.loss = self.x.new_full((len(self.x),), torch.inf)

    def observe(
        self,
        now: JointIterate,
        updated: JointIterate,
        evaluation: JointEvaluation,
        *,
        usable: Tensor,
        solved: Tensor,
    ) -> None:
        """Take in one iterate.

        Args:
            now: The iterate before its sweeps.
            updated: The iterate after them.
            evaluation: The evaluation at the inputs of `now`.
            usable: Problems that run and whose numbers are finite, as a mask.
            solved: Problems whose z is solved for at every x, as a mask.
        """
        if not self.is_open:
            return
        better = self._believed(usable, evaluation) & (evaluation.loss < self.loss)
        self.x = torch.where(better[:, None], now.x, self.x)
        self.loss = torch.where(better, evaluation.loss, self.loss)
        self._keep_state(better, now, updated, solved)

    def restart(self, rows: Tensor) -> None:
        """Discard the losses of the problems `rows`, whose iterates so far were wrong."""
        self.loss = torch.where(rows, torch.inf, self.loss)

    def candidates(self, last: JointIterate, converged: Tensor) -> list[Tensor]:
        """Return the inputs whose true losses decide on the result, the preferred ones first."""
        best = self._preferred(last, converged)
        if bool((last.x == best).all()):
            return [best]
        return [best, torch.where(converged[:, None], best, last.x)]

    def unchecked(self, last: JointIterate) -> tuple[Tensor, Tensor]:
        """Return the (x, z) that the search ends with where no true losses are computed."""
        return last.x, last.z

    def _believed(self, usable: Tensor, evaluation: JointEvaluation) -> Tensor:
        return usable & (evaluation.state_residual <= SMALL_RESIDUAL)

    def _keep_state(
        self, better: Tensor, now: JointIterate, updated: JointIterate, solved: Tensor
    ) -> None:
        """Remember the z of the best iterate, where `unchecked` needs it."""

    def _preferred(self, last: JointIterate, converged: Tensor) -> Tensor:
        return torch.where(converged[:, None], last.x, self.x)


class CheapestIterate(BestIterate):
    """The iterate of the lowest loss, whatever the residual of its z; no other is a candidate."""

    def candidates(self, last: JointIterate, converged: Tensor) -> list[Tensor]:
        return [self._preferred(last, converged)]

    def unchecked(self, last: JointIterate) -> tuple[Tensor, Tensor]:
        return self.x, self.z

    def _believed(self, usable: Tensor, evaluation: JointEvaluation) -> Tensor:
        return usable

    def _keep_state(
        self, better: Tensor, now: JointIterate, updated: JointIterate, solved: Tensor
    ) -> None:
        samples = self.groups.to_samples
        seen = torch.where(samples(solved)[:, None], updated.z, now.z)
        self.z = torch.where(samples(better)[:, None], seen, self.z)
