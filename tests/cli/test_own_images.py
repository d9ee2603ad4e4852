"""`equilibria train` on a folder or a table of images."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.data.batches import UnreadableImageWarning
from equilibria.data.source import behind_selections
from equilibria.training import load_recipe
from tests.data.photos import KINDS, photo, write_photos
from tests.data.test_own_images import TABLES, write_table
from tests.program import invoke

SHORT = (
    "training.epochs=2",
    "data.options.size=8",
    "model.options.channels=8",
    "model.options.widths=[8]",
    "model.options.scales=[1]",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_photos(tmp_path_factory.mktemp("mine") / "my photos", 20)
    broken = folder / KINDS[1] / "image 01.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    return folder


@pytest.mark.filterwarnings("ignore:.*image 01.jpg")
def test_folder_of_images_is_trained_on(photos: Path) -> None:
    run = photos.parent / "run"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = invoke("train", photos, *SHORT, "--output", run)
    assert result.exit_code == 0, result.output
    messages = " ".join([result.output, *(str(warning.message) for warning in caught)])
    assert messages.count("skipped: ") == 1, "a corrupt file must be reported once"
    assert messages.count("image 01.jpg") == 1
    output = " ".join(result.output.split())
    assert "40 color images of 2 classes" in output
    assert "Data my photos: 32 training and 8 test images of 3×8×8, 2 classes" in output
    assert "name: folder" not in output, "the recipe must not be printed"
    assert load_recipe(run / "config.yaml").data.name == "folder"
    assert "epoch 2/2" in output
    figures = json.loads(invoke("evaluate", run, "--json").stdout)
    assert 7 <= figures["samples"] <= 8
    assert invoke("evaluate", run).exit_code == 0
    photo(0, 77).save(photos.parent / "new.png")
    (prediction,) = json.loads(invoke("predict", run, photos.parent / "new.png", "--json").stdout)
    assert prediction["label"] in KINDS
    resumed = invoke("train", photos, *SHORT, "--output", run, "--resume")
    assert resumed.exit_code == 0, resumed.output
    again = invoke("train", run / "config.yaml", "--output", run, "--resume")
    assert again.exit_code == 0, again.output
    refused = invoke("train", photos, *SHORT, "--output", run)
    assert refused.exit_code == 2
    assert "already holds a run" in refused.output
    of_run = invoke("train", run, "--output", photos.parent / "other")
    assert of_run.exit_code == 2
    assert "is a run" in of_run.output


def test_a_test_image_that_cannot_be_read_is_reported_once_and_ends_no_report(
    tmp_path: Path,
) -> None:
    folder = write_photos(tmp_path / "photos", 10)
    test = eq.data.load_dataset("folder", root=folder, size=8).test
    files, indices = behind_selections(test, torch.arange(1, len(test)))
    assert isinstance(files, eq.data.ImageFiles)
    for index in indices:
        path = Path(files.paths[index])
        path.write_text("no image")
    run = tmp_path / "run"
    with pytest.warns(UnreadableImageWarning) as caught:
        result = invoke("train", folder, *SHORT, "--output", run, "--report")
    assert result.exit_code == 0, result.output
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(set(messages)) == len(indices) == 3
    assert not any("report" in message for message in messages)
    assert (run / "report.html").is_file()


def test_table_of_images_is_trained_on(tmp_path: Path) -> None:
    write_table(tmp_path, TABLES["header"])
    result = invoke("train", tmp_path / "labels.csv", *SHORT, "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    recipe = load_recipe(tmp_path / "run" / "config.yaml")
    assert recipe.data.root == str(tmp_path)
    assert recipe.data.options["labels"] == "labels.csv"
    assert invoke("evaluate", tmp_path / "run").exit_code == 0


def test_unusable_sources_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_photos(tmp_path / "one", 2, ("Himmel",))
    for source, message in (
        (tmp_path / "empty", "sort them into one folder per class"),
        (tmp_path / "one", "there is only one class (Himmel)"),
        (tmp_path / "nowhere", "there is no recipe, folder or table"),
    ):
        result = invoke("train", source, "--output", tmp_path / "run")
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
        assert not (tmp_path / "run").exists()
