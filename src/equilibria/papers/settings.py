"""Every setting of a table's recipes beside what the paper says of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from equilibria.equilibrium import Solving
from equilibria.inputs import get_engine
from equilibria.inputs.engines.mixing import MixingEngine
from equilibria.models import model_options
from equilibria.models.registry import SOLVING
from equilibria.papers.table import PaperSetting, PaperTable, Row
from equilibria.solvers import AndersonTypeOne
from equilibria.tasks import create_task
from equilibria.training.recipe import recipe_from_data

SILENT = "the paper is silent"
OF_THE_ROW = "as the row says"
NONE = "none"
"""In a note: the paper has no such thing."""
EMPTY: tuple[Any, ...] = (None, {}, (), [])
PARTS = ("model.", "data.", "training.", "task.")
OPTIONS = "model.options"
"""A note of all options of a model at once, but for those that a note names."""
UNREAD = "not noted here"
"""Nobody has written down what the paper says, if anything: this is no claim that it is silent."""
SUBJECT = ("model.name", "data.name", "task.name", "task.options.method", "task.options.kind")
"""What table and row are about."""
UNRELATED = (
    *("about", "threads", "data.root", "data.workers", "data.in_memory", "training.seed"),
    # No image of a data set is NaN.
    "training.non_finite",
    # What the data say.
    *("model.options.in_channels", "model.options.num_classes"),
    # The same map, or the same numbers, in another order.
    *("model.options.space", "model.options.checkpoint"),
    # Of an evaluation that no table prints.
    *("task.options.attack_share", "task.options.attack_method", "task.options.attack_restarts"),
)
"""What changes nothing about a result, or is a seed."""
OFF: Mapping[str, Any] = {
    "data.validation": 0.0,
    "data.normalize": False,
    "training.autocast": False,
    "training.warm_start": False,
    "training.nesterov": False,
    "training.jacobian_weight": 0.0,
    "training.accumulate": 1,
    "task.label_smoothing": 0.0,
    "task.options.label_smoothing": 0.0,
    "task.options.random_start": False,
    "task.options.warm_start": False,
    "task.options.stop_at_noise": False,
    "model.options.strict": False,
    "model.options.dropout": 0.0,
    "model.options.damping": 1.0,
    "model.options.mu": 1.0,
    "model.options.augment": 0,
    "model.options.gamma": 0.0,
    "model.options.learnable_alpha": False,
    "model.options.stem_strides": 0,
    "model.options.recompute": False,
}
"""With these values there is nothing to set."""
RULES = (None, "implicit", "phantom", "one_step")
ACTS_WITH: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    # Unrolling takes plain steps, or those of a solver that is an object.
    "model.options.solver": ("model.options.gradient.name", RULES),
    "model.options.tolerance": ("model.options.gradient.name", RULES),
    "model.options.max_iterations": ("model.options.gradient.name", RULES),
    "training.momentum": ("training.optimizer", ("sgd",)),
    "training.nesterov": ("training.optimizer", ("sgd",)),
    "training.milestones": ("training.schedule", ("step",)),
    "training.decay": ("training.schedule", ("step",)),
    "training.power": ("training.schedule", ("polynomial",)),
    "training.jacobian_at": ("training.jacobian_weight", ()),
    "training.jacobian_vectors": ("training.jacobian_weight", ()),
    "model.options.zeta": ("model.options.norm", ("bound", "estimate")),
    "model.options.zeta_hidden": ("model.options.norm", ("bound", "estimate")),
    "model.options.epsilon": ("model.options.pe", ("train", "always")),
    "model.options.perturb_for": ("model.options.pe", ("train", "always")),
    "model.options.freeze_after": ("model.options.sign", ("freeze",)),
    "model.options.tau": ("model.options.sign", ("smooth",)),
    "model.options.placement": ("model.options.regularizer.name", ()),
    "model.options.degree": ("model.options.kernel", ("polynomial",)),
    "model.options.rho": ("model.options.kernel", ("polynomial", "sigmoid")),
    "model.options.form": ("model.options.kernel", ("polynomial", "sigmoid", None)),
    "task.options.kl_weight": ("task.options.kind", ("vae",)),
    "task.options.latent_weight": ("task.options.kind", ("rae",)),
    "task.options.decoder_weight": ("task.options.kind", ("rae",)),
    "task.options.outer_iterations": ("task.options.outer", ("implicit",)),
    # The paper's algorithm has one.
    "task.options.sweeps": ("task.options.engine", ("secant", "anderson", "auto")),
}
"""A key, and the other whose value must be one of these (any, if none is named) for it to act."""
OF_A_SEARCH = ("engine", "iterations", "sweeps", "ridge", "tolerance", "outer")
"""Options of the task "restoration" for a generator alone, which searches for latents."""


@dataclass(frozen=True)
class SettingLine:
    """One setting of some rows: a key of their recipe, or what only the paper names."""

    name: str
    paper: str
    ours: str
    why: str
    agrees: bool | None
    """None where the paper says nothing, or nothing of it is noted."""
    rows: tuple[str, ...]


def compared_settings(table: PaperTable) -> list[SettingLine]:
    """The full setting of a table, key by key; rows that have the same in common are one line.

    Examples:
        >>> from equilibria.papers.settings import compared_settings
        >>> lines = compared_settings(eq.papers.find_table("opteq-t3"))
        >>> lines[0].name, lines[0].ours
        ('model.name', 'deep-opteq-199k')
    """
    lines: dict[tuple[str, str, str, str, bool | None], list[str]] = {}
    for row in table.rows:
        for line in _of_row(row, table.seeds):
            lines.setdefault(line, []).append(row.label)
    names = list(dict.fromkeys(name for name, *_ in lines))
    ordered = sorted(lines.items(), key=lambda item: names.index(item[0][0]))
    return [SettingLine(*line, tuple(rows)) for line, rows in ordered]


def full_settings(row: Row) -> dict[str, Any]:
    """What a row's full recipe sets, with the defaults of its model and task, by dotted keys.

    Keys that say nothing are left out: what is off, and what acts only beside another value.
    """
    return _acting(_all_settings(row))


def _acting(known: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: value
        for name, value in known.items()
        if value not in EMPTY and (name not in OFF or OFF[name] != value)
    }
    return {name: value for name, value in found.items() if _acts(name, found)}


def _all_settings(row: Row) -> dict[str, Any]:
    assert row.full is not None
    data = recipe_from_data(row.full).as_data()
    model, task = data["model"], data["task"]
    model["options"] = _plain({**model_options(model["name"]), **model["options"]})
    if "solver" in model["options"]:
        given = {name: model["options"][name] for name in SOLVING}
        solves = Solving(**{n: value for n, value in given.items() if value is not None})
        model["options"] |= {n: getattr(solves, n) for n in ("tolerance", "max_iterations")}
    if task["name"] is not None:
        made: Any = create_task(task["name"], **task["options"])
        task["options"] = {**_plain(dataclasses.asdict(made)), **task["options"]}
        task["options"]["search"] = _search(task["options"].get("joint_options", task["options"]))
        if task["name"] == "restoration" and "decoder" not in model["name"]:
            for name in (*OF_A_SEARCH, *(f"evaluation_{name}" for name in OF_A_SEARCH)):
                task["options"].pop(name, None)
    return dict(_leaves(data))


def _search(options: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the paper's algorithm (JIIO C.3), where a task takes it."""
    chosen = options.get("engine")
    name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    if chosen is None or name != "official":
        return {}
    engine = get_engine(chosen)
    assert isinstance(engine, MixingEngine)
    assert isinstance(engine.mixing, AndersonTypeOne)
    assert engine.alpha_x is not None
    return {
        "alphas": [engine.alpha_z, engine.alpha_mu, engine.alpha_x],
        "late_alpha": round(engine.late_factor * engine.alpha_x, 9),
        "memory": engine.mixing.memory,
    }


def _acts(name: str, found: Mapping[str, Any]) -> bool:
    if name not in ACTS_WITH:
        return True
    other, values = ACTS_WITH[name]
    return found.get(other) in values if values else other in found


def _of_row(row: Row, seeds: int) -> Iterator[tuple[str, str, str, str, bool | None]]:
    if row.full is None:
        return
    known = _all_settings(row)
    ours = {**_summarized(_acting(known), row), "seeds": seeds}
    noted = sorted({name for layer in row.settings for name in layer if "*" not in name})
    absent = [
        name
        for name in noted
        if name not in ours
        and name not in ACTS_WITH
        and name != OPTIONS
        # An option of another model or task says nothing here.
        and (name in known or not name.startswith(PARTS))
    ]
    for name in [*ours, *absent]:
        said = said_of(row, name)
        value = _shown(ours[name]) if name in ours else "–"
        if name in SUBJECT or (said is not None and said.paper == OF_THE_ROW):
            if name in ours:
                yield name, OF_THE_ROW, value, "" if said is None else said.why, None
        elif said is None:
            yield name, UNREAD, value, "", None
        elif said.paper is None:
            if name in ours or said.ours:
                yield name, SILENT, said.ours or value, said.why, None
        else:
            source = f" ({said.source})" if said.source else ""
            agrees = ours.get(name, NONE) == said.paper or said.ours == said.paper
            shown = NONE if agrees and name not in ours else value
            why = "" if agrees else said.why
            yield name, _shown(said.paper) + source, said.ours or shown, why, agrees


def _summarized(ours: dict[str, Any], row: Row) -> dict[str, Any]:
    """The same with one entry for the options of a model, where one note speaks of them all."""
    if said_of(row, OPTIONS) is None:
        return ours
    place = max(i for i, layer in enumerate(row.settings) if OPTIONS in layer)
    later = row.settings[place:]
    short = {
        name: value
        for name, value in ours.items()
        if not name.startswith(f"{OPTIONS}.") or said_of(replace(row, settings=later), name)
    }
    return {"model.name": ours["model.name"], OPTIONS: "those of that model", **short}


def said_of(row: Row, name: str) -> PaperSetting | None:
    """What the paper says of a setting: of the last layer that has its name or a pattern of it."""
    for layer in reversed(row.settings):
        if name in layer:
            return layer[name]
        for pattern, said in layer.items():
            if "*" in pattern and fnmatchcase(name, pattern):
                return said
    return None


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As YAML would hold them; what has no such form by its name."""
    found: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))
    return found


def _leaves(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, and what they hold; lists are one value."""
    for key, value in data.items():
        name = f"{place}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name)
        elif name not in UNRELATED:
            yield name, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
