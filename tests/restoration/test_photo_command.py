"""`equilibria restore`: the prior that comes with the program, on any picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image
from sklearn.datasets import load_sample_image

import equilibria as eq
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
    (found,) = json.loads(invoke("restore", str(photo), *chosen).stdout)
    assert found["restored_psnr"] > found["measured_psnr"] + 0.3
    assert (found["bound"] is not None) == (task == "denoise")
    with Image.open(found["restored"]) as restored, Image.open(found["sheet"]) as sheet:
        assert restored.size == (48, 40)
        assert sheet.width > 300


def test_a_photograph_as_it_is(photo: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "clean")]
    said = invoke("restore", str(photo), "--compare", *output).output
    assert "gray levels of the exact minimizer" in said
    assert "PSNR" not in said, "columns without a number, as there is no original"
    assert "Total variation" not in said
    assert "Iterations" in said
    again = invoke("restore", str(photo), *output).output
    assert "--overwrite" in again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "0"], "--noise must be positive"),
        (["--task", "inpaint"], "inpaint needs --mask"),
        (["--task", "paint"], "deblur, demosaic, denoise, inpaint, poisson, superres, got 'paint'"),
        (["--task", "deblur", "--blur", "30"], "beyond a picture"),
        (["--task", "demosaic"], "one number a pixel"),
        (["--strength", "0"], "strength must be positive"),
        (["--engine", "adam"], "No such option: --engine"),
        (["--blur", "2"], "--blur is for --task deblur, not denoise"),
        (["--task", "demosaic", "--factor", "2"], "--factor is for --task superres, not"),
        (["--mask", "{mask}"], "--mask is for --task inpaint"),
        (["--task", "inpaint", "--mask", "{mask}"], "is all white"),
    ],
)
def test_bad_options_are_explained(
    photo: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    mask = tmp_path / "mask.png"
    Image.new("L", (48, 40), 255).save(mask)
    given = [option.format(mask=mask) for option in options]
    output = ["--output", str(tmp_path / "clean")]
    said = invoke("restore", str(photo), *given, *output).output
    assert message in " ".join(said.split())


def test_a_picture_of_one_pixel_is_too_small(tmp_path: Path) -> None:
    path = tmp_path / "dot.png"
    Image.new("L", (1, 1)).save(path)
    output = ["--noise", "0.1", "--output", str(tmp_path / "clean")]
    said = invoke("restore", str(path), *output).output
    assert "too small" in said


@pytest.mark.parametrize(("task", "damage"), [("superres", "superres"), ("inpaint", "scatter")])
def test_the_drawn_objective_is_that_of_the_solve_and_does_not_rise(
    photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, damage: str
) -> None:
    drawn: dict[str, np.ndarray] = {}
    plot = Axes.plot

    def record(axis: Axes, *args: Any, **options: Any) -> Any:
        lines = plot(axis, *args, **options)
        drawn[str(lines[0].get_label())] = lines[0].get_ydata()
        return lines

    monkeypatch.setattr(Axes, "plot", record)
    with Image.open(photo) as image:
        image.crop((0, 0, 24, 20)).save(photo)
    pixels = eq.data.read_pixels(photo, is_gray=None)[None]
    corruption = eq.restoration.get_damage(damage, noise=0.02)
    seen = corruption.corrupt(pixels, torch.Generator().manual_seed(0))
    found = eq.restoration.PhotoRestorer().restore(seen)
    chosen = ["--task", task, "--simulate", "--noise", "0.02", "--output", str(tmp_path / "clean")]
    invoke("restore", str(photo), *chosen)
    line = drawn.get("lowest so far", next(iter(drawn.values())))
    assert line[-1] == pytest.approx(float(found.objective[-1, 0]), rel=1e-3)
    assert (np.diff(line) <= 0).all()
    assert len(drawn["each iteration"]) == len(line)
    assert found.strength != 1, "the discrepancy principle chose another"


def test_a_flat_picture_is_deblurred_with_a_sensible_statement(tmp_path: Path) -> None:
    path = tmp_path / "flat.png"
    Image.new("RGB", (48, 40), (128, 128, 128)).save(path)
    options = ["--task", "deblur", "--output", str(tmp_path / "clean"), "--json"]
    (found,) = json.loads(invoke("restore", str(path), *options).stdout)
    share = float(found["proven"].split("%")[0].split()[-1])
    assert share < 100
    assert found["proven"].endswith("of what the noise contributes")


@pytest.mark.parametrize("arguments", [["{photo}"], ["{photo}", "{photo}"], ["{folder}"]])
def test_images_without_a_run_are_told_of_the_prior(photo: Path, arguments: list[str]) -> None:
    paths = [text.format(photo=photo, folder=photo.parent) for text in arguments]
    result = invoke("restore-run", *paths)
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"`equilibria restore {' '.join(paths)}`" in said


@pytest.mark.parametrize(
    ("options", "assumed"),
    [
        (["--task", "deblur"], "assuming a Gaussian blur with a standard deviation of 1.5 pixels"),
        (["--task", "deblur", "--simulate"], "simulating a Gaussian blur"),
        (["--task", "superres"], "assuming a resolution that is 2 times lower"),
        (["--task", "deblur", "--blur", "1"], ""),
        (["--task", "denoise"], ""),
    ],
)
def test_what_is_assumed_of_the_damage_is_reported(
    tmp_path: Path, options: list[str], assumed: str
) -> None:
    path = tmp_path / "flat.png"
    Image.new("L", (20, 20), 128).save(path)
    given = [*options, "--strength", "1", "--output", str(tmp_path / "clean")]
    result = invoke("restore", str(path), *given)
    assert result.exit_code == 0, result.output
    assert assumed in " ".join(result.stderr.split())
    assert ("Warning" in result.stderr) == bool(assumed)
