"""How far classes are certain, and how far attacks come, in runs that were trained for it.

    equilibria train mnist-certified training.seed=0 --output runs/mnist-0  # and other seeds
    equilibria reproduce certified runs=[runs/mnist-0,runs/mnist-1,runs/mnist-2]

For each radius: the share of all test images that are right with a certified radius of at least as
much, and the shares of `attacked` test images that are right and stay so under PGD with 100 steps
and under JIIO at that ε (L2, pixels within [0, 1]), solved to 1e-5, beside the share of the same
images that is certified: it must not be more than what survives. Every image that is certified and
falls is counted, and there must be none.
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
from equilibria.papers.studies.study import Found, Study, Work
from equilibria.training.experiment import Experiment, trained

RADII = (0.1, 0.3, 0.5, 1.0, 1.58)
ATTACKED = 500
TOLERANCE = 1e-5
BATCH = 250


@dataclass
class Judged:
    """Measurements of one run."""

    run: str
    parameters: int
    accuracy: float
    certified: dict[float, float] = field(default_factory=dict)
    safe: dict[float, float] = field(default_factory=dict)
    """Certified, of those that are attacked."""
    pgd: dict[float, float] = field(default_factory=dict)
    jiio: dict[float, float] = field(default_factory=dict)
    broken: int = 0
    """Images whose class an attack changed within their certified radius."""


def judged(run: Path, radii: Sequence[float], attacked: int) -> Judged:
    """Measure the certified and the attacked accuracy of a trained run."""
    experiment = trained(run)
    model = experiment.model.eval()
    right, radius = _certified(experiment)
    found = Judged(
        run.name, eq.models.registry.parameter_count(model), float(right.double().mean())
    )
    for eps in radii:
        found.certified[eps] = float((radius >= eps).double().mean())
    images, labels = experiment.some_test_images(attacked)
    with eq.solving(model, tolerance=TOLERANCE):
        own = certifier(model, tuple(images.shape[1:]))(images, refine=False)
    safe = torch.where(own.prediction == labels, own.radius, 0.0)
    for eps in radii:
        found.safe[eps] = float((safe >= eps).double().mean())
        for method, shares in (("pgd", found.pgd), ("jiio", found.jiio)):
            survives = _under_attack(model, images, labels, method, eps)
            found.broken += int((~survives & (safe >= eps)).sum())
            shares[eps] = float(survives.double().mean())
    return found


def _certified(experiment: Experiment) -> tuple[Tensor, Tensor]:
    """Of every test image whether it is right, and its radius if it is certified so."""
    model, parts = experiment.model, []
    with eq.solving(model, tolerance=TOLERANCE):
        for images, labels in Batches(experiment.data.test, BATCH):
            by = certifier(model, tuple(images.shape[1:]))
            sure = by(images, refine=False)
            right = sure.prediction == labels
            parts.append((right, torch.where(right & sure.certified_class, sure.radius, 0.0)))
    rights, radii = zip(*parts, strict=True)
    return torch.cat(rights), torch.cat(radii)


def _under_attack(
    model: torch.nn.Module, images: Tensor, labels: Tensor, method: str, eps: float
) -> Tensor:
    """Which images are right, and stay so."""
    steps = 100 if method == "pgd" else None
    settings = AttackSettings(eps=eps, norm="l2", method=method, steps=steps)  # type: ignore[arg-type]
    return ~eq.attack(model, images, labels, settings, generator=torch.Generator()).success


def table(found: Sequence[Judged], radii: Sequence[float]) -> str:
    """Return the results of all runs as a Markdown table."""

    def over(values: Sequence[float]) -> str:
        shares = [100 * value for value in values]
        spread = f" ± {statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
        return f"{statistics.mean(shares):.1f}{spread}"

    lines = [
        f"{len(found)} runs, {found[0].parameters:,} parameters; accuracy "
        f"{over([one.accuracy for one in found])} %; certified images that an attack changed: "
        f"{sum(one.broken for one in found)}.",
        "",
        "| ε (L2) | certified (%) | of those attacked | PGD-100 (%) | JIIO (%) |",
        "|---:|---:|---:|---:|---:|",
    ]
    for eps in radii:
        shares = (over([getattr(one, kind)[eps] for one in found]) for kind in KINDS)
        lines.append(f"| {eps:g} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


KINDS = ("certified", "safe", "pgd", "jiio")


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Args:
        runs: Folders of finished runs.
        radii: Distances in L2, pixels in [0, 1].
        attacked: Number of test images that are attacked.
    """

    runs: tuple[Path, ...]
    radii: tuple[float, ...] = RADII
    attacked: int = ATTACKED


def carry_out(settings: Settings, work: Work) -> Found:
    """Certify and attack each run."""
    found = []
    for place, run in enumerate(settings.runs):
        work.on_progress(place, len(settings.runs), f"{run.name}: certifying and attacking")
        found.append(judged(run, settings.radii, settings.attacked))
    return Found({"runs": [asdict(one) for one in found]}, table(found, settings.radii))


STUDY = Study(
    "certified",
    "",
    "Certified and attacked accuracy of trained runs",
    Settings,
    carry_out,
)
