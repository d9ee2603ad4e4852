"""`equilibria restore-run`, with a generator, and with a network that was trained to restore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from equilibria.data import load_digits
from tests.program import invoke

DECODER = {
    "name": "opteq-decoder",
    "options": {"latent_dim": 8, "channels": 8, "width": 8, "head_channels": 8},
}
AUTOENCODER = {"name": "ae-conv", "options": {"latent_dim": 16, "width": 8}}
NOISE = {"corruption": {"denoise": {"noise": 0.3}}}


def learned(folder: Path, name: str, **parts: Any) -> Path:
    recipe = {
        "data": {"name": "digits", "options": {"train_samples": 256, "test_samples": 64}},
        "threads": 1,
        **parts,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    result = invoke("train", folder / f"{name}.yaml", "--output", folder / name)
    assert result.exit_code == 0, result.output
    return folder / name


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, trained through its inner problem (Eq. 24)."""
    options = {**NOISE, "iterations": 6, "evaluation_iterations": 20, "ridge": 0.01}
    return learned(
        tmp_path_factory.mktemp("runs"),
        "generator",
        model=DECODER,
        training={"epochs": 1, "batch_size": 32, "learning_rate": 0.01},
        task={"name": "restoration", "options": options},
    )


@pytest.fixture(scope="module")
def restorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder from noisy images to clean ones (Eq. 23)."""
    return learned(
        tmp_path_factory.mktemp("runs"),
        "restorer",
        model=AUTOENCODER,
        data={"name": "digits", "options": {"test_samples": 64}},
        training={"epochs": 12, "batch_size": 32, "learning_rate": 0.01},
        task={"name": "restoration", "options": NOISE},
    )


@pytest.fixture
def digits(tmp_path: Path) -> list[Path]:
    images = load_digits().test.images[:2]
    return [save(image, tmp_path / f"digit{i}.png") for i, image in enumerate(images)]


def save(image: Tensor, path: Path) -> Path:
    Image.fromarray((image[0] * 255).round().to(torch.uint8).numpy()).save(path)
    return path


def restored(*arguments: object) -> list[dict[str, Any]]:
    result = invoke("restore-run", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_a_run_is_evaluated_by_its_psnr(restorer: Path) -> None:
    result = invoke("evaluate", restorer, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["median_psnr"] > found["measured_psnr"]


def test_a_trained_restorer_improves_what_it_was_trained_for(
    restorer: Path, digits: list[Path], tmp_path: Path
) -> None:
    found = restored(restorer, *digits, "--simulate", "--output", tmp_path / "out")
    assert [Path(f["file"]).name for f in found] == ["digit0.png", "digit1.png"]
    gains = [f["restored_psnr"] - f["measured_psnr"] for f in found]
    assert sum(gains) / len(gains) > 1
    for f in found:
        assert f["iterations"] is None
        with Image.open(f["restored"]) as image:
            assert image.size == (8, 8)
        with Image.open(f["sheet"]) as sheet:
            assert sheet.width > 3 * 160  # original, measured, restored
    refused = invoke("restore-run", restorer, digits[0], "--task", "inpaint")
    assert refused.exit_code == 2
    assert "only a generator" in refused.output
    assert "without a search" in invoke("restore-run", restorer, digits[0], "--ridge", 1).output


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("inpaint", ["--window", 3]),
        ("denoise", ["--noise", 0.2, "--stop-at-noise"]),
        ("deblur", ["--blur", 0.8]),
        ("superres", ["--factor", 2, "--starts", 2]),
    ],
)
def test_a_generator_restores_all_kinds_of_damage(
    generator: Path, digits: list[Path], tmp_path: Path, task: str, options: list[object]
) -> None:
    found = restored(
        generator, *digits, "--simulate", "--task", task, *options, "--output", tmp_path / "out",
        "--iterations", 10,
    )  # fmt: skip
    assert len(found) == 2
    for f in found:
        assert f["status"] in ("converged", "out of iterations")
        assert f["residual"] >= 0
        assert 0 < f["misfit"] < 1
        assert f["message"]
        assert Path(f["sheet"]).is_file()


def test_known_pixels_are_kept(generator: Path, digits: list[Path], tmp_path: Path) -> None:
    mask = torch.zeros(1, 8, 8)
    mask[:, 2:5, 2:5] = 1
    arguments = ["--task", "inpaint", "--mask", save(mask, tmp_path / "mask.png")]
    (found,) = restored(generator, digits[0], *arguments, "--output", tmp_path / "out")
    assert found["measured_psnr"] is None
    assert found["restored_psnr"] is None
    with Image.open(found["restored"]) as image, Image.open(digits[0]) as original:
        difference = torch.from_numpy(np.array(image).astype(int) - np.array(original).astype(int))
    assert not difference[mask[0] == 0].any()
    assert difference[mask[0] == 1].any()
    arguments += ["--simulate", "--output", tmp_path / "other"]
    (seen,) = restored(generator, digits[0], *arguments)
    assert seen["restored_psnr"] is not None


def test_a_damaged_image_may_be_smaller(
    generator: Path, digits: list[Path], tmp_path: Path
) -> None:
    with Image.open(digits[0]) as image:
        image.resize((4, 4)).save(tmp_path / "small.png")
    options = ("--task", "superres", "--output", tmp_path / "out")
    (found,) = restored(generator, tmp_path / "small.png", *options)
    with Image.open(found["restored"]) as image:
        assert image.size == (8, 8)
    assert found["restored_psnr"] is None


def test_the_table_says_how_far_it_came(
    generator: Path, digits: list[Path], tmp_path: Path
) -> None:
    result = invoke(
        "restore-run", generator, *digits, "--simulate", "--task", "denoise", "--iterations", 1,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "0 of 2 converged" in result.output
    assert "raise iterations" in result.output
    assert "dB" in result.output
    unknown = invoke(
        "restore-run", generator, *digits, "--task", "denoise", "--iterations", 1,
        "--output", tmp_path / "unknown",
    )  # fmt: skip
    assert unknown.exit_code == 0, unknown.output
    assert "Misfit" in unknown.output
    assert "PSNR" not in unknown.output, "columns without a number, as there is no original"


def test_pictures_do_not_overwrite_images_or_each_other(generator: Path, tmp_path: Path) -> None:
    images = load_digits().test.images[:3]
    (tmp_path / "other").mkdir()
    files = [
        save(images[0], tmp_path / "a.png"),
        save(images[1], tmp_path / "a-restored.png"),
        save(images[2], tmp_path / "other" / "a.png"),
    ]
    before = files[1].read_bytes()
    found = restored(
        generator, *files, "--task", "denoise", "--iterations", 1, "--output", tmp_path
    )
    drawn = [f["restored"] for f in found] + [f["sheet"] for f in found]
    assert len(set(drawn)) == 6
    assert not set(drawn) & {str(file) for file in files}
    assert files[1].read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "scratch"], "unknown damage 'scratch'"),
        (["--window", "0.1"], "has no window: name another --task"),
        (["--task", "denoise", "--window", "3"], "damage 'denoise'"),
        (["--task", "inpaint"], "inpaint needs --mask"),
        (["--task", "denoise", "--mask", "DIGIT"], "--mask is for --task inpaint"),
        (["--task", "superres", "--factor", "3", "--simulate"], "divisible by"),
        (["--task", "denoise", "--engine", "newton"], "unknown engine 'newton'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    generator: Path, digits: list[Path], tmp_path: Path, arguments: list[str], said: str
) -> None:
    given = [str(digits[1]) if a == "DIGIT" else a for a in arguments]
    result = invoke("restore-run", generator, digits[0], *given, "--output", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


def test_the_test_images_of_the_run_are_restored(restorer: Path, tmp_path: Path) -> None:
    result = invoke("restore-run", restorer, "--test", 50, "--output", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["images"], found["data"], found["share_converged"]) == (50, "digits", None)
    assert 10 < found["measured_psnr"] < 13  # noise of 0.3, cut off at black and white
    assert found["model_psnr"] == found["restored_psnr"] > found["measured_psnr"]
    sheet = np.asarray(Image.open(found["sheet"]))
    assert sheet.shape[1] > 2 * sheet.shape[0]  # ten images in three rows
    refused = invoke("restore-run", restorer, "--test", 50, "--output", tmp_path)
    assert refused.exit_code == 2
    assert "test-images.png exists" in " ".join(refused.output.split())
    again = invoke("restore-run", restorer, "--test", 50, "--output", tmp_path, "--overwrite")
    assert again.exit_code == 0, again.output
    assert f"{found['model_psnr']:.2f}" in again.output
    assert "converged" not in again.output.lower()


def test_a_generator_fills_windows_of_its_test_images(generator: Path, tmp_path: Path) -> None:
    options = ["--task", "inpaint", "--iterations", 5, "--output", tmp_path]
    result = invoke("restore-run", generator, "--test", 9, *options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["restored_psnr"] > found["model_psnr"]
    assert 0 <= found["share_converged"] <= 1
    assert 1 <= found["mean_iterations"] <= 5
    assert (found["share_converged"] == 1) == (found["message"] == "")
    printed = invoke("restore-run", generator, "--test", 9, *options, "--overwrite")
    assert found["message"] in " ".join(printed.output.split())


def test_a_prior_draws_latents_to_those_of_training(
    generator: Path, digits: list[Path], tmp_path: Path
) -> None:
    """The heavier the mixture on the latents that the run keeps, the less the picture is fitted."""
    run = learned(
        tmp_path,
        "prior",
        model=DECODER,
        training={"epochs": 1, "batch_size": 32, "learning_rate": 0.01},
        task={"name": "generator", "options": {"iterations": 4, "evaluation_iterations": 10}},
    )
    options = [*digits, "--simulate", "--task", "inpaint", "--window", 3, "--iterations", 30]
    misfits = []
    for place, prior in enumerate(([], ["--prior", 1e-4], ["--prior", 10])):
        found = restored(run, *options, *prior, "--ridge", 0, "--output", tmp_path / f"{place}")
        misfits.append(sum(f["misfit"] for f in found))
    assert misfits[0] < misfits[2] > misfits[1]
    for refused, said in (
        ([generator, digits[0], "--task", "inpaint"], "has no stored latents"),
        ([run, digits[0], "--task", "inpaint", "--prior", -1], "weight must be positive"),
    ):
        result = invoke("restore-run", *refused, *([] if "--prior" in refused else ["--prior", 1]))
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either image files or folders to restore, or --test"),
        (["digit.png", "--test", "3"], "give either image files"),
        (["--test", "3", "--resize"], "not for --test"),
    ],
)
def test_what_is_restored_is_said_once(restorer: Path, arguments: list[str], message: str) -> None:
    result = invoke("restore-run", restorer, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_an_image_that_cannot_be_read_is_left_out(
    restorer: Path, digits: list[Path], tmp_path: Path
) -> None:
    spoiled = tmp_path / "spoiled.png"
    spoiled.write_bytes(digits[0].read_bytes()[:40])
    names = (digits[0], spoiled, digits[1])
    result = invoke("restore-run", restorer, *names, "--output", tmp_path / "drawn", "--json")
    assert result.exit_code == 1
    assert f"1 of 3 images were skipped: {spoiled}" in " ".join(result.stderr.split())
    found = json.loads(result.stdout)
    assert [image["file"] for image in found] == [str(path) for path in digits]
    assert all(Path(image["restored"]).is_file() for image in found)
