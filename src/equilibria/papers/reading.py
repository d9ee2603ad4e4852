"""The tables as they are written down: `tables/*.yaml`, a file a paper.

The parts of recipes have names there: `data`, `training`, `models` and `tasks`, in the paper's own
file or in `shared.yaml`. A part that begins with others says so: `from: NAME` or
`from: [NAME, …]`. Models and tasks are a name and options beside it. A table, the `run` that
several rows share, and a row each hold some of

    model, data, training, task   a part or its name; for a model also a name of the library
    options                       of the model, over those that it has
    full, quick                   the same of one setting; a name alone: a model; null: no recipe

and a recipe is made of the table's, then the run's, then the row's. The paper's figures, and
measures in the place of the columns' own, stand in the order of the columns. The lines of a table's
`picture` are those of `Panel`. What the paper sets stands in `settings` of a file, a table, a run
or a row, and in `settings_of` a model, by keys of the full recipe (`training.epochs`) or patterns
(`training.*`), the later ones above the earlier: file, model, table, run, row. `elsewhere` has what
the paper numbers besides: the table that draws it, or why there is none.
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
"""In the order in which tables are listed."""
KINDS = {"model": "models", "data": "data", "training": "training", "task": "tasks"}
"""The parts of a recipe, and the section of a file in which they have names."""

Part = str | list[str] | dict[str, Any]
M = TypeVar("M", bound=BaseModel)


class _Parts(BaseModel):
    """Of a recipe, as far as they are given."""

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
    """Of both settings, and of one; a setting that is given as None has no recipe."""

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
        """A part with all that it begins with."""
        known = getattr(self, KINDS[kind])
        if not isinstance(given, dict):
            given = {"from": given}
        bases = given.get("from", [])
        whole: dict[str, Any] = {}
        for name in [bases] if isinstance(bases, str) else bases:
            if name not in known:
                near = nearest(name, known)
                raise ValueError(f"there is no part of {KINDS[kind]} {name!r}{near}")
            whole |= self.part(kind, known[name])
        return whole | {key: value for key, value in given.items() if key != "from"}

    def recipe(self, layers: Sequence[_Recipes], setting: Setting) -> RecipeData | None:
        """What the layers say together, the later ones above the earlier."""
        made: dict[str, dict[str, Any]] = {}
        options: dict[str, Any] = {}
        for layer in layers:
            own = layer.full if setting == "full" else layer.quick
            if own is None:
                return None
            for parts in (layer, _Parts(model=own) if isinstance(own, str) else own):
                for kind in KINDS:
                    given = getattr(parts, kind)
                    if kind == "model" and isinstance(given, str) and given not in self.models:
                        made[kind] = {"name": given}  # one of the library's
                    elif given is not None:
                        made[kind] = self.part(kind, given)
                options |= self.part("model", parts.options)
        for kind in ("model", "data", "training"):
            if kind not in made:
                raise ValueError(f"the {setting} setting has no {kind}")
        made["model"] |= options
        # Where nothing is said of it, models train at the tolerance that they have.
        made["training"].setdefault("tolerance", None)
        for kind in ("model", "task"):
            if kind in made:
                name = made[kind].pop("name")
                made[kind] = {"name": name, "options": made[kind]}
        return made


def read_papers() -> list[PaperTable]:
    """The tables of all papers."""
    shared = _text("shared")
    return [table for name in FILES for table in read_tables(_text(name), shared)]


@cache
def read_elsewhere() -> list[Elsewhere]:
    """What the papers number that has no table of its own here."""
    return [
        Elsewhere(id=other_id, paper=given["paper"], **dict(_checked(_Elsewhere, other, other_id)))
        for given in (yaml.safe_load(_text(name)) for name in FILES)
        for other_id, other in given.get("elsewhere", {}).items()
    ]


def _text(name: str) -> str:
    folder = resources.files("equilibria.papers") / "tables"
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def read_tables(paper: str, shared: str = "") -> list[PaperTable]:
    """The tables of a paper's file; what is wrong there is an error that names table and row."""
    given = yaml.safe_load(paper)
    for section, parts in (yaml.safe_load(shared) or {}).items():
        given[section] = parts | given.get(section, {})
    file = _checked(_File, given, str(given.get("paper")))
    return [_table(file, table_id, data) for table_id, data in file.tables.items()]


def _table(file: _File, table_id: str, data: Mapping[str, Any]) -> PaperTable:
    given = _checked(_Table, data, table_id)
    kept = ("title", "extras", "pictures", "turned", "seeds")
    return PaperTable(
        id=table_id,
        paper=file.paper,
        columns=tuple(Column(title=title, measure=m) for title, m in given.columns.items()),
        rows=tuple(_row(file, given, row, table_id) for row in _flat(given.rows)),
        picture=tuple(panel.panel() for panel in given.picture),
        full_remarks=tuple(_flat(given.full_remarks)),
        quick_remarks=tuple(_flat(given.quick_remarks)),
        **{name: getattr(given, name) for name in kept},
    )


def _row(file: _File, table: _Table, data: Mapping[str, Any], table_id: str) -> Row:
    place = f"{table_id}, {data.get('label')}"
    given = _checked(_Row, data, place)
    titles, run = list(table.columns), given.run or table.run
    try:
        if max(len(given.paper), len(given.measures)) > len(titles):
            raise ValueError(f"there are figures or measures for more than {len(titles)} columns")
        if run is not None and run not in file.runs:
            raise ValueError(f"there is no run {run!r}{nearest(run, file.runs)}")
        layers = [table, *([] if run is None else [file.runs[run]]), given]
        full, quick = file.recipe(layers, "full"), file.recipe(layers, "quick")
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return Row(
        label=given.label,
        paper={t: figure for t, figure in zip(titles, given.paper, strict=False) if figure},
        full=full,
        quick=quick,
        missing=given.missing or table.missing if None in (full, quick) else "",
        measures=dict(zip(titles, given.measures, strict=False)),
        settings=_settings(file, layers, full),
    )


def _settings(
    file: _File, layers: Sequence[_Recipes], full: RecipeData | None
) -> tuple[dict[str, PaperSetting], ...]:
    """What is said for a row: by the file, of its model, and by the layers of its recipe."""
    model = "" if full is None else full["model"]["name"]
    of_model = [said for pattern, said in file.settings_of.items() if fnmatchcase(model, pattern)]
    said_there = (file.settings, *of_model, *(layer.settings for layer in layers))
    return tuple(
        {name: PaperSetting(**dict(said)) for name, said in some.items()} for some in said_there
    )


def _checked(kind: type[M], data: Any, place: str) -> M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        finding = error.errors()[0]
        where = ".".join(map(str, finding["loc"]))
        raise ValueError(
            f"{place}: {where}: {finding['msg']}, not {finding['input']!r}; a paper's figure is in "
            "quotes, as it is printed"
        ) from None


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """Rows and remarks that are shared are lists inside of lists."""
    for item in items:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item
