"""What a stranger meets first: a start, completion, JSON, exit codes, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from equilibria.cli import COMMANDS, app, faults
from equilibria.cli import runs as runs_command
from tests.program import invoke

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_A_TABLE = {"report", "bench", "serve", "explore"}
"""They write a page or serve one, or pass their options on."""


def test_the_program_alone_names_three_commands() -> None:
    said = invoke()
    assert said.exit_code == 0
    lines = [line for line in said.output.splitlines() if line.startswith("  equilibria ")]
    assert len(lines) == 3
    assert all(line.split()[1] in COMMANDS for line in lines)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - WITHOUT_A_TABLE))
def test_every_command_that_prints_a_table_prints_json_too(name: str) -> None:
    command = typer.main.get_command(app)
    options = command.commands[name].params  # type: ignore[attr-defined]
    assert any("--json" in option.opts for option in options)


@pytest.mark.parametrize("arguments", [("recipes",), ("datasets",), ("reproduce",)])
def test_lists_are_json_if_asked(arguments: tuple[str, ...]) -> None:
    found = json.loads(invoke(*arguments, "--json").output)
    assert len(found) > 10
    assert all({"name", "id"} & one.keys() for one in found)


def test_runs_as_json(tmp_path: Path) -> None:
    assert json.loads(invoke("runs", tmp_path, "--json").output) == []


def test_the_shell_completes_commands() -> None:
    words = {"_EQUILIBRIA_COMPLETE": "complete_bash", "COMP_WORDS": "equilibria rec"}
    done = subprocess.run(
        [sys.executable, "-c", "from equilibria.cli import app; app(prog_name='equilibria')"],
        env={**words, "COMP_CWORD": "1", "PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["recipes"]


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/program.md lists them."""
    assert invoke("recipes").exit_code == 0
    assert invoke("evaluate", tmp_path / "none").exit_code == 2
    assert invoke("recipes", "--no-such-option").exit_code == 2

    def raises(error: BaseException) -> int:
        def broken(_: object) -> None:
            raise error

        monkeypatch.setattr(runs_command.eq.training, "RunFolder", broken)
        (tmp_path / "config.yaml").touch()
        answer = invoke("runs", tmp_path)
        assert "Traceback" not in answer.output
        return answer.exit_code

    assert raises(RuntimeError("out of luck")) == 1
    assert raises(KeyboardInterrupt()) == faults.INTERRUPTED == 130
    assert raises(KeyError("ours")) == faults.DEFECT == 70
    shown = invoke("runs", tmp_path, "--debug")
    assert "Traceback" in shown.output
    assert "a defect of the program (KeyError: 'ours')" in shown.output
    page = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
    assert all(f"| {code} |" in page for code in (0, 1, 2, 70, 130))
