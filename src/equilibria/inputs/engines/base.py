"""What engines share: z, μ and x, and the sweeps of Eq. 11 that carry z and μ after x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from equilibria.inputs.engines.selection import BestIterate, CheapestIterate
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.inputs.steps import Decay, Rule
from equilibria.registry import check_at_least_one, check_positive, check_share
from equilibria.solvers import Solver

FIRST_PULLS = 3
"""More pull-backs for the first μ than for every later one."""
START_TOLERANCE = 0.1
"""Of the first z, where no check has solved for it: the sweeps go on from there."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to iterate Eq. 11: this one as it is printed, others derive from it.

    name: what results call it, where it is given as an object.
    sweeps: updates of (z, μ) for each step of x; None leaves it to the call.
    alpha_z, alpha_mu: damping of the sweeps.
    alpha_x: the step size where a call gives none; None leaves it to `optimize_input`.
    share: the length of the first normalized step where there is no step size, in units of the
        region's scale. A long step ends where the gradient points, as in the power method; the
        decay makes it finer.
    late_factor: what decay="late" multiplies the step length by after 65 iterations.
    from_zero: start at z = 0 rather than at the equilibrium of x0.
    unit_loss: scale the loss so that μ is of the order of 1; otherwise it is taken as given.
    cheapest: the result is the iterate of the least loss as it seemed, whatever the residual of its
        z; otherwise only iterates near their equilibrium, and the last one, are believed.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> engine = eq.inputs.Engine(rule="adam", sweeps=2, alpha_x=0.01)
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, engine=engine, iterations=5)
        >>> bool(found.loss < found.initial_loss), found.engine
        (True, 'own')
    """

    name: str = "own"
    rule: Rule = "gradient"
    decay: Decay = "cosine"
    sweeps: int | None = None
    alpha_z: float = 1.0
    alpha_mu: float = 1.0
    alpha_x: float | None = None
    share: float = 8.0
    late_factor: float = 1.0
    from_zero: bool = False
    unit_loss: bool = True
    cheapest: bool = False

    def __post_init__(self) -> None:
        check_share(alpha_z=self.alpha_z, alpha_mu=self.alpha_mu, late_factor=self.late_factor)
        check_at_least_one(sweeps=self.sweeps)
        check_positive(alpha_x=self.alpha_x, share=self.share)

    def begin(self, problem: InputProblem, sweeps: int) -> EngineRun[Any]:
        """A run of its own, with what it remembers."""
        return EngineRun(self, problem, sweeps)


EngineT = TypeVar("EngineT", bound=Engine)


@dataclass
class EngineRun(Generic[EngineT]):
    """One search of an engine: how z and μ follow x, and where the next iteration starts."""

    engine: EngineT
    problem: InputProblem
    sweeps: int

    @property
    def residual_limit(self) -> float:
        """The residual below which its size decides on what is done next."""
        return 0.0

    @property
    def strays(self) -> bool:
        """Whether x may be evaluated outside its region: such points are no results."""
        return False

    @property
    def inner(self) -> Solver[Any] | None:
        """What accelerates the sweeps at one x, z and μ each on its own.

        It takes the place of the damping in all of them but the last.
        """
        return None

    def start(self, here: FixedInput, z: Tensor | None) -> Tensor:
        """Where z starts: solved loosely, or at `z` where that is its equilibrium already."""
        if self.engine.from_zero:
            return self.problem.packing.pack(self.problem.zero_state)
        return self._solved(here, None, START_TOLERANCE) if z is None else z

    def follow(
        self, here: FixedInput, now: JointIterate, *, first: bool
    ) -> tuple[JointIterate, JointEvaluation]:
        """Return z and μ updated at x, and the last evaluation.

        z first, without a graph; then μ, through the graph of the last evaluation alone.
        """
        alpha_z, alpha_mu = self.engine.alpha_z, self.engine.alpha_mu
        z = self._advanced(here.image, now.z, self.sweeps - 1, alpha_z)
        linear = JointLinearization(here, z)
        mu, pulls = now.mu, self.sweeps - 1
        if first and not self.engine.from_zero:
            # z is an equilibrium here, so μ can be had as well: the first step sets the course.
            mu, pulls = linear.slope, pulls + FIRST_PULLS
        mu = self._advanced(linear.pull, mu, pulls, alpha_mu)
        evaluation = linear.evaluation(mu)
        z = _towards(z, evaluation.image, alpha_z)
        mu = _towards(mu, evaluation.adjoint, alpha_mu)
        return JointIterate(z, mu, now.x), evaluation

    def extrapolated(
        self, now: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        """Where the next iteration starts."""
        return updated

    def selection(self, x: Tensor, z: Tensor) -> BestIterate:
        """Return what chooses the result among the iterates of a search that starts at (x, z)."""
        kind = CheapestIterate if self.engine.cheapest else BestIterate
        return kind(x, z, self.problem.groups, is_open=not self.strays)

    def restart(self, rows: Tensor, x: Tensor) -> None:
        """Discard what depends on the iterates so far, because some problems start over.

        Args:
            rows: The problems that start over, as a mask.
            x: The inputs of all problems, in these the start.
        """

    def _solved(
        self, here: FixedInput, start: Tensor | None, tolerance: float, limit: int | None = None
    ) -> Tensor:
        found = self.problem.solve(here.context, start, tolerance=tolerance, max_iterations=limit)
        self.problem.evaluations += found.evaluations
        return self.problem.packing.pack(found.state)

    def _advanced(
        self, image_of: Callable[[Tensor], Tensor], point: Tensor, times: int, alpha: float = 1.0
    ) -> Tensor:
        """`point` after so many applications of a map, accelerated or damped."""
        inner = self.inner
        memory: Any = None if inner is None or times < 1 else inner.begin(point)
        for _ in range(times):
            image = image_of(point)
            point = (
                _towards(point, image, alpha)
                if inner is None
                else inner.propose(memory, point, image, image - point)
            )
        return point


def _towards(point: Tensor, image: Tensor, alpha: float) -> Tensor:
    return image if alpha == 1 else point.lerp(image, alpha)
