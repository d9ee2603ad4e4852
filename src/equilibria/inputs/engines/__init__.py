"""Engines: iterations that find a joint fixed point of z, μ and x. One file per method."""

from __future__ import annotations

from functools import partial

from equilibria.inputs.engines.base import Engine
from equilibria.inputs.engines.mixing import anderson
from equilibria.inputs.engines.momentum import MomentumEngine
from equilibria.inputs.engines.official import official
from equilibria.inputs.engines.secant import SecantEngine
from equilibria.inputs.engines.solved import SolvedEngine
from equilibria.registry import Registry

_engines: Registry[Engine] = Registry(
    "engine",
    Engine,
    {
        "momentum": MomentumEngine,
        "secant": SecantEngine,
        "anderson": anderson,
        "official": official,
        "gradient": partial(SolvedEngine, name="gradient"),
        "gradient-warm": partial(SolvedEngine, name="gradient-warm", warm=True),
        "adam": partial(SolvedEngine, name="adam", rule="adam"),
        "adam-warm": partial(SolvedEngine, name="adam-warm", rule="adam", warm=True),
    },
)


register_engine = _engines.register
list_engines = _engines.names
get_engine = _engines.resolve
"""Return an engine by name, with options, or an engine object unchanged."""
