"""Selection of the iterate that an engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.inputs.groups import Groups
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import SMALL_RESIDUAL, JointEvaluation


@dataclass
class BestIterate:
    """Rule of a search: the iterate of the lowest loss among those whose z is near its equilibrium.

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
        current: JointIterate,
        updated: JointIterate,
        evaluation: JointEvaluation,
        *,
        usable: Tensor,
        solved: Tensor,
    ) -> None:
        """Compare one iterate with the best so far.

        Args:
            current: The iterate before its sweeps.
            updated: The iterate after them.
            evaluation: The evaluation at the inputs of `current`.
            usable: Mask of the running problems whose values are finite.
            solved: Mask of the problems whose z is solved for at every x.
        """
        if not self.is_open:
            return
        better = self._eligible(usable, evaluation) & (evaluation.loss < self.loss)
        self.x = torch.where(better[:, None], current.x, self.x)
        self.loss = torch.where(better, evaluation.loss, self.loss)
        self._keep_state(better, current, updated, solved)

    def restart(self, rows: Tensor) -> None:
        """Discard the losses of the problems `rows`, whose iterates so far were invalid."""
        self.loss = torch.where(rows, torch.inf, self.loss)

    def candidates(self, last: JointIterate, converged: Tensor) -> list[Tensor]:
        """Return the inputs x whose true losses are compared, the preferred ones first."""
        best = self._preferred(last, converged)
        if bool((last.x == best).all()):
            return [best]
        return [best, torch.where(converged[:, None], best, last.x)]

    def unchecked(self, last: JointIterate) -> tuple[Tensor, Tensor]:
        """Return the input x and state z that a search ends with without computing true losses."""
        return last.x, last.z

    def _eligible(self, usable: Tensor, evaluation: JointEvaluation) -> Tensor:
        return usable & (evaluation.state_residual <= SMALL_RESIDUAL)

    def _keep_state(
        self, better: Tensor, current: JointIterate, updated: JointIterate, solved: Tensor
    ) -> None:
        """Keep the z of the best iterate, if `unchecked` needs it."""

    def _preferred(self, last: JointIterate, converged: Tensor) -> Tensor:
        return torch.where(converged[:, None], last.x, self.x)


class CheapestIterate(BestIterate):
    """Rule of a search: the iterate of the lowest loss, whatever the residual of its state z.

    It is the only candidate.
    """

    def candidates(self, last: JointIterate, converged: Tensor) -> list[Tensor]:
        return [self._preferred(last, converged)]

    def unchecked(self, last: JointIterate) -> tuple[Tensor, Tensor]:
        return self.x, self.z

    def _eligible(self, usable: Tensor, evaluation: JointEvaluation) -> Tensor:
        return usable

    def _keep_state(
        self, better: Tensor, current: JointIterate, updated: JointIterate, solved: Tensor
    ) -> None:
        samples = self.groups.to_samples
        evaluated = torch.where(samples(solved)[:, None], updated.z, current.z)
        self.z = torch.where(samples(better)[:, None], evaluated, self.z)
