"""`equilibria restore-run` on pictures of any size: they keep their size and colors."""

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
from tests.restoration.test_run_command import AUTOENCODER, learned, restored, save

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
    return learned(folder, "equilibrium", model=model, data=data, training=settings, task=DENOISE)


@pytest.fixture(scope="module")
def network(folder: Path) -> Path:
    """Of colored images."""
    model = {"name": "dncnn", "options": {"channels": 8, "depth": 3, "norm": "none"}}
    data, settings = {"name": "colored-digits"}, {**SETTINGS, "gradient": None}
    return learned(folder, "network", model=model, data=data, training=settings, task=DENOISE)


@pytest.fixture(scope="module")
def enlarger(folder: Path) -> Path:
    model = {"name": "deq-restorer", "options": {**RESTORER, "factor": 2}}
    settings = {**SETTINGS, "epochs": 1}
    return learned(folder, "enlarger", model=model, training=settings, task=TWICE)


def clean(height: int, width: int) -> Tensor:
    """Many digits beside each other."""
    images = load_digits().test.images[: -(-height // 8) * -(-width // 8)]
    rows = images.reshape(-(-height // 8), -(-width // 8), 8, 8)
    return rows.permute(0, 2, 1, 3).reshape(1, -(-height // 8) * 8, -1)[:, :height, :width]


def read(path: Path | str) -> Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.atleast_3d(np.array(image)) / 255).permute(2, 0, 1)


def test_a_noisy_picture_becomes_a_clean_one_of_its_size(equilibrium: Path, tmp_path: Path) -> None:
    truth = clean(61, 75)
    noisy = (truth + NOISE * torch.randn(truth.shape, generator=chance())).clamp(0, 1)
    file = save(noisy, tmp_path / "noisy.png")
    (found,) = restored(equilibrium, file, "--output", tmp_path / "out")
    assert (found["measured_psnr"], found["restored_psnr"]) == (None, None)
    assert found["status"] == "converged"
    after = read(found["restored"])
    assert after.shape == truth.shape
    before, gained = (
        float(picture_psnr(some[None].float(), truth[None])) for some in (read(file), after)
    )
    assert gained > before + 1
    (shown,) = restored(equilibrium, file, "--simulate", "--output", tmp_path / "simulated")
    assert shown["measured_psnr"] < shown["restored_psnr"]
    assert read(shown["restored"]).shape == truth.shape


def test_pieces_make_the_same_picture(equilibrium: Path, tmp_path: Path) -> None:
    file = save(clean(90, 201), tmp_path / "wide.png")
    (whole,) = restored(equilibrium, file, "--output", tmp_path / "whole")
    (pieces,) = restored(equilibrium, file, "--output", tmp_path / "pieces", "--tile", 130)
    difference = (read(whole["restored"]) - read(pieces["restored"])).abs().max()
    assert float(difference) <= 1.01 / 255  # rounded to bytes
    small = invoke("restore-run", equilibrium, file, "--output", tmp_path / "small", "--tile", 20)
    assert small.exit_code == 2
    assert "pieces of 20 pixels are too small" in " ".join(small.output.split())


@pytest.mark.parametrize("run_name", ["equilibrium", "network"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_gray_stays_gray_and_color_in_color(
    run_name: str, mode: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Path = request.getfixturevalue(run_name)
    made = Image.fromarray((255 * clean(23, 37)[0]).byte().numpy()).convert(mode)
    made.save(tmp_path / "image.png")
    (found,) = restored(run, tmp_path / "image.png", "--output", tmp_path / "out")
    with Image.open(found["restored"]) as image:
        assert (image.mode, image.size) == (mode, (37, 23))
    if run_name == "equilibrium" and mode == "RGB":  # color by color
        assert torch.equal(*read(found["restored"])[:2])


def test_a_lower_resolution_is_made_a_higher_one(enlarger: Path, tmp_path: Path) -> None:
    file = save(clean(19, 27), tmp_path / "small.png")
    (found,) = restored(enlarger, file, "--output", tmp_path / "out")
    assert read(found["restored"]).shape == (1, 38, 54)
    (shown,) = restored(enlarger, file, "--simulate", "--output", tmp_path / "simulated")
    assert read(shown["restored"]).shape == (1, 19, 27)
    assert shown["restored_psnr"] is not None


def test_a_model_of_one_size_says_so(folder: Path, tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch_size": 32}
    run = learned(folder, "fixed", model=AUTOENCODER, training=settings, task=DENOISE)
    large, fitting = (save(clean(n, n), tmp_path / f"{n}.png") for n in (20, 8))
    result = invoke("restore-run", run, large, fitting, "--output", tmp_path / "out", "--json")
    assert result.exit_code == 1
    assert [Path(f["file"]).name for f in json.loads(result.stdout)] == ["8.png"]
    said = " ".join(result.stderr.split())
    assert "20.png has 20×20 pixels, but ae-conv needs 8×8" in said
    assert "use --resize to restore a copy" in said
    (found,) = restored(run, large, "--resize", "--output", tmp_path / "resized")
    assert read(found["restored"]).shape == (1, 8, 8)


def test_what_a_network_cannot_be_told_is_refused(equilibrium: Path, tmp_path: Path) -> None:
    file = save(clean(16, 16), tmp_path / "image.png")
    result = invoke("restore-run", equilibrium, file, "--sigma", 0.1, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "noise can only be changed with --simulate, or for generators" in " ".join(
        result.output.split()
    )
    assert not (tmp_path / "out").exists()
    options = ("--simulate", "--sigma", 0.1, "--output", tmp_path / "out")
    (found,) = restored(equilibrium, file, *options)
    assert 19 < found["measured_psnr"] < 24  # 20 dB, but for what is cut off at black and white


def test_a_mask_has_the_size_of_its_picture(folder: Path, tmp_path: Path) -> None:
    task = {"name": "restoration", "options": {"corruption": "inpaint"}}
    model = {"name": "deq-restorer", "options": RESTORER}
    settings = {**SETTINGS, "epochs": 1}
    run = learned(folder, "inpainter", model=model, training=settings, task=task)
    file = save(clean(30, 40), tmp_path / "image.png")
    hidden = torch.zeros(1, 30, 40)
    hidden[:, 10:14, 20:25] = 1
    mask = save(hidden, tmp_path / "mask.png")
    (found,) = restored(run, file, "--mask", mask, "--output", tmp_path / "out")
    seen = hidden == 0
    assert torch.equal(read(found["restored"])[seen], read(file)[seen])
    wrong = save(hidden[:, :20], tmp_path / "wrong.png")
    result = invoke("restore-run", run, file, "--mask", wrong, "--output", tmp_path / "wrong")
    assert result.exit_code == 1
    assert "a mask must have the size of the image" in " ".join(result.output.split())
    none = invoke("restore-run", run, file, "--output", tmp_path / "none")
    assert none.exit_code == 2
    assert "inpaint needs --mask" in " ".join(none.output.split())


def test_a_flat_folder_of_pictures_trains_a_denoiser(tmp_path: Path) -> None:
    """No classes are needed to learn it, nor is the folder to use it."""
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
    (found,) = restored(run, tmp_path / "new.png", "--output", tmp_path / "out")
    assert read(found["restored"]).shape == (3, 33, 47)
    evaluated = invoke("evaluate", run, "--root", tmp_path / "moved", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["samples"] == 2
    (tmp_path / "empty").mkdir()
    nothing = invoke("evaluate", run, "--root", tmp_path / "empty")
    assert nothing.exit_code == 2
    assert "there is no image in it" in " ".join(nothing.output.split())
