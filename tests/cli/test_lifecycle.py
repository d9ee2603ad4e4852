"""The life of a run: training, interruption, resuming, and more epochs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equilibria.training import RunFolder
from equilibria.training.experiment import Experiment
from equilibria.training.planning import open_run, plan_run
from tests.program import SOURCE, invoke, program

SMALL = (
    "digits-opteq",
    "training.epochs=2",
    "data.options.train_samples=60",
    "data.options.test_samples=20",
    "model.options={channels: 4, width: 4, pool: 2}",
)
PARTS = '''
"""A data set and a task that interrupt the program at a chosen moment."""

import os
import signal

from equilibria.data import DataSetCard, load_digits, register_dataset
from equilibria.tasks import Classification, register_task

MOMENT, STEPS = os.environ.get("MOMENT"), [0]
signal.signal(signal.SIGINT, signal.default_int_handler)  # The parent process may ignore it.


def interrupt(moment):
    if moment == MOMENT:
        os.kill(os.getpid(), signal.SIGINT)


@register_dataset(DataSetCard("digits that interrupt"))
def digits():
    interrupt("loading")
    return load_digits()


@register_task("classes that interrupt")
class Interrupted(Classification):
    def training_step(self, model, inputs, targets):
        STEPS[0] += 1
        interrupt(f"step {STEPS[0]}")
        return super().training_step(model, inputs, targets)

    def evaluate(self, *arguments, **options):
        interrupt("evaluation")
        return super().evaluate(*arguments, **options)
'''


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal of POSIX")
@pytest.mark.parametrize(
    ("moment", "message", "epochs"),
    [
        pytest.param(
            "loading", "no epoch was finished, and nothing is stored", None, marks=pytest.mark.slow
        ),
        pytest.param("step 1", "no epoch was finished, and nothing is stored", None),
        pytest.param(
            "step 2",
            "the checkpoint epoch-00001 is stored; continue with: equilibria train --resume "
            "--output run --import parts.py",
            1,
        ),
        pytest.param(
            "evaluation",
            "the trained model is stored; evaluate it with: equilibria evaluate run "
            "--import parts.py",
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_interruption_reports_what_is_stored(
    moment: str, message: str, epochs: int | None, tmp_path: Path
) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    changes = ("data.name=digits that interrupt", "task.name=classes that interrupt")
    words = ("train", *SMALL, *changes, "task.label_smoothing=0", "training.batch_size=60")
    ended = program(tmp_path, *words, "--output", "run", "--import", "parts.py", MOMENT=moment)
    assert ended.returncode == 130, ended.stderr
    assert one_line(ended.stderr) == f"Error: interrupted: {message}"
    run = RunFolder(tmp_path / "run")
    if epochs is None:
        assert not run.path.exists()
        return
    assert len(run.read_metrics()) == epochs
    advice = message.partition(": equilibria ")[2].split()
    resumed = program(tmp_path, *advice)
    assert resumed.returncode == 0, resumed.stderr
    assert len(run.read_metrics()) == 2


def test_run_is_resumed_with_its_own_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    nameless = invoke("train", "--output", folder)
    assert nameless.exit_code == 2
    assert "nothing to train: give a recipe" in one_line(nameless.output)
    nothing = invoke("train", "--resume", "--output", folder)
    assert nothing.exit_code == 2
    assert "there is no run in" in one_line(nothing.output)
    assert not folder.exists()
    assert invoke("train", *SMALL, "--epochs", "1", "--output", folder).exit_code == 0
    resumed = invoke("train", "--resume", "--output", folder)
    assert resumed.exit_code == 0, resumed.output
    assert "epoch 1/1" not in resumed.output
    other = invoke("train", "training.seed=1", "--resume", "--output", folder)
    assert other.exit_code == 2
    assert "differs from the given recipe" in one_line(other.output)
    longer = invoke("train", "--epochs", "+1", "--output", folder)
    assert longer.exit_code == 0, longer.output
    assert "From epoch 2 to 2 the learning rate starts again at 0.002" in one_line(longer.output)
    assert "epoch 2/2" in longer.output
    assert "2/2" in invoke("runs", tmp_path).output
    constant = invoke("train", *SMALL, "training.schedule=constant", "--output", tmp_path / "even")
    assert constant.exit_code == 0
    more = invoke("train", "--epochs", "3", "--resume", "--output", tmp_path / "even")
    assert "From epoch 3 to 3 the learning rate follows its schedule" in one_line(more.output)


def test_run_without_checkpoints_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan = plan_run(SMALL[0], SMALL[1:], folder)
    open_run(plan, Experiment.of(plan.recipe), folder).close()
    resumed = invoke("train", "--resume", "--output", folder)
    assert resumed.exit_code == 0, resumed.output
    assert (
        f"The run in {folder} ended before its first checkpoint; it starts from the beginning."
        in one_line(resumed.output)
    )
    assert "epoch 1/2" in resumed.output
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    refused = invoke("train", "--resume", "--output", other)
    assert refused.exit_code == 2
    assert "there is no run in" in one_line(refused.output)
    assert [path.name for path in other.iterdir()] == ["config.yaml"]


def test_training_starts_from_weights_of_another_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert invoke("train", *SMALL, "--output", first).exit_code == 0
    started = invoke("train", *SMALL, "--from", first, "--output", second)
    assert started.exit_code == 0, started.output
    assert f"Started with the weights of {first}." in one_line(started.output)
    noted = json.loads((second / "run.json").read_text())["started_from"]
    assert noted["run"] == str(first)
    wider = ("model.options.channels=6", "--from", first, "--output", tmp_path / "wider")
    refused = invoke("train", *SMALL, *wider)
    assert refused.exit_code == 2
    assert "stem.0.weight is 4 × 1 × 3 × 3 in the run, 6 × 1 × 3 × 3 in the model" in one_line(
        refused.output
    )
    assert not (tmp_path / "wider").exists()


def test_run_is_not_overwritten_by_another_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert invoke("train", *SMALL, "--epochs", "1", "--output", folder).exit_code == 0
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for options in ((), ("--resume",)):
        refused = invoke("train", *SMALL, "training.seed=5", "--output", folder, *options)
        assert refused.exit_code == 2
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    replaced = invoke("train", *SMALL, "training.seed=5", "--output", folder, "--overwrite")
    assert replaced.exit_code == 0, replaced.output
    assert RunFolder(folder).recipe().training.seed == 5


@pytest.mark.skipif(os.name != "posix", reason="locks of folders are those of POSIX")
def test_second_process_in_the_same_folder_is_an_error(tmp_path: Path) -> None:
    holder = """
import sys
from pathlib import Path
from equilibria.training import RunFolder, load_recipe
run = RunFolder.opened(Path("run"), load_recipe("digits-opteq").as_data())
print("open", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        for options in ((), ("--resume",), ("--overwrite",)):
            second = invoke("train", *SMALL, "--output", tmp_path / "run", *options)
            assert second.exit_code == 2
            assert "another process is training in" in one_line(second.output)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the launcher needs POSIX")
def test_two_processes_continue_a_run(tmp_path: Path) -> None:
    assert invoke("train", *SMALL, "--epochs", "1", "--output", tmp_path / "run").exit_code == 0
    words = ("train", "--epochs", "+2", "--output", "run", "--devices", "2", "--device", "cpu")
    ended = program(tmp_path, *words)
    assert ended.returncode == 0, ended.stderr
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 3
