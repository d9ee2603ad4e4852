"""The demo, models and --help of the command line, and its import time."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import equilibria
from equilibria.cli import COMMANDS, app
from equilibria.training import EpochMetrics, NonFiniteError, load_recipe
from equilibria.training.experiment import Experiment
from equilibria.training.metrics import StepProgress
from tests.program import output_of_python

HEAVY = {
    *("torch", "numpy", "matplotlib", "sklearn", "scipy", "safetensors", "PIL", "pooch", "jinja2"),
    *("tensorboard", "equilibria.training"),
}
HELPFUL = [name for name in COMMANDS if name != "bench"]
"""Commands that print help themselves; bench passes --help on."""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


def demo(folder: Path, *arguments: str) -> Result:
    return invoke("demo", "--epochs", "1", "--device", "cpu", "--output", str(folder), *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, demo(folder)


def test_demo_writes_a_complete_run(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "convergence-dark.svg",
        "convergence-light.svg",
        "convergence-narrow-dark.svg",
        "convergence-narrow-light.svg",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "run.json",
    ]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["name"] == "opteq-small"
    assert config["training"]["epochs"] == 1
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["share_converged"] == 1


def words(svg: bytes) -> list[str]:
    """Return the texts of a figure without numbers."""
    texts = (
        element for element in ElementTree.fromstring(svg).iter() if element.tag[-4:] == "text"
    )
    joined = ("".join("".join(text.itertext()).split()) for text in texts)
    return [text for text in (re.sub(r"[\d.−⁻⁰¹²³⁴⁵⁶⁷⁸⁹]", "", text) for text in joined) if text]


def test_figure_of_the_gallery_matches_the_demo(finished: tuple[Path, Result]) -> None:
    """`make figures` copies the figure of the demo to docs/images."""
    folder, _ = finished
    page = (folder / "report.html").read_text(encoding="utf-8")
    images = Path(__file__).resolve().parents[2] / "docs" / "images"
    drawn = sorted(folder.glob("convergence-*.svg"))
    assert len(drawn) == 4
    for file in drawn:
        curves = re.findall(r'<path d="([^"]+)"', file.read_text(encoding="utf-8"))
        assert len(curves) > 20
        assert all(f'd="{curve}"' in page for curve in curves)
        shown = images / file.name
        assert words(shown.read_bytes()) == words(file.read_bytes())
        assert file.name in (images.parent / "gallery.md").read_text(encoding="utf-8")


def test_demo_prints_one_line_per_epoch_and_a_table(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    for piece in (
        "epoch 1/1",
        "loss",
        "Test accuracy",
        "Parameters",
        "Iterations, mean",
        "Share converged",
        "Relative residual, max",
        "Contraction bound q",
        "Hidden objective, first step",
        "Hidden objective, equilibrium",
        "Training time",
        str(folder / "report.html"),
    ):
        assert piece in result.output


def test_run_of_the_demo_can_be_loaded(finished: tuple[Path, Result]) -> None:
    from equilibria.training.experiment import trained

    folder, _ = finished
    assert trained(folder).model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert json.loads(invoke("evaluate", str(folder), "--json").output)["samples"] == 450


def test_unknown_model_suggests_similar_names(tmp_path: Path) -> None:
    result = demo(tmp_path / "run", "--model", "optek-small")
    assert result.exit_code == 2
    assert "did you mean 'opteq-small'" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_unknown_device_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = demo(tmp_path / "run", "--device", "abacus")
    assert result.exit_code == 2
    assert "the device 'abacus' is not available: use auto" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_unwritable_output_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = demo(tmp_path / "file" / "run")
    assert result.exit_code == 2
    assert "--output" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_failed_training_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise NonFiniteError("the loss is nan: lower the learning rate")

    monkeypatch.setattr(Experiment, "train", fail)
    result = demo(tmp_path / "run")
    assert result.exit_code == 1
    assert "Error: the loss is nan: lower the learning rate" in result.output


def test_demo_uses_the_recipe_digits_opteq(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    config = load_recipe(folder / "config.yaml")
    assert config == load_recipe("digits-opteq", ["training.epochs=1"])


def test_demo_of_a_model_without_equilibrium_is_an_error(tmp_path: Path) -> None:
    result = demo(tmp_path / "run", "--model", "resnet-small")
    assert result.exit_code == 2
    assert "--model opteq-small" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_training_display_has_a_bar_on_terminals_only(terminal: bool) -> None:
    from rich.console import Console

    from equilibria.training.progress import TrainingDisplay

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=80)
    metrics = EpochMetrics(
        epoch=1,
        loss=0.5,
        accuracy=0.875,
        share_converged=None,
        mean_iterations=None,
        gradient_norm=1.0,
        learning_rate=0.1,
        seconds=2.0,
    )
    display = TrainingDisplay(console, epochs=3)
    with display.progress:
        display.on_step(StepProgress(epoch=1, step=1, steps=3, loss=0.5))
        display.on_epoch(metrics)
    assert ("━" in screen.getvalue()) is terminal
    assert "converged" not in screen.getvalue()
    if not terminal:
        assert screen.getvalue() == "epoch 1/3  loss 0.5000  accuracy 87.5%  2.0 s\n"


def test_epochs_must_be_positive() -> None:
    assert invoke("demo", "--epochs", "0").exit_code == 2


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"]])
def test_help_shows_examples(command: list[str]) -> None:
    result = invoke(*command)
    assert result.exit_code == 0
    assert "equilibria demo --model deep-opteq-small --output runs/deep" in result.output


def test_version_is_printed() -> None:
    result = invoke("--version")
    assert result.output.strip() == f"equilibria {equilibria.__version__}"


def test_models_lists_all_models() -> None:
    result = invoke("models")
    assert result.exit_code == 0
    for name in equilibria.list_models():
        assert name in result.output


def test_models_describes_one_model() -> None:
    result = invoke("models", "mopteq-small")
    assert result.exit_code == 0
    assert "48,314" in result.output
    assert "Hidden objective: G(y) = 1ᵀf(y) + ½‖y‖²" in result.output
    assert "cell.lifted.energy.terms.heritage_diversity.W.0" in result.output
    assert "Guarantee: unique, q ≤ 0.81" in invoke("models", "popteq-small").output
    assert "Hidden objective: none" in invoke("models", "mdeq-small").output
    assert "Hidden objective" not in invoke("models", "resnet-small").output
    wrong = invoke("models", "mopteq-smal")
    assert wrong.exit_code == 2
    assert "did you mean 'mopteq-small'" in wrong.output


def test_models_are_listed_in_markdown() -> None:
    lines = invoke("models", "--markdown").output.splitlines()
    assert len(lines) == 2 + len(equilibria.list_models())
    assert all(line.startswith("|") and line.endswith("|") for line in lines)


def test_help_does_not_import_heavy_packages() -> None:
    """Check all commands in one process; `[]` is the import alone."""
    calls = [[], ["--help"], ["--version"], *([name, "--help"] for name in HELPFUL)]
    program = (
        "import sys; import equilibria.cli\n"
        "from typer.testing import CliRunner\n"
        f"for call in {calls!r}:\n"
        "    if call:\n"
        "        assert CliRunner().invoke(equilibria.cli.app, call).exit_code == 0, call\n"
        f"    loaded = {HEAVY!r} & set(sys.modules)\n"
        "    assert not loaded, (call, loaded)"
    )
    assert output_of_python(program) == ""


def test_modules_of_the_command_line_do_not_import_heavy_packages() -> None:
    program = (
        "import importlib, pkgutil, sys; import equilibria.cli\n"
        "for module in pkgutil.iter_modules(equilibria.cli.__path__, 'equilibria.cli.'):\n"
        "    importlib.import_module(module.name)\n"
        f"    loaded = {HEAVY!r} & set(sys.modules)\n"
        "    assert not loaded, (module.name, loaded)"
    )
    assert output_of_python(program) == ""
