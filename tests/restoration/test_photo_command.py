"""`equilibria restore` on single pictures, with the prior of the package."""

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
def test_restoration_raises_the_psnr(photo: Path, tmp_path: Path, task: str) -> None:
    output = tmp_path / "clean"
    options = ["--task", task, "--simulate", "--strength", "1", "--output", str(output), "--json"]
    (report,) = json.loads(invoke("restore", str(photo), *options).stdout)
    assert report["restored_psnr"] > report["measured_psnr"] + 0.3
    assert (report["bound"] is not None) == (task == "denoise")
    with Image.open(report["restored"]) as restored, Image.open(report["sheet"]) as sheet:
        assert restored.size == (48, 40)
        assert sheet.width > 300


def test_picture_without_original_has_no_psnr(photo: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "clean")]
    printed = invoke("restore", str(photo), "--compare", *output).output
    assert "gray levels of the exact minimizer" in printed
    assert "PSNR" not in printed, "there is no original, so the column would be empty"
    assert "Total variation" not in printed
    assert "Iterations" in printed
    printed = invoke("restore", str(photo), *output).output
    assert "--overwrite" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "0"], "--noise must be positive"),
        (["--task", "inpaint"], "inpaint needs --mask"),
        (["--task", "paint"], "deblur, demosaic, denoise, inpaint, poisson, superres, got 'paint'"),
        (["--task", "deblur", "--blur", "30"], "needs a picture of more than"),
        (["--task", "demosaic"], "one value per pixel"),
        (["--strength", "0"], "strength must be positive"),
        (["--engine", "adam"], "No such option: --engine"),
        (["--blur", "2"], "--blur is for --task deblur, not denoise"),
        (["--task", "demosaic", "--factor", "2"], "--factor is for --task superres, not"),
        (["--mask", "{mask}"], "--mask is for --task inpaint"),
        (["--task", "inpaint", "--mask", "{mask}"], "is all white"),
    ],
)
def test_invalid_options_are_explained(
    photo: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    mask = tmp_path / "mask.png"
    Image.new("L", (48, 40), 255).save(mask)
    given = [option.format(mask=mask) for option in options]
    output = ["--output", str(tmp_path / "clean")]
    printed = invoke("restore", str(photo), *given, *output).output
    assert message in " ".join(printed.split())


def test_picture_of_one_pixel_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "dot.png"
    Image.new("L", (1, 1)).save(path)
    output = ["--noise", "0.1", "--output", str(tmp_path / "clean")]
    printed = invoke("restore", str(path), *output).output
    assert "must have more than 8 pixels per side" in " ".join(printed.split())


@pytest.mark.parametrize(("task", "damage"), [("superres", "superres"), ("inpaint", "scatter")])
def test_plotted_objective_is_that_of_the_solve_and_decreases(
    photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, damage: str
) -> None:
    plotted: dict[str, np.ndarray] = {}
    plot = Axes.plot

    def record(axis: Axes, *args: Any, **options: Any) -> Any:
        lines = plot(axis, *args, **options)
        plotted[str(lines[0].get_label())] = lines[0].get_ydata()
        return lines

    monkeypatch.setattr(Axes, "plot", record)
    with Image.open(photo) as image:
        image.crop((0, 0, 24, 20)).save(photo)
    pixels = eq.data.read_pixels(photo, is_gray=None)[None]
    corruption = eq.restoration.get_damage(damage, noise=0.02)
    problem = corruption.corrupt(pixels, torch.Generator().manual_seed(0))
    restored = eq.restoration.PhotoRestorer().restore(problem)
    options = ["--task", task, "--simulate", "--noise", "0.02", "--output", str(tmp_path / "clean")]
    invoke("restore", str(photo), *options)
    line = plotted.get("lowest so far", next(iter(plotted.values())))
    assert line[-1] == pytest.approx(float(restored.objective[-1, 0]), rel=1e-3)
    assert (np.diff(line) <= 0).all()
    assert len(plotted["each iteration"]) == len(line)
    assert restored.strength != 1, "the discrepancy principle chooses another strength"


def test_statement_for_a_flat_picture_is_finite(tmp_path: Path) -> None:
    path = tmp_path / "flat.png"
    Image.new("RGB", (48, 40), (128, 128, 128)).save(path)
    options = ["--task", "deblur", "--output", str(tmp_path / "clean"), "--json"]
    (report,) = json.loads(invoke("restore", str(path), *options).stdout)
    share = float(report["proven"].split("%")[0].split()[-1])
    assert share < 100
    assert report["proven"].endswith("of the contribution of the noise")


@pytest.mark.parametrize("arguments", [["{photo}"], ["{photo}", "{photo}"], ["{folder}"]])
def test_restore_run_without_a_run_suggests_restore(photo: Path, arguments: list[str]) -> None:
    paths = [text.format(photo=photo, folder=photo.parent) for text in arguments]
    result = invoke("restore-run", *paths)
    assert result.exit_code == 2
    printed = " ".join(result.stderr.split())
    assert f"`equilibria restore {' '.join(paths)}`" in printed


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
def test_assumptions_about_the_damage_are_reported(
    tmp_path: Path, options: list[str], assumed: str
) -> None:
    path = tmp_path / "flat.png"
    Image.new("L", (20, 20), 128).save(path)
    given = [*options, "--strength", "1", "--output", str(tmp_path / "clean")]
    result = invoke("restore", str(path), *given)
    assert result.exit_code == 0, result.output
    assert assumed in " ".join(result.stderr.split())
    assert ("Warning" in result.stderr) == bool(assumed)
