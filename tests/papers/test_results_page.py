"""docs/results.md, which is generated from the claims and the records."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from equilibria.papers import find_table, list_tables
from equilibria.papers.studies.claims import CLAIM_STUDIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("results", DOCS / "site" / "results.py")
assert SPEC is not None
assert SPEC.loader is not None
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)
cells, page = SCRIPT.cells, SCRIPT.page
CLAIMS = yaml.safe_load((DOCS / "site" / "claims.yaml").read_text(encoding="utf-8"))
ALL = [claim for claims in CLAIMS.values() for claim in claims]


def test_page_matches_the_records() -> None:
    """If this fails, run `python docs/site/results.py`."""
    assert (DOCS / "results.md").read_text(encoding="utf-8") == page()


def test_every_paper_and_every_table_has_a_claim() -> None:
    assert list(CLAIMS) == list(dict.fromkeys(table.paper for table in list_tables()))
    claimed = {claim["table"] for claim in ALL}
    # Other tables have claims about the regularizers of Table 5 and about noise. Figure 6 of JIIO
    # shows faces without a claim.
    without_claim = {"opteq-t5", "jiio-t4c", "jiio-f6"}
    assert {table.id for table in list_tables()} - claimed == without_claim


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim["claim"])
def test_claim_refers_to_existing_rows_and_studies(claim: dict[str, str]) -> None:
    labels = {row.label for row in find_table(claim["table"]).rows}
    assert {claim["above"], claim["below"]} <= labels
    for name, words in dict(claim.get("study", {})).items():
        assert words in {comparison.claim for comparison in CLAIM_STUDIES[name].comparisons}


def claim_of(text: str) -> dict[str, str]:
    return next(claim for claim in ALL if claim["claim"] == text)


def test_quick_table_decides_sizes_but_not_accuracies(tmp_path: Path) -> None:
    def write_record(values: dict[str, list[float]], name: str) -> None:
        rows = [
            {"label": label, "runs": [{"seed": s, name: v} for s, v in enumerate(numbers)]}
            for label, numbers in values.items()
        ]
        file = tmp_path / "results" / "opteq-t3-quick.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"rows": rows}))

    smaller = claim_of("λ‖·‖² shrinks the mean of z²")
    assert cells(smaller, tmp_path)[2:4] == ["not recorded", "*undecided*"]
    for low, high, verdict in (
        ([1.0, 1.1, 1.2], [3.0, 3.1, 3.3], "*holds*"),
        ([3.0, 3.1, 3.3], [1.0, 1.1, 1.2], "*does not*"),
        ([1.0, 3.1, 1.2], [3.0, 1.1, 1.3], "*undecided*"),
    ):
        write_record({smaller["above"]: low, smaller["below"]: high}, "feature_energy")
        assert cells(smaller, tmp_path)[3] == verdict
    claim = claim_of("α = 0.8 is more accurate than α = 0.01")
    write_record({claim["above"]: [0.5, 0.5, 0.51], claim["below"]: [0.1, 0.1, 0.12]}, "accuracy")
    assert cells(claim, tmp_path)[3] == "*undecided* (quick: as claimed)"


def test_study_overrides_a_table(tmp_path: Path) -> None:
    claim = claim_of("PE raises accuracy")
    ((name, words),) = dict(claim["study"]).items()
    finding = {"claim": words, "difference": 1.5, "low": 0.5, "high": 2.5, "seeds": 6}
    file = tmp_path / "results" / f"{name}-quick.json"
    file.parent.mkdir(parents=True)
    command_line = f"equilibria reproduce {name} --quick --seeds 6"
    record = {"command": command_line, "findings": [{**finding, "verdict": "holds"}]}
    file.write_text(json.dumps(record))
    _, _, ours, verdict, command = cells(claim, tmp_path)
    assert "+1.50, 95 % in [+0.50, +2.50], 6 seeds" in ours
    assert (verdict, command) == ("*holds*", f"`{command_line}`")


def test_page_refers_to_existing_files_and_tables() -> None:
    text = page()
    for name in set(re.findall(r"`(tests/[^`]+)`", text)):
        assert (DOCS.parent / name).is_file(), name
    for name in set(re.findall(r"\]\(([^)#]+)[^)]*\)", text)):
        assert (DOCS / name).is_file(), name
    for table_id in set(re.findall(r"equilibria reproduce (\S+) --quick", text)):
        assert table_id in CLAIM_STUDIES or find_table(table_id).id == table_id
