"""The choice of a recipe for images of the user, and its training."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import equilibria as eq
from equilibria.data import MissingDataError, UnreadableImageWarning, from_dataset, load_digits
from equilibria.training import Recipe, RunFolder, load_recipe
from equilibria.training.experiment import Experiment, trained
from equilibria.training.files import read_weights
from equilibria.training.own_images import _Facts, _recipe
from tests.data.photos import KINDS, photo, write_photos
from tests.data.test_own_images import Labelled, Photos

SHORT = (
    "training.epochs=2",
    "data.options.size=8",
    "model.options.channels=8",
    "model.options.widths=[8]",
    "model.options.scales=[1]",
)


def assert_same_weights(first: Path, second: Path) -> None:
    weights = [read_weights(RunFolder(run).weights) for run in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_recipe_depends_on_the_images(tmp_path: Path) -> None:
    for i in range(60):
        for kind, name in enumerate(KINDS):
            (tmp_path / "wide" / name).mkdir(parents=True, exist_ok=True)
            photo(kind, i, (60, 90)).save(tmp_path / "wide" / name / f"{i}.jpg")
            (tmp_path / "gray" / name).mkdir(parents=True, exist_ok=True)
            photo(kind, i, (28, 28)).convert("L").save(tmp_path / "gray" / name / f"{i}.png")
    (tmp_path / "gray" / KINDS[0] / "notes.txt").touch()
    wide, gray = load_recipe(tmp_path / "wide"), load_recipe(str(tmp_path / "gray") + os.sep)
    assert wide.data.name == "folder"
    assert wide.data.root == str(tmp_path / "wide")
    assert wide.data.options == {"size": [64, 96]}
    assert "flip" in wide.data.augmentation
    assert gray.data.options == {"size": 32, "gray": True}
    assert "flip" not in gray.data.augmentation
    assert gray.model.options["stem_strides"] < wide.model.options["stem_strides"]
    for recipe in (wide, gray):
        assert recipe.data.normalize
        assert recipe.data.in_memory
        assert recipe.data.validation == 0.1
        assert recipe.training.batch_size == 8
    assert "120 color images of 2 classes, median size 60×90" in wide.about
    assert "1 other files ignored (1 × .txt)" in gray.about
    assert "A fifth of every class is held out for tests" in gray.about


def test_more_images_give_fewer_epochs_and_larger_batches() -> None:
    def training(images: int) -> Any:
        return _recipe(_Facts([images // 2] * 2, 32, 32, False), {})["training"]

    sizes = (20, 200, 2000, 20_000)
    epochs = [training(images)["epochs"] for images in sizes]
    assert epochs == sorted(epochs, reverse=True)
    assert epochs[0] > epochs[-1]
    assert [training(images)["batch_size"] for images in sizes] == [8, 16, 64, 64]
    large = _recipe(_Facts([200_000], 64, 64, False), {})
    assert not large["data"]["in_memory"]
    assert not _recipe(_Facts([4, 4], 32, 32, False), {})["data"]["validation"]


@pytest.mark.parametrize(
    ("height", "width"), [(8, 8), (24, 32), (32, 32), (64, 96), (100, 100), (33, 47)]
)
def test_the_model_fits_images_of_any_size(height: int, width: int) -> None:
    model = _recipe(_Facts([50, 50], height, width, False), {})["model"]
    network = eq.create_model(model["name"], in_channels=3, num_classes=2, **model["options"])
    assert network(torch.rand(2, 3, height, width)).shape == (2, 2)


def test_the_choice_can_be_overridden(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 4)
    requested = (
        "data.options.size=64",
        "training.epochs=3",
        "model.name=opteq-small",
        "data.workers=2",
    )
    recipe = load_recipe(folder, requested)
    assert recipe.data.options["size"] == 64
    assert recipe.data.workers == 2
    assert recipe.training.epochs == 3
    assert recipe.model.name == "opteq-small"
    assert recipe.model.options["stem_strides"] == 3
    Experiment.of(recipe)
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        load_recipe(folder, ["training.epoch=3"])


def test_names_of_recipes_take_precedence_over_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "digits-opteq", 2)
    assert load_recipe("digits-opteq").data.name == "digits"
    assert load_recipe("./digits-opteq").data.name == "folder"


def test_a_run_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    with pytest.raises(ValueError, match=r"is a run: continue it with .*config\.yaml"):
        load_recipe(tmp_path)


def test_classes_with_a_single_image_warn(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 3)
    (folder / "single").mkdir()
    photo(0, 0).save(folder / "single" / "image.png")
    with pytest.warns(
        UserWarning, match="classes with only one image: single. It is used for training"
    ):
        load_recipe(folder)


def test_training_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 16)
    changes = (*SHORT, "data.in_memory=false", "training.evaluation_batch_size=4")
    runs = {}
    for workers in (0, 2):
        output = tmp_path / f"run {workers}"
        eq.train(folder, *changes, f"data.workers={workers}", output=output, device="cpu")
        runs[workers] = output
    assert_same_weights(runs[0], runs[2])


def test_a_run_resumes_after_the_folder_has_moved(tmp_path: Path) -> None:
    """An interrupted run continues with another number of workers and another root."""
    folder = write_photos(tmp_path / "photos", 12)
    whole = tmp_path / "whole"
    eq.train(folder, *SHORT, output=whole, device="cpu")
    recipe = load_recipe(whole / "config.yaml")
    assert recipe.data.root == str(folder)
    assert eq.evaluate(whole).samples == 4

    class Enough(Exception):  # noqa: N818
        pass

    def stop(_: object) -> None:
        raise Enough

    half = tmp_path / "half"
    with pytest.raises(Enough):
        eq.train(folder, *SHORT, output=half, device="cpu", on_epoch=stop)
    folder.rename(tmp_path / "moved")
    moved = load_recipe(half / "config.yaml", [f"data.root={tmp_path / 'moved'}", "data.workers=1"])
    eq.train(moved, output=half, resume=True, device="cpu")
    assert_same_weights(whole, half)
    with pytest.raises(MissingDataError, match="there is no folder"):
        trained(whole)
    assert eq.load(whole).images.class_names == KINDS


@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_training_continues_with_unreadable_images(tmp_path: Path, in_memory: str) -> None:
    folder = write_photos(tmp_path / "photos", 8)
    damaged = folder / KINDS[0] / "image 00.png"
    damaged.write_bytes(damaged.read_bytes()[:200])  # The header is intact.
    with pytest.warns(UnreadableImageWarning, match=r"image 00\.png: cannot be read"):
        eq.train(
            folder, *SHORT, f"data.in_memory={in_memory}", output=tmp_path / "run", device="cpu"
        )
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 2


def test_training_raises_if_all_images_are_gone(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 8)
    changes = (*SHORT, "data.in_memory=false", "data.workers=0")

    def remove(_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    with (
        pytest.warns(UnreadableImageWarning),
        pytest.raises(ValueError, match="no training image can be read"),
    ):
        eq.train(folder, *changes, output=tmp_path / "run", device="cpu", on_epoch=remove)
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 1


def test_images_are_normalized_with_measured_statistics(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 10)
    experiment = Experiment.of(load_recipe(folder, SHORT))
    images, _ = experiment.training.fetch(torch.arange(len(experiment.training)))
    assert experiment.images.normalization is not None
    mean, deviation = experiment.images.normalization
    assert mean == pytest.approx(images.mean(dim=(0, 2, 3)).tolist(), abs=1e-3)
    assert deviation == pytest.approx(images.std(dim=(0, 2, 3)).tolist(), rel=1e-2)
    plain = Experiment.of(load_recipe(folder, [*SHORT, "data.normalize=false"]))
    assert plain.images.normalization is None


def test_the_chosen_recipe_learns(tmp_path: Path) -> None:
    """The classes are bright at the top and at the bottom; the schedule is shortened."""
    folder = write_photos(tmp_path / "photos", 30)
    model = eq.train(folder, *SHORT, "training.epochs=8", output=tmp_path / "run", device="cpu")
    assert (eq.evaluate(tmp_path / "run").accuracy or 0) > 0.9
    photo(1, 77).save(tmp_path / "new.png")
    (prediction,) = eq.predict(model, tmp_path / "new.png")
    assert prediction.label == KINDS[1]  # type: ignore[union-attr]


def test_map_style_datasets_can_be_trained_on(tmp_path: Path) -> None:
    data = from_dataset(Labelled(30), size=8)
    changes = [change for change in SHORT if "size" not in change]
    model = eq.train(None, *changes, data=data, output=tmp_path / "run", device="cpu")
    assert model.images.class_names == KINDS
    assert eq.load(tmp_path / "run").images.image_shape == (3, 8, 8)
    assert eq.evaluate(model, Photos(10)).samples == 10
    assert eq.evaluate(model, data).samples == 6
    with pytest.raises(MissingDataError, match="passed in Python"):
        eq.evaluate(tmp_path / "run")
    before = model.state_dict()
    again = eq.train(
        None, *changes, data=data, output=tmp_path / "run", resume=True, device="cpu"
    ).state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)
    recipe, other = (
        load_recipe(tmp_path / "run" / "config.yaml"),
        from_dataset(Labelled(28), size=8),
    )
    with pytest.raises(ValueError, match="training data has changed"):
        eq.train(recipe, data=other, output=tmp_path / "run", resume=True, device="cpu")


def test_a_dataset_replaces_that_of_the_recipe(tmp_path: Path) -> None:
    digits = load_digits().train
    data = TensorDataset(digits.images[:60], digits.labels[:60])
    model = eq.train(
        "digits-opteq", "training.epochs=1", data=data, output=tmp_path / "a", device="cpu"
    )
    assert model.images.image_shape == (1, 8, 8)
    recipe: Recipe = load_recipe("digits-opteq", ["training.epochs=1"])
    same = eq.train(recipe, data=data, output=tmp_path / "b", device="cpu")
    assert torch.equal(same(digits.images[:3]), model(digits.images[:3]))
    with pytest.raises(ValueError, match="nothing to train: give a recipe"):
        eq.train(output=tmp_path / "c")


def test_another_task_can_be_chosen(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 4)
    recipe = load_recipe(folder, ["task.name=adversarial", "task.options.eps=0.1"])
    assert recipe.task.label_smoothing == 0
    assert recipe.data.normalize
    requested = ("task.name=autoencoder", "model.name=vae-small", "training.epochs=1")
    autoencoder = load_recipe(folder, requested)
    assert not autoencoder.data.normalize
