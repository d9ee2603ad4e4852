"""Reader of `tables/*.yaml`, one file per paper.

The sections `data`, `training`, `models` and `tasks` name parts of recipes, in the file of the
paper or in `shared.yaml`. A part extends others by `from: NAME` or `from: [NAME, …]`. Models and
tasks consist of a name and options. A table, a `run` that several rows share, and a row can have
these keys:

    model, data, training, task   a part or the name of one; a model may be one of the library
    options                       options of the model, which override those of the part
    full, quick                   the same keys for one setting, the name of a model, or null for
                                  no recipe

A recipe merges the table, the run and the row; later ones override earlier ones. `paper` lists the
printed numbers of a row, `measures` its measures if they differ from those of the columns, both in
the order of the columns. The entries of `picture` are those of `Panel`. `settings` of a file, a
table, a run or a row, and `settings_of` a model, list what the paper sets, by keys of the full
recipe (`training.epochs`) or patterns (`training.*`). The order of precedence is row, run, table,
model, file. `elsewhere` lists numbered items of the paper without a table here: the table that
covers them, or why there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from equilibria.papers.table import (
    Column,
    Elsewhere,
    Panel,
    PaperSetting,
    PaperTable,
    RecipeData,
    Row,
    Setting,
)
from equilibria.registry import nearest

FILES = ("opteq", "mopteqs", "geq", "jiio")
"""Files in the order in which tables are listed."""
KINDS = {"model": "models", "data": "data", "training": "training", "task": "tasks"}
"""Section of a file for each part of a recipe."""

Part = str | list[str] | dict[str, Any]
M = TypeVar("M", bound=BaseModel)


class _Parts(BaseModel):
    """The given parts of a recipe."""

    model_config = ConfigDict(extra="forbid")

    model: Part | None = None
    data: Part | None = None
    training: Part | None = None
    task: Part | None = None
    options: Part = {}


class _Setting(BaseModel):
    model_config = ConfigDict(extra="forbid")

    paper: Any
    source: str = ""
    why: str = ""
    ours: str = ""


class _Recipes(_Parts):
    """Parts for both settings and for each one; a setting that is None has no recipe."""

    settings: dict[str, _Setting] = {}

    full: _Parts | str | None = _Parts()
    quick: _Parts | str | None = _Parts()


class _Row(_Recipes):
    label: str
    paper: list[str | None] = []
    measures: list[str | None] = []
    run: str | None = None
    missing: str = ""


class _Panel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    show: str | list[str]
    over: str = ""
    along: str = ""
    rows: list[str] = [""]
    measure: str | None = None
    unit: str = ""
    form: Literal["", "curves", "dots", "map"] = ""

    def panel(self) -> Panel:
        shown = [self.show] if isinstance(self.show, str) else self.show
        return Panel(**{**vars(self), "show": tuple(shown), "rows": tuple(self.rows)})


class _Table(_Recipes):
    title: str
    columns: dict[str, str | None]
    rows: list[Any]
    run: str | None = None
    missing: str = ""
    extras: tuple[str, ...] = ()
    picture: list[_Panel] = []
    pictures: tuple[str, ...] = ()
    turned: bool = False
    seeds: int = 3
    full_remarks: list[Any] = []
    quick_remarks: list[Any] = []


class _Elsewhere(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str
    table: str | None = None
    why: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    paper: str
    data: dict[str, Part] = {}
    training: dict[str, Part] = {}
    models: dict[str, Part] = {}
    tasks: dict[str, Part] = {}
    runs: dict[str, _Recipes] = {}
    settings: dict[str, _Setting] = {}
    settings_of: dict[str, dict[str, _Setting]] = {}
    tables: dict[str, dict[str, Any]]
    elsewhere: dict[str, _Elsewhere] = {}

    def part(self, kind: str, given: Part) -> dict[str, Any]:
        """Return a part merged with the parts that it extends."""
        known = getattr(self, KINDS[kind])
        if not isinstance(given, dict):
            given = {"from": given}
        bases = given.get("from", [])
        merged: dict[str, Any] = {}
        for name in [bases] if isinstance(bases, str) else bases:
            if name not in known:
                near = nearest(name, known)
                raise ValueError(f"{KINDS[kind]} has no part {name!r}{near}")
            merged |= self.part(kind, known[name])
        return merged | {key: value for key, value in given.items() if key != "from"}

    def recipe(self, layers: Sequence[_Recipes], setting: Setting) -> RecipeData | None:
        """Merge the layers of a setting; later ones override earlier ones."""
        recipe: dict[str, dict[str, Any]] = {}
        options: dict[str, Any] = {}
        for layer in layers:
            parts_of_setting = layer.full if setting == "full" else layer.quick
            if parts_of_setting is None:
                return None
            if isinstance(parts_of_setting, str):
                parts_of_setting = _Parts(model=parts_of_setting)
            for parts in (layer, parts_of_setting):
                for kind in KINDS:
                    given = getattr(parts, kind)
                    if kind == "model" and isinstance(given, str) and given not in self.models:
                        recipe[kind] = {"name": given}  # a model of the library
                    elif given is not None:
                        recipe[kind] = self.part(kind, given)
                options |= self.part("model", parts.options)
        for kind in ("model", "data", "training"):
            if kind not in recipe:
                raise ValueError(f"the {setting} setting has no {kind}")
        recipe["model"] |= options
        # By default models train at their own tolerance.
        recipe["training"].setdefault("tolerance", None)
        for kind in ("model", "task"):
            if kind in recipe:
                name = recipe[kind].pop("name")
                recipe[kind] = {"name": name, "options": recipe[kind]}
        return recipe


def read_papers() -> list[PaperTable]:
    """Read the tables of all papers."""
    shared = _text("shared")
    return [table for name in FILES for table in read_tables(_text(name), shared)]


@cache
def read_elsewhere() -> list[Elsewhere]:
    """Read the numbered items of the papers that have no separate table here."""
    return [
        Elsewhere(id=other_id, paper=given["paper"], **dict(_checked(_Elsewhere, other, other_id)))
        for given in (yaml.safe_load(_text(name)) for name in FILES)
        for other_id, other in given.get("elsewhere", {}).items()
    ]


def _text(name: str) -> str:
    folder = resources.files("equilibria.papers") / "tables"
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def read_tables(paper: str, shared: str = "") -> list[PaperTable]:
    """Read the tables in the file of a paper.

    Args:
        paper: Content of the file.
        shared: Content of the file with shared parts.

    Raises:
        ValueError: If an entry is wrong; the message names its table and row.
    """
    given = yaml.safe_load(paper)
    for section, parts in (yaml.safe_load(shared) or {}).items():
        given[section] = parts | given.get(section, {})
    file = _checked(_File, given, str(given.get("paper")))
    return [_table(file, table_id, data) for table_id, data in file.tables.items()]


def _table(file: _File, table_id: str, data: Mapping[str, Any]) -> PaperTable:
    given = _checked(_Table, data, table_id)
    copied = ("title", "extras", "pictures", "turned", "seeds")
    return PaperTable(
        id=table_id,
        paper=file.paper,
        columns=tuple(Column(title=title, measure=m) for title, m in given.columns.items()),
        rows=tuple(_row(file, given, row, table_id) for row in _flat(given.rows)),
        picture=tuple(panel.panel() for panel in given.picture),
        full_remarks=tuple(_flat(given.full_remarks)),
        quick_remarks=tuple(_flat(given.quick_remarks)),
        **{name: getattr(given, name) for name in copied},
    )


def _row(file: _File, table: _Table, data: Mapping[str, Any], table_id: str) -> Row:
    place = f"{table_id}, {data.get('label')}"
    given = _checked(_Row, data, place)
    titles, run = list(table.columns), given.run or table.run
    try:
        if max(len(given.paper), len(given.measures)) > len(titles):
            raise ValueError(f"it has more numbers or measures than the {len(titles)} columns")
        if run is not None and run not in file.runs:
            raise ValueError(f"unknown run {run!r}{nearest(run, file.runs)}")
        layers = [table, *([] if run is None else [file.runs[run]]), given]
        full, quick = file.recipe(layers, "full"), file.recipe(layers, "quick")
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return Row(
        label=given.label,
        paper={t: number for t, number in zip(titles, given.paper, strict=False) if number},
        full=full,
        quick=quick,
        missing=given.missing or table.missing if None in (full, quick) else "",
        measures=dict(zip(titles, given.measures, strict=False)),
        settings=_settings(file, layers, full),
    )


def _settings(
    file: _File, layers: Sequence[_Recipes], full: RecipeData | None
) -> tuple[dict[str, PaperSetting], ...]:
    """Collect the paper's settings of a row from the file, its model and the layers."""
    model = "" if full is None else full["model"]["name"]
    of_model = [group for pattern, group in file.settings_of.items() if fnmatchcase(model, pattern)]
    groups = (file.settings, *of_model, *(layer.settings for layer in layers))
    return tuple(
        {name: PaperSetting(**dict(given)) for name, given in group.items()} for group in groups
    )


def _checked(kind: type[M], data: Any, place: str) -> M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{place}: {key}: {first['msg']}, got {first['input']!r}. Write numbers of the paper "
            "in quotes, as printed."
        ) from None


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """Flatten nested lists, which result from shared rows and remarks."""
    for item in items:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item
