"""Comparison of the settings in a table's recipes with those that the paper states."""

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

NOT_STATED = "not stated"
SET_BY_ROW = "set by the row"
NONE = "none"
"""Value of a note: the paper does not have this option."""
EMPTY_VALUES: tuple[Any, ...] = (None, {}, (), [])
PARTS = ("model.", "data.", "training.", "task.")
OPTIONS = "model.options"
"""Key of a note about all options of a model, except those with a separate note."""
NO_NOTE = "not recorded"
"""There is no note, which does not mean that the paper leaves the setting open."""
SUBJECT_KEYS = ("model.name", "data.name", "task.name", "task.options.method", "task.options.kind")
"""Settings that define the table and the row."""
NEUTRAL_KEYS = (
    *("about", "threads", "data.root", "data.workers", "data.in_memory", "training.seed"),
    # No data set contains NaN.
    "training.non_finite",
    # Determined by the data.
    *("model.options.in_channels", "model.options.num_classes"),
    # The same map, or the same numbers, in another order.
    *("model.options.space", "model.options.checkpoint"),
    # Evaluations that no table prints.
    *("task.options.attack_share", "task.options.attack_method", "task.options.attack_restarts"),
)
"""Seeds, and settings that do not change the results."""
OFF_VALUES: Mapping[str, Any] = {
    "data.validation": 0.0,
    "data.normalize": False,
    "training.autocast": False,
    "training.warm_start": False,
    "training.nesterov": False,
    "training.jacobian_weight": 0.0,
    "training.segments": 1,
    "training.averaging": 0.0,
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
    "model.options.start": "cell",
    "model.options.state_noise": 0.0,
    "model.options.starts": 1,
    "model.options.pick": "residual",
}
"""Values with which an option is off."""
RULES = (None, "implicit", "phantom", "one_step")
EFFECTIVE_WITH: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    # Unrolling takes plain steps, or those of a solver object.
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
    # The algorithm of the paper has one sweep.
    "task.options.sweeps": ("task.options.engine", ("secant", "anderson", "auto")),
}
"""For a key, the other key and the values of it (empty: any) with which the key has an effect."""
SEARCH_OPTIONS = ("engine", "iterations", "sweeps", "ridge", "tolerance", "outer")
"""Options of the task "restoration" that apply to generators only, which search for latents."""


@dataclass(frozen=True)
class SettingLine:
    """One setting of some rows, as stated in the paper and as used here.

    Attributes:
        name: Key of the recipe, or a name for a setting that only the paper has.
        paper: Value in the paper, with its source.
        ours: Value here.
        why: Reason for a difference.
        agrees: Whether both agree; None if the paper does not state it or there is no note.
        rows: Labels of the rows.
    """

    name: str
    paper: str
    ours: str
    why: str
    agrees: bool | None
    rows: tuple[str, ...]


def compared_settings(table: PaperTable) -> list[SettingLine]:
    """Compare the full setting of a table with the paper, key by key.

    Rows with equal values share a line.

    Args:
        table: The table.

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
    """Return the settings that reproduce a row of a paper's table in the setting of the paper.

    They include the defaults of the model and the task. Keys are dotted, such as "training.epochs".
    Options that are off, or without effect given the others, are omitted.

    Args:
        row: The row; its recipe `row.full` must not be None.
    """
    return _effective(_all_settings(row))


def _effective(known: Mapping[str, Any]) -> dict[str, Any]:
    active = {
        name: value
        for name, value in known.items()
        if value not in EMPTY_VALUES and (name not in OFF_VALUES or OFF_VALUES[name] != value)
    }
    return {name: value for name, value in active.items() if _has_effect(name, active)}


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
        task_object: Any = create_task(task["name"], **task["options"])
        task["options"] = {**_plain(dataclasses.asdict(task_object)), **task["options"]}
        task["options"]["search"] = _search(task["options"].get("joint_options", task["options"]))
        if task["name"] == "restoration" and "decoder" not in model["name"]:
            for name in (*SEARCH_OPTIONS, *(f"evaluation_{name}" for name in SEARCH_OPTIONS)):
                task["options"].pop(name, None)
    return dict(_leaves(data))


def _search(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the paper's algorithm (JIIO C.3) if a task uses it."""
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


def _has_effect(name: str, active: Mapping[str, Any]) -> bool:
    if name not in EFFECTIVE_WITH:
        return True
    other, values = EFFECTIVE_WITH[name]
    return active.get(other) in values if values else other in active


def _of_row(row: Row, seeds: int) -> Iterator[tuple[str, str, str, str, bool | None]]:
    if row.full is None:
        return
    known = _all_settings(row)
    ours = {**_summarized(_effective(known), row), "seeds": seeds}
    noted = sorted({name for layer in row.settings for name in layer if "*" not in name})
    absent = [
        name
        for name in noted
        if name not in ours
        and name not in EFFECTIVE_WITH
        and name != OPTIONS
        # Leave out options of other models and tasks.
        and (name in known or not name.startswith(PARTS))
    ]
    for name in [*ours, *absent]:
        stated = stated_in_paper(row, name)
        value = _shown(ours[name]) if name in ours else "–"
        if name in SUBJECT_KEYS or (stated is not None and stated.paper == SET_BY_ROW):
            if name in ours:
                yield name, SET_BY_ROW, value, "" if stated is None else stated.why, None
        elif stated is None:
            yield name, NO_NOTE, value, "", None
        elif stated.paper is None:
            if name in ours or stated.ours:
                yield name, NOT_STATED, stated.ours or value, stated.why, None
        else:
            source = f" ({stated.source})" if stated.source else ""
            agrees = ours.get(name, NONE) == stated.paper or stated.ours == stated.paper
            shown = NONE if agrees and name not in ours else value
            why = "" if agrees else stated.why
            yield name, _shown(stated.paper) + source, stated.ours or shown, why, agrees


def _summarized(ours: dict[str, Any], row: Row) -> dict[str, Any]:
    """Replace the options of a model by one entry if a note covers all of them."""
    if stated_in_paper(row, OPTIONS) is None:
        return ours
    place = max(i for i, layer in enumerate(row.settings) if OPTIONS in layer)
    later = row.settings[place:]
    short = {
        name: value
        for name, value in ours.items()
        if not name.startswith(f"{OPTIONS}.") or stated_in_paper(replace(row, settings=later), name)
    }
    return {"model.name": ours["model.name"], OPTIONS: "those of the model", **short}


def stated_in_paper(row: Row, name: str) -> PaperSetting | None:
    """Return the paper's value of a setting, from the last layer with its name or a pattern."""
    for layer in reversed(row.settings):
        if name in layer:
            return layer[name]
        for pattern, stated in layer.items():
            if "*" in pattern and fnmatchcase(name, pattern):
                return stated
    return None


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as plain data; other objects become their names."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))
    return plain


def _leaves(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested data with dotted keys; lists are leaves."""
    for key, value in data.items():
        name = f"{place}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name)
        elif name not in NEUTRAL_KEYS:
            yield name, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
