"""Base class of restorers, `Restorer.restore(problem) -> Restored`, and their result."""

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
    """Outcome of the solve or the search for one image; empty if there was none.

    Args:
        status: Name of the `Status`, in words.
        residual: Relative residual.
        iterations: Number of iterations.
        message: Sentence on the outcome.

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
    """Restored images, with the outcome of their solves.

    Args:
        problem: The problem that was solved.
        images: Restored images, shape (B, C, H, W).
        solves: Outcome of the solve of each image.
        seconds: Wall-clock time in seconds.
        generated: Output of the model, before pixels that were measured without noise are put back;
            the same tensor as `images` if there are none.
        strength: λ, the weight of the prior; None for a method without one.
        trace: Objective at the start and after each iteration, shape (iterations + 1, B), if the
            restorer records it.
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
        """Measured values as images of the restored size; None if they are not images."""
        return self.problem.picture(tuple(self.images.shape[2:]))

    @property
    def bound(self) -> Tensor | None:
        """Proven bound on the root mean square distance of each image to the exact minimizer.

        None if nothing is proven.
        """
        return None

    @property
    def statement(self) -> str:
        """Sentence on the proven accuracy of the images; "" if nothing is proven."""
        return ""

    @property
    def best_trace(self) -> Tensor | None:
        """Lowest objective up to each iteration; None without a trace."""
        return None if self.trace is None else self.trace.cummin(dim=0).values


class Restorer(ABC):
    """A method that restores images.

    Examples:
        >>> from equilibria.restoration.restorer import Solve
        >>> class Unchanged(eq.restoration.Restorer):
        ...     def restore(self, problem):
        ...         images, solves = problem.measured, [Solve()]
        ...         return eq.restoration.Restored(
        ...             problem=problem, images=images, generated=images, solves=solves, seconds=0.0
        ...         )
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 8, 8))
        >>> Unchanged().restore(problem).images.shape
        torch.Size([1, 1, 8, 8])
    """

    @abstractmethod
    def restore(self, problem: RestorationProblem) -> Restored:
        """Restore the images of a problem.

        Args:
            problem: Measured values, measurement operator and noise.
        """


def worst(solves: Sequence[Solve]) -> Solve:
    """Return a solve that did not converge, or else the solve with the most iterations."""
    return max(solves, key=lambda solve: (solve.status != "converged", solve.iterations or 0))


def solves_of(result: Any, message: Callable[[int], str]) -> list[Solve]:
    """Return the outcome of a solve or a search for each image.

    Args:
        result: Result with a `status`, a `residual` and `iterations` per image.
        message: Returns the message for the image with a given index.
    """
    return [
        Solve(
            status=status_name(int(result.status[row])),
            residual=float(result.residual[row]),
            iterations=int(result.iterations[row]),
            message=message(row),
        )
        for row in range(len(result.status))
    ]


def status_name(status: int) -> str:
    """Return the name of a status code in words."""
    return Status(status).name.lower().replace("_", " ")
