"""`equilibria tune`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import equilibria as eq
from equilibria.cli import app
from equilibria.models.opteq.models import opteq
from equilibria.training import RunFolder, save_weights
from equilibria.training.tuning import Measurement, TuningReport, overrides

FEW = ["--batch", "2", "--repeats", "1", "--tolerances", "1e-2,1e-4", "--solvers", "picard"]


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "120"})


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a fast model."""
    from equilibria.models import registry
    from equilibria.models.opteq.models import opteq

    monkeypatch.setattr(registry._models, "_factories", dict(registry._models._factories))
    monkeypatch.setattr(registry, "_cards", dict(registry._cards))
    eq.register_model("tiny", opteq, summary="tiny", channels=4, width=4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    options = {"in_channels": 1, "channels": 4, "width": 4, "pool": 4}
    config = {
        "model": {"name": "opteq-small", "options": options},
        "data": {"name": "digits"},
        "task": {"label_smoothing": 0.05},
        "training": {"epochs": 1},
    }
    folder = RunFolder.opened(tmp_path / "run", config)
    save_weights(eq.create_model("opteq-small", **options), folder.weights)
    return folder.path


def test_tune_prints_a_table_and_a_recommendation() -> None:
    result = tune("tiny", "--size", "8", *FEW)
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    for piece in (
        "tiny, a training step on 2 × 3 × 8 × 8",
        "Picard",
        "Auto → Anderson",
        "OneStep",
        "Phantom steps=5",
        "Unrolled steps=",
        "Implicit tolerance=",
        "100%",
        "The solver auto chooses Anderson",
        "random images and initial weights",
        "current setting",
    ):
        assert piece in printed, piece


def test_json_has_all_measurements() -> None:
    result = tune("tiny", "--size", "8", "--channels", "1", *FEW, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["images"] == [2, 1, 8, 8]
    assert report["auto"] == "Anderson"
    assert report["present"]["solver"] == "Auto"
    assert report["recommended"]["qualifies"]
    assert report["recommended"] in report["measurements"]
    assert sum(m["present"] for m in report["measurements"]) == 1
    seconds = [m["seconds"] for m in report["measurements"]]
    assert seconds == sorted(seconds)
    assert report["speedup"] == report["present"]["seconds"] / report["recommended"]["seconds"]


def test_same_seed_gives_the_same_gradients() -> None:
    def cosines(seed: str) -> dict[str, float]:
        result = tune(
            "tiny", "--size", "8", *FEW, "--gradients", "implicit", "--seed", seed, "--json"
        )
        return {m["overrides"]: m["cosine"] for m in json.loads(result.stdout)["measurements"]}

    present = "solver=eq.Auto(tolerance=0.0001), gradient=eq.Implicit()"
    assert cosines("0")[present] == cosines("0")[present] != cosines("1")[present]


def test_run_is_tuned_on_its_test_images(run: Path) -> None:
    result = tune(str(run), *FEW, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "opteq-small"
    assert report["images"] == [2, 1, 8, 8]


def test_size_for_a_run_is_an_error(run: Path) -> None:
    result = tune(str(run), "--size", "8")
    assert result.exit_code == 2
    assert "a run uses its test images" in result.output


def test_unknown_name_suggests_similar_names() -> None:
    result = tune("optek-small")
    assert result.exit_code == 2
    assert "unknown model 'optek-small'; did you mean 'opteq-small'" in result.output
    assert "There is no run folder 'optek-small' either" in result.output
    assert "Traceback" not in result.output


def test_run_without_weights_is_an_error_of_one_line(run: Path) -> None:
    (run / "model.safetensors").unlink()
    result = tune(str(run))
    assert result.exit_code == 2
    assert "model.safetensors is missing, and there is no intact checkpoint" in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.filterwarnings("ignore:.*config.yaml was changed or damaged")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model: Input should be"),
        ({"data": {"name": "faces"}}, "data set 'faces'"),
        ({"optimizer": "sgd"}, "unknown key 'optimizer'"),
        ({"model": {"name": "opteq-small", "options": {}}}, "do not fit the model 'opteq-small'"),
    ],
)
def test_run_that_cannot_be_loaded_is_an_error(
    run: Path, change: dict[str, object], message: str
) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | change))
    result = tune(str(run))
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tolerances", "small"], "--tolerances must be comma-separated numbers"),
        (["--solvers", "pickard"], "did you mean 'picard'"),
        (["--gradients", "fantom"], "did you mean 'phantom'"),
    ],
)
def test_wrong_options_are_errors_of_one_line(options: list[str], message: str) -> None:
    result = tune("tiny", "--size", "8", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_model_without_equilibrium_is_an_error() -> None:
    eq.register_model("plain", lambda in_channels: torch.nn.Conv2d(in_channels, 2, 3))
    result = tune("plain", "--size", "8")
    assert result.exit_code == 2
    assert "Conv2d has no equilibrium layer" in result.output


def test_missing_recommendation_has_a_reason() -> None:
    eq.register_model("short", opteq, channels=4, width=4, max_iterations=1)
    result = tune("short", "--size", "8", *FEW)
    assert result.exit_code == 0, result.output
    assert "No recommendation: none of" in result.output
    assert "some samples did not converge (raise max_iterations" in result.output


CURRENT = Measurement(
    setting=eq.Solving(eq.Auto(), eq.Implicit()),
    found_by="Anderson",
    seconds=0.3,
    evaluations=10,
    backward_evaluations=8,
    share_converged=1.0,
    backward_converged=True,
    cosine=0.9999,
    relative_error=0.01,
)
BEST = replace(CURRENT, setting=eq.Solving(eq.Picard(tolerance=1e-2), eq.Implicit()), seconds=0.1)


@pytest.mark.parametrize(
    ("best", "present", "message"),
    [
        (BEST, CURRENT, "3.00× faster than the current setting: 100 ms instead of 300 ms"),
        (CURRENT, CURRENT, "Keep the current setting"),
        (replace(BEST, seconds=0.299), CURRENT, "Not measurably faster than the current setting"),
        (BEST, replace(CURRENT, seconds=0.1, cosine=0.9), "current setting does not qualify"),
        (replace(BEST, setting=eq.Solving(eq.Picard(), eq.Unrolled())), CURRENT, "fixed number"),
    ],
)
def test_advice_matches_the_recommendation(
    best: Measurement, present: Measurement, message: str
) -> None:
    from equilibria.cli.tune import Subject, advice

    options = {"in_channels": 1}
    subject = Subject("tiny", options, torch.nn.Identity(), torch.rand(1), loss=None, note="")
    report = TuningReport((best, present), present=present, recommended=best, auto="Anderson")
    text = "\n".join(advice(subject, report))
    assert message in text
    call = f'eq.create_model("tiny", in_channels=1, {overrides(best.setting)})'
    assert (call in text) is (best is not present)
