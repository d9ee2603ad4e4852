"""What is installed from a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built in `folder` without network."""
    pytest.importorskip("setuptools", minversion="77")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('dist')"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    """Recipes, tables of the papers, catalogs and templates among them."""
    with ZipFile(build_wheel(tmp_path)) as archive:
        packed = {name for name in archive.namelist() if name.startswith("equilibria/")}
        (facts,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        description = archive.read(facts).decode().split("\n\n", 1)[1]
    source = tmp_path / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert "equilibria/recipes/digits-opteq.yaml" in packed
    assert packed == {name for name in files if name.startswith("equilibria/")}
    assert description.startswith("# Equilibria")
    assert not re.search(r"\]\((?!https?:)|src(set)?=", description), "leads into the repository"
