"""`equilibria restore-run` keeps the size and the colors of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from equilibria.data import DataSet, DataSetCard, Split, load_digits, register_dataset
from equilibria.tasks.image_quality import picture_psnr
from tests.data.photos import photo
from tests.inputs.small_generator import chance
from tests.program import invoke
from tests.restoration.test_run_command import AUTOENCODER, restored, save, train_run

NOISE = 0.3
DENOISE = {"name": "restoration", "options": {"corruption": {"denoise": {"noise": NOISE}}}}
TWICE = {"name": "restoration", "options": {"corruption": {"superres": {"factor": 2}}}}
RESTORER: dict[str, Any] = {"channels": 8, "kernel_size": 5, "tolerance": 1e-4}
SETTINGS = {"epochs": 3, "batch_size": 32, "learning_rate": 0.01, "gradient": "one_step"}


@pytest.fixture(autouse=True, scope="module")
def colored_digits() -> None:
    def load() -> DataSet:
        colors = torch.tensor([1.0, 0.7, 0.4])[:, None, None]
        parts = [
            Split(part.images[:600] * colors, part.labels[:600])
            for part in (load_digits().train, load_digits().test)
        ]
        return DataSet("colored-digits", *parts, load_digits().class_names)

    register_dataset(DataSetCard("colored-digits"), load, replace=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def equilibrium(folder: Path) -> Path:
    model = {"name": "deq-restorer", "options": RESTORER}
    data, settings = {"name": "digits"}, {**SETTINGS, "epochs": 6}
    return train_run(folder, "equilibrium", model=model, data=data, training=settings, task=DENOISE)


@pytest.fixture(scope="module")
def network(folder: Path) -> Path:
    """Run of a network for color images."""
    model = {"name": "dncnn", "options": {"channels": 8, "depth": 3, "norm": "none"}}
    data, settings = {"name": "colored-digits"}, {**SETTINGS, "gradient": None}
    return train_run(folder, "network", model=model, data=data, training=settings, task=DENOISE)


@pytest.fixture(scope="module")
def enlarger(folder: Path) -> Path:
    model = {"name": "deq-restorer", "options": {**RESTORER, "factor": 2}}
    settings = {**SETTINGS, "epochs": 1}
    return train_run(folder, "enlarger", model=model, training=settings, task=TWICE)


def clean(height: int, width: int) -> Tensor:
    """Return a mosaic of digits."""
    images = load_digits().test.images[: -(-height // 8) * -(-width // 8)]
    rows = images.reshape(-(-height // 8), -(-width // 8), 8, 8)
    return rows.permute(0, 2, 1, 3).reshape(1, -(-height // 8) * 8, -1)[:, :height, :width]


def read(path: Path | str) -> Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.atleast_3d(np.array(image)) / 255).permute(2, 0, 1)


def test_noisy_picture_is_restored_in_its_size(equilibrium: Path, tmp_path: Path) -> None:
    truth = clean(61, 75)
    noisy = (truth + NOISE * torch.randn(truth.shape, generator=chance())).clamp(0, 1)
    file = save(noisy, tmp_path / "noisy.png")
    (report,) = restored(equilibrium, file, "--output", tmp_path / "out")
    assert (report["measured_psnr"], report["restored_psnr"]) == (None, None)
    assert report["status"] == "converged"
    images = read(file), read(report["restored"])
    assert images[1].shape == truth.shape
    before, after = (float(picture_psnr(x[None].float(), truth[None])) for x in images)
    assert after > before + 1
    (simulated,) = restored(equilibrium, file, "--simulate", "--output", tmp_path / "simulated")
    assert simulated["measured_psnr"] < simulated["restored_psnr"]
    assert read(simulated["restored"]).shape == truth.shape


def test_tiles_give_the_same_picture(equilibrium: Path, tmp_path: Path) -> None:
    file = save(clean(90, 201), tmp_path / "wide.png")
    (whole,) = restored(equilibrium, file, "--output", tmp_path / "whole")
    (tiled,) = restored(equilibrium, file, "--output", tmp_path / "tiled", "--tile", 130)
    difference = (read(whole["restored"]) - read(tiled["restored"])).abs().max()
    assert float(difference) <= 1.01 / 255  # rounded to bytes
    small = invoke("restore-run", equilibrium, file, "--output", tmp_path / "small", "--tile", 20)
    assert small.exit_code == 2
    assert "tiles must have at least" in " ".join(small.output.split())


@pytest.mark.parametrize("run_name", ["equilibrium", "network"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_color_mode_is_kept(
    run_name: str, mode: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Path = request.getfixturevalue(run_name)
    picture = Image.fromarray((255 * clean(23, 37)[0]).byte().numpy()).convert(mode)
    picture.save(tmp_path / "image.png")
    (report,) = restored(run, tmp_path / "image.png", "--output", tmp_path / "out")
    with Image.open(report["restored"]) as image:
        assert (image.mode, image.size) == (mode, (37, 23))
    if run_name == "equilibrium" and mode == "RGB":  # each color is restored separately
        assert torch.equal(*read(report["restored"])[:2])


def test_super_resolution_doubles_the_size(enlarger: Path, tmp_path: Path) -> None:
    file = save(clean(19, 27), tmp_path / "small.png")
    (report,) = restored(enlarger, file, "--output", tmp_path / "out")
    assert read(report["restored"]).shape == (1, 38, 54)
    (simulated,) = restored(enlarger, file, "--simulate", "--output", tmp_path / "simulated")
    assert read(simulated["restored"]).shape == (1, 19, 27)
    assert simulated["restored_psnr"] is not None


def test_model_of_fixed_size_suggests_resize(folder: Path, tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch_size": 32}
    run = train_run(folder, "fixed", model=AUTOENCODER, training=settings, task=DENOISE)
    large, fitting = (save(clean(n, n), tmp_path / f"{n}.png") for n in (20, 8))
    result = invoke("restore-run", run, large, fitting, "--output", tmp_path / "out", "--json")
    assert result.exit_code == 1
    assert [Path(f["file"]).name for f in json.loads(result.stdout)] == ["8.png"]
    message = " ".join(result.stderr.split())
    assert "20.png has 20×20 pixels, but ae-conv needs 8×8" in message
    assert "use --resize to restore a copy" in message
    (report,) = restored(run, large, "--resize", "--output", tmp_path / "resized")
    assert read(report["restored"]).shape == (1, 8, 8)


def test_noise_option_without_simulate_is_rejected(equilibrium: Path, tmp_path: Path) -> None:
    file = save(clean(16, 16), tmp_path / "image.png")
    result = invoke("restore-run", equilibrium, file, "--sigma", 0.1, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "noise can only be changed with --simulate, or for generators" in " ".join(
        result.output.split()
    )
    assert not (tmp_path / "out").exists()
    options = ("--simulate", "--sigma", 0.1, "--output", tmp_path / "out")
    (report,) = restored(equilibrium, file, *options)
    assert 19 < report["measured_psnr"] < 24  # 20 dB, before clipping at black and white


def test_mask_must_have_the_size_of_the_picture(folder: Path, tmp_path: Path) -> None:
    task = {"name": "restoration", "options": {"corruption": "inpaint"}}
    model = {"name": "deq-restorer", "options": RESTORER}
    settings = {**SETTINGS, "epochs": 1}
    run = train_run(folder, "inpainter", model=model, training=settings, task=task)
    file = save(clean(30, 40), tmp_path / "image.png")
    hidden = torch.zeros(1, 30, 40)
    hidden[:, 10:14, 20:25] = 1
    mask = save(hidden, tmp_path / "mask.png")
    (report,) = restored(run, file, "--mask", mask, "--output", tmp_path / "out")
    known = hidden == 0
    assert torch.equal(read(report["restored"])[known], read(file)[known])
    wrong = save(hidden[:, :20], tmp_path / "wrong.png")
    result = invoke("restore-run", run, file, "--mask", wrong, "--output", tmp_path / "wrong")
    assert result.exit_code == 1
    assert "a mask must have the size of the image" in " ".join(result.output.split())
    none = invoke("restore-run", run, file, "--output", tmp_path / "none")
    assert none.exit_code == 2
    assert "inpaint needs --mask" in " ".join(none.output.split())


def test_denoiser_is_trained_on_a_folder_without_classes(tmp_path: Path) -> None:
    """Training needs no classes, and the run can be used without the folder."""
    (tmp_path / "photos" / "older").mkdir(parents=True)
    for i in range(10):
        photo(i % 2, i, (20, 30)).save(
            tmp_path / "photos" / ("older" if i % 3 else "") / f"{i}.jpg"
        )
    small = ("training.epochs=1", "data.options.size=8", "model.options.channels=4")
    run, root = tmp_path / "run", ("--root", tmp_path / "photos")
    result = invoke("train", "folder-restore-deq-denoise", *small, *root, "--output", run)
    assert result.exit_code == 0, result.output
    (tmp_path / "photos").rename(tmp_path / "moved")
    photo(0, 99, (33, 47)).save(tmp_path / "new.png")
    (report,) = restored(run, tmp_path / "new.png", "--output", tmp_path / "out")
    assert read(report["restored"]).shape == (3, 33, 47)
    evaluated = invoke("evaluate", run, "--root", tmp_path / "moved", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["samples"] == 2
    (tmp_path / "empty").mkdir()
    nothing = invoke("evaluate", run, "--root", tmp_path / "empty")
    assert nothing.exit_code == 2
    assert "there is no image in it" in " ".join(nothing.output.split())
