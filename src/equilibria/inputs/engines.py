"""Engines: how z, μ and x are carried towards a joint fixed point."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from equilibria.inputs.steps import Decay, Rule
from equilibria.registry import (
    Registry,
    check_at_least_one,
    check_choice,
    check_positive,
    check_share,
)
from equilibria.solvers import Anderson, AndersonTypeOne, Broyden, Solver

Inference = Literal["sweeps", "cold", "warm"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to iterate Eq. 11.

    name: what results call it, where it is given as an object.
    inference: how z and μ follow x. "sweeps": a few damped updates of both; "cold": solved anew at
        every x, from nothing; "warm": solved anew from where they were.
    mixing: the solver that extrapolates the joint iterates (z, μ, x), or None.
    mix_below: the residual below which a problem is mixed. Far from the optimum an extrapolated x
        is worse than a plain step; infinity and `project_mixed=False` mix always.
    sweeps: updates of (z, μ) for each step of x; None leaves it to the call.
    alpha_z, alpha_mu: damping of the sweeps.
    alpha_x: the step size where a call gives none; None leaves it to `optimize_input`.
    late_factor: what decay="late" multiplies the step length by after 65 iterations.
    from_zero: start at z = 0 rather than at the equilibrium of x0.
    unit_loss: scale the loss so that μ is of the order of 1; otherwise it is taken as given.
    cheapest: the result is the iterate of the least loss as it seemed, whatever the residual of its
        z; otherwise only iterates near their equilibrium, and the last one, are believed.
    project_mixed: whether x is projected after mixing; otherwise the map is evaluated at its
        projection, which keeps the steps that Broyden's updates rely on.
    inner_tolerance, inner_iterations: of the solves of "cold" and "warm"; None: the layer's limit.
    secants: how many of the last steps of x predict z and μ at the next one (see `Secants`).
    inner: the solver that accelerates the sweeps at one x, z and μ each on its own, or None; it
        takes the place of the damping in all of them but the last.
    """

    name: str = "own"
    inference: Inference = "sweeps"
    mixing: Solver[Any] | None = None
    rule: Rule = "gradient"
    decay: Decay = "cosine"
    sweeps: int | None = None
    alpha_z: float = 1.0
    alpha_mu: float = 1.0
    alpha_x: float | None = None
    late_factor: float = 1.0
    from_zero: bool = False
    unit_loss: bool = True
    cheapest: bool = False
    project_mixed: bool = True
    mix_below: float = 0.05
    inner_tolerance: float = 1e-3
    inner_iterations: int | None = None
    secants: int = 0
    inner: Solver[Any] | None = None

    def __post_init__(self) -> None:
        check_share(alpha_z=self.alpha_z, alpha_mu=self.alpha_mu, late_factor=self.late_factor)
        check_at_least_one(sweeps=self.sweeps)
        check_positive(inner_tolerance=self.inner_tolerance, alpha_x=self.alpha_x)


def _secant(memory: int = 2, inner_memory: int = 3, **options: Any) -> Engine:
    """The default: sweeps that start where the last steps of x predict z and μ.

    Measured best on attacks and on latents (docs/benchmarks.md). Extrapolating x itself, as
    Anderson's and Broyden's methods do with the joint iterate, is behind plain steps on a ball and
    behind quasi-Newton steps elsewhere.
    """
    inner = Anderson(memory=inner_memory) if inner_memory else None
    return Engine(
        secants=memory, inner=inner, **{"rule": "quasi-newton", "decay": "linear", **options}
    )


def _anderson(memory: int = 5, ridge: float = 1e-3, cap: float = 10.0, **options: Any) -> Engine:
    return Engine(mixing=AndersonTypeOne(memory=memory, ridge=ridge, cap=cap), **options)


def _anderson_two(memory: int = 5, ridge: float = 1e-8, **options: Any) -> Engine:
    mixing = Anderson(memory=memory, ridge=ridge)
    return Engine(mixing=mixing, **{"mix_below": float("inf"), **options})


def _broyden(rank: int = 20, **options: Any) -> Engine:
    return Engine(mixing=Broyden(rank=rank), project_mixed=False, **options)


@dataclass(frozen=True)
class PaperSettings:
    """What Appendix C.3 sets for a task: α_x, what it drops to after 65 iterations, and memory."""

    alpha_x: float
    late_alpha_x: float
    memory: int


PAPER_SETTINGS = {
    "latents": PaperSettings(0.01, 0.003, 40),
    "mnist": PaperSettings(0.6, 0.2, 20),
    "cifar10": PaperSettings(0.1, 0.1, 20),
    "few-shot": PaperSettings(0.04, 0.01, 10),
}
"""By task. Table 9 swaps α of MNIST and CIFAR-10; the text of C.3, used here, says more: it is
MNIST's 0.6 that drops to 0.2. Attacks need `normalize=True`: their α is the length of a step."""


def _official(
    task: str = "latents",
    memory: int | None = None,
    selection: Literal["cost", "residual"] = "cost",
) -> Engine:
    """The paper's algorithm: Eq. 11 as printed, every step mixed by Anderson's type I.

    As the authors do it: everything from zero, one sweep, the loss as it is given, no ridge, cap or
    restart (a row whose system has no solution takes a plain step), α_x that drops after 65
    iterations, and the iterate of the least cost as the result. x is projected in the map and again
    after mixing. `task` chooses C.3's settings, a key of `PAPER_SETTINGS`.

    selection: "cost" is C.3's rule. An iterate whose z is far from its equilibrium can look cheap:
        an attack on a small OptEq reached a loss of 1.2 by it, and 2.2 with "residual", which
        believes iterates of a small residual alone. A.2 speaks of a heuristic "that traded off
        between a small KKT residual and a small cost", without a formula.
    """
    check_choice(PAPER_SETTINGS, task=task)
    check_choice(("cost", "residual"), selection=selection)
    chosen = PAPER_SETTINGS[task]
    mixing = AndersonTypeOne(
        memory=memory or chosen.memory,
        ridge=0.0,
        cap=float("inf"),
        restart_growth=float("inf"),
    )
    return Engine(
        mixing=mixing,
        mix_below=float("inf"),
        sweeps=1,
        alpha_z=0.8,
        alpha_mu=0.6,
        alpha_x=chosen.alpha_x,
        decay="late",
        late_factor=chosen.late_alpha_x / chosen.alpha_x,
        from_zero=True,
        unit_loss=False,
        cheapest=selection == "cost",
    )


_engines: Registry[Engine] = Registry(
    "engine",
    Engine,
    {
        "secant": _secant,
        "anderson": _anderson,
        "anderson2": _anderson_two,
        "broyden": _broyden,
        "damped": partial(Engine, alpha_z=0.8, alpha_mu=0.6),
        "official": _official,
        "gradient": partial(Engine, inference="cold", rule="gradient"),
        "gradient-warm": partial(Engine, inference="warm", rule="gradient"),
        "adam": partial(Engine, inference="cold", rule="adam"),
        "adam-warm": partial(Engine, inference="warm", rule="adam"),
    },
)


register_engine = _engines.register
list_engines = _engines.names
get_engine = _engines.resolve
"""The engine called by a name, with options; an engine passes through."""
