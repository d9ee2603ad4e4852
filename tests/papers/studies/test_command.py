"""`equilibria reproduce ID` with a study."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from equilibria.papers import list_studies, list_tables
from tests.program import invoke


def test_study_runs_by_its_name(tmp_path: Path) -> None:
    given = ["models=[dnn-small]", "epochs=1", "validate=true", "--output", str(tmp_path)]
    assert "Plain network" in invoke("reproduce", "digits", *given).output
    record = json.loads((tmp_path / "digits.json").read_text())
    words = shlex.split(record["command"])
    assert words == ["equilibria", "reproduce", "digits", *given[:2], "validate=True"]
    assert record["runs"][0]["parameters"] == 11_610


def test_list_contains_every_table_and_study_once() -> None:
    listed = json.loads(invoke("reproduce", "--json").stdout)
    names = [item["id"] for item in listed]
    assert names == [
        *(table.id for table in list_tables()),
        *(study.id for study in list_studies()),
    ]
    assert len(set(names)) == len(names)


def test_settings_of_a_study_are_listed() -> None:
    assert "learning_rate  0.02" in invoke("reproduce", "digits", "--settings").output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["digits", "modles=[a]"], "no setting 'modles'; did you mean 'models'"),
        (["digits", "--seeds", "3"], "the study digits has no option --seeds: omit it"),
        (["digits", "epochs=many"], "the study digits: epochs: Input should be a valid integer"),
        (["certified"], "runs: Field required"),
        (["hdh"], "unknown table or study 'hdh'; did you mean 'hhd'"),
        (
            ["opteq-t3", "epochs=1"],
            "KEY=VALUE settings are for studies, and opteq-t3 is a table; remove 'epochs=1'",
        ),
        (["digits", "--dry-run"], "--dry-run is for tables, and digits is a study"),
    ],
)
def test_wrong_settings_raise(given: list[str], message: str) -> None:
    result = invoke("reproduce", *given)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_recorded_command_gives_the_same_settings() -> None:
    for study in list_studies():
        if study.id in ("certified", "early-exit"):
            continue
        settings = study.configure()
        assert study.command(settings) == f"equilibria reproduce {study.id}"
    (budgets,) = (study for study in list_studies() if study.id == "small-budgets")
    settings = budgets.configure(['families=["ResNet, 1 block", OptEq]', "budgets=300"], seeds=2)
    words = shlex.split(budgets.command(settings))
    again = budgets.configure([word for word in words if "=" in word], seeds=2)
    assert again == settings
