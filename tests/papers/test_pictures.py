"""Pictures of runs, and rows that share a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equilibria.papers import (
    Column,
    Panel,
    PaperTable,
    Row,
    carry_out,
    find_table,
    pictures,
    plan,
    register_table,
    table,
    write_report,
)
from equilibria.papers.report import provenance
from equilibria.papers.runner import findings
from equilibria.training.experiment import Experiment

CPU = torch.device("cpu")
RECIPE = {
    "model": {"name": "opteq-small", "options": {"channels": 8, "width": 8}},
    "data": {"name": "digits", "options": {"train_samples": 60, "test_samples": 50}},
    "training": {"epochs": 1, "gradient": "one_step"},
}


def row(label: str, **measures: str | None) -> Row:
    return Row(label=label, paper={"Acc.": "90"}, full=RECIPE, quick=RECIPE, measures=measures)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperTable]:
    made = PaperTable(
        id="digits-t2",
        paper="Digits",
        title="Table 2",
        columns=(Column(title="Acc.", measure="accuracy"),),
        rows=(row("One"), row("Two", **{"Acc.": "top5_accuracy"}), row("Three", **{"Acc.": None})),
        seeds=2,
        pictures=("sheet",),
    )

    def sheet(experiment: Experiment, device: torch.device) -> bytes:
        return f"PNG of seed {experiment.recipe.training.seed}".encode()

    monkeypatch.setitem(pictures.PICTURES, "sheet", sheet)
    register_table(made)
    yield made
    del table._tables()[made.id]


def test_panels_refer_to_existing_columns_or_measures(drawn: PaperTable) -> None:
    assert [panel.show for panel in drawn.picture] == [("Acc.",)]
    columns = (*drawn.columns, Column(title="Top 5", measure="top5_accuracy"))
    two = replace(drawn, columns=columns, picture=(Panel(show=("Top 5",), over="parameters"),))
    assert [panel.show for panel in two.picture] == [("Top 5",)]
    with pytest.raises(ValueError, match="the picture has no column or measure 'Top 7'"):
        replace(two, picture=(Panel(show=("Top 7",)),))


def test_rows_share_a_run_and_its_picture(drawn: PaperTable, tmp_path: Path) -> None:
    made = plan(drawn, "quick", range(2), tmp_path)
    outcomes = list(carry_out(made, workers=None, device=CPU))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    results = findings(made, outcomes)
    files = write_report(made, results, tmp_path, "equilibria reproduce digits-t2", provenance())
    name = f"{made.jobs['One', 0].folder.name}-sheet.png"
    assert files[-1] == tmp_path / name
    assert (tmp_path / name).read_bytes() == b"PNG of seed 0"
    text = (tmp_path / "digits-t2-quick.md").read_text()
    assert f"![One]({name})" in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    runs = json.loads((tmp_path / "digits-t2-quick.json").read_text())["rows"][0]["runs"]
    for label, measure in (("One", "accuracy"), ("Two", "top5_accuracy")):
        mean = 100 * sum(run[measure] for run in runs) / 2
        assert f"| {mean:.2f} ± " in lines[label]
    assert "| – | 90 |" in lines["Three"]


def test_tables_that_share_a_run_share_its_picture(drawn: PaperTable, tmp_path: Path) -> None:
    for made in (drawn, replace(drawn, id="digits-t3", rows=drawn.rows[1:])):
        planned = plan(made, "quick", range(1), tmp_path)
        results = findings(planned, list(carry_out(planned, workers=None, device=CPU)))
        write_report(planned, results, tmp_path, "a command", provenance())
    (shared,) = tmp_path.glob("*-sheet.png")
    for name in ("digits-t2", "digits-t3"):
        assert f"({shared.name})" in (tmp_path / f"{name}-quick.md").read_text()


def test_missing_picture_is_redrawn_without_training(drawn: PaperTable, tmp_path: Path) -> None:
    made = plan(drawn, "quick", range(1), tmp_path)
    list(carry_out(made, workers=None, device=CPU))
    first = made.jobs["One", 0]
    trained_at = (first.folder / "result.json").stat().st_mtime_ns
    first.picture("sheet").unlink()
    assert len(made.unfinished()) == 1
    list(carry_out(made, workers=None, device=CPU))
    assert first.picture("sheet").is_file()
    assert (first.folder / "result.json").stat().st_mtime_ns == trained_at


def test_figure_resolves_to_its_table() -> None:
    assert find_table("jiio-f4") is find_table("jiio-t3")
    with pytest.raises(ValueError, match="did you mean 'jiio-f4'"):
        find_table("jiio-f44")
