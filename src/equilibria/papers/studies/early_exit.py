"""What a certified early exit saves, in trained classifiers.

    equilibria train digits-deep-opteq --output runs/deep  # and others
    equilibria reproduce early-exit runs=[runs/deep,runs/geq]

For each run the share of test images whose class `certify` proves at three tolerances; evaluations
of the map, all images together, to solve to 1e-4 and with `CertifiedExit` (those that judge the
states of a reflection network included); the share that is certain by then; processor time, the
median of solves in turn, one thread. Classes that differ are counted, and there must be none.
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
from equilibria.papers.studies.study import Found, Study, Work
from equilibria.training.experiment import trained

TOLERANCES = (1e-2, 1e-3, 1e-4)
SAMPLES = 360
TURNS = 7


@dataclass
class Saved:
    """Of one run."""

    run: str
    model: str
    certified: list[float]
    """The share that `certify` proves at each of the tolerances."""
    evaluations: int
    early: int
    exits: float
    """The share whose class is certain in the model's own type."""
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
    by, shares = certifier(model, shape), []
    for tolerance in TOLERANCES:
        with eq.solving(model, tolerance=tolerance):
            shares.append(by(images, refine=False).share_certified)
    quick = CertifiedExit(model, shape)
    times: tuple[list[float], list[float]] = ([], [])
    with eq.solving(model, tolerance=TOLERANCES[-1]), torch.no_grad():
        for _ in range(turns):
            whole, evaluations = _timed(model, images, times[0])
            early, fewer = _timed(quick, images, times[1])
    return Saved(
        run=run.name,
        model=experiment.recipe.model.name,
        certified=shares,
        evaluations=evaluations,
        early=fewer,
        exits=float(quick.certified.double().mean()),
        different=int((whole != early).sum()),
        seconds=statistics.median(times[0]),
        early_seconds=statistics.median(times[1]),
    )


def _timed(
    model: torch.nn.Module | CertifiedExit, images: Tensor, times: list[float]
) -> tuple[Tensor, int]:
    """The classes, and how many evaluations of a map they took."""
    solver = model.model if isinstance(model, CertifiedExit) else model
    with eq.solving(solver, record=True) as record:
        start = time.process_time()
        classes = predicted_classes(model(images))
        times.append(time.process_time() - start)
    judges = isinstance(model, CertifiedExit) and isinstance(solver, ReflectionNetwork)
    judged = sum(len(one.iterations) for one in record.solutions) if judges else 0
    return classes, judged + sum(int(one.sample_evaluations) for one in record.solutions)


def table(found: Sequence[Saved]) -> str:
    """Return the results of all runs as a Markdown table."""
    lines = [
        "| run | certified at 1e-2 / 1e-3 / 1e-4 (%) | evaluations to 1e-4 | early exit | saved | "
        "certain (%) | processor time (s) | other classes |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        shares = " / ".join(f"{100 * share:.1f}" for share in one.certified)
        lines.append(
            f"| {one.run} | {shares} | {one.evaluations} | {one.early} | {one.share:.0%} | "
            f"{100 * one.exits:.1f} | {one.seconds:.3f} → {one.early_seconds:.3f} | "
            f"{one.different} |"
        )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Args:
        runs: Folders of finished runs.
        samples: Number of test images.
        turns: Number of solves that are timed.
    """

    runs: tuple[Path, ...]
    samples: int = SAMPLES
    turns: int = TURNS


def carry_out(settings: Settings, work: Work) -> Found:
    """Solve the test images of each run with and without the early exit."""
    torch.set_num_threads(1)
    found = []
    for place, run in enumerate(settings.runs):
        work.on_progress(place, len(settings.runs), f"{run.name}: solving")
        found.append(saved(run, settings.samples, settings.turns))
    return Found({"runs": [asdict(one) for one in found]}, table(found))


STUDY = Study("early-exit", "", "What a certified early exit saves", Settings, carry_out)
