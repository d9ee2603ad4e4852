"""Imports of user code from a file, a folder, a module or an installed package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria import activations, data, plugins, tasks
from equilibria.data import registry as data_registry
from equilibria.models import registry as model_registry
from equilibria.tasks import base as task_registry
from tests.program import invoke, output_of_python, program

PARTS = '''
"""A model, an activation, a task and a data set."""

from dataclasses import dataclass

import torch
from torch import nn

import equilibria as eq
from equilibria.activations import ReLU, register_activation
from equilibria.data import DataSet, DataSetCard, load_digits, register_dataset
from equilibria.tasks import Classification, register_task


@eq.register_model("linear-of-mine", summary="One layer.", width=64)
class Linear(nn.Module):
    def __init__(self, width, num_classes=10):
        super().__init__()
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(images.flatten(1))


@register_activation
@dataclass(frozen=True)
class Rectifier(ReLU):
    name = "relu-of-mine"


register_task("classes-of-mine")(Classification)


@register_dataset(DataSetCard("digits-of-mine"))
def digits():
    return load_digits()
'''
RECIPE = """
model: {name: linear-of-mine}
data: {name: digits-of-mine, options: {train_samples: 64, test_samples: 40}}
training: {epochs: 1}
task: {name: classes-of-mine}
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file with the parts; registrations are undone afterwards."""
    for registry in (
        model_registry._models,
        data_registry._loaders,
        task_registry._tasks,
        activations.base._ACTIVATIONS,
    ):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(plugins, "_imported", {})
    file = tmp_path / "parts_of_mine.py"
    file.write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    yield file
    sys.modules.pop("parts_of_mine", None)


def test_a_recipe_can_name_parts_of_an_imported_file(parts: Path) -> None:
    result = invoke("train", "recipe.yaml", "--import", parts.name, "--output", "run")
    assert result.exit_code == 0, result.output
    imports = json.loads((parts.parent / "run" / "run.json").read_text())["imports"]
    assert [item["source"] for item in imports] == ["parts_of_mine.py"]
    assert activations.get_activation("relu-of-mine")(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    assert "digits-of-mine" in data.list_datasets()
    assert "classes-of-mine" in tasks.list_tasks()
    assert eq.evaluate("run").samples == 40
    # A run does not import the parts by itself.
    unaware = program(parts.parent, "evaluate", "run")
    assert unaware.returncode == 2
    assert "needs parts_of_mine.py, which was not imported" in unaware.stderr
    assert "add --import parts_of_mine.py" in unaware.stderr
    aware = program(parts.parent, "--import", "parts_of_mine.py", "evaluate", "run", "--json")
    assert json.loads(aware.stdout)["samples"] == 40, aware.stderr


def test_changed_code_raises_or_warns(parts: Path) -> None:
    eq.train("recipe.yaml", output="run", imports=parts, device="cpu")
    model = eq.load("run", imports=[parts.name])  # already imported
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    parts.write_text(PARTS + "\n# Changed.\n")
    with pytest.raises(ImportError, match="changed since it was imported: restart Python"):
        eq.load("run", imports=parts)
    with pytest.warns(plugins.PluginWarning, match="has changed since"):
        eq.load("run")


def test_a_folder_and_a_module_can_be_imported(
    parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = parts.parent / "package_of_mine"
    package.mkdir()
    parts.rename(package / "models.py")
    (package / "__init__.py").write_text("from . import models\n")
    refused = invoke("models", "--import", "package_of_mine")
    assert refused.exit_code == 2
    assert "./package_of_mine for a folder" in " ".join(refused.output.split())
    listed = invoke("--import", "./package_of_mine", "models", "linear-of-mine")
    assert "One layer." in listed.output
    (before,) = plugins.imported()
    for name in ("package_of_mine", "package_of_mine.models"):
        del sys.modules[name]
    model_registry._models._factories.pop("linear-of-mine")
    data_registry._loaders._factories.pop("digits-of-mine")
    task_registry._tasks._factories.pop("classes-of-mine")
    activations.base._ACTIVATIONS._factories.pop("relu-of-mine")
    monkeypatch.syspath_prepend(parts.parent)
    monkeypatch.setattr(plugins, "_imported", {})
    plugins.import_parts("package_of_mine")
    (after,) = plugins.imported()
    assert (after.module, after.sha256) == (before.module, before.sha256)
    for name in ("package_of_mine", "package_of_mine.models"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import torch\n\nx = nowhere\n", "broken.py, line 3: NameError: name 'nowhere'"),
        ("def f(:\n    pass\n", "broken.py, line 1: SyntaxError: "),
        ("import module_that_is_not_there\n", "broken.py, line 1: ModuleNotFoundError"),
        ("import sys\nsys.exit('an end')\n", "broken.py, line 2: SystemExit: an end"),
        (
            "import equilibria as eq\n\n\neq.register_model('opteq-small', eq.Dense)\n",
            "broken.py, line 4: ValueError: the model 'opteq-small' exists already",
        ),
    ],
)
def test_an_error_in_a_file_is_reported_with_its_line(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(content)
    result = invoke("models", "--import=broken.py")
    assert result.exit_code == 2
    assert f"Error: {message}" in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert "Traceback" in invoke("models", "--import=broken.py", "--debug").output
    assert "broken" not in sys.modules
    assert plugins.imported() == []


def test_a_failed_import_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text("")
    for source, message in (
        ("nothing.py", "cannot import nothing.py: there is no such file"),
        ("nothing.here", "cannot import 'nothing.here': there is no such module"),
        ("./json.py", "there is another module 'json'; rename the file"),
        ("/", "there is no such file"),
    ):
        result = invoke("models", "--import", source)
        assert result.exit_code == 2, source
        assert message in " ".join(result.output.split())
    missing = invoke("models", "--import")
    assert missing.exit_code == 2
    assert "--import needs a file or a module" in missing.output


def test_installed_packages_provide_parts_by_an_entry_point(tmp_path: Path) -> None:
    """They are imported if a name is not known; broken ones are skipped."""
    (tmp_path / "installed_parts.py").write_text(
        "import torch\nimport equilibria as eq\n\n\n"
        "def register():\n    eq.register_model('installed', torch.nn.Identity)\n"
    )
    about = tmp_path / "installed_parts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[equilibria.plugins]\nparts = installed_parts:register\nbroken = nowhere_to_be_found\n"
    )
    output = output_of_python(
        f"import sys, warnings; sys.path.append({str(tmp_path)!r}); import equilibria as eq\n"
        "eq.create_model('opteq-small'); print('installed_parts' in sys.modules)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    print(type(eq.create_model('installed')).__name__, 'installed' in eq.list_models())\n"
        "print(*[warning.message for warning in caught])\n"
    )
    first, second, warning = output.splitlines()
    assert first == "False"
    assert second == "Identity True"
    assert warning.startswith("skipped the plugin 'broken' (nowhere_to_be_found): ModuleNotFound")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the launcher needs POSIX")
def test_all_processes_import_the_parts(parts: Path) -> None:
    command = ["train", "recipe.yaml", "--import", parts.name, "--output", "run", "--devices", "2"]
    result = program(parts.parent, *command)
    assert result.returncode == 0, result.stderr
    assert "with 2 processes" in result.stdout
