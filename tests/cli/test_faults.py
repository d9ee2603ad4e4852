"""Errors: a message of one sentence, an exit code, and no control characters in the output."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import Result

from equilibria.training import RunFolder
from equilibria.training.experiment import Experiment
from equilibria.training.progress import TrainingDisplay
from tests.program import invoke

SMALL = (
    *("digits-opteq", "data.options.train_samples=60", "training.batch_size=30"),
    *("model.options.channels=4", "model.options.width=4"),
)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
RED = "\x1b[31mred\x9b1m\u202e"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = invoke("train", *SMALL, "training.epochs=1", "--output", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


def error_of(result: Result, code: int) -> str:
    """Return the error message of a command, after checking its exit code."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("Error: ")
    return " ".join(result.stderr.split())


def draw_digit(path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("training.seed=-1", "seed must be from 0"),
        ("training.seed=1e30", "training.seed"),
        ("threads=0", "threads must be from 1 to"),
        ("threads=100000", "threads must be from 1 to"),
        ("model.options.num_classes=3", "digits has 10 classes"),
        ("model.options.num_classes=many", "model.options"),
        ("model.options.in_channels=3", "the images of digits have 1 channels"),
        ("model.options.width=wide", "model.options"),
        ("model.options.width=1e300", "model.options"),
        ("model.options.width=2020-01-01", "an option has a value that JSON cannot represent"),
        ("data.validation=.0001", "holds out 0 of 60 samples"),
        ("data.augmentation=[{shift: 3}]", "data.augmentation"),
        ("data.options.train_samples=[1]", "data.options"),
        ("training.epochs=[1", "'training.epochs' is not YAML"),
        ("training.epochs=" + "[" * 5000, "'training.epochs' is not YAML"),
        ("training.epochs=2020-99-99", "'training.epochs' is not YAML"),
        ("training.epochs=" + RED, "training.epochs"),
        (RED + "=1", "unknown key"),
    ],
)
def test_wrong_settings_of_a_recipe_are_errors(change: str, sentence: str, tmp_path: Path) -> None:
    result = invoke("train", *SMALL, change, "--output", tmp_path / "run")
    assert sentence in error_of(result, 2)
    assert len(result.stderr.splitlines()) == 1
    assert not CONTROL.search(result.output)
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """The option can precede or follow the command."""
    wrong = ("train", *SMALL, "threads=0", "--output", tmp_path / "run")
    for arguments in (("--debug", *wrong), (*wrong, "--debug")):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("Traceback")
        assert "Error: " in result.stderr.splitlines()[-1]
    error_of(invoke(*wrong), 2)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("can't allocate memory"), "can't allocate memory"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "f"), "f: no space left on device; free"),
    ],
)
def test_failed_computation_exits_with_code_1(
    error: Exception, sentence: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Experiment, "evaluate", fail)
    assert sentence in error_of(invoke("evaluate", run), 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO])
def test_training_that_cannot_write_reports_how_to_continue(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing fails from the second checkpoint on; afterwards the run can be continued."""
    first_epoch = []
    sync = os.fsync

    def on_epoch(self: TrainingDisplay, metrics: Any) -> None:
        first_epoch.append(metrics)

    def fsync(descriptor: int) -> None:
        if first_epoch:
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "on_epoch", on_epoch)
        patch.setattr(os, "fsync", fsync)
        result = invoke("train", *SMALL, "training.epochs=3", "--output", tmp_path / "run")
    sentence = error_of(result, 1)
    assert os.strerror(code).lower() in sentence
    assert "epoch-00001 is stored" in sentence
    follow_advice(sentence)
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 3


def follow_advice(sentence: str) -> None:
    """Run the command that an error message recommends."""
    _, advice = sentence.split("continue with: equilibria ")
    result = invoke(*shlex.split(advice))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("epoch", [1, 2])
def test_interruption_reports_what_is_stored_and_how_to_continue(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_epoch(self: TrainingDisplay, metrics: Any) -> None:
        if metrics.epoch == epoch:
            raise KeyboardInterrupt

    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "on_epoch", on_epoch)
        result = invoke("train", *SMALL, "training.epochs=2", "--output", folder)
    sentence = error_of(result, 130)
    assert "interrupted" in sentence
    assert f"epoch-0000{epoch} is stored" in sentence
    follow_advice(sentence)
    assert len(RunFolder(folder).read_metrics()) == 2


def test_interruption_outside_of_training(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "on_step", interrupt)
        result = invoke("train", *SMALL, "training.epochs=1", "--output", tmp_path / "early")
        assert "nothing is stored" in error_of(result, 130)
    monkeypatch.setattr(Experiment, "evaluate", interrupt)
    assert error_of(invoke("evaluate", run), 130) == "Error: interrupted"
    late = invoke("train", *SMALL, "training.epochs=1", "--output", tmp_path / "late")
    assert f"stored; evaluate it with: equilibria evaluate {tmp_path / 'late'}" in error_of(
        late, 130
    )


def test_outputs_are_checked_before_the_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("equilibria.training.experiment.trained", work)
    monkeypatch.setattr("equilibria.analysis.compare.read_runs", work)
    digit = draw_digit(tmp_path / "digit.png")
    for command, option, path in (
        (("attack", run, "--eps", "1"), "--draw", tmp_path / "nowhere" / "drawn.png"),
        (("attack", run, "--eps", "1"), "--draw", tmp_path),
        (("evaluate", run), "--draw", digit / "drawn.png"),
        (("generate", run), "--output", tmp_path),
        (("restore-run", run, digit), "--output", digit),
        (("restore-run", run, digit), "--output", digit / "below"),
        (("compare", run), "--output", digit),
    ):
        sentence = error_of(invoke(*command, option, path), 2)
        assert str(path if path == tmp_path else path.parent) in sentence


def test_read_only_output_folder_is_an_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{dir}/tmp123")

    monkeypatch.setattr("equilibria.cli.faults.TemporaryFile", refuse)
    sentence = error_of(invoke("evaluate", run, "--draw", tmp_path / "drawn.png"), 2)
    assert (
        f"{tmp_path}: cannot be written (read-only file system); give a writable path" in sentence
    )


def test_unreadable_images_do_not_stop_predictions(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    intact = [draw_digit(folder / f"{name}.png") for name in "ace"]
    for name in "bd":
        (folder / f"{name}.png").write_bytes(intact[0].read_bytes()[:50])
    result = invoke("predict", run, folder, "--json")
    sentence = error_of(result, 1)
    assert "2 of 5 images were skipped" in sentence
    assert str(folder / "b.png") in sentence
    assert [prediction["file"] for prediction in json.loads(result.stdout)] == [
        str(path) for path in intact
    ]
    table = invoke("predict", run, folder)
    error_of(table, 1)
    assert all(str(path) in table.stdout for path in intact)
    assert "1 of 1 images" in error_of(invoke("predict", run, folder / "b.png"), 1)


def test_control_characters_are_escaped_in_all_output(run: Path, tmp_path: Path) -> None:
    """They are in names of files and folders, in recipes, in runs, and in errors."""
    odd = tmp_path / RED
    odd.mkdir()
    draw_digit(odd / f"{RED}.png")
    undecodable = Path(os.fsdecode(os.fsencode(str(odd)) + b"/\xff\xfe.png"))
    shutil.copy(odd / f"{RED}.png", undecodable)
    moved = Path(shutil.copytree(run, odd / RED))
    recipe = (run / "config.yaml").read_text().replace("about:", f"about: {json.dumps(RED)} #")
    (odd / f"{RED}.yaml").write_text(recipe)
    for arguments in (
        ("predict", moved, odd),
        ("predict", moved, odd, "--json"),
        ("predict", run, odd / "nothing"),
        ("runs", odd),
        ("compare", moved),
        ("compare", moved, "--json"),
        ("evaluate", odd),
        ("recipes", odd / f"{RED}.yaml"),
        ("train", odd / f"{RED}.yaml", f"training.{RED}=1"),
        ("train", RED),
        ("train", odd / f"{RED}.yaml", "training.epochs=1", "--output", odd / "new"),
        ("models", RED),
        ("tune", RED),
        ("reproduce", RED),
    ):
        result = invoke(*arguments)
        assert isinstance(result.exception, SystemExit | None), arguments
        assert not CONTROL.search(result.output), arguments
        assert re.search(r"\\(u00|x)1b", result.output), arguments


def test_warning_is_one_line_without_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    from equilibria.cli.faults import warn

    warn(UserWarning(f"{RED} is deprecated"), UserWarning, "file.py", 3)
    printed = capsys.readouterr().err
    assert printed.startswith("Warning: ")
    assert "file.py" not in printed
    assert not CONTROL.search(printed)


def test_runs_reports_missing_folders_and_damaged_runs(run: Path, tmp_path: Path) -> None:
    assert "there is no folder" in error_of(invoke("runs", tmp_path / "nowhere"), 2)
    shutil.copytree(run, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.yaml").write_text("model: [")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("of: another program")
    result = invoke("runs", tmp_path)
    assert f"{tmp_path / 'damaged'} cannot be read" in error_of(result, 1)
    assert "other" not in result.output
    assert str(run) in result.stdout
