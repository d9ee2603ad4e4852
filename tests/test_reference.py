"""The reference: public names are few and have examples, and all examples run."""

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

MOST_NAMES = 306
"""Limit on distinct public objects. It may fall; the test states when it may rise."""

WITHOUT = {
    "State": "a type alias",
    "CompileWarning": "a warning, which states the reason",
    "CompiledModel": "the result of `compile`, shown there",
    "__version__": "a string",
    "BatchCouplingWarning": "a warning, which states the remedy",
    "NoObjectiveError": "an error, which states the remedy",
    "SmoothActivation": "an abstract class; Tanh is one",
    "RidgePrior": "a part of `OpponentPrior`, shown there",
    "Iterate": "the argument of a `StoppingCriterion`, shown there",
    "NoCertificateError": "an error, which states the reason",
    "NoContributionsError": "an error, which states the reason",
    "Method": "the base class of solvers and minimizers",
    "Minimizer": "an abstract class; `Descent` is one",
    "Augmentation": "a type alias; `RandomShift` is one",
    "DataFileError": "an error, which states the remedy",
    "DownloadError": "an error, which states the remedy",
    "MissingDataError": "an error, which states the remedy",
    "UnreadableImageWarning": "a warning, which names the file",
    "CheckpointWarning": "a warning, which names the checkpoint used instead",
    "DamagedFileError": "an error, which states the remedy",
    "ModelSizeError": "an error, which states the remedy",
    "NonFiniteError": "an error, which states the remedy",
    "ProcessLostError": "an error, which states the remedy",
    "RecipeError": "an error, which states the remedy",
    "RunError": "an error, which states the remedy",
    "app": "the program",
    "main": "the program",
    "PartsError": "an error, which states the remedy",
    "PluginWarning": "a warning, which states the remedy",
    "ExportError": "an error, which states the reason",
    "run_server": "it runs until Ctrl-C; `prediction_app` has an example",
    "RunFindings": "the result of `measure_run`, shown there",
    "report_page": "shown with `measure_run`",
    "write_report": "the last step of `train` and `reproduce`",
    "carry_out": "it trains the models of a table, for `equilibria reproduce`",
}

RUN = """
import doctest, importlib, inspect, pkgutil, sys
import torch
import equilibria as eq

finder = doctest.DocTestFinder(recurse=False)
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
seen = set()
modules = [m.name for m in pkgutil.walk_packages(eq.__path__, "equilibria.") if m.name[-2:] != "__"]
for name in ["equilibria", *modules]:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", ())
    for name, thing in [*vars(module).items()]:
        own = getattr(thing, "__module__", None) == module.__name__
        thing = inspect.unwrap(thing) if callable(thing) else thing
        text = getattr(thing, "__doc__", None) or ""
        if not (own or name in public) or ">>>" not in text or text in seen:
            continue
        seen.add(text)
        for test in finder.find(thing, name, globs={"eq": eq, "torch": torch}):
            torch.manual_seed(0)
            runner.run(test)
print(len(seen), "names, ", runner.summarize(verbose=False))
"""


def test_all_examples_run(tmp_path: Path) -> None:
    """Includes internal names. The process is separate because some examples register parts."""
    command = [sys.executable, "-W", "error", "-c", RUN]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "TestResults(failed=0, attempted=" in answer.stdout, answer.stdout
    assert int(answer.stdout.split()[0]) > 350


def test_public_names_have_an_example() -> None:
    without = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        named = {name: getattr(module, name) for name in getattr(module, "__all__", [])}
        without |= {name for name, thing in named.items() if ">>>" not in (thing.__doc__ or "")}
    assert without == {*WITHOUT}, without ^ {*WITHOUT}


def test_public_names_are_few() -> None:
    packages = [
        m.name for m in pkgutil.walk_packages(equilibria.__path__, "equilibria.") if m.ispkg
    ]
    modules = [importlib.import_module(name) for name in ("equilibria", *packages)]
    public = {
        id(thing): f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", ())
        for thing in [getattr(module, name)]
    }
    assert len(public) <= MOST_NAMES, (
        f"{len(public)} public names; at most {MOST_NAMES} are allowed. A name belongs in "
        "`__all__` if a guide, a tutorial or an example uses it, if users construct it as an "
        "argument or receive it as a result, if they catch it, or if they subclass or call it to "
        "register parts. Import any other name from its module, as in `from "
        "equilibria.data.survey import Survey`. If the new name belongs there, raise MOST_NAMES."
    )
