"""Measurements for the figures of the MOptEqs paper.

Every function returns numbers by name. The entries of a series have names such as "residual@10",
the residual at iteration 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import SupportsFloat

import torch
from torch import nn

from equilibria.analysis.features import relations
from equilibria.data import Batches
from equilibria.inputs import AttackSettings, measure_attack
from equilibria.models import EquilibriumClassifier
from equilibria.models.base import predicted_classes
from equilibria.models.mopteq.models import Direction, branch_features, perturbed_logits
from equilibria.solvers import Anderson, RelativeResidual
from equilibria.training.experiment import Experiment

Numbers = dict[str, float | None]

RELATED_IMAGES = 100
TRACED_IMAGES = 100
TRACED_ITERATIONS = 50
STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Sizes ε of the perturbation of features, whose channels have standard deviation 1."""
DRAWS = 5
"""Number of random perturbations per image that are averaged."""
ATTACK_BUDGET = 2 / 255
ATTACK_ITERATIONS = (1, 2, 3, 5, 10, 20)
ATTACKED_IMAGES = 200
SIGNIFICANT_DIGITS = 4
"""Significant digits of the numbers in a series."""


@torch.no_grad()
def branch_relations(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure heritage and diversity of test images, and correlations of channels (Figure 2).

    The figure is that of the MOptEqs paper. Only the ratio of heritage to diversity can be compared
    between models.
    """
    model = _classifier(experiment)
    images, _ = experiment.some_test_images(RELATED_IMAGES)
    solution = model.solve(images.to(device))
    z = branch_features(model.layer.cell, solution.state, solution.context)
    measured = relations(z)
    heritage, diversity = measured.heritage, measured.diversity
    products = measured.correlation
    entries = {f"{k},{j}": v for k, row in enumerate(products) for j, v in enumerate(row)}
    return {
        "average_heritage": float(heritage.mean()),
        "average_diversity": float(diversity.mean()),
        "heritage_ratio": float(heritage.mean() / diversity.mean()),
        "diagonal_share": float(products.diagonal().mean() / products.mean()),
        **_series("average_heritage", enumerate(heritage)),
        **_series("average_diversity", enumerate(diversity)),
        **_series("correlation", entries.items()),
    }


@torch.no_grad()
def solve_trace(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure ‖T^{j+1} − T^j‖ / ‖T^j‖ for the images T^j of the iterates j of Anderson's method.

    The result is the geometric mean over test images.
    """
    model = _classifier(experiment)
    images, _ = experiment.some_test_images(TRACED_IMAGES)
    never = RelativeResidual(1e-300)  # below rounding errors, so that no sample stops
    solver = Anderson(stop=never, max_iterations=TRACED_ITERATIONS)
    trace = model.solve(images.to(device), solver=solver, trace=True).trace
    assert trace is not None
    means = trace.residual.log().nanmean(dim=1).exp()
    return _series("residual", enumerate(means))


@torch.no_grad()
def perturbations(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure the accuracy for perturbed features g(x) − δ over ‖δ‖∞ (MOptEqs, Figure 3a).

    The perturbation δ of the stem's features is reconstructed from an equilibrium, or random.
    """
    model = _classifier(experiment)
    accuracies: Numbers = {}
    directions: dict[Direction, int] = {"reconstructed": 1, "binomial": DRAWS, "uniform": DRAWS}
    for direction, draws in directions.items():
        generator = torch.Generator().manual_seed(0)
        correct = dict.fromkeys(STRENGTHS, 0.0)
        total = clean = 0
        for images, labels in Batches(experiment.test, experiment.recipe.training.batch_size):
            images, labels = images.to(device), labels.to(device)
            total += len(labels)
            clean += int((predicted_classes(model(images)) == labels).sum())
            for strength in STRENGTHS:
                for _ in range(draws):
                    logits = perturbed_logits(
                        model, images, strength, direction=direction, generator=generator
                    )
                    hits = (predicted_classes(logits) == labels).sum()
                    correct[strength] += float(hits) / draws
        shares = {0.0: clean / total} | {at: hits / total for at, hits in correct.items()}
        accuracies |= _series(f"{direction}_accuracy", shares.items())
    return accuracies


def attack_iterations(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure the accuracy under PGD over the number of its steps (MOptEqs, Figure 3b).

    The steps have a fixed size.
    """
    model = _classifier(experiment)
    is_whole = not any(name.endswith("_samples") for name in experiment.recipe.data.options)
    count = len(experiment.test) if is_whole else ATTACKED_IMAGES
    images, labels = (tensor.to(device) for tensor in experiment.some_test_images(count))
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
        raise TypeError(f"expected an EquilibriumClassifier, got {type(model).__name__}")
    return model


def _series(name: str, values: Iterable[tuple[object, SupportsFloat]]) -> Numbers:
    """Name the values by their positions; values that are not finite are left out."""
    numbers = ((place, float(value)) for place, value in values)
    return {
        f"{name}@{p}": float(f"{v:.{SIGNIFICANT_DIGITS}g}") for p, v in numbers if math.isfinite(v)
    }
