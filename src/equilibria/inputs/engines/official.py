"""The paper's algorithm: Eq. 11 with the settings of Appendix C.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from equilibria.inputs.engines.mixing import MixingEngine
from equilibria.registry import check_choice
from equilibria.solvers import Anderson, AndersonTypeOne, Broyden, Solver

Acceleration = Literal["type-1", "type-2", "broyden", "none"]


@dataclass(frozen=True)
class PaperSettings:
    """Settings of JIIO's algorithm for one task (Appendix C.3).

    Attributes:
        alpha_x: Step size α_x.
        late_alpha_x: Step size after 65 iterations.
        memory: Number of iterates that Anderson's method mixes.
    """

    alpha_x: float
    late_alpha_x: float
    memory: int


PAPER_SETTINGS = {
    "latents": PaperSettings(0.01, 0.003, 40),
    "mnist": PaperSettings(0.6, 0.2, 20),
    "cifar10": PaperSettings(0.1, 0.1, 20),
    "few-shot": PaperSettings(0.04, 0.01, 10),
}
"""Settings of each task, from the text of C.3; Table 9 swaps α of MNIST and CIFAR-10.

Attacks need `normalize=True`: their α is the length of a step.
"""


def official(
    task: str = "latents",
    memory: int | None = None,
    selection: Literal["cost", "residual"] = "cost",
    acceleration: Acceleration = "type-1",
) -> MixingEngine:
    """Build the algorithm of the JIIO paper: Eq. 11, every step mixed by Anderson's method, type I.

    As in the paper, the equilibrium z and its adjoint μ start at zero and are updated once per step
    of the input x, the loss is not scaled, the step size α_x drops after 65 iterations, and the
    result is the iterate of the lowest cost. The mixing has no ridge, cap or restart; rows whose
    system has no solution take a plain step. x is projected in the map and again after mixing.

    Args:
        task: Key of `PAPER_SETTINGS`.
        memory: Number of iterates that are mixed; by default that of the task.
        selection: "cost" is the rule of the paper's Appendix C.3. The loss at a z far from its
            equilibrium can be too low; "residual" considers only iterates with a small residual.
            A.2 mentions a heuristic "that traded off between a small KKT residual and a small
            cost", without a formula.
        acceleration: "type-1" is the paper's; A.2 compares it with the others.
    """
    check_choice(PAPER_SETTINGS, task=task)
    check_choice(("cost", "residual"), selection=selection)
    check_choice(get_args(Acceleration), acceleration=acceleration)
    settings = PAPER_SETTINGS[task]
    return MixingEngine(
        name="official",
        mixing=_solver(acceleration, memory or settings.memory),
        mix_below=float("inf"),
        project_mixed=acceleration != "broyden",
        sweeps=1,
        alpha_z=0.8,
        alpha_mu=0.6,
        alpha_x=settings.alpha_x,
        decay="late",
        late_factor=settings.late_alpha_x / settings.alpha_x,
        from_zero=True,
        unit_loss=False,
        cheapest=selection == "cost",
    )


def _solver(acceleration: Acceleration, memory: int) -> Solver[Any] | None:
    unlimited = float("inf")
    if acceleration == "type-1":
        return AndersonTypeOne(memory=memory, ridge=0.0, cap=unlimited, restart_growth=unlimited)
    if acceleration == "type-2":
        return Anderson(memory=memory)
    return Broyden(rank=memory) if acceleration == "broyden" else None
