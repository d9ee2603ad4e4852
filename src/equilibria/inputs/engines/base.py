"""Base class of engines, with the sweeps of Eq. 11 that update z and μ after a step of x."""

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

EXTRA_FIRST_PULLBACKS = 3
"""Pull-backs for the first μ, in addition to those for every later one."""
START_TOLERANCE = 0.1
"""Relative residual of the solve for the first z. The sweeps reduce it further."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Engine of `optimize_input` that runs the iteration of JIIO's Eq. 11 as printed.

    It updates an equilibrium z, its adjoint μ and the input x in turn. A sweep is one update of z
    and μ. Other engines derive from it.

    Args:
        name: Name in results, if the engine is passed as an object.
        rule: Direction of a step of x: "gradient", "quasi-newton" or "adam".
        decay: Decay of the step length: "cosine", "linear", "late" (one drop after 65 iterations)
            or "none".
        sweeps: Updates of (z, μ) per step of x; None uses those of the call.
        alpha_z: Damping of the sweeps of z.
        alpha_mu: Damping of the sweeps of μ.
        alpha_x: Step size of x if the call does not set one; None leaves it to `optimize_input`.
        share: Default length of the first normalized step, in units of the region's scale. A step
            that is much longer than the region ends where the gradient points, as in the power
            method.
        late_factor: Factor of the step length after the drop of decay="late".
        from_zero: Start at z = 0 instead of the equilibrium of x0.
        unit_loss: Scale the loss such that μ is of the order of 1.
        cheapest: Return the iterate of the lowest observed loss, whatever the residual of its z.
            Otherwise only iterates near their equilibrium, and the last one, are candidates.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> engine = eq.inputs.Engine(rule="adam", sweeps=2, alpha_x=0.01)
        >>> result = eq.optimize_input(model, lambda y: y[:, 3], image, engine=engine)
        >>> bool(result.loss < result.initial_loss), result.engine
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
        """Return the state of a new search with this engine.

        Args:
            problem: The problems to solve.
            sweeps: Updates of (z, μ) per step of x.
        """
        return EngineRun(self, problem, sweeps)


EngineT = TypeVar("EngineT", bound=Engine)


@dataclass
class EngineRun(Generic[EngineT]):
    """State of one search: updates equilibria z and adjoints μ, and proposes the next iterate."""

    engine: EngineT
    problem: InputProblem
    sweeps: int

    @property
    def residual_limit(self) -> float:
        """Limit of the other residuals below which the search computes that of its input x.

        The residual of x takes more computation. It is computed once the residuals of the
        equilibrium and its adjoint are, for some problem, at most this limit or the search's
        tolerance. The default 0 leaves the tolerance.
        """
        return 0.0

    @property
    def leaves_region(self) -> bool:
        """Whether the input may be evaluated outside its region, where it cannot be a result."""
        return False

    @property
    def inner(self) -> Solver[Any] | None:
        """Solver that accelerates the updates of equilibrium and adjoint at one input, each alone.

        It replaces the damping in all updates but the last.
        """
        return None

    def start(self, fixed: FixedInput, z: Tensor | None) -> Tensor:
        """Return the equilibrium z to start from: `z` if given, otherwise that of a loose solve."""
        if self.engine.from_zero:
            return self.problem.packing.pack(self.problem.zero_state)
        return self._solved(fixed, None, START_TOLERANCE) if z is None else z

    def update(
        self, fixed: FixedInput, current: JointIterate, *, first: bool
    ) -> tuple[JointIterate, JointEvaluation]:
        """Update equilibrium z and adjoint μ at an input; return the iterate and last evaluation.

        z is updated first, without a graph, then μ, with the graph of the last evaluation only.
        """
        alpha_z, alpha_mu = self.engine.alpha_z, self.engine.alpha_mu
        z = self._advanced(fixed.image, current.z, self.sweeps - 1, alpha_z)
        linear = JointLinearization(fixed, z)
        mu, pullbacks = current.mu, self.sweeps - 1
        if first and not self.engine.from_zero:
            # z is an equilibrium, so a good μ is cheap, and the first step of x is important.
            mu, pullbacks = linear.slope, pullbacks + EXTRA_FIRST_PULLBACKS
        mu = self._advanced(linear.pull, mu, pullbacks, alpha_mu)
        evaluation = linear.evaluation(mu)
        z = _interpolated(z, evaluation.image, alpha_z)
        mu = _interpolated(mu, evaluation.adjoint, alpha_mu)
        return JointIterate(z, mu, current.x), evaluation

    def extrapolated(
        self, current: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        """Return the start of the next iteration."""
        return updated

    def selection(self, x: Tensor, z: Tensor) -> BestIterate:
        """Return the rule that chooses the result of a search.

        Args:
            x: Inputs that the search starts from.
            z: Equilibria that the search starts from.
        """
        kind = CheapestIterate if self.engine.cheapest else BestIterate
        return kind(x, z, self.problem.groups, is_open=not self.leaves_region)

    def restart(self, rows: Tensor, x: Tensor) -> None:
        """Discard the history of optimization problems whose search starts over.

        Args:
            rows: Mask of the problems that start over.
            x: Inputs of all problems; those of the problems `rows` are the start.
        """

    def _solved(
        self, fixed: FixedInput, start: Tensor | None, tolerance: float, limit: int | None = None
    ) -> Tensor:
        solution = self.problem.solve(
            fixed.context, start, tolerance=tolerance, max_iterations=limit
        )
        self.problem.evaluations += solution.evaluations
        return self.problem.packing.pack(solution.state)

    def _advanced(
        self, image_of: Callable[[Tensor], Tensor], point: Tensor, times: int, alpha: float = 1.0
    ) -> Tensor:
        """Apply a map `times` times, accelerated or damped."""
        inner = self.inner
        memory: Any = None if inner is None or times < 1 else inner.begin(point)
        for _ in range(times):
            image = image_of(point)
            point = (
                _interpolated(point, image, alpha)
                if inner is None
                else inner.propose(memory, point, image, image - point)
            )
        return point


def _interpolated(point: Tensor, image: Tensor, alpha: float) -> Tensor:
    return image if alpha == 1 else point.lerp(image, alpha)
