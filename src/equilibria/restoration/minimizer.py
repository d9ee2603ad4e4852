"""The minimizer of what was measured of a photograph and of a learned prior.

    y* = argmin (w/2)‖Ay − x‖² + R_σ(y),  w = (σ/ν)²/λ

Here ν is the noise of x, σ the noise level that the prior is given, λ its strength, and R_σ is no
more concave than `concavity` < 1. Where A is the identity the objective is strongly convex, so that
y* is unique. Where A hides something the file bounds how much better an image nearby can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Context
from equilibria.energies import DataFidelity, OpponentPrior
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import Implicit
from equilibria.models.blocks import check_images
from equilibria.models.restorers.photo import PhotoCell
from equilibria.operators import Identity, LinearOperator
from equilibria.operators.measurements import about, reflect
from equilibria.operators.spectral import leading_vector, seeded_vector
from equilibria.registry import (
    check_at_least_one,
    check_positive,
    check_positive_pixels,
)
from equilibria.restoration.problem import RestorationProblem
from equilibria.restoration.proof import GRAY_LEVEL, RestoredPhotos
from equilibria.restoration.restorer import solves_of
from equilibria.restoration.tiles import answer_in_tiles
from equilibria.solvers import Accelerated, Anderson, Solution
from equilibria.solvers.convergence import Iterate, StoppingCriterion
from equilibria.solvers.method import Method

MIRRORED = 8
"""Pixels by which a picture goes on beyond its edges, reflected, while it is restored."""
STEEPEST = 1e-2
"""Of the gradient of the objective, its root mean square over the prior's noise level, where a
solve without a proof ends."""

POWERS = 10
"""Steps of the power iteration that tells how steep a measurement of one's own is."""


@dataclass(frozen=True)
class ErrorBelow(StoppingCriterion):
    """√(‖T(y) − y*‖²/pixels) ≤ `level`, proven: ‖T(y) − y*‖ ≤ q/(1−q)·‖T(y) − y‖."""

    level: float
    contraction: float

    def reached(self, iterate: Iterate) -> Tensor:
        proven = iterate.residuals.absolute * self.contraction / (1 - self.contraction)
        return proven <= self.level * math.sqrt(iterate.image.shape[1])


@dataclass(frozen=True)
class FlatBelow(StoppingCriterion):
    """The root mean square of ∇G is at most `level`; T(y) − y is `length` times −∇G."""

    level: float
    length: float

    def reached(self, iterate: Iterate) -> Tensor:
        size = math.sqrt(iterate.image.shape[1])
        return iterate.residuals.absolute <= self.length * self.level * size


@dataclass(frozen=True)
class Iteration:
    """One iteration of a solve, as an observer sees it."""

    count: int
    images: Tensor
    """The images after the iteration, without the mirrored edge."""
    objective: Callable[[], Tensor]
    """Computes the objective of each image."""


Observer = Callable[[Iteration], None]


@dataclass(frozen=True)
class _Observed(StoppingCriterion):
    """Another criterion; `see` gets each state that it is asked about."""

    criterion: StoppingCriterion
    see: Callable[[Tensor], None]

    def reached(self, iterate: Iterate) -> Tensor:
        state = iterate.problem.unpack(iterate.image)
        assert isinstance(state, Tensor)
        self.see(state)
        return self.criterion.reached(iterate)


class _Trace:
    """The objective at the start and at every state that it is called with."""

    def __init__(self, objective: Any, start: Tensor) -> None:
        self.objective = objective
        self.found: list[Tensor] = [objective.value(start)]

    def __call__(self, state: Tensor) -> None:
        self.found.append(self.objective.value(state))

    @property
    def values(self) -> Tensor:
        return torch.stack(self.found)


def _solve(
    layer: EquilibriumLayer,
    inputs: tuple[Tensor, ...],
    start: Tensor,
    solver: Method | None,
    *watchers: Callable[[Tensor], None] | None,
) -> Solution:
    """Solve; each watcher gets the state after every iteration."""
    seeing = [watcher for watcher in watchers if watcher is not None]

    def see(state: Tensor) -> None:
        for watcher in seeing:
            watcher(state)

    if seeing:
        usual = layer.solver if solver is None else solver
        solver = replace(usual, stop=_Observed(usual.criterion, see))
    return layer.solve(inputs, start, solver=solver)


class PhotoMinimizer(nn.Module):
    """Restores pictures of any size, gray or colored, with values in [0, 1].

    A measurement of one's own is a linear operator or any differentiable map of images; the picture
    then ends at its edges. Where a map changes the size of pictures `restore` needs a `start`.

    noise: ν, of what was measured, as a fraction of the pixel range. level: σ of the prior, ν where
        nothing but noise was added.
    strength: λ of the prior: the data term weighs (σ/ν)²/λ.
    accuracy: where a solve ends, as a proven root mean square distance to the exact minimizer; by
        default a gray level.
    factor: how much finer the restored picture is.
    box: the step, or the steps, of a quantization that x went through (see `DataFidelity`).

    Examples:
        >>> restorer = eq.restoration.PhotoMinimizer(eq.models.photo_prior(), noise=0.1)
        >>> found = restorer.restore(0.5 + 0.1 * torch.randn(1, 1, 24, 24))
        >>> found.images.shape, found.bound <= 1 / 255  # of the distance to the exact minimizer
        (torch.Size([1, 1, 24, 24]), tensor([True]))
        >>> restorer.restore(torch.rand(1, 1, 24, 24), eq.operators.Blur(1.5)).images.shape
        torch.Size([1, 1, 24, 24])
    """

    takes_measurement = True

    def __init__(
        self,
        prior: OpponentPrior,
        noise: float,
        *,
        level: float | None = None,
        strength: float = 1.0,
        accuracy: float = GRAY_LEVEL,
        max_iterations: int = 200,
        factor: int = 1,
        box: float | Tensor = 0.0,
    ) -> None:
        super().__init__()
        # A measurement that is no picture may have another unit than pixels.
        check_positive(noise=noise, strength=strength)
        check_positive_pixels(level=level, accuracy=accuracy)
        if level is None:
            check_positive_pixels(noise=noise)
        check_at_least_one(max_iterations=max_iterations, factor=factor)
        self.prior = prior
        self.noise = noise
        self.level = noise if level is None else level
        self.strength = strength
        self.accuracy = accuracy
        self.max_iterations = max_iterations
        self.factor = factor
        self.box = box
        self._traced_tile: int | None = None
        self._trace: _Trace | None = None
        self.solutions: list[Solution] = []
        """How the solves of `forward` ended, one a piece."""

    def reach(self, accuracy: float) -> int:
        """Overlap of pieces in pixels; a heuristic, not a proof.

        The bound on the error of the whole picture includes the effect of cut edges.
        """
        return 4 * self.prior.size

    @torch.no_grad()
    def forward(
        self, measured: Tensor, measurement: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The minimizer for a piece of a picture, which ends at its edges."""
        operator = Identity() if measurement is None else measurement
        start = self.guess(measured, operator)
        layer, inputs = self.layer(measured, operator, start)
        is_traced = len(self.solutions) == self._traced_tile
        trace = _Trace(layer.objective(inputs), start) if is_traced else None
        solution = _solve(layer, inputs, start, None, trace)
        self._trace = trace if is_traced else self._trace
        self.solutions.append(solution.facts())
        assert isinstance(solution.state, Tensor)
        return solution.state

    @torch.no_grad()
    def restore(
        self,
        measured: Tensor,
        measurement: Callable[[Tensor], Tensor] | None = None,
        *,
        start: Tensor | None = None,
        solver: Method | None = None,
        trace: bool = False,
        observe: Observer | None = None,
    ) -> RestoredPhotos:
        """Find the minimizer.

        Args:
            measured: x, (B, 1 or 3, H, W) for a measurement of pictures.
            measurement: A; the identity if None.
            start: Where the solve begins; a guess of the operator's if None.
            solver: Another solver than the usual one.
            trace: Keep the objective of every iteration.
            observe: Called after every iteration.
        """
        padded, operator = self.mirrored(measured, measurement)
        edge = self.margin(operator) * self.factor
        begin = self.guess(padded, operator) if start is None else reflect(start, edge)
        problem = RestorationProblem(measured, measurement or Identity(), self.noise)
        return self.finish(
            problem, padded, operator, begin, solver=solver, trace=trace, observe=observe
        )

    @torch.no_grad()
    def restore_in_tiles(
        self,
        problem: RestorationProblem,
        tile: int,
        progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
        *,
        trace: bool = False,
        observe: Observer | None = None,
    ) -> RestoredPhotos:
        """Find the minimizer of a large picture from that of its overlapping tiles.

        The tiles fade into each other. One gradient of the objective of the whole picture then
        bounds the distance to its minimizer; where that exceeds the accuracy, the solve goes on
        with the whole picture. It keeps two pictures in memory instead of sixteen.

        Args:
            problem: What is restored.
            tile: Side of the tiles, in pixels of the restored picture.
            progress: Goes through the tiles, to show how many are done.
            trace: Keep the objective of every iteration of the solve of the tile in the middle.
            observe: Called after every iteration of the solve of the whole picture.
        """

        def noted(tiles: Sequence[Any]) -> Iterable[Any]:
            self._traced_tile = len(self.solutions) + len(tiles) // 2 if trace else None
            return progress(tiles)

        padded, operator = self.mirrored(problem.measured, problem.measurement)
        whole = RestorationProblem(padded, operator, problem.noise)
        start = answer_in_tiles(self, whole, tile, noted)
        found = self.finish(problem, padded, operator, start, low_memory=True, observe=observe)
        done = [solution.iterations.amax() for solution in self.solutions]
        iterations = found.solution.iterations + torch.stack(done).amax()
        solution = replace(found.solution, iterations=iterations)
        return replace(
            found,
            solution=solution,
            solves=solves_of(solution, solution.message),
            trace=None if self._trace is None else self._trace.values,
            traces_tile=True,
        )

    def finish(
        self,
        problem: RestorationProblem,
        padded: Tensor,
        operator: LinearOperator | Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        solver: Method | None = None,
        low_memory: bool = False,
        trace: bool = False,
        observe: Observer | None = None,
    ) -> RestoredPhotos:
        """Solve from a start, for what `mirrored` gives, and drop the mirrored edge."""
        began = perf_counter()
        layer, inputs = self.layer(padded, operator, start, low_memory=low_memory)
        edge = self.margin(operator) * self.factor

        def inside(state: Tensor) -> Tensor:
            height, width = (size - edge for size in state.shape[2:])
            return state[..., edge:height, edge:width]

        objective, count = layer.objective(inputs), itertools.count(1)
        traced = _Trace(objective, start) if trace else None

        def see(state: Tensor) -> None:
            if observe is not None:
                observe(Iteration(next(count), inside(state), lambda: objective.value(state)))

        solution = _solve(layer, inputs, start, solver, traced, None if observe is None else see)
        cell, state = layer.cell, solution.state
        assert isinstance(cell, PhotoCell)
        assert isinstance(state, Tensor)
        images, image = inside(state), cell.step(state, solution.context)
        assert isinstance(image, Tensor)
        # (w/2)·ν² per measured value, with w = (σ/ν)²/λ.
        counted = about(operator).counted(padded).flatten(1).sum(dim=1)
        return RestoredPhotos(
            problem=problem,
            images=images,
            generated=images,
            solves=solves_of(solution, solution.message),
            seconds=perf_counter() - began,
            strength=self.strength,
            steepness=((image - state) / cell.damping).square().flatten(1).mean(dim=1).sqrt(),
            solution=solution,
            start=start,
            cell=cell,
            noise_term=0.5 * self.level**2 / self.strength * counted,
            trace=None if traced is None else traced.values,
        )

    def layer(
        self,
        measured: Tensor,
        measurement: LinearOperator | Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        low_memory: bool = False,
    ) -> tuple[EquilibriumLayer, tuple[Tensor, Tensor]]:
        """The equilibrium layer whose output is the minimizer, and its inputs."""
        context, layout = Context(), (tuple(start.shape[1:]),)
        spread = self.noise * math.sqrt(self.strength)
        data = DataFidelity(measurement, spread, box=self.box, image_shape=layout[0])
        weight = (self.level / spread) ** 2
        bounds = self.prior.bounds(context, layout)
        assert bounds.curvature is not None
        assert bounds.concavity is not None
        bend, top = float(bounds.concavity), float(bounds.curvature)
        if isinstance(measurement, LinearOperator):
            norm = float(measurement.to(measured).norm_bound(layout[0]))
            known = weight if about(measurement).keeps_all and not data.has_box else 0.0
        else:
            norm, known = _norm_near(measurement, start), -math.inf
        cell = PhotoCell(data, self.prior, top + weight * norm**2, known - bend)
        contraction = cell.limits.contraction
        # No sample is dropped: a mask may have one for each.
        options: dict[str, Any] = {"max_iterations": self.max_iterations, "drop_share": 1.0}
        if contraction is None:
            stop: StoppingCriterion = FlatBelow(STEEPEST * self.level, cell.damping)
            solver: Method = Anderson(memory=8, stop=stop, **options)
        else:
            # Where there is one minimizer, a bolder search finds it in fewer steps.
            stop = ErrorBelow(self.accuracy, contraction)
            solver = Anderson(memory=10, damping=3.0, stop=stop, **options)
        if low_memory:
            solver = Accelerated(stop=stop, **options)
        layer = EquilibriumLayer(cell, solver=solver, gradient=Implicit(tolerance=0.04))
        return layer, (measured, measured.new_full((len(measured),), self.level))

    def guess(self, measured: Tensor, measurement: Callable[[Tensor], Tensor]) -> Tensor:
        """Where a solve starts."""
        return about(measurement).first_guess(measured, self.noise)

    def mirrored(
        self, measured: Tensor, measurement: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, LinearOperator | Callable[[Tensor], Tensor]]:
        """Return the measured picture, extended beyond its edges.

        Pictures of a custom measurement are returned unchanged, since their size may be fixed.
        """
        check_images(measured, measured.shape[1] if measured.dim() == 4 else 1)
        if not bool(measured.isfinite().all()):
            raise ValueError("the picture has values that are NaN or infinite")
        operator = Identity() if measurement is None else measurement
        margin = self.margin(operator)
        if margin:
            check_positive_pixels(noise=self.noise)
        if min(measured.shape[2:]) <= margin:
            height, width = measured.shape[2:]
            raise ValueError(
                f"a picture of {width}×{height} pixels is too small to be restored: it needs more "
                f"than {margin} a side"
            )
        about(operator).check(measured)
        if margin:
            operator = about(operator).reflected(margin, measured)
        return reflect(measured, margin), operator

    def margin(self, measurement: object) -> int:
        """Pixels of what was measured that are mirrored at every edge."""
        return math.ceil(MIRRORED / self.factor) if about(measurement).continues else 0


def _norm_near(measurement: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """About the norm of the derivative of a map at a picture, by a power iteration: no bound."""
    with torch.enable_grad():
        y = start[:1].detach().requires_grad_()
        image = measurement(y)

    def pulled(rows: Tensor) -> Tensor:
        return torch.autograd.grad(image, y, rows, retain_graph=True)[0]

    def pushed(direction: Tensor) -> Tensor:
        """Jv, as the derivative of ⟨Jᵀu, v⟩ in u."""
        with torch.enable_grad():
            rows = torch.zeros_like(image).requires_grad_()
            (back,) = torch.autograd.grad(image, y, rows, create_graph=True)
            return torch.autograd.grad(back, rows, direction)[0]

    first = seeded_vector(tuple(y.shape), y)
    return 1.1 * float(pushed(leading_vector(pushed, pulled, first, POWERS)).norm())
