"""Figures of tables, drawn from the records."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from equilibria.papers import Panel, find_table, list_tables
from equilibria.papers.plots import table_figure
from equilibria.papers.reading import read_tables
from equilibria.papers.report import recorded, redraw
from tests.program import invoke

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results"
RECORDED = [path.stem for path, _ in recorded(RECORDS)]


def record_of(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def labels(axis: Any) -> list[str]:
    return [label.get_text().replace("\n", " ") for label in axis.get_yticklabels()]


def names(part: Any) -> list[str]:
    return [text.get_text() for legend in part.legends for text in legend.get_texts()]


def lists(record: dict[str, Any], panel: Panel) -> list[str]:
    labels = [str(row["label"]) for row in record["rows"]]
    return [label for label in labels if label.startswith(panel.rows)]


@pytest.mark.parametrize("name", RECORDED)
def test_figure_shows_all_rows_of_a_record(name: str) -> None:
    record = record_of(name)
    table = find_table(record["id"])
    figure = table_figure(table, record)
    assert len(figure.subfigs) == len(table.picture)
    first = figure.subfigs[0].axes
    titles = ["this library (quick setting)", "the paper, as printed"]
    prints = any(row["paper"] for row in record["rows"])  # figures may print no numbers
    assert [axis.get_title() for axis in first] == titles[: 2 if prints else 1]
    for part, panel in zip(figure.subfigs, table.picture, strict=True):
        ours = part.axes[0]
        assert ours.has_data()
        if panel.form:
            assert ours.get_xlabel()
            assert ours.get_ylabel()
            continue
        assert all(axis.get_xlabel() for axis in part.axes)
        if panel.over:
            assert ours.get_ylabel()
            assert set(names(part)) <= set(lists(record, panel))
            assert len(names(part)) > 1
        elif panel.along:
            assert {label.split(f", {panel.along}")[0] for label in lists(record, panel)} == set(
                names(part)
            )
        elif table.turned:
            assert labels(ours) == list(panel.show)
            assert names(part) == lists(record, panel)
        else:
            assert labels(ours) == lists(record, panel)
            assert names(part) == (list(panel.show) if len(panel.show) > 1 else [])
        for axis in part.axes[1:]:
            assert axis.get_xlabel().startswith("paper") or axis.get_ylabel().startswith("paper")


def test_long_labels_do_not_overlap() -> None:
    record = record_of("jiio-t7-quick")
    first = record["rows"][0]
    words = [*"abcdef", *(f"{letter}, a label that takes two lines of text" for letter in "gh")]
    record["rows"] = [{**first, "label": label} for label in words]
    figure = table_figure(find_table("jiio-t7"), record)
    figure.draw_without_rendering()
    places = [tick.get_window_extent() for tick in figure.subfigs[0].axes[0].get_yticklabels()]
    assert len(places) == 8
    for upper, lower in pairwise(places):
        assert lower.y1 <= upper.y0


def test_figure_shows_the_numbers_of_the_runs() -> None:
    record = record_of("opteq-t8-quick")
    figure = table_figure(find_table("opteq-t8"), record)
    drawn = [line.get_xdata() for line in figure.subfigs[0].axes[0].lines]
    for row in record["rows"]:
        expected = [100 * run["accuracy"] for run in row["runs"]]
        assert any(list(values) == pytest.approx(expected) for values in drawn)
    printed = [float(line.get_xdata()[0]) for line in figure.subfigs[0].axes[1].lines]
    assert printed == [83.52, 87.28, 87.71, 87.83, 87.63, 85.95]
    (memory,) = figure.subfigs[2].axes
    assert memory.get_xlabel() == "memory of a step (MiB)"


def test_record_is_drawn_even_if_its_table_has_changed() -> None:
    record = record_of("jiio-t7-quick")
    record["rows"][1] |= {"label": "renamed"}
    table = find_table("jiio-t7")
    assert "renamed" not in [row.label for row in table.rows]
    first, second = table_figure(table, record).subfigs
    assert "renamed" in labels(first.axes[0])
    assert "renamed" in names(second)


def test_curves_are_drawn_over_the_values_in_labels() -> None:
    figure = table_figure(find_table("opteq-t5"), record_of("opteq-t5-quick"))
    (ours, papers), *measured = (part.axes for part in figure.subfigs)
    for axis in (ours, papers):
        ticks = [label.get_text() for label in axis.get_xticklabels()]
        assert ticks == ["0.01", "0.1", "0.4", "0.8", "1"]
    assert [len(line.get_xdata()) for line in ours.lines] == [3] * 8
    assert [len(line.get_xdata()) for line in papers.lines] == [5] * 8
    # For z², cos² and HSIC: the rows without and with the corresponding regularizer.
    assert [len(axis.lines) for (axis,) in measured] == [4, 3, 3]


def test_default_picture_shows_the_first_measure() -> None:
    assert all(table.picture for table in list_tables())
    (table,) = read_tables(
        "{paper: P, tables: {p-t1: {title: T, columns: {Size: null, Acc.: accuracy}, rows: []}}}"
    )
    assert table.picture == (Panel(show=("Acc.",)),)


def test_redraw_writes_figures_from_records(tmp_path: Path) -> None:
    name = "jiio-t7-quick"
    shutil.copy(RECORDS / f"{name}.json", tmp_path)
    (tmp_path / "other.json").write_text("{}")
    result = invoke("reproduce", "--redraw", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"{name}.png" in result.output
    first = (tmp_path / f"{name}.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert redraw(tmp_path) == [tmp_path / f"{name}.png"]
    assert (tmp_path / f"{name}.png").read_bytes() == first
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".png"]
    refused = invoke("reproduce", "--redraw", tmp_path / "nothing")
    assert refused.exit_code == 2
    assert "has no records of tables" in refused.output
