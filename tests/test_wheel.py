"""Files of a wheel, and the description of the package on PyPI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout in `folder`, with the installed setuptools."""
    copy_project(folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    return build(folder, "build_wheel")


def copy_project(folder: Path) -> None:
    """Copy the files that describe the package, without its sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def build(folder: Path, hook: str) -> Path:
    """Run a hook of setuptools in `folder`, without network, and return what it built."""
    subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; build_meta.{hook}('dist')"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (built,) = (folder / "dist").iterdir()
    return built


def description_on_pypi(folder: Path) -> str:
    """Build the sdist of the project in `folder`, and read the description in its metadata."""
    (folder / "src" / "equilibria").mkdir(parents=True)
    (folder / "src" / "equilibria" / "__init__.py").touch()
    with tarfile.open(build(folder, "build_sdist")) as archive:
        (name,) = [name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode().split("\n\n", 1)[1]


def test_description_on_pypi_has_no_pictures_and_no_relative_links(
    tmp_path: Path,
) -> None:
    """A picture is not a link: removing links left "!A noisy photograph" at the top."""
    copy_project(tmp_path)
    description = description_on_pypi(tmp_path)
    prose = re.sub(r"^```.*?^```$", "", description, flags=re.DOTALL | re.MULTILINE)
    assert description.startswith("# Equilibria")
    assert "## Install" in prose
    assert "import equilibria as eq" in description
    assert not re.search(r"^!", prose, flags=re.MULTILINE), "remains of a picture"
    assert not re.search(r"\]\((?!https?:)", prose), "a relative link"
    assert not re.search(r"</?(picture|source|img)\b|src(set)?=|docs/images", prose)
    assert not re.search(r"^\*(?!\*)", prose, flags=re.MULTILINE), "a caption without its picture"


def test_description_keeps_code_and_external_links(tmp_path: Path) -> None:
    copy_project(tmp_path)
    code = "```python\nsolutions[0](docs)\n```"
    kept = "See [the paper](https://example.org) ![a badge](https://example.org/badge.svg).\n"
    (tmp_path / "README.md").write_text(
        f"# Title\n\n**Bold** text.\n\n![One\npicture](docs/a.jpg)\n\n*Its\ncaption.*\n\n{code}\n\n"
        f'<picture>\n<img src="b.svg">\n</picture>\n\n**Next:** [guide](docs/guide.md).\n{kept}'
    )
    description = description_on_pypi(tmp_path)
    assert description == f"# Title\n\n**Bold** text.\n\n{code}\n\n**Next:** guide.\n{kept}"


@pytest.mark.slow
def test_wheel_contains_every_file_of_the_package(tmp_path: Path) -> None:
    """This includes recipes, tables of the papers, catalogs and templates."""
    with ZipFile(build_wheel(tmp_path)) as archive:
        packed = {name for name in archive.namelist() if name.startswith("equilibria/")}
    source = tmp_path / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert "equilibria/recipes/digits-opteq.yaml" in packed
    assert packed == {name for name in files if name.startswith("equilibria/")}
