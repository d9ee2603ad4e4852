"""Runs that are extended by epochs, or initialized with the weights of another run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.data import DataSetCard, load_digits, register_dataset
from equilibria.data import registry as data_registry
from equilibria.training import (
    CheckpointWarning,
    Recipe,
    RunFolder,
    TrainingSettings,
    load_recipe,
)
from equilibria.training.experiment import Experiment
from equilibria.training.planning import initialize_from, open_run, plan_run
from equilibria.training.recipe import recipe_from_data
from equilibria.training.settings import learning_rate_share

RECIPE: dict[str, Any] = {
    "model": {"name": "opteq-small", "options": {"channels": 4, "width": 4, "pool": 2}},
    "data": {"name": "digits", "options": {"train_samples": 60, "test_samples": 20}},
    "training": {"epochs": 2, "batch_size": 20, "tolerance": 1e-2, "final_tolerance": 1e-3},
}


def recipe(**training: Any) -> Recipe:
    return recipe_from_data({**RECIPE, "training": {**RECIPE["training"], **training}})


def metrics(folder: Path) -> list[dict[str, Any]]:
    times = ("seconds", "cpu_seconds")
    lines = RunFolder(folder).read_metrics()
    return [{key: line[key] for key in line if key not in times} for line in lines]


@pytest.mark.parametrize("schedule", ["cosine", "polynomial", "step", "constant"])
def test_more_epochs_do_not_change_the_first_part_of_the_schedule(schedule: str) -> None:
    planned = TrainingSettings(epochs=4, schedule=schedule, milestones=(2,), decay=0.2)
    longer = replace(planned, epochs=9, continued_at=(4, 7))
    for step in range(4 * 5):
        assert learning_rate_share(longer, step, 5) == learning_rate_share(planned, step, 5)
    again = [learning_rate_share(longer, step, 5) for step in range(4 * 5, 9 * 5)]
    first, second = again[:15], again[15:]
    if schedule == "constant":
        assert set(again) == {1.0}
    elif schedule == "step":
        assert set(again) == {0.2}
    else:
        whole = replace(planned, warmup_epochs=0)
        for part, epochs in ((first, 3), (second, 2)):
            alone = replace(whole, epochs=epochs)
            expected = [0.2 * learning_rate_share(alone, step, 5) for step in range(epochs * 5)]
            assert part == pytest.approx(expected)
            assert part[0] == pytest.approx(0.2)


def test_the_final_tolerance_is_kept_for_more_epochs() -> None:
    planned = TrainingSettings(epochs=3, tolerance=1e-1, final_tolerance=1e-3)
    longer = replace(planned, epochs=5, continued_at=(3,))
    earlier = [planned.tolerance_in(epoch) for epoch in (1, 2, 3)]
    assert [longer.tolerance_in(epoch) for epoch in (1, 2, 3)] == earlier
    assert [longer.tolerance_in(epoch) for epoch in (4, 5)] == pytest.approx([1e-3, 1e-3])


@pytest.mark.parametrize("ends", [(0,), (5,), (3, 3), (3, 2), (-1,)])
def test_continued_at_must_be_ascending_epochs_of_the_run(ends: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="continued_at must be ascending numbers"):
        TrainingSettings(epochs=5, continued_at=ends)


def test_continued_at_is_written_only_if_it_is_set() -> None:
    assert "continued_at" not in recipe().as_data()["training"]
    longer = recipe(epochs=4, continued_at=[2])
    assert longer.as_data()["training"]["continued_at"] == [2]
    assert recipe_from_data(longer.as_data()) == longer


def test_two_epochs_and_one_more_equal_three_epochs(tmp_path: Path) -> None:
    """The results are bitwise equal to those of one run with the same recipe."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    eq.train(recipe(), output=parts, device="cpu")
    before = metrics(parts)
    model = eq.train(epochs="+1", output=parts, device="cpu")
    assert metrics(parts)[:2] == before
    assert load_recipe(parts / "config.yaml") == recipe(epochs=3, continued_at=[2])
    again = eq.train(recipe(epochs=3, continued_at=[2]), output=whole, device="cpu")
    assert metrics(parts) == metrics(whole)
    for value, expected in zip(
        model.state_dict().values(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(value, expected)
    assert metrics(parts)[2]["learning_rate"] < 0.1 * recipe().training.learning_rate
    # The run is finished, so that resuming it changes nothing.
    eq.train(output=parts, resume=True, device="cpu")
    assert metrics(parts) == metrics(whole)
    assert RunFolder(parts).is_finished()


def test_an_interrupted_run_completes_its_schedule_before_more_epochs(tmp_path: Path) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eq.train(recipe(), output=tmp_path / "run", device="cpu", on_epoch=interrupt)
    eq.train(epochs=3, resume=True, output=tmp_path / "run", device="cpu")
    eq.train(recipe(epochs=3, continued_at=[2]), output=tmp_path / "whole", device="cpu")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_an_interrupted_extension_is_not_finished(tmp_path: Path) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    eq.train(recipe(), output=folder, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        eq.train(output=folder, epochs="+2", device="cpu", on_epoch=interrupt)
    assert not RunFolder(folder).is_finished()
    assert len(metrics(folder)) == 3
    with pytest.warns(CheckpointWarning, match="using the weights after epoch 3 of 4"):
        eq.load(folder)
    eq.train(output=folder, resume=True, device="cpu")
    assert RunFolder(folder).is_finished()
    assert len(metrics(folder)) == 4


def test_a_kill_between_the_files_of_an_extension_is_harmless(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    eq.train(recipe(), output=folder, device="cpu")
    earlier = (folder / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match="differs from the given recipe"):
        RunFolder.opened(folder, recipe(epochs=3).as_data(), resume=True)
    plan = plan_run(None, [], folder, epochs="+1")
    run = RunFolder.opened(
        folder, plan.recipe.as_data(), resume=True, earlier=plan.earlier.as_data()
    )
    run.close()
    (folder / "config.yaml").write_bytes(
        earlier
    )  # As if the process was killed before it wrote this file.
    eq.train(output=folder, resume=True, device="cpu")
    assert len(metrics(folder)) == 2
    eq.train(output=folder, epochs="+1", device="cpu")
    assert len(metrics(folder)) == 3


def test_runs_that_cannot_be_continued_raise(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for epochs in ("+0", "-1", "1.5", "+", "ten", 0):
        with pytest.raises(ValueError, match=r"epochs must be a number, such as 20, or \+5"):
            eq.train(recipe(), output=folder, epochs=epochs)
    for options in ({"epochs": "+1"}, {"resume": True}):
        with pytest.raises(ValueError, match="there is no run in"):
            eq.train(output=folder, **options)
    with pytest.raises(ValueError, match="nothing to train: give a recipe"):
        eq.train(output=folder)
    assert not folder.exists()
    eq.train(recipe(), output=folder, epochs=1, device="cpu")
    assert len(metrics(folder)) == 1
    with pytest.raises(ValueError, match="use only one of them"):
        eq.train(output=folder, epochs="+1", overwrite=True)
    eq.train(output=folder, epochs=3, resume=True, device="cpu")
    with pytest.raises(ValueError, match="epochs must be at least 3"):
        eq.train(output=folder, epochs=2, resume=True)
    other = replace(recipe(), task=replace(recipe().task, label_smoothing=0.3))
    with pytest.raises(ValueError, match="differs from the given recipe"):
        eq.train(other, output=folder, epochs="+1")
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(ValueError, match="no checkpoint to continue from"):
        eq.train(output=folder, epochs="+1")
    assert len(metrics(folder)) == 3


def killed(folder: Path, chosen: Recipe, **options: Any) -> dict[str, bytes]:
    """Create a run as if it was killed before its first checkpoint; return its files."""
    plan = plan_run(chosen, [], folder)
    open_run(plan, Experiment.of(plan.recipe), folder, **options).close()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without checkpoints is recognized as a run."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    killed(folder, recipe(seed=4))
    assert not plan_run(recipe(), [], whole, resume=True).from_beginning
    assert plan_run(None, [], folder, resume=True).from_beginning
    eq.train(output=folder, resume=True, device="cpu")
    note = "ended before its first checkpoint; it starts from the beginning."
    assert note in " ".join(capsys.readouterr().err.split())
    eq.train(recipe(seed=4), output=whole, device="cpu", progress=False)
    assert metrics(folder) == metrics(whole)
    assert not plan_run(None, [], folder, resume=True).from_beginning


def test_an_interrupted_restart_does_not_change_the_run(tmp_path: Path) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    before = killed(folder, recipe())
    (folder / "notes.txt").write_text("mine")
    for options in ({"resume": True}, {"recipe": recipe(seed=1)}):
        with pytest.raises(KeyboardInterrupt):
            eq.train(output=folder, device="cpu", on_step=interrupt, progress=False, **options)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert files == {**before, "notes.txt": b"mine"}


def test_a_folder_that_cannot_be_resumed_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = killed(folder, recipe())
    with pytest.raises(ValueError, match=r"has no checkpoint, so that epochs=\+2"):
        eq.train(output=folder, epochs="+2")
    changed = before["config.yaml"].replace(b"epochs: 2", b"epochs: 3")
    (folder / "config.yaml").write_bytes(changed)
    with pytest.raises(ValueError, match="was changed or damaged since the run wrote it"):
        eq.train(output=folder, resume=True)
    assert (folder / "config.yaml").read_bytes() == changed
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_bytes(
        before["config.yaml"]
    )  # A folder without run.json is not a run.
    with pytest.raises(ValueError, match="there is no run in"):
        eq.train(output=other, resume=True)
    assert [path.name for path in other.iterdir()] == ["config.yaml"]


def test_a_finished_run_without_checkpoints_cannot_be_resumed(tmp_path: Path) -> None:
    """`--resume` must not train from the beginning and replace the weights."""
    folder = tmp_path / "run"
    eq.train(recipe(), output=folder, device="cpu", progress=False)
    shutil.rmtree(folder / "checkpoints")
    weights = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="no checkpoint to continue from"):
        eq.train(output=folder, resume=True)
    assert (folder / "model.safetensors").read_bytes() == weights


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = tmp_path / "trained"
    eq.train(recipe(), output=folder, epochs=1, device="cpu")
    return folder


def test_a_run_can_start_from_the_weights_of_another(trained: Path, tmp_path: Path) -> None:
    model = Experiment.of(recipe(seed=3)).model
    origin = initialize_from(model, trained)
    assert origin["new"] == []
    for name, value in eq.load(trained).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    tuned = tmp_path / "tuned"
    eq.train(recipe(learning_rate=1e-12), output=tuned, start_from=trained, device="cpu")
    recorded = json.loads((tuned / "run.json").read_text())["started_from"]
    assert recorded == origin
    for value, expected in zip(
        eq.load(tuned).parameters(), eq.load(trained).parameters(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    # A run that continues keeps its origin, and rejects another one.
    eq.train(output=tuned, epochs="+1", device="cpu")
    assert json.loads((tuned / "run.json").read_text())["started_from"] == origin
    with pytest.raises(ValueError, match="was not started from the weights of"):
        eq.train(output=tuned, resume=True, start_from=tuned)


def test_a_restart_uses_the_original_initial_weights(trained: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    killed(tuned, recipe(learning_rate=1e-12), start_from=trained)
    origin = json.loads((tuned / "run.json").read_text())["started_from"]
    model = eq.train(output=tuned, resume=True, device="cpu", progress=False)
    assert json.loads((tuned / "run.json").read_text())["started_from"] == origin
    for value, expected in zip(model.parameters(), eq.load(trained).parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    again = tmp_path / "again"
    killed(again, recipe(), start_from=trained)
    eq.train(output=trained, epochs="+1", device="cpu", progress=False)
    with pytest.raises(ValueError, match="have changed since the run in"):
        eq.train(output=again, resume=True)


def test_the_last_layer_is_new_for_other_classes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        data_registry._loaders, "_factories", dict(data_registry._loaders._factories)
    )

    @register_dataset(DataSetCard("three digits"))
    def three_digits() -> Any:
        data = load_digits()
        train, test = (p.subset((p.labels < 3).nonzero()[:, 0]) for p in (data.train, data.test))
        return replace(data, train=train, test=test, class_names=("0", "1", "2"))

    fewer = replace(recipe(), data=replace(recipe().data, name="three digits"))
    fresh, model = Experiment.of(fewer).model, Experiment.of(fewer).model
    origin = initialize_from(model, trained)
    assert origin["new"] == ["head.classifier.weight", "head.classifier.bias"]
    trained_weights = eq.load(trained).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(
            value, (fresh.state_dict() if name in origin["new"] else trained_weights)[name]
        )
    model = eq.train(fewer, output=tmp_path / "fewer", start_from=trained, device="cpu")
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_the_error_names_weights_that_do_not_fit(trained: Path, tmp_path: Path) -> None:
    for changes, message in (
        (
            {"channels": 8},
            r"stem\.0\.weight is 4 × 1 × 3 × 3 in the run, 8 × 1 × 3 × 3 in the model",
        ),
        ({"stem_depth": 2}, r"do not fit the model: stem\.\S+ is missing in the run \(and"),
    ):
        options = {**RECIPE["model"]["options"], **changes}
        other = recipe_from_data({**RECIPE, "model": {"name": "opteq-small", "options": options}})
        with pytest.raises(ValueError, match=message):
            eq.train(other, output=tmp_path / "run", start_from=trained, device="cpu")
    with pytest.raises(FileNotFoundError, match="folder of a finished run"):
        eq.train(recipe(), output=tmp_path / "run", start_from=tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()
