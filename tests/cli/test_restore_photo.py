"""`equilibria restore --model photo`: the prior that comes with the program, on any picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from tests.program import invoke


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "flower.png"
    Image.fromarray(np.array(load_sample_image("flower.jpg"))[150:190, 250:298]).save(path)
    return path


@pytest.mark.parametrize("task", ["denoise", "deblur", "inpaint", "superres", "demosaic"])
def test_a_damaged_photograph_gets_better(photo: Path, tmp_path: Path, task: str) -> None:
    output = tmp_path / "clean"
    chosen = ["--task", task, "--simulate", "--strength", "1", "--output", str(output), "--json"]
    (found,) = json.loads(invoke("restore", "--model", "photo", str(photo), *chosen).stdout)
    assert found["restored_psnr"] > found["measured_psnr"] + 0.3
    assert (found["bound"] is not None) == (task == "denoise")
    with Image.open(found["restored"]) as restored, Image.open(found["sheet"]) as sheet:
        assert restored.size == (48, 40)
        assert sheet.width > 300


def test_a_photograph_as_it_is(photo: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "clean")]
    said = invoke("restore", "--model", "photo", str(photo), "--compare", *output).output
    assert "gray levels of the exact minimizer" in said
    again = invoke("restore", "--model", "photo", str(photo), *output).output
    assert "--overwrite" in again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "0"], "a noise of zero"),
        (["--task", "inpaint"], "which pixels are missing"),
        (["--task", "paint"], "denoise, deblur, inpaint"),
        (["--task", "deblur", "--blur", "30"], "beyond a picture"),
        (["--task", "demosaic"], "one number a pixel"),
        (["--strength", "0"], "strength must be positive"),
        (["--engine", "adam"], "--engine is for runs"),
        (["--mask", "{mask}"], "it is for --task inpaint"),
        (["--task", "inpaint", "--mask", "{mask}"], "hides every pixel, or none"),
    ],
)
def test_bad_options_are_explained(
    photo: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    mask = tmp_path / "mask.png"
    Image.new("L", (48, 40), 255).save(mask)
    given = [option.format(mask=mask) for option in options]
    output = ["--output", str(tmp_path / "clean")]
    said = invoke("restore", "--model", "photo", str(photo), *given, *output).output
    assert message in " ".join(said.split())


def test_a_picture_of_one_pixel_and_another_model_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "dot.png"
    Image.new("L", (1, 1)).save(path)
    output = ["--noise", "0.1", "--output", str(tmp_path / "clean")]
    said = invoke("restore", "--model", "photo", str(path), *output).output
    assert "too small" in said
    said = invoke("restore", "--model", "foto", str(path), *output).output
    assert "--model takes photo" in said
