"""Tables of the papers as data: the printed numbers, and the recipe of every row."""

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
"""A recipe as plain data, as in YAML, without a seed."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: the printed numbers and the measure that is compared with them.

    Attributes:
        title: Title as printed.
        measure: Name of the measure; None if nothing is measured for this column.

    Examples:
        >>> column = eq.papers.find_table("opteq-t3").columns[0]
        >>> column.title, column.measure
        ('Acc.', 'accuracy')
    """

    title: str
    measure: str | None = None


@dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """A setting as stated in a paper.

    Attributes:
        paper: Value in the paper; None if it is not stated.
        source: Section or table of the paper.
        why: Reason for a different value here.
        ours: Value here, if no key of a recipe contains it.
    """

    paper: Any
    source: str = ""
    why: str = ""
    ours: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a paper's table: one model or setting, with the paper's numbers and our recipes.

    Attributes:
        label: Label of the row.
        paper: Printed numbers as text, by title of the column.
        full: Recipe in the setting of the paper, or None.
        quick: Recipe in the quick setting, or None.
        missing: Why a setting has no recipe.
        measures: Measures of this row that differ from those of the columns, by title of the
            column. Rows that share a recipe can measure different quantities.
        settings: Settings that the paper states, as mappings of which later ones override earlier
            ones: those of the whole paper, of the row's model, of the table, of a recipe that
                several rows share, and of the row. The keys are recipe keys
            ("training.epochs"), patterns of recipe keys ("training.*"), or free names for what no
            recipe key describes.

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
        """Return the measure in the cell of a column.

        Args:
            column: Column of the table.

        Returns:
            Name of the measure, or None if nothing is measured.
        """
        return self.measures.get(column.title, column.measure)

    def recipe(self, setting: Setting) -> RecipeData | None:
        """Return the recipe of the row.

        Args:
            setting: "full" for the setting of the paper, "quick" for a small one.

        Returns:
            The recipe as data, or None if the setting has none.
        """
        return self.full if setting == "full" else self.quick


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One line of plots in the figure of a table: our results, and those of the paper if printed.

    Attributes:
        show: Titles of columns or names of measures with a common unit. By default the rows are
            listed below each other.
        over: Title or name of another measure: `show` is drawn over it, one marker per row.
        along: Quantity at the end of labels, such as α in "no Reg, α = 0.4": draws curves over it.
        rows: Prefixes of the labels of the rows to draw.
        measure: Measure of columns that have none.
        unit: Title of the axis for several columns without a unit in their titles.
        form: How to draw series, values "NAME@POSITION" of a run. "curves" draws one curve per row
            and series over the positions, which `along` names. "dots" draws one series over
            another (`over`). "map" draws one matrix per row; positions are "row,column", and
            `along` names both ("column / row").

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
    """A table of a paper that can be reproduced.

    Attributes:
        id: Name of the table, such as "opteq-t3".
        paper: Name of the paper.
        title: Title of the table.
        columns: The columns.
        rows: The rows.
        extras: Measurements besides the evaluation, such as "efficiency" (`measures.EXTRAS`).
        picture: Panels of the figure; by default the first column with a measure.
        pictures: Pictures of every row's run with the first seed (`pictures.PICTURES`).
        turned: Whether table and figure are transposed: columns below each other.
        seeds: Number of seeds in the setting of the paper.
        full_remarks: Choices that the paper leaves open.
        quick_remarks: Differences between the quick setting and that of the paper.

    Raises:
        ValueError: If a panel or a row refers to an unknown column, or a row without a recipe does
            not give the reason.

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
                raise ValueError(f"{self.id}: the picture has no column or measure {name!r}")
        for row in self.rows:
            unknown = {*row.paper, *row.measures} - titles
            if unknown:
                raise ValueError(f"{self.id}, {row.label}: unknown column {unknown.pop()!r}")
            if None in (row.full, row.quick) and not row.missing:
                raise ValueError(
                    f"{self.id}, {row.label}: a setting has no recipe; set 'missing' to the reason"
                )

    def remarks(self, setting: Setting) -> tuple[str, ...]:
        """Return the remarks below the table.

        Args:
            setting: "full" or "quick".
        """
        return self.full_remarks if setting == "full" else self.quick_remarks

    def data_sets(self, setting: Setting) -> list[str]:
        """Return the names of the data sets that the rows need.

        Args:
            setting: "full" or "quick".
        """
        recipes = [row.recipe(setting) for row in self.rows]
        return list(dict.fromkeys(recipe["data"]["name"] for recipe in recipes if recipe))


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A numbered item of a paper, such as a figure, that has no separate table here.

    Attributes:
        id: Name of the item, such as "opteq-f2".
        paper: Name of the paper.
        title: Title of the item.
        table: Name of the table that draws or measures it, or None.
        why: Why no table covers it.

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
    """All known tables by id; the first call reads those of the papers."""
    from equilibria.papers.reading import read_papers

    return {table.id: table for table in read_papers()}


def register_table(table: PaperTable, *, replace: bool = False) -> None:
    """Register a table under its id.

    Args:
        table: The table.
        replace: Whether it may replace a table with the same id.

    Raises:
        ValueError: If the id is taken and `replace` is False.

    Examples:
        >>> from dataclasses import replace
        >>> mine = replace(eq.papers.find_table("opteq-t3"), id="my-table", title="Mine")
        >>> eq.papers.register_table(mine)
        >>> eq.papers.find_table("my-table").title
        'Mine'
    """
    if table.id in _tables() and not replace:
        raise ValueError(
            f"a table {table.id!r} is registered already; pass replace=True to replace it"
        )
    _tables()[table.id] = table


def list_tables() -> list[PaperTable]:
    """Return all tables, sorted by paper, kind (table, figure, appendix) and number.

    Examples:
        >>> len(eq.papers.list_tables()) > 20
        True
    """
    papers = [table.paper for table in _tables().values()]

    def place(table: PaperTable) -> tuple[int, int, int, str]:
        match = re.search(r"-([tfc])(\d+)", table.id)
        kind, number = match.groups() if match else ("t", 0)
        return papers.index(table.paper), "tfc".index(kind), int(number), table.id

    return sorted(_tables().values(), key=place)


def list_elsewhere() -> list[Elsewhere]:
    """Return the numbered items of the papers that have no separate table here.

    Examples:
        >>> from equilibria.papers.table import list_elsewhere
        >>> len(list_elsewhere()) > 10
        True
    """
    from equilibria.papers.reading import read_elsewhere

    return read_elsewhere()


def find_table(table_id: str) -> PaperTable:
    """Return the table with an id, or the table that covers a figure.

    Args:
        table_id: Id of a table or of another numbered item (`list_elsewhere`).

    Returns:
        The table.

    Raises:
        ValueError: If the id is unknown, or no table covers the item.

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
            raise ValueError(f"{table_id} ({other.title}) cannot be reproduced: {other.why}")
        return tables[other.table]
    from equilibria.papers.studies import list_studies

    studies = [study.id for study in list_studies()]
    near = nearest(table_id.lower(), [*tables, *others, *studies], cutoff=0.4)
    known = ", ".join([*(table.id for table in list_tables()), *studies])
    raise ValueError(f"unknown table or study {table_id!r}{near} Known: {known}.")
