"""The walk-through of docs/tutorials/photos.md, command by command, from an installed wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_wheel import build_wheel

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorials" / "photos.md"


@pytest.mark.slow
def test_the_walk_through_with_photos_runs_outside_the_checkout(tmp_path: Path) -> None:
    installed, here = tmp_path / "installed", tmp_path / "home"
    wheel = build_wheel(tmp_path / "build")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(installed), str(wheel)], check=True)
    here.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "PATH": os.pathsep.join([str(installed / "bin"), os.environ["PATH"]]),
    }
    environment.pop("EQUILIBRIA_DATA", None)
    shell = shutil.which("bash")
    assert shell is not None
    runners = {"python": [sys.executable, "-c"], "bash": [shell, "-euo", "pipefail", "-c"]}
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    printed = ""
    for language, block in blocks:
        ran = subprocess.run(
            [*runners[language], block], cwd=here, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
        printed += ran.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import equilibria; print(equilibria.__file__)"],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed)
