"""What MOptEqs' figures show of a run: series of numbers, "residual@10" being that at 10."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import SupportsFloat

import torch
from torch import nn

from equilibria.data import Batches
from equilibria.inputs import AttackSettings, measure_attack
from equilibria.models import EquilibriumClassifier
from equilibria.models.base import predicted_classes
from equilibria.models.mopteq.models import Direction, branch_features, perturbed_logits
from equilibria.report.features import relations
from equilibria.solvers import Anderson, RelativeResidual
from equilibria.training.experiment import Experiment

Numbers = dict[str, float | None]

RELATED_IMAGES = 100
TRACED_IMAGES = 100
TRACED_ITERATIONS = 50
STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""ε of perturbed features, whose channels have deviation 1."""
DRAWS = 5
ATTACK_BUDGET = 2 / 255
ATTACK_ITERATIONS = (1, 2, 3, 5, 10, 20)
ATTACKED_IMAGES = 200
SIGNIFICANT = 4
"""Digits that are kept of a number in a series."""


@torch.no_grad()
def branch_relations(experiment: Experiment, device: torch.device) -> Numbers:
    """Average H and D of test images, and the channels' correlations for one of them (Figure 2).

    Their ratio is what can be compared (`report/features.py`).
    """
    model = _classifier(experiment)
    images, _ = experiment.some_test_images(RELATED_IMAGES)
    solution = model.solve(images.to(device))
    z = branch_features(model.layer.cell, solution.state, solution.context)
    found = relations(z)
    similar, diverse, products = found.heritage, found.diversity, found.correlation
    entries = {f"{k},{j}": v for k, row in enumerate(products) for j, v in enumerate(row)}
    return {
        "average_heritage": float(similar.mean()),
        "average_diversity": float(diverse.mean()),
        "heritage_ratio": float(similar.mean() / diverse.mean()),
        "diagonal_share": float(products.diagonal().mean() / products.mean()),
        **_series("average_heritage", enumerate(similar)),
        **_series("average_diversity", enumerate(diverse)),
        **_series("correlation", entries.items()),
    }


@torch.no_grad()
def solve_trace(experiment: Experiment, device: torch.device) -> Numbers:
    """‖T^{j+1} − T^j‖ / ‖T^j‖ along Anderson's iterations, the geometric mean of test images."""
    model = _classifier(experiment)
    images, _ = experiment.some_test_images(TRACED_IMAGES)
    never = RelativeResidual(1e-300)  # below all rounding: no sample stops
    solver = Anderson(stop=never, max_iterations=TRACED_ITERATIONS)
    trace = model.solve(images.to(device), solver=solver, trace=True).trace
    assert trace is not None
    means = trace.residual.log().nanmean(dim=1).exp()
    return _series("residual", enumerate(means))


@torch.no_grad()
def perturbations(experiment: Experiment, device: torch.device) -> Numbers:
    """The accuracy at g(x) − δ over ‖δ‖∞, reconstructed and by chance (Figure 3a)."""
    model = _classifier(experiment)
    found: Numbers = {}
    directions: dict[Direction, int] = {"reconstructed": 1, "binomial": DRAWS, "uniform": DRAWS}
    for direction, draws in directions.items():
        chance = torch.Generator().manual_seed(0)
        right = dict.fromkeys(STRENGTHS, 0.0)
        total = clean = 0
        for images, labels in Batches(experiment.test, experiment.recipe.training.batch_size):
            images, labels = images.to(device), labels.to(device)
            total += len(labels)
            clean += int((predicted_classes(model(images)) == labels).sum())
            for strength in STRENGTHS:
                for _ in range(draws):
                    logits = perturbed_logits(
                        model, images, strength, direction=direction, generator=chance
                    )
                    hits = (predicted_classes(logits) == labels).sum()
                    right[strength] += float(hits) / draws
        shares = {0.0: clean / total} | {at: hits / total for at, hits in right.items()}
        found |= _series(f"{direction}_accuracy", shares.items())
    return found


def attack_iterations(experiment: Experiment, device: torch.device) -> Numbers:
    """The accuracy under PGD over its iterations, of a fixed length (Figure 3b)."""
    model = _classifier(experiment)
    whole = not any(name.endswith("_samples") for name in experiment.recipe.data.options)
    count = len(experiment.test) if whole else ATTACKED_IMAGES
    images, labels = (some.to(device) for some in experiment.some_test_images(count))
    shares: dict[int, float] = {}
    for steps in ATTACK_ITERATIONS:
        settings = AttackSettings(
            eps=ATTACK_BUDGET, norm="linf", method="pgd", steps=steps, step_size=ATTACK_BUDGET / 4
        )
        result = measure_attack(model, images, labels, settings, 100)
        shares[0] = result.accuracy
        shares[steps] = result.robust_accuracy
    return _series("pgd_iterations", shares.items())


def _classifier(experiment: Experiment) -> EquilibriumClassifier:
    model: nn.Module = experiment.model.eval()
    if not isinstance(model, EquilibriumClassifier):
        raise TypeError(f"{type(model).__name__} is no equilibrium classifier")
    return model


def _series(name: str, values: Iterable[tuple[object, SupportsFloat]]) -> Numbers:
    """By its places; what is not a number is left out."""
    kept = ((place, float(value)) for place, value in values)
    return {f"{name}@{p}": float(f"{v:.{SIGNIFICANT}g}") for p, v in kept if math.isfinite(v)}
