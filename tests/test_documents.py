"""The tutorials run, and the examples of the README are typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.test_wheel import build_wheel

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PHOTOS = ROOT / "docs" / "tutorials" / "photos.md"
"""Tutorial with commands of the program."""

RUN = """
import os, re, sys, tempfile
import torch._dynamo, equilibria.training
for page in sys.argv[1:]:
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.chdir(tempfile.mkdtemp(dir="."))
        for block in re.findall(r"```python\\n(.*?)```", open(page, encoding="utf-8").read(), re.S):
            exec(compile(block, page, "exec"), {})
        sys.exit()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{page} failed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_tutorials_run(tmp_path: Path) -> None:
    """Each runs in a fork, because it may register models; the imports are shared."""
    pages = [str(page) for page in TUTORIALS if page != PHOTOS]
    command = [sys.executable, "-W", "error", "-c", RUN, *pages]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_tutorial_on_photos_runs_with_an_installed_wheel(tmp_path: Path) -> None:
    """Run it block by block, outside the checkout and without data sets."""
    installed, folder = tmp_path / "installed", tmp_path / "folder"
    wheel = build_wheel(tmp_path / "build")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(installed), str(wheel)], check=True)
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "EQUILIBRIA_DATA"}
    environment["PYTHONPATH"] = str(installed)
    environment["PATH"] = os.pathsep.join([str(installed / "bin"), os.environ["PATH"]])
    runners = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}
    printed = ""
    text = PHOTOS.read_text(encoding="utf-8")
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", text, flags=re.DOTALL):
        run = subprocess.run(
            [*runners[language], block], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{block}\n{run.stdout}\n{run.stderr}"
        printed += run.stdout
    psnr_noisy, psnr_restored = map(float, re.findall(r"([0-9.]+) dB", printed))
    assert psnr_restored > psnr_noisy + 1
    assert (folder / "predicted.csv").read_text().count("\n") == 161
    photograph, restored = folder / "temple.png", folder / "restored" / "temple-restored.png"
    assert image_size(restored) == image_size(photograph)


def image_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "architecture.md"])
def test_pages_link_every_tutorial(page: Path) -> None:
    linked = re.findall(r"tutorials/([\w-]+)\.md", page.read_text(encoding="utf-8"))
    assert sorted(set(linked)) == [tutorial.stem for tutorial in TUTORIALS]


@pytest.mark.slow
def test_examples_of_the_readme_pass_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    files = []
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)):
        files.append(tmp_path / f"example{number}.py")
        files[-1].write_text(block, encoding="utf-8")
    # Use the cache of `make lint`, so that the package is not checked again.
    options = ["--config-file", "pyproject.toml", "--strict", "--cache-dir", ".mypy_cache"]
    command = [sys.executable, "-m", "mypy", *options]
    answer = subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout
