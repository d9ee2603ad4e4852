"""Certified and attacked accuracy of runs that were trained for certificates.

    equilibria train mnist-certified training.seed=0 --output runs/mnist-0  # and other seeds
    equilibria reproduce certified runs=[runs/mnist-0,runs/mnist-1,runs/mnist-2]

For each radius ε (L2, pixels within [0, 1]), the table has the share of all test images that are
classified correctly with a certified radius of at least ε. For `attacked` test images it also has
the shares that are certified and that remain correct under PGD with 100 steps and under JIIO. All
solves have tolerance 1e-5. The certified share cannot exceed that under attack: certified images
whose class an attack changes are counted, and the count must be 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import equilibria as eq
from equilibria.certificates import certifier
from equilibria.data import Batches
from equilibria.inputs import AttackSettings
from equilibria.papers.studies.study import Study, StudyOutcome, Work
from equilibria.training.experiment import Experiment, trained

RADII = (0.1, 0.3, 0.5, 1.0, 1.58)
ATTACKED = 500
TOLERANCE = 1e-5
BATCH = 250


@dataclass
class Judged:
    """Certified accuracy and accuracy under attack of one trained run, by distance."""

    run: str
    parameters: int
    accuracy: float
    certified: dict[float, float] = field(default_factory=dict)
    safe: dict[float, float] = field(default_factory=dict)
    """Certified share of the attacked images."""
    pgd: dict[float, float] = field(default_factory=dict)
    jiio: dict[float, float] = field(default_factory=dict)
    broken: int = 0
    """Images whose class an attack changed within their certified radius."""


def judged(run: Path, radii: Sequence[float], attacked: int) -> Judged:
    """Measure the certified and the attacked accuracy of a trained run."""
    experiment = trained(run)
    model = experiment.model.eval()
    correct, radius = _certified(experiment)
    result = Judged(
        run.name, eq.models.registry.parameter_count(model), float(correct.double().mean())
    )
    for eps in radii:
        result.certified[eps] = float((radius >= eps).double().mean())
    images, labels = experiment.some_test_images(attacked)
    with eq.solving(model, tolerance=TOLERANCE):
        certificate = certifier(model, tuple(images.shape[1:]))(images, refine=False)
    safe = torch.where(certificate.prediction == labels, certificate.radius, 0.0)
    for eps in radii:
        result.safe[eps] = float((safe >= eps).double().mean())
        for method, shares in (("pgd", result.pgd), ("jiio", result.jiio)):
            survives = _under_attack(model, images, labels, method, eps)
            result.broken += int((~survives & (safe >= eps)).sum())
            shares[eps] = float(survives.double().mean())
    return result


def _certified(experiment: Experiment) -> tuple[Tensor, Tensor]:
    """Return whether each test image is correct, and its radius, 0 if it is not certified."""
    model, parts = experiment.model, []
    with eq.solving(model, tolerance=TOLERANCE):
        for images, labels in Batches(experiment.data.test, BATCH):
            certificate = certifier(model, tuple(images.shape[1:]))(images, refine=False)
            correct = certificate.prediction == labels
            is_certified = correct & certificate.certified_class
            parts.append((correct, torch.where(is_certified, certificate.radius, 0.0)))
    corrects, radii = zip(*parts, strict=True)
    return torch.cat(corrects), torch.cat(radii)


def _under_attack(
    model: torch.nn.Module, images: Tensor, labels: Tensor, method: str, eps: float
) -> Tensor:
    """Return which images are correct and remain so under an attack."""
    steps = 100 if method == "pgd" else None
    settings = AttackSettings(eps=eps, norm="l2", method=method, steps=steps)  # type: ignore[arg-type]
    return ~eq.attack(model, images, labels, settings, generator=torch.Generator()).success


def table(results: Sequence[Judged], radii: Sequence[float]) -> str:
    """Return the results of all runs as a Markdown table."""

    def mean_and_deviation(values: Sequence[float]) -> str:
        shares = [100 * value for value in values]
        spread = f" ± {statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
        return f"{statistics.mean(shares):.1f}{spread}"

    lines = [
        f"{len(results)} runs, {results[0].parameters:,} parameters; accuracy "
        f"{mean_and_deviation([result.accuracy for result in results])} %; certified images whose "
        f"class an attack changed: {sum(result.broken for result in results)}.",
        "",
        "| ε (L2) | certified (%) | certified, attacked images (%) | PGD-100 (%) | JIIO (%) |",
        "|---:|---:|---:|---:|---:|",
    ]
    for eps in radii:
        shares = (
            mean_and_deviation([getattr(result, kind)[eps] for result in results]) for kind in KINDS
        )
        lines.append(f"| {eps:g} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


KINDS = ("certified", "safe", "pgd", "jiio")


@dataclass(frozen=True)
class CertifiedSettings:
    """Settings of the study.

    Args:
        runs: Folders of finished runs.
        radii: Distances in L2, pixels in [0, 1].
        attacked: Number of test images to attack.
    """

    runs: tuple[Path, ...]
    radii: tuple[float, ...] = RADII
    attacked: int = ATTACKED


def carry_out(settings: CertifiedSettings, work: Work) -> StudyOutcome:
    """Certify and attack each run."""
    results = []
    for place, run in enumerate(settings.runs):
        work.on_progress(place, len(settings.runs), f"{run.name}: certifying and attacking")
        results.append(judged(run, settings.radii, settings.attacked))
    return StudyOutcome(
        {"runs": [asdict(result) for result in results]}, table(results, settings.radii)
    )


STUDY = Study(
    "certified",
    "",
    "Certified and attacked accuracy of trained runs",
    CertifiedSettings,
    carry_out,
)
