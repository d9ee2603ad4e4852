"""What a run folder keeps for its report: metrics of the epochs, and robustness once measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from equilibria.context.caller import warn_caller
from equilibria.inputs import RobustnessCurves
from equilibria.report.html import report_page
from equilibria.report.page import RunReport, run_report
from equilibria.tasks import Evaluation
from equilibria.training import CheckpointWarning, EpochMetrics, RunFolder
from equilibria.training.experiment import Experiment, trained
from equilibria.training.files import read_run_text, sealed_json, unsealed, write_atomically
from equilibria.training.weights_source import Weights


def stored_history(run: RunFolder) -> list[EpochMetrics]:
    """The metrics of all epochs, as far as they can be read."""
    known = {f.name for f in fields(EpochMetrics)}
    needed = {"epoch", "loss", "accuracy", "share_converged", "mean_iterations"}
    usual = {"gradient_norm": 0.0, "learning_rate": 0.0}
    entries = [entry for entry in run.read_metrics() if needed <= entry.keys()]
    return [
        EpochMetrics(**usual | {name: entry[name] for name in known & entry.keys()})
        for entry in entries
    ]


def store_robustness(folder: Path, curves: RobustnessCurves) -> None:
    """Keep what `equilibria attack --curve` has measured.

    Examples:
        >>> from pathlib import Path
        >>> Path("attacked").mkdir()
        >>> curves = eq.inputs.RobustnessCurves("l2", 4, 1.0, {}, {}, 0.5)
        >>> from equilibria.report.stored import store_robustness
        >>> store_robustness(Path("attacked"), curves)
        >>> [path.name for path in Path("attacked").iterdir()]
        ['robustness.json']
    """
    text = sealed_json(asdict(curves))
    write_atomically(RunFolder(folder).robustness, text.encode())


def stored_robustness(run: RunFolder) -> RobustnessCurves | None:
    """None if there is none to be read, or if it is older than the weights, so not of them."""
    file = run.robustness
    if not (file.is_file() and run.weights.is_file()):
        return None
    if file.stat().st_mtime < run.weights.stat().st_mtime:
        return None
    try:
        data = unsealed(read_run_text(file, run.path).decode(), file)
        return TypeAdapter(RobustnessCurves).validate_python(data)
    except (ValueError, ValidationError) as error:
        warn_caller(f"{file} cannot be used: {error}", CheckpointWarning)
        return None


def report_of(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    weights: Weights = "last",
    root: Path | None = None,
    quick: bool = False,
    refine: bool = False,
    on_step: Callable[[str], object] | None = None,
) -> RunReport:
    """Make the report of a run folder.

    Args:
        folder: Folder of the run.
        device: Where the model computes.
        weights: "best" takes those of the epoch with the best validation score.
        root: Folder of data sets, if it is not where the recipe says.
        quick: Leave out what takes long (`run_report`).
        refine: Refine the certificates, which takes more evaluations (`run_report`).
        on_step: Called with a description of each step before it starts.

    Returns:
        The report, for `report_page`.
    """
    run = RunFolder(folder)
    experiment = trained(folder, device=device, weights=weights, root=root)
    return run_report(
        experiment,
        stored_history(run),
        name=str(folder),
        robustness=stored_robustness(run),
        quick=quick,
        refine=refine,
        on_step=on_step,
    )


def write_report(folder: Path, experiment: Experiment, evaluation: Evaluation, footer: str) -> Path:
    """What `train` ends with: the page of the run in its folder, in seconds."""
    run = RunFolder(folder)
    found = run_report(
        experiment, stored_history(run), name=str(folder), evaluation=evaluation, quick=True
    )
    write_atomically(run.report, report_page([found], footer).encode())
    return run.report
