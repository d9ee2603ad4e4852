"""What every restorer takes and gives: `Restorer.restore(problem) -> Restored`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equilibria.restoration.problem import RestorationProblem
from equilibria.solvers import Status


@dataclass(frozen=True)
class Solve:
    """How the solve or the search for one image ended; empty where there was none.

    Examples:
        >>> from equilibria.restoration.restorer import Solve
        >>> Solve(status="converged", iterations=12).residual is None
        True
    """

    status: str = ""
    residual: float | None = None
    iterations: int | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Restored images with all that a report shows of them.

    Args:
        problem: What was restored.
        images: The restored images, (B, C, H, W).
        solves: How the solve of each image ended.
        seconds: Wall-clock time.
        generated: The images as a model makes them, before pixels that were seen without noise are
            put back; the same tensor as `images` where none are.
        strength: λ, the weight of the prior that was used; None for a method without one.
        trace: Objective at the start and after each iteration, (iterations + 1, B), if the restorer
            was told to keep it.
        traces_tile: Whether the trace is that of the tile in the middle of a large picture.

    Examples:
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.full((1, 1, 16, 16), 0.5))
        >>> restored = eq.restoration.PhotoRestorer().restore(problem)
        >>> restored.strength, restored.solves[0].status
        (1.0, 'converged')
    """

    problem: RestorationProblem
    images: Tensor
    solves: Sequence[Solve]
    seconds: float
    generated: Tensor
    strength: float | None = None
    trace: Tensor | None = None
    traces_tile: bool = False

    @property
    def picture(self) -> Tensor | None:
        """What was measured, as images of the size of the restored ones; None if it is none."""
        return self.problem.picture(tuple(self.images.shape[2:]))

    @property
    def bound(self) -> Tensor | None:
        """Proven bound of the root mean square distance of each image to the exact minimizer.

        None where nothing is proven.
        """
        return None

    @property
    def statement(self) -> str:
        """One sentence on what is proven of the images; "" where nothing is."""
        return ""

    @property
    def best_trace(self) -> Tensor | None:
        """The lowest value of the objective up to each iteration."""
        return None if self.trace is None else self.trace.cummin(dim=0).values


class Restorer(ABC):
    """A method that restores images.

    Examples:
        >>> from equilibria.restoration.restorer import Solve
        >>> class Nothing(eq.restoration.Restorer):
        ...     def restore(self, problem):
        ...         same, solves = problem.measured, [Solve()]
        ...         return eq.restoration.Restored(
        ...             problem=problem, images=same, generated=same, solves=solves, seconds=0.0
        ...         )
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 8, 8))
        >>> Nothing().restore(problem).images.shape
        torch.Size([1, 1, 8, 8])
    """

    @abstractmethod
    def restore(self, problem: RestorationProblem) -> Restored:
        """Restore the images of a problem."""


def worst(solves: Sequence[Solve]) -> Solve:
    """Return a solve that did not converge, if any; otherwise the one with most iterations."""
    return max(solves, key=lambda solve: (solve.status != "converged", solve.iterations or 0))


def solves_of(found: Any, message: Callable[[int], str]) -> list[Solve]:
    """Describe a solution or a search, image by image.

    Args:
        found: It has a `status`, a `residual` and `iterations` per image.
        message: Gives the message for the image of an index.
    """
    return [
        Solve(
            status=status_name(int(found.status[row])),
            residual=float(found.residual[row]),
            iterations=int(found.iterations[row]),
            message=message(row),
        )
        for row in range(len(found.status))
    ]


def status_name(status: int) -> str:
    """Return the name of a status in words."""
    return Status(status).name.lower().replace("_", " ")
