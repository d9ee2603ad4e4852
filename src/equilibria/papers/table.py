"""A paper's table as data: its figures as printed, and the recipe behind every row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from equilibria.papers.measures import MEASURES
from equilibria.registry import nearest

Setting = Literal["full", "quick"]
RecipeData = Mapping[str, Any]
"""A recipe as YAML holds it, without a seed."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column as printed, and the measure that stands beside it; None: it is only the paper's.

    Examples:
        >>> column = eq.papers.find_table("opteq-t3").columns[0]
        >>> column.title, column.measure
        ('Acc.', 'accuracy')
    """

    title: str
    measure: str | None = None


@dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """What a paper sets (None: it is silent), where it says so, and why ours is what it is.

    ours: of what no key of a recipe holds.
    """

    paper: Any
    source: str = ""
    why: str = ""
    ours: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model or setting.

    paper: its figures by the titles of columns, exactly as printed.
    full, quick: recipes; None where a setting has none, for the reason `missing`.
    measures: by the title of a column, what stands there in this row instead of the column's own:
        rows that share a recipe may measure different things.
    settings: what the paper sets, by keys of the full recipe, patterns of them or other names; of
        the paper, the model, the table, the run and the row, a later one above the earlier.

    Examples:
        >>> row = eq.papers.find_table("opteq-t3").rows[0]
        >>> row.label, dict(row.paper)
        ('no Reg, α = 0.01', {'Acc.': '58.4%'})
    """

    label: str
    paper: Mapping[str, str]
    full: RecipeData | None = None
    quick: RecipeData | None = None
    missing: str = ""
    measures: Mapping[str, str | None] = field(default_factory=dict)
    settings: tuple[Mapping[str, PaperSetting], ...] = ()

    def measure(self, column: Column) -> str | None:
        """Return the measure in the cell of a column."""
        return self.measures.get(column.title, column.measure)

    def recipe(self, setting: Setting) -> RecipeData | None:
        """Return the recipe of the row in a setting."""
        return self.full if setting == "full" else self.quick


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A line of a table's picture: ours, and the paper's where it has figures.

    show: titles of columns, or names of measures, of one unit. Rows stand below each other.
    over: the same, one: what is shown over what it costs, a mark a row.
    along: a quantity that labels end with, α in "no Reg, α = 0.4": curves over its values.
    rows: beginnings of the labels of the rows that are drawn.
    measure: what is drawn here of a column that has no measure.
    unit: what the axis of several columns says, where their titles do not.
    form: what is shown are series, values "NAME@PLACE" of a run. "curves": over their places, which
        `along` names; a curve for each row and series. "dots": one series over another (`over`).
        "map": a matrix a row, its places "row,column", which `along` names ("column / row").

    Examples:
        >>> panel = eq.papers.Panel(show=("Acc.",), unit="%")
        >>> panel.show
        ('Acc.',)
    """

    show: tuple[str, ...]
    over: str = ""
    along: str = ""
    rows: tuple[str, ...] = ("",)
    measure: str | None = None
    unit: str = ""
    form: Literal["", "curves", "dots", "map"] = ""


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table that can be reproduced.

    extras: measures beyond those of an evaluation: "efficiency", "features" and others.
    picture: what is drawn of the table; nothing given: the first column that is measured.
    pictures: what is drawn of every row's run with the first seed.
    turned: the columns stand below each other and the rows side by side, in table and picture.
    full_remarks: what the paper leaves open and was chosen here.
    quick_remarks: how the quick setting differs from the paper's.

    Examples:
        >>> table = eq.papers.find_table("opteq-t3")
        >>> table.paper, len(table.rows), table.data_sets("full")
        ('OptEq', 22, ['cifar10'])
    """

    id: str
    paper: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    extras: tuple[str, ...] = ()
    picture: tuple[Panel, ...] = ()
    pictures: tuple[str, ...] = ()
    turned: bool = False
    seeds: int = 3
    full_remarks: tuple[str, ...] = ()
    quick_remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        titles = {column.title for column in self.columns}
        if not self.picture:
            first = next(column.title for column in self.columns if column.measure is not None)
            object.__setattr__(self, "picture", (Panel(show=(first,)),))
        for panel in self.picture:
            names = {*panel.show, panel.over, panel.measure} - {"", None}
            for name in names - titles - set(MEASURES):
                raise ValueError(f"{self.id}: no column or measure {name!r} to draw")
        for row in self.rows:
            unknown = {*row.paper, *row.measures} - titles
            if unknown:
                raise ValueError(f"{self.id}, {row.label}: no column {unknown.pop()!r}")
            if None in (row.full, row.quick) and not row.missing:
                raise ValueError(f"{self.id}, {row.label}: say why it has no recipe (missing)")

    def remarks(self, setting: Setting) -> tuple[str, ...]:
        """Return the remarks below the table in a setting."""
        return self.full_remarks if setting == "full" else self.quick_remarks

    def data_sets(self, setting: Setting) -> list[str]:
        """The names of the data sets that the rows need."""
        recipes = [row.recipe(setting) for row in self.rows]
        return list(dict.fromkeys(recipe["data"]["name"] for recipe in recipes if recipe))


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What a paper numbers that has no table of its own here.

    table: the one that draws or measures it; None: nothing does, for the reason `why`.

    Examples:
        >>> from equilibria.papers.table import list_elsewhere
        >>> elsewhere = list_elsewhere()[0]
        >>> bool(elsewhere.table or elsewhere.why)
        True
    """

    id: str
    paper: str
    title: str
    table: str | None = None
    why: str = ""


@cache
def _tables() -> dict[str, PaperTable]:
    """All that are known, by id; those of the papers are read when the first one is asked for."""
    from equilibria.papers.reading import read_papers

    return {table.id: table for table in read_papers()}


def register_table(table: PaperTable, *, replace: bool = False) -> None:
    """Make a table known by its id.

    Examples:
        >>> from dataclasses import replace
        >>> mine = replace(eq.papers.find_table("opteq-t3"), id="my-table", title="Mine")
        >>> eq.papers.register_table(mine)
        >>> eq.papers.find_table("my-table").title
        'Mine'
    """
    if table.id in _tables() and not replace:
        raise ValueError(f"there is a table {table.id!r} already")
    _tables()[table.id] = table


def list_tables() -> list[PaperTable]:
    """All of them, paper by paper, in the order of their numbers: tables, figures, appendices.

    Examples:
        >>> len(eq.papers.list_tables()) > 20
        True
    """
    papers = [table.paper for table in _tables().values()]

    def place(table: PaperTable) -> tuple[int, int, int, str]:
        found = re.search(r"-([tfc])(\d+)", table.id)
        kind, number = found.groups() if found else ("t", 0)
        return papers.index(table.paper), "tfc".index(kind), int(number), table.id

    return sorted(_tables().values(), key=place)


def list_elsewhere() -> list[Elsewhere]:
    """What the papers number besides, as it stands in their files.

    Examples:
        >>> from equilibria.papers.table import list_elsewhere
        >>> len(list_elsewhere()) > 10
        True
    """
    from equilibria.papers.reading import read_elsewhere

    return read_elsewhere()


def find_table(table_id: str) -> PaperTable:
    """The table of this id, or the one that draws a figure; an unknown id is an error.

    Examples:
        >>> eq.papers.find_table("opteq-t3").title
        'Table 3, Deep OptEq with and without regularizers on CIFAR-10'
    """
    tables, others = _tables(), {other.id: other for other in list_elsewhere()}
    if table_id in tables:
        return tables[table_id]
    if table_id in others:
        other = others[table_id]
        if other.table is None:
            raise ValueError(f"{table_id} ({other.title}) is not run: {other.why}")
        return tables[other.table]
    from equilibria.papers.studies import list_studies

    studies = [study.id for study in list_studies()]
    near = nearest(table_id.lower(), [*tables, *others, *studies], cutoff=0.4)
    known = ", ".join([*(table.id for table in list_tables()), *studies])
    raise ValueError(f"there is no table or study {table_id!r}{near} There are: {known}.")
