"""Names of files and classes with formulas, control characters, or markup."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest

import equilibria as eq
from equilibria.cli.csv_files import csv_rows
from tests.data.photos import photo, write_photos
from tests.program import invoke

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
KINDS = ("=HYPERLINK(1)", "@\x1b[31mred", '"><img src=x onerror=alert(1)>')
FILES = ("=1+1.png", "-2.png", "+3.png", "@4.png", "\t5.png", "\r6.png", "\x1b[31m7.png", "8.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    photos = write_photos(folder / "photos", 4, KINDS)
    small = ("model.options.channels=8", "model.options.widths=[8, 8, 8]", "data.options.size=8")
    settings = ("training.epochs=1", "data.workers=0", *small)
    eq.train(photos, *settings, output=folder / "run")
    return folder / "run"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Images in the current folder, so that tables have their names without a path."""
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate(FILES):
        photo(0, index).save(name, format="PNG")
    return list(FILES)


def check_cells(text: str) -> list[list[str]]:
    rows = list(csv.reader(StringIO(text, newline="")))
    for row in rows:
        for cell in row:
            assert not CONTROL.search(cell), cell
            if not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", cell):
                assert not cell.startswith(("=", "+", "-", "@", "\t", "\r")), cell
    return rows


@pytest.mark.parametrize("to", ["table.csv", "-"])
@pytest.mark.parametrize("command", [("predict", "--top", "3"), ("certify",)])
def test_csv_cells_have_no_formulas_and_no_control_characters(
    run: Path, files: list[str], command: tuple[str, ...], to: str
) -> None:
    result = invoke(command[0], run, "--csv", to, *command[1:], "--", *files)
    assert result.exit_code == 0, result.output
    text = result.stdout if to == "-" else Path(to).read_text(encoding="utf-8")
    rows = check_cells(text)
    named = [row[0] for row in rows[1:]]
    assert named[:4] == ["'=1+1.png", "'-2.png", "'+3.png", "'@4.png"]
    assert named[6:] == ["\\u001b[31m7.png", "8.png"]
    cells = {cell for row in rows[1:] for cell in row}
    if command[0] == "predict":
        assert {"'=HYPERLINK(1)", "'@\\u001b[31mred"} <= cells


def test_numbers_in_csv_cells_are_unchanged() -> None:
    written = StringIO()
    write = csv_rows(written)
    write(["-1", -1, -0.5, None, True, "a,b", "–1", "x=1"])
    assert written.getvalue() == '\'-1,-1,-0.5,,True,"a,b",–1,x=1\n'


@pytest.mark.parametrize("text", [" =1", "\uff1d1", "\uff20A1"])
def test_spaces_and_wide_characters_hide_no_formula(text: str) -> None:
    written = StringIO()
    csv_rows(written)([text])
    assert written.getvalue() == f"'{text}\n"


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_output_has_no_control_characters(
    run: Path, files: list[str], extra: tuple[str, ...]
) -> None:
    for command in ("predict", "certify", "explain", "evaluate"):
        images = () if command == "evaluate" else ("--", *files[:7])
        result = invoke(command, run, *extra, *images)
        assert result.exit_code == 0, result.output
        assert not CONTROL.search(result.output)


class Tags(HTMLParser):
    """Names of the tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        assert not any(name == "src" and value == "x" for name, value in attrs)


def test_pages_escape_names(run: Path, files: list[str]) -> None:
    assert invoke("report", run, "--quick", "--output", "report.html").exit_code == 0
    assert invoke("explain", run, "--output", "why.html", "--", *files[:2]).exit_code == 0
    for name in ("report.html", "why.html"):
        page = Path(name).read_text(encoding="utf-8")
        assert "onerror=alert(1)" in page
        assert not CONTROL.search(page)
        parsed = Tags(page)
        assert "script" not in parsed.tags
        assert not any(attribute.startswith("on") for attribute in parsed.attributes)
    assert "@\\u001b[31mred" in Path("report.html").read_text(encoding="utf-8")
