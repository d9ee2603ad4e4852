"""docs/commands.md shows all commands, with lines that can be typed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from equilibria.cli import COMMANDS, app

SITE = Path(__file__).resolve().parents[1] / "docs" / "site"
PAGE = SITE.parent / "commands.md"
PARTS = re.split(r"^## `([\w-]+)`\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
SHOWN = dict(zip(PARTS[1::2], PARTS[2::2], strict=True))
LINES = [line for text in SHOWN.values() for line in re.findall(r"^\$ (.+)$", text, re.M)]


def test_page_shows_all_commands_and_no_others() -> None:
    assert sorted(SHOWN) == sorted(COMMANDS)
    for name, text in SHOWN.items():
        assert re.search(rf"^\$ equilibria {name}\b", text, re.M), name
        printed = text.split("```console")[1]
        assert re.search(r"^ ?[^$`\s]", printed, re.M), f"{name} printed nothing"


def test_page_matches_its_script() -> None:
    spec = importlib.util.spec_from_file_location("commands", SITE / "commands.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert [line.text for section in script.SECTIONS.values() for line in section.lines] == LINES
    assert PARTS[0].strip() == script.HEAD.strip()


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("equilibria")])
def test_lines_are_valid_commands(line: str) -> None:
    """Parse the line without running it."""
    program = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    context = program.make_context("equilibria", words)
    name, command, rest = program.resolve_command(
        context, [*context._protected_args, *context.args]
    )
    assert name in COMMANDS
    if "--help" not in rest:
        command.make_context(name, rest, parent=context)
