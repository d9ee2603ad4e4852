"""Savings by certified early exit in trained classifiers.

    equilibria train digits-deep-opteq --output runs/deep  # and others
    equilibria reproduce early-exit runs=[runs/deep,runs/geq]

For each run, the table has the share of test images whose class `certify` proves at three
tolerances, the evaluations of the map over all images for a solve to 1e-4 and with `CertifiedExit`,
the share of classes that are certain at the exit, and the median processor time on one thread.
Evaluations include those that certify the states of a reflection network. Predictions that differ
are counted, and the count must be 0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import equilibria as eq
from equilibria.certificates import CertifiedExit, certifier
from equilibria.models.base import predicted_classes
from equilibria.models.reflection.model import ReflectionNetwork
from equilibria.papers.studies.study import Study, StudyOutcome, Work
from equilibria.training.experiment import trained

TOLERANCES = (1e-2, 1e-3, 1e-4)
SAMPLES = 360
TURNS = 7


@dataclass
class Saved:
    """Evaluations and time that certified early exit saves for one trained run."""

    run: str
    model: str
    certified: list[float]
    """Share that `certify` proves at each tolerance."""
    evaluations: int
    early: int
    exits: float
    """Share whose class is certain in the floating-point type of the model."""
    different: int
    seconds: float
    early_seconds: float

    @property
    def share(self) -> float:
        return 1 - self.early / self.evaluations


def saved(run: Path, samples: int, turns: int) -> Saved:
    """Measure the evaluations that certified early exit saves."""
    experiment = trained(run)
    model = experiment.model.eval()
    images, _ = experiment.some_test_images(samples)
    shape = tuple(images.shape[1:])
    certify, shares = certifier(model, shape), []
    for tolerance in TOLERANCES:
        with eq.solving(model, tolerance=tolerance):
            shares.append(certify(images, refine=False).share_certified)
    quick = CertifiedExit(model, shape)
    times: tuple[list[float], list[float]] = ([], [])
    with eq.solving(model, tolerance=TOLERANCES[-1]), torch.no_grad():
        for _ in range(turns):
            full, evaluations = _timed(model, images, times[0])
            early, fewer = _timed(quick, images, times[1])
    return Saved(
        run=run.name,
        model=experiment.recipe.model.name,
        certified=shares,
        evaluations=evaluations,
        early=fewer,
        exits=float(quick.certified.double().mean()),
        different=int((full != early).sum()),
        seconds=statistics.median(times[0]),
        early_seconds=statistics.median(times[1]),
    )


def _timed(
    model: torch.nn.Module | CertifiedExit, images: Tensor, times: list[float]
) -> tuple[Tensor, int]:
    """Return the predicted classes and the number of evaluations of the map."""
    solver = model.model if isinstance(model, CertifiedExit) else model
    with eq.solving(solver, record=True) as record:
        start = time.process_time()
        classes = predicted_classes(model(images))
        times.append(time.process_time() - start)
    judges = isinstance(model, CertifiedExit) and isinstance(solver, ReflectionNetwork)
    judged = sum(len(solution.iterations) for solution in record.solutions) if judges else 0
    return classes, judged + sum(int(solution.sample_evaluations) for solution in record.solutions)


def table(results: Sequence[Saved]) -> str:
    """Return the results of all runs as a Markdown table."""
    lines = [
        "| run | certified at 1e-2 / 1e-3 / 1e-4 (%) | evaluations to 1e-4 | early exit | saved | "
        "certain (%) | processor time (s) | different classes |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        shares = " / ".join(f"{100 * share:.1f}" for share in result.certified)
        lines.append(
            f"| {result.run} | {shares} | {result.evaluations} | {result.early} | "
            f"{result.share:.0%} | {100 * result.exits:.1f} | "
            f"{result.seconds:.3f} → {result.early_seconds:.3f} | {result.different} |"
        )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class EarlyExitSettings:
    """Settings of the study.

    Args:
        runs: Folders of finished runs.
        samples: Number of test images.
        turns: Number of timed repetitions.
    """

    runs: tuple[Path, ...]
    samples: int = SAMPLES
    turns: int = TURNS


def carry_out(settings: EarlyExitSettings, work: Work) -> StudyOutcome:
    """Solve the test images of each run with and without the early exit."""
    torch.set_num_threads(1)
    results = []
    for place, run in enumerate(settings.runs):
        work.on_progress(place, len(settings.runs), f"{run.name}: solving")
        results.append(saved(run, settings.samples, settings.turns))
    return StudyOutcome({"runs": [asdict(result) for result in results]}, table(results))


STUDY = Study("early-exit", "", "Savings by certified early exit", EarlyExitSettings, carry_out)
