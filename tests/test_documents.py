"""What the documents promise: the tutorials run, and the example of the README is typed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))

RUN = """
import re, sys
for block in re.findall(r"```python\\n(.*?)```", open(sys.argv[1], encoding="utf-8").read(), re.S):
    exec(compile(block, sys.argv[1], "exec"), {})
"""


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    """In a process of its own: models that a tutorial registers would stay in this one."""
    command = [sys.executable, "-W", "error", "-c", RUN, str(page)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "architecture.md"])
def test_the_tutorials_are_found(page: Path) -> None:
    linked = re.findall(r"tutorials/([\w-]+)\.md", page.read_text(encoding="utf-8"))
    assert sorted(linked) == [tutorial.stem for tutorial in TUTORIALS]


@pytest.mark.slow
def test_the_examples_of_the_readme_pass_a_strict_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    files = []
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)):
        files.append(tmp_path / f"example{number}.py")
        files[-1].write_text(block, encoding="utf-8")
    options = ["--config-file", "pyproject.toml", "--strict", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache")]
    answer = subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout
