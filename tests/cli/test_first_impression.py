"""The program without arguments, shell completion, JSON output, and exit codes."""

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
WITHOUT_TABLES = {"report", "bench", "serve", "explore"}
"""Commands that write or serve a page, or pass their options on."""


def test_program_without_arguments_suggests_three_commands() -> None:
    result = invoke()
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if line.startswith("  equilibria ")]
    assert len(lines) == 3
    assert all(line.split()[1] in COMMANDS for line in lines)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - WITHOUT_TABLES))
def test_commands_that_print_tables_also_print_json(name: str) -> None:
    command = typer.main.get_command(app)
    options = command.commands[name].params  # type: ignore[attr-defined]
    assert any("--json" in option.opts for option in options)


@pytest.mark.parametrize("arguments", [("recipes",), ("datasets",), ("reproduce",)])
def test_lists_are_printed_as_json(arguments: tuple[str, ...]) -> None:
    entries = json.loads(invoke(*arguments, "--json").output)
    assert len(entries) > 10
    assert all({"name", "id"} & entry.keys() for entry in entries)


def test_runs_of_an_empty_folder_are_an_empty_list(tmp_path: Path) -> None:
    assert json.loads(invoke("runs", tmp_path, "--json").output) == []


def test_shell_completes_commands() -> None:
    words = {"_EQUILIBRIA_COMPLETE": "complete_bash", "COMP_WORDS": "equilibria rec"}
    done = subprocess.run(
        [sys.executable, "-c", "from equilibria.cli import app; app(prog_name='equilibria')"],
        env={**words, "COMP_CWORD": "1", "PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["recipes"]


def test_exit_codes_match_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes are listed in docs/program.md."""
    assert invoke("recipes").exit_code == 0
    assert invoke("evaluate", tmp_path / "none").exit_code == 2
    assert invoke("recipes", "--no-such-option").exit_code == 2

    def exit_code_of(error: BaseException) -> int:
        def broken(_: object) -> None:
            raise error

        monkeypatch.setattr(runs_command.eq.training, "RunFolder", broken)
        (tmp_path / "config.yaml").touch()
        result = invoke("runs", tmp_path)
        assert "Traceback" not in result.output
        return result.exit_code

    assert exit_code_of(RuntimeError("out of luck")) == 1
    assert exit_code_of(KeyboardInterrupt()) == faults.INTERRUPTED == 130
    assert exit_code_of(KeyError("ours")) == faults.DEFECT == 70
    shown = invoke("runs", tmp_path, "--debug")
    assert "Traceback" in shown.output
    assert "this is a bug in the program (KeyError: 'ours')" in shown.output
    page = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
    assert all(f"| {code} |" in page for code in (0, 1, 2, 70, 130))
