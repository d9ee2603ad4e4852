"""What tuning found: settings, what they cost, and which of them to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from equilibria.gradients import GradientRule
from equilibria.solvers import Solver

SMALLEST_COSINE = 0.999
"""What the gradient of a recommended setting must have with the exact one."""


@dataclass(frozen=True)
class Setting:
    """What is tuned of a layer."""

    solver: Solver[Any]
    gradient: GradientRule

    @property
    def tolerance(self) -> float:
        return self.solver.tolerance

    @property
    def overrides(self) -> str:
        """The setting as keywords of `eq.create_model` and `eq.EquilibriumLayer`."""
        solver = _code(self.solver, always=("tolerance",))
        return f"solver={solver}, gradient={_code(self.gradient, always=('steps',))}"

    @property
    def solver_label(self) -> str:
        """The solver without its tolerance, and with the options that are not the usual ones."""
        return _label(self.solver, without=("tolerance",))

    @property
    def gradient_label(self) -> str:
        return _label(self.gradient, always=("steps",))


@dataclass(frozen=True)
class Measurement:
    """One setting on one batch: what a training step costs, and how good its gradient is."""

    setting: Setting
    found_by: str
    """What found the equilibrium: the solver, or what "auto" chose."""
    seconds: float
    """The median over the repeats: of the CPU time, or of the clock where a GPU computes."""
    evaluations: int
    """Calls of the map in the forward solve."""
    backward_evaluations: int | None
    """Products with the Jacobian in the backward pass; None where the rule does not say."""
    share_converged: float
    backward_converged: bool
    """Whether the backward solve converged; True where there is none to fail."""
    cosine: float
    """Of the gradient over all parameters with the exact one; NaN where either is not finite."""
    relative_error: float
    """‖gradient − exact‖/‖exact‖."""

    @property
    def qualifies(self) -> bool:
        """Every sample converged, forward and backward, and the gradient points the right way."""
        return self.share_converged == 1 and self.backward_converged and self._is_accurate

    @property
    def _is_accurate(self) -> bool:
        return self.cosine >= SMALLEST_COSINE


@dataclass(frozen=True)
class TuningReport:
    """All measurements, the fastest first."""

    measurements: tuple[Measurement, ...]
    present: Measurement
    recommended: Measurement | None
    auto: str
    """What the solver "auto" chooses for this model."""

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the present setting the recommended one is."""
        if self.recommended is None:
            return None
        return self.present.seconds / self.recommended.seconds


def recommend(measurements: Sequence[Measurement]) -> Measurement | None:
    """The fastest that qualifies, or None."""
    return min((m for m in measurements if m.qualifies), key=lambda m: m.seconds, default=None)


def explain_none(measurements: Sequence[Measurement]) -> str:
    """Why no measurement qualifies, with the remedy for each cause."""
    unsolved = sum(m.share_converged < 1 for m in measurements)
    failed = sum(not m.backward_converged for m in measurements)
    inaccurate = [m.cosine for m in measurements if not m._is_accurate]
    causes = []
    if unsolved:
        causes.append(
            f"{unsolved} left samples unconverged (raise max_iterations, or bound the norm of W "
            "with norm='bound')"
        )
    if failed:
        causes.append(
            f"the backward solve of {failed} did not converge (raise the max_iterations of the "
            "gradient rule)"
        )
    if inaccurate:
        finite = [cosine for cosine in inaccurate if math.isfinite(cosine)]
        best = f", {max(finite):.4f} at the most" if finite else ""
        causes.append(
            f"the gradient of {len(inaccurate)} has a cosine below {SMALLEST_COSINE} with the "
            f"exact one{best} (lower the tolerances)"
        )
    return f"none of {len(measurements)} settings qualifies: {'; '.join(causes)}"


def _code(thing: object, always: Sequence[str] = ()) -> str:
    """The expression that makes it."""
    prefix = "eq." if type(thing).__module__.startswith("equilibria.") else ""
    return f"{prefix}{type(thing).__name__}({_options(thing, always=always)})"


def _label(thing: object, always: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    options = _options(thing, always=always, without=without)
    return f"{type(thing).__name__} {options}".rstrip()


def _options(thing: object, *, always: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """The options that are not the usual ones, as keywords."""
    if not is_dataclass(thing):
        return ""
    shown = []
    for field in fields(thing):
        value = getattr(thing, field.name)
        usual = field.default is not MISSING and value == field.default
        if field.name in always or not (usual or field.name in without):
            shown.append(f"{field.name}={value!r}")
    return ", ".join(shown)
