"""Run folders: no data are lost by mistakes, failures or interruptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.data import DataSet, DataSetCard, Split, load_digits, register_dataset
from equilibria.training import CheckpointWarning, Recipe, RunError, RunFolder
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data

CPU = torch.device("cpu")
SMALL = {"channels": 4, "width": 4, "pool": 4}
available = [60]
"""Number of training images; tests reduce it."""


@pytest.fixture(autouse=True)
def vanishing_digits() -> None:
    digits = load_digits().train

    def load() -> DataSet:
        split = digits.subset(torch.arange(available[0]))
        return DataSet("some-digits", split, digits.subset(torch.arange(20)), tuple("0123456789"))

    available[0] = 60
    register_dataset(DataSetCard("some-digits"), load, replace=True)


def recipe(**changes: Any) -> Recipe:
    return recipe_from_data(
        {
            "model": {"name": "opteq-small", "options": {**SMALL, **changes.pop("model", {})}},
            "data": {"name": "some-digits", "validation": 0.25},
            "training": {"epochs": 2, "batch_size": 20, "tolerance": 1e-2, **changes},
        }
    )


def train(folder: Path, chosen: Recipe | None = None, **options: Any) -> None:
    eq.train(recipe() if chosen is None else chosen, output=folder, device="cpu", **options)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stop(_: object) -> None:
    raise KeyboardInterrupt


def fail(_: object) -> None:
    raise RuntimeError("no more")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_cannot_start_does_not_change_files(overwrite: bool, tmp_path: Path) -> None:
    """Mistakes are detected before the folder changes."""
    run = tmp_path / "run"
    train(run)
    before = contents(tmp_path)
    missing = ("data.name=cifar10", "data.root=no-such-folder")
    mistakes: list[Callable[[], object]] = [
        lambda: train(run, recipe(model={"chanels": 3}), overwrite=overwrite),
        lambda: train(run, recipe(epochs=3), resume=True),
        lambda: train(run / "config.yaml", overwrite=overwrite),
        lambda: eq.train("digits-opteq", *missing, output=run, overwrite=overwrite),
    ]
    if not overwrite:
        mistakes.append(lambda: train(run))
    for mistake in mistakes:
        with pytest.raises((OSError, TypeError, ValueError)):
            mistake()
        assert contents(tmp_path) == before


def test_a_folder_with_a_run_needs_resume_or_overwrite(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(
        RunError, match=r"already holds a run: .*--resume .* --overwrite .* another"
    ):
        train(tmp_path)


def test_a_run_is_replaced_once_the_new_one_has_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder)
    before = contents(folder)
    replaced = []

    def look(_: object) -> None:
        replaced.append(contents(tmp_path / ".run.replaced") if replaced == [] else None)

    other = recipe(seed=1)
    train(folder, other, overwrite=True, on_step=look)
    assert replaced[0] == before
    assert RunFolder(folder).recipe() == other
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("end", [stop, fail])
def test_a_failed_replacement_restores_the_earlier_run(
    end: Callable[[object], None], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder)
    before = contents(folder)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        train(folder, recipe(seed=1), overwrite=True, on_step=end)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_killed_replacement_restores_the_earlier_run(tmp_path: Path) -> None:
    """The earlier run was set aside, and the new run may have started."""
    folder, aside = tmp_path / "run", tmp_path / ".run.replaced"
    train(folder)
    before = contents(folder)
    folder.rename(aside)
    with pytest.raises(RunError, match="already holds a run"):
        train(folder)
    assert contents(folder) == before
    folder.rename(aside)
    folder.mkdir()
    RunFolder.opened(folder, recipe().as_data()).close()
    assert aside.is_dir()
    with pytest.raises(RuntimeError, match="no more"):
        train(folder, on_step=fail)
    assert contents(folder) == before


def test_a_failed_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no more"):
        train(tmp_path / "run", on_step=fail)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="no more"):
        train(tmp_path / "empty", on_step=fail)
    assert contents(tmp_path) == {}


def test_a_folder_with_other_files_raises(tmp_path: Path) -> None:
    """A folder with the config.yaml of another program is not a run."""
    for name in ("report.html", "config.yaml"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        precious = folder / name
        precious.write_text("a: year of work")
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(FileExistsError, match="files that are not a run"):
                RunFolder.opened(folder, {}, **options)
        assert contents(folder) == {name: b"a: year of work"}
        with pytest.raises(FileExistsError, match="is a file"):
            RunFolder.opened(precious, {})


def test_a_run_behind_a_link_is_replaced_in_place(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target, target_is_directory=True)
    train(link)
    train(link, recipe(seed=1), overwrite=True)
    assert link.is_symlink()
    assert RunFolder(target).recipe() == recipe(seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link"}


def test_leftover_temporary_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".run.json.123.tmp").write_text("{")
    train(tmp_path, resume=True)
    (tmp_path / ".config.yaml.99.tmp").write_text("mo")
    (tmp_path / "checkpoints" / ".epoch-00001.99.tmp").mkdir()
    train(tmp_path, resume=True)
    assert not list(tmp_path.rglob("*.tmp"))


def test_only_one_process_can_write_to_a_folder(tmp_path: Path) -> None:
    """Otherwise the recipe of one run could be next to the weights of the other."""
    first = RunFolder.opened(tmp_path, recipe().as_data())
    before = contents(tmp_path)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(RunError, match="another process is training"):
            train(tmp_path, recipe(seed=1), **options)
    assert contents(tmp_path) == before
    first.close()
    train(tmp_path)


def test_metrics_are_restored_from_the_checkpoint(tmp_path: Path) -> None:
    """Missing and damaged lines are rewritten on resume."""
    train(tmp_path)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    first, second = whole.splitlines()
    assert json.loads(first)["epoch"] == 1
    for damaged in (first, b"", b"{" + second, first[:-5] + b"\n" + second):
        file.write_bytes(damaged)
        train(tmp_path, resume=True)
        assert file.read_bytes() == whole
    file.unlink()
    train(tmp_path, resume=True)
    assert file.read_bytes() == whole


def test_a_damaged_line_of_metrics_is_skipped_with_a_warning(tmp_path: Path) -> None:
    train(tmp_path, recipe(epochs=3))
    run = RunFolder(tmp_path)
    text = run.metrics.read_text().splitlines()
    text[1] = text[1].replace('"loss": ', '"loss": 1')
    run.metrics.write_text("\n".join(text))
    with pytest.warns(CheckpointWarning, match="line 2 of .* checksum"):
        assert [line["epoch"] for line in run.read_metrics()] == [1, 3]


def test_a_changed_recipe_is_detected(tmp_path: Path) -> None:
    train(tmp_path)
    run = RunFolder(tmp_path)
    whole = run.config.read_text()
    run.config.write_text(whole.replace("epochs: 2", "epochs: 6"))
    with pytest.warns(CheckpointWarning, match="changed or damaged since the run wrote it"):
        eq.load(tmp_path)
    with pytest.raises(RunError, match="changed or damaged since the run wrote it"):
        train(tmp_path, recipe(epochs=6), resume=True)
    train(tmp_path, resume=True)  # The original recipe is accepted.
    assert run.config.read_text() == whole


def test_changed_data_raise_on_resume(tmp_path: Path) -> None:
    """A run must not continue with a quarter of the images missing."""
    with pytest.raises(RuntimeError, match="no more"):
        train(tmp_path, on_epoch=fail)
    available[0] = 45
    with pytest.raises(RunError, match="44 samples then, 33 now"):
        train(tmp_path, resume=True)
    available[0] = 60
    train(tmp_path, resume=True)


def test_other_images_have_another_fingerprint() -> None:
    def fingerprint(split: Split) -> dict[str, Any]:
        experiment = Experiment.of(recipe())
        data = DataSet("some-digits", split, split, tuple("0123456789"))
        return Experiment(**{**vars(experiment), "data": data}).facts()["data"]

    split = load_digits().train.subset(torch.arange(60))
    other = Split(split.images.clone(), split.labels)
    assert fingerprint(split) == fingerprint(other)
    other.images[7] += 0.5
    assert fingerprint(split) != fingerprint(other)
    labels = split.labels.clone()
    labels[3] += 1
    assert fingerprint(split) != fingerprint(Split(split.images, labels))


def test_a_run_whose_folder_was_deleted_raises(tmp_path: Path) -> None:
    """The folder must not be created again without its recipe."""
    with pytest.raises(FileNotFoundError, match="run"):
        train(tmp_path / "run", on_epoch=lambda _: shutil.rmtree(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_loads_without_its_data(tmp_path: Path) -> None:
    train(tmp_path)
    model = eq.load(tmp_path)
    available[0] = 0  # The data are not available.
    again = eq.load(tmp_path)
    assert again.images.class_names == model.images.class_names == tuple("0123456789")
    assert again.images.image_shape == model.images.image_shape == (1, 8, 8)
    assert again.images.frame == model.images.frame
    assert again.images.normalization is None
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(images), again(images))
    labels = [prediction.label for prediction in eq.predict(tmp_path, images)]
    assert labels == [prediction.label for prediction in eq.predict(model, images)]


def test_a_run_without_run_json_loads_and_resumes(tmp_path: Path) -> None:
    train(tmp_path)
    (tmp_path / "run.json").unlink()
    eq.load(tmp_path)
    train(tmp_path, resume=True)
    assert RunFolder(tmp_path).facts()["images"]["image_shape"] == [1, 8, 8]


def test_damaged_weights_raise(tmp_path: Path) -> None:
    train(tmp_path)
    for name, weights in (("model", "last"), ("checkpoints/best", "best")):
        file = tmp_path / f"{name}.safetensors"
        content = bytearray(file.read_bytes())
        content[-7] ^= 4
        file.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            eq.load(tmp_path, weights=weights)
