"""Engines: how z, μ and x are carried towards a joint fixed point. One file a method."""

from __future__ import annotations

from functools import partial

from equilibria.inputs.engines.base import Engine, JointIterate
from equilibria.inputs.engines.mixing import Mixing, anderson
from equilibria.inputs.engines.momentum import Momentum
from equilibria.inputs.engines.official import PAPER_SETTINGS, official
from equilibria.inputs.engines.secant import Secant
from equilibria.inputs.engines.solved import Solved
from equilibria.registry import Registry

__all__ = [
    "PAPER_SETTINGS",
    "Engine",
    "JointIterate",
    "Mixing",
    "Momentum",
    "Secant",
    "Solved",
    "get_engine",
    "list_engines",
    "register_engine",
]

_engines: Registry[Engine] = Registry(
    "engine",
    Engine,
    {
        "momentum": Momentum,
        "secant": Secant,
        "anderson": anderson,
        "official": official,
        "gradient": partial(Solved, name="gradient"),
        "gradient-warm": partial(Solved, name="gradient-warm", warm=True),
        "adam": partial(Solved, name="adam", rule="adam"),
        "adam-warm": partial(Solved, name="adam-warm", rule="adam", warm=True),
    },
)


register_engine = _engines.register
list_engines = _engines.names
get_engine = _engines.resolve
"""The engine called by a name, with options; an engine passes through."""
