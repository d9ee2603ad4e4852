"""The examples of the reference: public names have one, and all of them run."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import equilibria

ROOMS = [room.name for room in pkgutil.iter_modules(equilibria.__path__) if room.name != "__main__"]
PACKAGES = ["equilibria", *(f"equilibria.{room}" for room in (*ROOMS, "papers.theory"))]
"""Packages whose `__all__` is public: the top level, the rooms, and the theory of the papers."""

WITHOUT = {
    "State": "a type alias",
    "OperatorLike": "a type alias",
    "Shape": "a type alias",
    "Weights": "a type alias",
    "Inputs": "a type alias",
    "__version__": "a string",
    "BatchCouplingWarning": "a warning, which says what to do",
    "NoObjectiveError": "an error, which says what to do",
    "SmoothActivation": "an abstract class; Tanh is one",
    "RidgePrior": "a part of `OpponentPrior`, shown there",
    "Rounding": "a table of constants, for certificates",
    "Iterate": "what a `StoppingCriterion` is given, shown there",
    "LinearSolution": "what `gmres` returns, shown there",
    "Memory": "what a solver keeps for itself",
    "Potential": "what `Descent` is given by a layer",
    "Backward": "between a layer and its gradient rule",
    "BackwardLog": "between a layer and its gradient rule",
    "Linearization": "between a layer and its gradient rule",
    "Map": "a protocol of cells",
    "EnergyForm": "between a cell and a gradient rule",
    "NoCertificateError": "an error, which says why",
    "NoContributionsError": "an error, which says why",
    "Method": "the names of attacks; the base class of solvers and minimizers",
    "Minimizer": "an abstract class; `Descent` is one",
    "Norm": "the names of norms",
    "Outer": "the names of two ways to differentiate",
    "BRIGHTEST": "a number",
    "CORRUPTIONS": "the names of corruptions",
    "Augmentation": "a type alias; `RandomShift` is one",
    "Kind": "the names of kinds of data sets",
    "DataFileError": "an error, which says what to do",
    "DownloadError": "an error, which says what to do",
    "MissingDataError": "an error, which says what to do",
    "UnreadableImageWarning": "a warning, which names the file",
    "CheckpointWarning": "a warning, which says what was taken instead",
    "ClassMap": "what `predict` returns for a model that segments",
    "DamagedFileError": "an error, which says what to do",
    "ModelSizeError": "an error, which says what to do",
    "NonFiniteError": "an error, which says what to do",
    "ProcessLostError": "an error, which says what to do",
    "RecipeError": "an error, which says what to do",
    "RunError": "an error, which says what to do",
    "TensorBoardLog": "it needs TensorBoard, which is not installed along",
    "app": "the program",
    "main": "the program",
    "Entry": "a type alias",
    "Layout": "a type alias",
    "PartsError": "an error, which says what to do",
    "PluginWarning": "a warning, which says what to do",
    "ExportError": "an error, which says why",
    "Format": "the names of formats",
    "run_server": "it serves until Ctrl-C; `prediction_app` is shown",
    "FIGURES": "how measures are named and printed",
    "AttackedFile": "what `attack_files` gives, shown there",
    "RunReport": "what `run_report` returns, shown there",
    "report_page": "shown with `run_report`",
    "write_report": "what `train` and `reproduce` end with",
    "report_of": "`run_report` of a folder, for `equilibria report`",
    "generate": "for `equilibria generate`, with the data of the run",
    "generate_without_data": "for `equilibria generate`",
    "PixelPrediction": "for `equilibria predict`, with a run that segments",
    "predict_pixels": "for `equilibria predict`, with a run that segments",
    "Setting": "the names of two settings",
    "carry_out": "it trains the models of a table, for `equilibria reproduce`",
    "check_data": "it looks for the data of a table, for `equilibria reproduce`",
    "run_job": "it trains a model, for `equilibria reproduce`",
    "run_jobs": "it trains models, for `equilibria reproduce`",
    "joined_group": "it waits for other processes; `train --devices` starts them",
}

RUN = """
import doctest, importlib, inspect, sys
import torch
import equilibria as eq

finder = doctest.DocTestFinder(recurse=False)
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
seen = set()
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", []):
        thing = inspect.unwrap(getattr(module, name))
        text = getattr(thing, "__doc__", None) or ""
        if ">>>" not in text or text in seen:
            continue
        seen.add(text)
        for test in finder.find(thing, name, globs={"eq": eq, "torch": torch}):
            torch.manual_seed(0)
            runner.run(test)
print(len(seen), "names, ", runner.summarize(verbose=False))
"""


def test_all_examples_run(tmp_path: Path) -> None:
    """In one process of their own, since some register parts."""
    command = [sys.executable, "-W", "error", "-c", RUN, *PACKAGES]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "TestResults(failed=0, attempted=" in answer.stdout, answer.stdout
    assert int(answer.stdout.split()[0]) > 350


def test_every_name_has_an_example() -> None:
    bare = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        named = {name: getattr(module, name) for name in getattr(module, "__all__", [])}
        bare |= {name for name, thing in named.items() if ">>>" not in (thing.__doc__ or "")}
    assert bare == {*WITHOUT}, bare ^ {*WITHOUT}
