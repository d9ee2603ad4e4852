"""`equilibria train photos/`, and what follows it, as a user calls them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

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
def test_a_folder_is_trained_on_evaluated_and_predicted_with(photos: Path) -> None:
    run = photos.parent / "run"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = invoke("train", photos, *SHORT, "--output", run)
    assert result.exit_code == 0, result.output
    everything = " ".join([result.output, *(str(warning.message) for warning in told)])
    assert everything.count("skipped: ") == 1, "a corrupt file was reported three times"
    assert everything.count("image 01.jpg") == 1
    said = " ".join(result.output.split())
    assert "40 color images of 2 classes" in said
    assert "Data my photos: 32 training and 8 test images of 3×8×8, 2 classes" in said
    assert "name: folder" not in said, "the recipe was printed, in sixty lines"
    assert load_recipe(run / "config.yaml").data.name == "folder"
    assert "epoch 2/2" in said
    found = json.loads(invoke("evaluate", run, "--json").stdout)
    assert 7 <= found["samples"] <= 8
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


def test_a_table_is_trained_on(tmp_path: Path) -> None:
    write_table(tmp_path, TABLES["header"])
    result = invoke("train", tmp_path / "labels.csv", *SHORT, "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    recipe = load_recipe(tmp_path / "run" / "config.yaml")
    assert recipe.data.root == str(tmp_path)
    assert recipe.data.options["labels"] == "labels.csv"
    assert invoke("evaluate", tmp_path / "run").exit_code == 0


def test_mistakes_end_with_a_sentence(tmp_path: Path) -> None:
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
