"""Base class of methods that minimize the hidden objective instead of iterating the map."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from equilibria.solvers.method import Method
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution


@dataclass(frozen=True, kw_only=True)
class Minimizer(Method):
    """Base class of minimizers of the hidden objective.

    A minimizer has the settings, the stopping rules and the minimum check of every `Method`. It
    needs a problem with a `potential` and evaluates the objective and its gradient instead of the
    map, so it has no `begin` and `propose`.

    Args:
        max_iterations: Largest number of gradients and Hessian products per sample.
        tolerance, stop, check_minimum: See `Method`.
    """

    max_iterations: int = 10_000

    @property
    def minimizer(self) -> Minimizer:
        return self

    @abstractmethod
    def run(
        self,
        problem: FixedPointProblem,
        *,
        trace: bool | Literal["states"] = False,
        visited: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Solution:
        """Minimize the objective of `problem`; every sample stops independently of the others.

        Args:
            problem: Problem with a hidden objective.
            trace: True records the residuals of all iterations, "states" also the states.
            visited: Known pairs of a state y and d = −∇E(y), packed, in the order in which they
                were computed.

        Returns:
            State, status and residual of every sample.
        """
