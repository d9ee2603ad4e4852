"""Engines: how z, μ and x are carried towards a joint fixed point."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from equilibria.inputs.steps import Decay, Rule
from equilibria.registry import Registry, check_at_least_one, check_positive, check_share
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
        is worse than a plain step; `project_mixed=False` mixes always.
    sweeps: updates of (z, μ) for each step of x; None leaves it to the call.
    alpha_z, alpha_mu: damping of the sweeps.
    from_zero: start at z = 0 rather than at the equilibrium of x0.
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
    from_zero: bool = False
    project_mixed: bool = True
    mix_below: float = 0.05
    inner_tolerance: float = 1e-3
    inner_iterations: int | None = None
    secants: int = 0
    inner: Solver[Any] | None = None

    def __post_init__(self) -> None:
        check_share(alpha_z=self.alpha_z, alpha_mu=self.alpha_mu)
        check_at_least_one(sweeps=self.sweeps)
        check_positive(inner_tolerance=self.inner_tolerance)


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


def _official(memory: int = 20) -> Engine:
    """Eq. 11 as printed, in the authors' way: no ridge, no restart, one sweep, a late drop of α."""
    mixing = AndersonTypeOne(
        memory=memory, ridge=0.0, cap=float("inf"), restart_growth=float("inf")
    )
    return Engine(mixing=mixing, sweeps=1, alpha_z=0.8, alpha_mu=0.6, from_zero=True, decay="late")


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
