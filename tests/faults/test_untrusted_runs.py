"""Run folders of unknown origin: file names, links, and sizes are checked before use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import equilibria as eq
from equilibria.training import CheckpointWarning, DamagedFileError, ModelSizeError
from equilibria.training.experiment import Experiment
from equilibria.training.files import sealed_json, unsealed
from equilibria.training.recipe import is_of_package, recipe_from_data
from equilibria.training.sizes import size_limit
from tests.program import invoke

SMALL = (
    *("digits-opteq", "data.options.train_samples=60", "training.batch_size=30"),
    *("model.options.channels=4", "model.options.width=4", "training.epochs=1"),
)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    eq.train(*SMALL, output=folder)
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


@pytest.fixture
def unfinished(run: Path) -> Path:
    """A run without final weights, which are read from its checkpoint."""
    (run / "model.safetensors").unlink()
    return run


def checkpoint(run: Path) -> Path:
    (folder,) = (run / "checkpoints").glob("epoch-*")
    return folder


def name_in_manifest(run: Path, name: str) -> None:
    """Add a file to the manifest of the checkpoint."""
    path = checkpoint(run) / "manifest.json"
    manifest = unsealed(path.read_text(), path)
    manifest["files"][name] = "0" * 64
    path.write_text(sealed_json(manifest))


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../../config.yaml", "pipe", "optimizer.pt", "./state.pt"]
)
def test_manifest_may_name_only_the_files_of_a_checkpoint(unfinished: Path, name: str) -> None:
    """Otherwise `load` would read /dev/zero or a pipe forever."""
    name_in_manifest(unfinished, name)
    with (
        pytest.warns(CheckpointWarning, match=f"lists .*'{name}', but a checkpoint has"),
        pytest.raises(FileNotFoundError, match="no intact checkpoint"),
    ):
        eq.load(unfinished)


def test_unfinished_run_is_loaded_from_its_checkpoint(unfinished: Path) -> None:
    with pytest.warns(CheckpointWarning, match="weights after epoch 1 of 1"):
        assert eq.load(unfinished).images.image_shape == (1, 8, 8)


PLACES: dict[str, Callable[[Path], Path]] = {
    "weights": lambda run: run / "model.safetensors",
    "recipe": lambda run: run / "config.yaml",
}


@pytest.mark.parametrize("place", PLACES)
def test_links_out_of_the_folder_are_errors(run: Path, tmp_path: Path, place: str) -> None:
    file = PLACES[place](run)
    outside = shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(outside)
    with pytest.raises(DamagedFileError, match=r"is a link to .*elsewhere, outside the run"):
        eq.load(run)


def test_links_within_the_folder_and_to_the_folder_are_followed(run: Path, tmp_path: Path) -> None:
    weights = run / "model.safetensors"
    weights.rename(run / "weights")
    weights.symlink_to("weights")
    (tmp_path / "link").symlink_to(run)
    assert eq.load(tmp_path / "link").images.image_shape == (1, 8, 8)


def test_checkpoints_linked_from_outside_are_skipped(unfinished: Path, tmp_path: Path) -> None:
    outside = shutil.move(unfinished / "checkpoints", tmp_path / "elsewhere")
    (unfinished / "checkpoints").symlink_to(outside)
    with (
        pytest.warns(CheckpointWarning, match="outside the run"),
        pytest.raises(FileNotFoundError, match="no intact checkpoint"),
    ):
        eq.load(unfinished)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_checkpoint_with_a_pipe_is_skipped(unfinished: Path, name: str) -> None:
    file = checkpoint(unfinished) / name
    file.unlink()
    os.mkfifo(file)
    with (
        pytest.warns(CheckpointWarning, match="a pipe or a device"),
        pytest.raises(FileNotFoundError, match="no intact checkpoint"),
    ):
        eq.load(unfinished)


def test_pipe_instead_of_the_metrics_is_an_error(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(DamagedFileError, match="a pipe or a device"):
        eq.training.RunFolder(run).read_metrics()


def test_oversized_files_are_not_read(run: Path) -> None:
    """The test files are sparse and take no space on the disk."""
    os.truncate(run / "model.safetensors", 2**34)
    with pytest.raises(DamagedFileError, match="17,179,869,184 bytes, but the weights"):
        eq.load(run)
    os.truncate(run / "run.json", 2**34)
    with pytest.warns(CheckpointWarning, match="more than the limit of 67,108,864"):
        assert eq.training.RunFolder(run).facts() == {}


def test_oversized_checkpoint_is_skipped_unread(unfinished: Path) -> None:
    os.truncate(checkpoint(unfinished) / "model.safetensors", 2**36)
    with (
        pytest.warns(CheckpointWarning, match="68.7 GB, more than the limit of 10 GB"),
        pytest.raises(FileNotFoundError, match="no intact checkpoint"),
    ):
        eq.load(unfinished)


def change_model(run: Path, options: dict[str, Any], **model: Any) -> None:
    """Change the model in the recipe of a run, and remove the checksum of the recipe."""
    config = run / "config.yaml"
    recipe = yaml.safe_load(config.read_text())
    recipe["model"]["options"] |= options
    recipe["model"] |= model
    config.write_text(yaml.safe_dump(recipe))
    mark = unsealed((run / "run.json").read_text(), "")
    mark.pop("config")
    (run / "run.json").write_text(sealed_json(mark))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem_depth": 10_000_000}, "stem_depth .* is 10,000,000"),
        ({"stem_depth": 1_000_000}, "takes more operations to build than"),
        ({"channels": 1_000_000_000}, "channels .* is 1,000,000,000"),
        ({"channels": 500_000}, "GB"),
        ({"width": 1_000_000, "channels": 100_000}, "GB"),
        ({"solver": {"name": "anderson", "memory": 10**9}}, "GB"),
        ({"solver": {"name": "broyden", "rank": 10**9}}, "GB"),
    ],
)
def test_models_of_absurd_sizes_are_errors(
    run: Path, options: dict[str, Any], message: str
) -> None:
    change_model(run, options)
    with pytest.raises(ModelSizeError, match=message) as caught:
        eq.load(run)
    assert "max_gigabytes" in str(caught.value)
    assert "--max-gigabytes" in str(caught.value)
    result = invoke("predict", run, "nothing.png")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mdeq-small", {"channels": [900_000, 900_000, 900_000]}),
        ("mondeq-small", {"kernel_size": 1_000_001}),
        ("geq-small", {"stem_depth": 1_000_000}),
        ("resnet-small", {"blocks": [1_000_000, 1, 1]}),
        ("mopteq-small", {"channels": 10**6, "widths": [10**6] * 3}),
        ("reflection-digits", {"units": [10**6] * 50}),
    ],
)
def test_every_family_is_checked(name: str, options: dict[str, Any]) -> None:
    data = {"model": {"name": name, "options": options}, "data": {"name": "digits"}}
    recipe = recipe_from_data({**data, "training": {"epochs": 1}})
    with pytest.raises(ModelSizeError, match="raise the limit"):
        Experiment.of(recipe)


@pytest.mark.parametrize("fact", ["frame", "image_shape"])
def test_images_of_absurd_sizes_are_errors(run: Path, fact: str) -> None:
    mark = unsealed((run / "run.json").read_text(), "")
    huge = [1_000_000, 1_000_000]
    mark["images"][fact] = [1, *huge] if fact == "image_shape" else {"size": huge, "cover": None}
    (run / "run.json").write_text(sealed_json(mark))
    with pytest.raises(ValueError, match=r"1,000,000×1,000,000|one image of 1×1000000|GB"):
        eq.load(run)


def test_size_limit_can_be_raised_and_lowered(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSizeError, match=r"needs about .* more than the limit of 5e-06 GB"):
        eq.load(run, max_gigabytes=5e-6)
    assert eq.load(run, max_gigabytes=0.1).images.image_shape == (1, 8, 8)
    with pytest.raises(ValueError, match="max_gigabytes must be positive, got -1"):
        eq.load(run, max_gigabytes=-1)
    picture = tmp_path / "digit.png"
    eq.data.image_from_tensor(torch.rand(1, 8, 8)).save(picture)
    for words in (("--max-gigabytes", "1e-6"), ("--max-gigabytes=1e-6",)):
        for line in ((*words, "predict", run, picture), ("predict", run, picture, *words)):
            result = invoke(*line)
            assert result.exit_code == 2
            assert "more than the limit of 1e-06 GB" in " ".join(result.stderr.split())
    assert invoke("predict", run, picture, "--max-gigabytes", "1", "--json").exit_code == 0


@pytest.mark.parametrize("name", eq.list_models())
def test_every_preset_is_within_the_size_limit(name: str) -> None:
    """For images of the size in its paper."""
    options = eq.models.model_options(name)
    channels = options["in_channels"] if isinstance(options.get("in_channels"), int) else 3
    sides = {"cityscapes": (1024, 2048), "segmentation": (360, 480), "imagenet": (224, 224)}
    height, width = next((sides[part] for part in sides if part in name), (32, 32))
    eq.training.sizes.check_model_size(name, {}, (channels, height, width))


def test_models_of_the_package_load_without_the_compiler_of_pytorch() -> None:
    """The estimate of a size imports it, which takes longer than the rest of `load`."""
    code = (
        "import sys, equilibria as eq\n"
        "for name, card in eq.models.pretrained_cards().items():\n"
        "    card.task == 'restore' or eq.load(name)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_beside_those_of_the_package_are_checked() -> None:
    model = eq.training.load_recipe("digits-opteq").model
    assert is_of_package(model)
    assert is_of_package(replace(model, options={**model.options, "tolerance": 1e-6}))
    assert not is_of_package(replace(model, options={**model.options, "stem_depth": 3}))
    assert not is_of_package(replace(model, name="opteq"))


def test_models_of_the_package_observe_a_lowered_limit() -> None:
    with size_limit(1e-6), pytest.raises(ModelSizeError, match="limit of 1e-06 GB"):
        eq.load("digits-opteq")


def test_estimating_the_size_does_not_change_initial_weights() -> None:
    recipe = eq.training.load_recipe("digits-opteq", [*SMALL[1:]])
    torch.manual_seed(recipe.training.seed)
    options = {"in_channels": 1, "num_classes": 10, "channels": 4, "width": 4}
    options = {**recipe.model.options, **options}
    expected = eq.create_model(recipe.model.name, **options).state_dict()
    weights = Experiment.of(recipe).model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_checkpoint_with_an_invalid_manifest_is_skipped(unfinished: Path) -> None:
    (checkpoint(unfinished) / "manifest.json").write_text(sealed_json({"files": "/dev/zero"}))
    with (
        pytest.warns(CheckpointWarning, match="lists '/dev/zero', but a checkpoint has"),
        pytest.raises(FileNotFoundError, match="no intact checkpoint"),
    ):
        eq.load(unfinished)
