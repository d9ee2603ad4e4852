"""Measures of run folders: metrics of the epochs, stored robustness, and new measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from equilibria.analysis.run import RunFindings, measure_run
from equilibria.context.caller import warn_caller
from equilibria.inputs import RobustnessCurves
from equilibria.training import CheckpointWarning, EpochMetrics, RunFolder
from equilibria.training.experiment import trained
from equilibria.training.files import read_run_text, sealed_json, unsealed, write_atomically
from equilibria.training.weights_source import Weights


def stored_history(run: RunFolder) -> list[EpochMetrics]:
    """Return the metrics of all epochs that can be read."""
    known = {f.name for f in fields(EpochMetrics)}
    needed = {"epoch", "loss", "accuracy", "share_converged", "mean_iterations"}
    defaults = {"gradient_norm": 0.0, "learning_rate": 0.0}
    entries = [entry for entry in run.read_metrics() if needed <= entry.keys()]
    return [
        EpochMetrics(**defaults | {name: entry[name] for name in known & entry.keys()})
        for entry in entries
    ]


def store_robustness(folder: Path, curves: RobustnessCurves) -> None:
    """Store robustness curves, as measured by `equilibria attack --curve`, in a run folder.

    Examples:
        >>> from pathlib import Path
        >>> Path("attacked").mkdir()
        >>> curves = eq.inputs.RobustnessCurves("l2", 4, 1.0, {}, {}, 0.5)
        >>> from equilibria.analysis.stored import store_robustness
        >>> store_robustness(Path("attacked"), curves)
        >>> [path.name for path in Path("attacked").iterdir()]
        ['robustness.json']
    """
    text = sealed_json(asdict(curves))
    write_atomically(RunFolder(folder).robustness, text.encode())


def stored_robustness(run: RunFolder) -> RobustnessCurves | None:
    """Return stored curves; None if they are missing, damaged, or older than the weights."""
    file = run.robustness
    if not (file.is_file() and run.weights.is_file()):
        return None
    if file.stat().st_mtime < run.weights.stat().st_mtime:
        return None
    try:
        data = unsealed(read_run_text(file, run.path).decode(), file)
        return TypeAdapter(RobustnessCurves).validate_python(data)
    except (ValueError, ValidationError) as error:
        warn_caller(f"{file} cannot be read and is ignored: {error}", CheckpointWarning)
        return None


def measure_stored_run(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    weights: Weights = "last",
    root: Path | None = None,
    quick: bool = False,
    refine: bool = False,
    on_step: Callable[[str], object] | None = None,
) -> RunFindings:
    """Measure the run of a folder on its test images.

    Args:
        folder: Folder of the run.
        device: Device of the computation.
        weights: "last", or "best" for the epoch with the best validation score.
        root: Folder of data sets, if it differs from that of the recipe.
        quick: Omit slow measurements (`measure_run`).
        refine: Refine the certificates, at many times the cost (`measure_run`).
        on_step: Called with a description of each step before it starts.

    Returns:
        The measures, for `report_page`.
    """
    run = RunFolder(folder)
    experiment = trained(folder, device=device, weights=weights, root=root)
    return measure_run(
        experiment,
        stored_history(run),
        name=str(folder),
        robustness=stored_robustness(run),
        quick=quick,
        refine=refine,
        on_step=on_step,
    )
