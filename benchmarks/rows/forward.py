"""Forward solves to a given relative residual.

Every contestant starts at zero and must bring every sample to the tolerance. The time includes
`inject` on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks import checks, ours, peer, problems
from benchmarks.contest import Candidate, Ladder, Settings, compare
from benchmarks.problems import Problem
from benchmarks.results import Duel
from benchmarks.rows.row import Row

TOLERANCES = (1e-3, 1e-5)


def solve_duel(
    problem: Problem, tolerance: float, settings: Settings, *, row: str, topic: str, **aims: Any
) -> Duel:
    """Compare solves from zero to `tolerance`."""
    sides = {
        "ours": [[our_candidate(problem, tolerance)]],
        "tuned": tuned_ladders(problem, tolerance),
        "rewritten": tuned_ladders(problem, tolerance, rewritten=True),
        "default": [default_ladder(problem, tolerance)],
    }
    results = compare({name: side for name, side in sides.items() if side}, tolerance, settings)
    facts = {"shape": list(problem.x.shape), "nonzero_share": round(problem.nonzero_share, 3)}
    return Duel(row=row, topic=topic, wanted=tolerance, **results, **aims, details=facts)


def our_candidate(problem: Problem, tolerance: float, solver: str | None = None) -> Candidate:
    layer = ours.layer(problem.cell, tolerance=tolerance, solver=solver).eval()

    def evaluations() -> int:
        assert layer.last_solution is not None
        return layer.last_solution.evaluations

    def solve() -> Tensor:
        state = layer.solve(problem.x).state
        assert isinstance(state, Tensor)
        return state

    return Candidate(
        label=lambda: ours.solver_label(layer, solver),
        run=solve,
        error=partial(checks.relative_residual, problem.cell, problem.x),
        evaluations=evaluations,
    )


def peer_candidate(problem: Problem, setting: peer.Setting) -> Candidate:
    contestant = peer.Peer(problem, setting)

    def solve() -> Tensor:
        contestant.meter.reset_counts()
        return contestant.solve()

    return Candidate(
        label=lambda: setting.solver + setting.layout_label,
        run=solve,
        error=partial(checks.relative_residual, problem.cell, problem.x),
        evaluations=lambda: contestant.meter.forward,
        meter=contestant.meter,
        details={"tolerance": setting.tolerance, "stop": setting.stop},
    )


def default_ladder(problem: Problem, tolerance: float) -> Ladder:
    settings = peer.default_settings(problem, tolerance)
    return [peer_candidate(problem, setting) for setting in settings]


def tuned_ladders(problem: Problem, tolerance: float, *, rewritten: bool = False) -> list[Ladder]:
    settings = peer.tuned_settings(problem, tolerance, rewritten=rewritten)
    return [[peer_candidate(problem, setting)] for setting in settings]


def _measure(
    make: Callable[[Settings], Problem], aims: dict[float, dict[str, float]], settings: Settings
) -> Iterator[Duel]:
    problem = make(settings)
    for tolerance in TOLERANCES:
        yield solve_duel(
            problem,
            tolerance,
            settings,
            row=f"{problem.name}, to {tolerance:.0e}",
            topic="forward",
            **aims.get(tolerance, {}),
        )


def dense(settings: Settings) -> Problem:
    return problems.dense(**_vectors(settings), norm=0.9)


def hard_dense(settings: Settings) -> Problem:
    return problems.dense(**_vectors(settings), norm=0.99, hard=True)


def conv(settings: Settings) -> Problem:
    return problems.conv(**_image(settings), norm=0.95)


def hard_conv(settings: Settings) -> Problem:
    return problems.conv(**_image(settings), norm=0.99, hard=True)


def deep(settings: Settings) -> Problem:
    return problems.deep(**_image(settings), norm=0.99)


def mdeq(settings: Settings) -> Problem:
    return problems.mdeq(**_image(settings))


def _vectors(settings: Settings) -> dict[str, int]:
    return {
        "width": settings.size(256, 128),
        "batch": settings.size(64, 16),
        "seed": settings.seed,
    }


def _image(settings: Settings) -> dict[str, int]:
    return {
        "channels": settings.size(32, 8),
        "size": settings.size(32, 12),
        "batch": settings.size(32, 4),
        "seed": settings.seed,
    }


def _row(make: Callable[[Settings], Problem], about: str, **aims: dict[float, Any]) -> Row:
    name = make.__name__.replace("_", "-")
    measure = partial(_measure, make, aims.get("aims", {}))
    return Row(f"forward-{name}", f"forward to 1e-3 and 1e-5: {about}", measure)


DENSE_AIMS = {tolerance: {"aim_tuned": 0.7} for tolerance in TOLERANCES}
CONV_AIMS = {tolerance: {"aim_tuned": 0.5} for tolerance in TOLERANCES}

ROWS = (
    _row(dense, "dense, width 256, batch 64, ‖W‖ = 0.9", aims=DENSE_AIMS),
    _row(hard_dense, "dense, ‖W‖ = 0.99 and most ReLUs active", aims=DENSE_AIMS),
    _row(conv, "3×3 convolution, 32 channels, 32×32, batch 32, ‖W‖ = 0.95", aims=CONV_AIMS),
    _row(hard_conv, "the same, ‖W‖ = 0.99 and most ReLUs active", aims=CONV_AIMS),
    _row(deep, "Deep OptEq, two layers in z-space, no symmetry"),
    _row(mdeq, "a cell like MDEQ's, no symmetry and no bound"),
)
