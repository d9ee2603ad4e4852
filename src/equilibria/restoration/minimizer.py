"""Minimizer of the sum of a data term and a learned prior of photographs.

    y* = argmin G(y),  G(y) = (w/2)‖Ay − x‖² + R_σ(y),  w = (σ/ν)²/λ

Here x are the measured values, A is the measurement, ν the noise of x, σ the noise level of the
prior R, and λ its strength. R is a sum of ridge functions of filtered pictures
(`energies/ridge.py`, `opponent.py`), with −c ≼ ∇²R_σ ≼ C and c < 1 (`concavity`, `curvature`).
`PhotoRestorer` denoises with ν and σ both λν, so that w = 1: G(y) = ½‖y − x‖² + R_{λν}(y).

The minimizer is a fixed point of a gradient step (`models/restorers/photo.py`):

    T(y) = y − s∇G(y),  s = min(1, 1/L),  m ≼ ∇²G ≼ L = C + w‖A‖²

- If A is the identity, m = w − c. If m > 0, y* is unique and T is a contraction with q = 1 − sm.
  Anderson's method, with a damping of 3, stops at q/(1 − q)·‖T(y) − y‖ ≤ accuracy·√n, which bounds
  the root mean square distance of the n returned pixels to those of y*.
- If A loses information, m = −c; if A is not linear, m = −∞. Then y* need not be unique, and no
  distance to it is proven. Anderson's method stops where the root mean square of
  ∇G = (y − T(y))/s is at most 0.01 σ. `RestoredPhotos` then bounds how much lower the objective of
  any picture within one gray level is.

For a large picture in tiles, the last solve uses Nesterov's method, which stores two pictures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from equilibria.models.restorers.photo import GradientBelow, PhotoCell
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

MIRRORED_PIXELS = 8
"""Pixels by which a picture is extended at each edge, by reflection, while it is restored."""
GRADIENT_TOLERANCE = 1e-2
"""Root mean square of the gradient at which a solve without an error bound stops, in units of the
prior's noise level."""
POWER_ITERATIONS = 10
"""Iterations that estimate the norm of the derivative of a custom measurement."""


@dataclass(frozen=True)
class ErrorBelow(StoppingCriterion):
    """Proven root mean square distance to the minimizer y* at most `distance`.

    ‖T(y) − y*‖ ≤ q/(1−q)·‖T(y) − y‖ for all pixels, and so for those that are returned.

    Args:
        distance: Root mean square distance of the returned pixels.
        contraction: q.
        numbers: Number of returned pixels, times the channels.
    """

    distance: float
    contraction: float
    numbers: int

    def reached(self, iterate: Iterate) -> Tensor:
        proven = iterate.residuals.absolute * self.contraction / (1 - self.contraction)
        return proven <= self.distance * math.sqrt(self.numbers)


@dataclass(frozen=True)
class Iteration:
    """One iteration of a solve, for observers.

    Attributes:
        count: Number of the iteration, from 1.
        images: Images after the iteration, without the mirrored edge.
        objective: Computes the objective of each image.
    """

    count: int
    images: Tensor
    objective: Callable[[], Tensor]


Observer = Callable[[Iteration], None]


@dataclass(frozen=True)
class _Observed(StoppingCriterion):
    """A criterion that passes each state to `on_state` before it is evaluated."""

    criterion: StoppingCriterion
    on_state: Callable[[Tensor], None]

    def notes(self) -> Mapping[str, Tensor]:
        return self.criterion.notes()

    def reached(self, iterate: Iterate) -> Tensor:
        state = iterate.problem.unpack(iterate.image)
        assert isinstance(state, Tensor)
        self.on_state(state)
        return self.criterion.reached(iterate)


class _Trace:
    """Record of the objective at the start and at every state that it is called with."""

    def __init__(self, objective: Any, start: Tensor) -> None:
        self.objective = objective
        self.recorded: list[Tensor] = [objective.value(start)]

    def __call__(self, state: Tensor) -> None:
        self.recorded.append(self.objective.value(state))

    @property
    def values(self) -> Tensor:
        return torch.stack(self.recorded)


def _solve(
    layer: EquilibriumLayer,
    inputs: tuple[Tensor, ...],
    start: Tensor,
    solver: Method | None,
    *callbacks: Callable[[Tensor], None] | None,
) -> Solution:
    """Solve, and pass the state to each callback after every iteration."""
    active = [callback for callback in callbacks if callback is not None]

    def on_state(state: Tensor) -> None:
        for callback in active:
            callback(state)

    if active:
        chosen = layer.solver if solver is None else solver
        solver = replace(chosen, stop=_Observed(chosen.criterion, on_state))
    return layer.solve(inputs, start, solver=solver)


class PhotoMinimizer(nn.Module):
    """Restorer of gray or color pictures of any size, with pixels in [0, 1].

    A custom measurement is a linear operator or any differentiable map of images. Pictures of a
    custom measurement are not extended at their edges. If a map changes the size of pictures,
    `restore` needs a `start`.

    Args:
        prior: Prior R of pictures.
        noise: Standard deviation ν of the noise of the measured values.
        level: Noise level σ of the prior; by default `noise`.
        strength: Strength λ of the prior; the data term has the weight (σ/ν)²/λ.
        accuracy: Proven root mean square distance to the exact minimizer at which a solve stops; by
            default one gray level.
        max_iterations: Limit of the iterations of a solve.
        factor: Factor by which the resolution of the restored picture is higher.
        box: Step of the quantization of the measured values, or a tensor of steps (see
            `DataFidelity`).

    Examples:
        >>> restorer = eq.restoration.PhotoMinimizer(eq.models.photo_prior(), noise=0.1)
        >>> restored = restorer.restore(0.5 + 0.1 * torch.randn(1, 1, 24, 24))
        >>> restored.images.shape, restored.bound <= 1 / 255  # distance to the exact minimizer
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
        # The noise may exceed 1 if the measured values are not pixels.
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
        """Solutions of `forward`: those of the last picture in tiles, one per tile."""

    def reach(self, accuracy: float) -> int:
        """Return the overlap of tiles in pixels; a heuristic without a proof.

        The bound on the error of the whole picture includes the effect of cut edges.

        Args:
            accuracy: Not used; `answer_in_tiles` passes it to every restorer.
        """
        return 4 * self.prior.size

    @torch.no_grad()
    def forward(
        self, measured: Tensor, measurement: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the minimizer for a tile, which is not extended at its edges.

        Args:
            measured: Measured values of the tile, shape (B, 1 or 3, H, W).
            measurement: Measurement operator A of the tile; by default the identity.
        """
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
        """Compute the minimizer.

        Args:
            measured: Measured values x, shape (B, 1 or 3, H, W) for pictures.
            measurement: Measurement operator A; by default the identity.
            start: Start of the solve; by default the operator's first guess.
            solver: Solver; by default Anderson's method, until the error bound is below `accuracy`
                or, where there is no bound, until the gradient is small.
            trace: Record the objective of every iteration.
            observe: Called after every iteration.

        Returns:
            The pictures with a bound on their error.

        Raises:
            ValueError: If the picture is too small, not finite, or does not fit the measurement.
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
        """Compute the minimizer of a large picture, starting from those of overlapping tiles.

        The tiles fade into each other. A solve of the whole picture starts from the result, with a
        solver that stores 2 pictures instead of 16 to 20. It takes one evaluation if its stopping
        rule is met at the start.

        Args:
            problem: The problem of the whole picture.
            tile: Side of the tiles, in pixels of the restored picture.
            progress: Wraps the sequence of tiles, for example to show a progress bar.
            trace: Record the objective of every iteration for the tile in the middle.
            observe: Called after every iteration of the solve of the whole picture.
        """

        def with_traced_tile(tiles: Sequence[Any]) -> Iterable[Any]:
            self._traced_tile = len(self.solutions) + len(tiles) // 2 if trace else None
            return progress(tiles)

        self.solutions, self._traced_tile, self._trace = [], None, None
        padded, operator = self.mirrored(problem.measured, problem.measurement)
        whole = RestorationProblem(padded, operator, problem.noise)
        start = answer_in_tiles(self, whole, tile, with_traced_tile)
        restored = self.finish(problem, padded, operator, start, low_memory=True, observe=observe)
        in_tiles = [solution.iterations.amax() for solution in self.solutions]
        iterations = restored.solution.iterations + torch.stack(in_tiles).amax()
        solution = replace(restored.solution, iterations=iterations)
        return replace(
            restored,
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
        """Solve from a given start, and remove the mirrored edge.

        Args:
            problem: The problem to report.
            padded: Measured values with mirrored edges, from `mirrored`.
            operator: Measurement operator of `padded`, from `mirrored`.
            start: Start of the solve, with mirrored edges.
            solver: Solver; by default the layer's.
            low_memory: Use a solver that stores two pictures.
            trace: Record the objective of every iteration.
            observe: Called after every iteration.
        """
        started = perf_counter()
        edge = self.margin(operator) * self.factor
        layer, inputs = self.layer(padded, operator, start, edge=edge, low_memory=low_memory)

        def inside(state: Tensor) -> Tensor:
            height, width = (size - edge for size in state.shape[2:])
            return state[..., edge:height, edge:width]

        objective, count = layer.objective(inputs), itertools.count(1)
        traced = _Trace(objective, start) if trace else None

        def report(state: Tensor) -> None:
            if observe is not None:
                observe(Iteration(next(count), inside(state), lambda: objective.value(state)))

        solution = _solve(layer, inputs, start, solver, traced, None if observe is None else report)
        cell, state = layer.cell, solution.state
        assert isinstance(cell, PhotoCell)
        assert isinstance(state, Tensor)
        images, image = inside(state), cell.step(state, solution.context)
        assert isinstance(image, Tensor)
        noise_term = None
        if not cell.convexity > 0:
            # (w/2)·ν² per measured value, with w = (σ/ν)²/λ.
            counted = about(operator).counted(padded).flatten(1).sum(dim=1)
            noise_term = 0.5 * self.level**2 / self.strength * counted
        return RestoredPhotos(
            problem=problem,
            images=images,
            generated=images,
            solves=solves_of(solution, solution.message),
            seconds=perf_counter() - started,
            strength=self.strength,
            steepness=((image - state) / cell.damping).square().flatten(1).mean(dim=1).sqrt(),
            solution=solution,
            start=start,
            cell=cell,
            noise_term=noise_term,
            trace=None if traced is None else traced.values,
        )

    def layer(
        self,
        measured: Tensor,
        measurement: LinearOperator | Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        edge: int = 0,
        low_memory: bool = False,
    ) -> tuple[EquilibriumLayer, tuple[Tensor, Tensor]]:
        """Build the equilibrium layer whose output is the restored picture, with its two inputs.

        The restored picture minimizes the data term of the measurement plus the learned prior. The
        inputs are the measured values and the prior's noise level of each picture.

        Args:
            measured: Measured values x.
            measurement: Measurement operator A.
            start: Start of the solve, which defines the shape of the pictures.
            edge: Pixels at each edge that the result does not contain. `accuracy` is the distance
                of the other pixels to those of the minimizer.
            low_memory: Use a solver that stores two pictures.
        """
        if self.prior.is_adaptive and not about(measurement).keeps_all:
            raise ValueError(
                "a prior that adapts to the noisy picture removes noise only; use a prior without "
                "a network, such as that of the package"
            )
        context, layout = Context(), (tuple(start.shape[1:]),)
        # `DataFidelity` weighs by (σ/spread)² with σ the last input of the layer: this gives w.
        spread = self.noise * math.sqrt(self.strength)
        data = DataFidelity(measurement, spread, box=self.box, image_shape=layout[0])
        weight = (self.level / spread) ** 2
        bounds = self.prior.bounds(context, layout)
        assert bounds.curvature is not None
        assert bounds.concavity is not None
        concavity, curvature = float(bounds.concavity), float(bounds.curvature)
        if isinstance(measurement, LinearOperator):
            norm = float(measurement.to(measured).norm_bound(layout[0]))
            data_convexity = weight if about(measurement).keeps_all and not data.has_box else 0.0
        else:
            norm, data_convexity = _norm_near(measurement, start), -math.inf
        convexity = data_convexity - concavity
        cell = PhotoCell(
            data, self.prior, curvature=curvature + weight * norm**2, convexity=convexity
        )
        contraction = cell.limits.contraction
        # Converged samples stay in the batch, because a measurement may have one mask per sample.
        options: dict[str, Any] = {"max_iterations": self.max_iterations, "drop_share": 1.0}
        if contraction is None:
            gradient = measured.new_full((len(measured),), GRADIENT_TOLERANCE * self.level)
            stop: StoppingCriterion = GradientBelow(gradient, cell.damping)
            solver: Method = Anderson(memory=8, stop=stop, **options)
        else:
            # For a unique minimizer, overrelaxation needs fewer iterations.
            channels, height, width = layout[0]
            returned = channels * (height - 2 * edge) * (width - 2 * edge)
            stop = ErrorBelow(self.accuracy, contraction, returned)
            solver = Anderson(memory=10, damping=3.0, stop=stop, **options)
        if low_memory:
            solver = Accelerated(stop=stop, **options)
        layer = EquilibriumLayer(cell, solver=solver, gradient=Implicit(tolerance=0.04))
        return layer, (measured, measured.new_full((len(measured),), self.level))

    def guess(self, measured: Tensor, measurement: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the default start of a solve.

        Args:
            measured: Measured values.
            measurement: Measurement operator.
        """
        return about(measurement).first_guess(measured, self.noise)

    def mirrored(
        self, measured: Tensor, measurement: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, LinearOperator | Callable[[Tensor], Tensor]]:
        """Return the measured picture with mirrored edges, and the operator for it.

        Pictures of a custom measurement are returned unchanged, since their size may be fixed.

        Args:
            measured: Measured values, shape (B, C, H, W).
            measurement: Measurement operator; None for the identity.

        Raises:
            ValueError: If the picture is not finite or too small.
        """
        check_images(measured, measured.shape[1] if measured.dim() == 4 else 1)
        if not bool(measured.isfinite().all()):
            raise ValueError("the picture must be finite, got NaN or infinite values")
        operator = Identity() if measurement is None else measurement
        margin = self.margin(operator)
        if margin:
            check_positive_pixels(noise=self.noise)
        if min(measured.shape[2:]) <= margin:
            height, width = measured.shape[2:]
            raise ValueError(
                f"the picture must have more than {margin} pixels per side, got {width}×{height}"
            )
        about(operator).check(measured)
        if margin:
            operator = about(operator).reflected(margin, measured)
        return reflect(measured, margin), operator

    def margin(self, measurement: object) -> int:
        """Return the number of measured pixels that are mirrored at each edge.

        Args:
            measurement: Measurement operator.
        """
        return math.ceil(MIRRORED_PIXELS / self.factor) if about(measurement).continues else 0


def _norm_near(measurement: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Estimate the norm of the derivative of a map at a picture; not an upper bound."""
    with torch.enable_grad():
        y = start[:1].detach().requires_grad_()
        image = measurement(y)

    def pulled(rows: Tensor) -> Tensor:
        return torch.autograd.grad(image, y, rows, retain_graph=True)[0]

    def pushed(direction: Tensor) -> Tensor:
        """Return Jv, as the derivative of ⟨Jᵀu, v⟩ in u."""
        with torch.enable_grad():
            rows = torch.zeros_like(image).requires_grad_()
            (back,) = torch.autograd.grad(image, y, rows, create_graph=True)
            return torch.autograd.grad(back, rows, direction)[0]

    first = seeded_vector(tuple(y.shape), y)
    return 1.1 * float(pushed(leading_vector(pushed, pulled, first, POWER_ITERATIONS)).norm())
