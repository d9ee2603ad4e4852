"""Results, their JSON, tables, and Markdown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import markdown
from benchmarks.report import duel_cells, overhead_cells, sheets, verdict
from benchmarks.results import Duel, Measured, Overhead, averaged, from_json, to_json

ROOT = Path(__file__).resolve().parents[2]


def measured(value: float, *, reached: bool = True, **details: Any) -> Measured:
    return Measured("anderson", value, 12, 1e-6, reached, details)


def duel(
    ours: Measured | None = None,
    tuned: Measured | None = None,
    default: Measured | None = None,
    **options: Any,
) -> Duel:
    return Duel(
        row="conv",
        topic="forward",
        ours=ours or measured(50.0),
        tuned=tuned or measured(100.0),
        default=default or measured(200.0),
        wanted=1e-5,
        **options,
    )


OVERHEAD = Overhead("conv", "overhead", "Equilibria", "anderson", bare=2.0, ratio=1.2, aim=1.3)


def run_of(*results: Duel | Overhead) -> dict[str, Any]:
    return {
        "format": 2,
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m benchmarks",
        "quick": False,
        "repeats": 7,
        "threads": 2,
        "machine": {"processor": "P", "cores": 2, "memory_gib": 8.0, "system": "Linux"},
        "versions": {
            "equilibria": "1",
            "commit": None,
            "torchdeq": "0.1.0",
            "torch": "2",
            "python": "3",
        },
        "rows": [to_json(result) for result in results],
    }


@pytest.mark.parametrize(
    "result", [duel(tuned=measured(30.0, stop="rel"), details={"a": 1}), OVERHEAD]
)
def test_json_round_trip(result: Duel | Overhead) -> None:
    assert from_json(json.loads(json.dumps(to_json(result)))) == result


def test_ratios_and_aims() -> None:
    cells = duel_cells(duel(aim_tuned=0.65, aim_default=0.2))
    assert cells[5:] == ["0.50, aim ≤ 0.65 ✓", "–", "0.25, aim ≤ 0.2 ✗", "yes"]
    assert overhead_cells(OVERHEAD)[-2:] == ["1.20", "≤ 1.3 ✓"]


def test_peer_that_missed_the_target_is_not_counted() -> None:
    missed = duel(tuned=measured(100.0, reached=False), aim_tuned=0.65)
    assert not missed.is_won("tuned")
    assert duel_cells(missed)[5:] == ["(0.50) not counted", "–", "0.25", "tuned: no (1e-06)"]
    assert verdict([missed]) == ["Ahead of the default peer in 1 of 1 comparable rows."]


def test_no_ratio_if_equilibria_missed_the_target() -> None:
    missed = duel(ours=measured(1.0, reached=False))
    assert duel_cells(missed)[5:] == ["–", "–", "–", "ours: no (1e-06)"]
    assert verdict([missed]) == ["Equilibria did not reach the target in: conv."]


def test_rows_in_which_the_peer_is_ahead_are_named() -> None:
    assert "The tuned peer is ahead in: conv." in verdict([duel(tuned=measured(40.0))])


def test_each_topic_has_a_table() -> None:
    tables = sheets([OVERHEAD, duel()])
    assert [sheet.title.split()[0] for sheet in tables] == ["Forward", "Cost"]
    assert all(len(row) == len(sheet.columns) for sheet in tables for row in sheet.rows)


def test_markdown_contains_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_of(duel(), OVERHEAD)))
    assert markdown.main([str(file)]) == 0
    text = capsys.readouterr().out
    assert "2026-01-02, `python -m benchmarks`: P, 2 cores, 8.0 GiB" in text
    assert "| conv | anderson; 50 ms; 12 ev. | anderson; 100 ms; 12 ev." in text
    assert "| conv | Equilibria | anderson | 2.00 | 1.20 | ≤ 1.3 ✓ |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {7, 10}


def test_markdown_is_inserted_between_the_markers(tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "page.md"
    file.write_text(json.dumps(run_of(duel())))
    page.write_text(f"before\n\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")
    for _ in range(2):
        assert markdown.main([str(file), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{markdown.END}\nafter\n")
    assert "old" not in text
    assert text.count("| conv |") == 1


def test_page_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="results: begin"):
        markdown.inserted("text", "table")


def test_documentation_has_the_markers() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "new table" in markdown.inserted(page, "new table")


def test_seeds_are_averaged_and_their_range_is_printed() -> None:
    runs = [
        [Duel("a", "forward", Measured("x", ours), Measured("y", theirs))]
        for ours, theirs in ((1.0, 2.0), (3.0, 4.0), (1.0, 1.0))
    ]
    (mean,) = averaged(runs)
    assert isinstance(mean, Duel)
    assert mean.ours.value == pytest.approx(5 / 3)
    assert mean.ratio("tuned") == pytest.approx((0.5 + 0.75 + 1) / 3)
    assert "(0.50–1.00)" in duel_cells(mean)[5]
    assert from_json(to_json(mean)) == mean
    slow = Measured("y", 1.0, reached=False)
    assert not averaged([runs[0], [replace(runs[1][0], tuned=slow)]])[0].counts("tuned")
