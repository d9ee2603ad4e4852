"""Measurements of trained models besides their accuracy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from equilibria.data import Batches, Split
from equilibria.energies.branch_coupling import diversity, heritage
from equilibria.inputs import AttackSettings, measure_attack
from equilibria.models import EquilibriumClassifier
from equilibria.models.base import predicted_classes
from equilibria.models.mopteq.models import Direction, branch_features, perturbed_logits
from equilibria.papers.studies.protocol import Measure

FEATURE_IMAGES = 500
"""Number of test images over which H and D are averaged."""
ATTACKED_IMAGES = 500
BUDGET = 8 / 255
ATTACK_STEPS = 10
PERTURBED_IMAGES = 2000
EPSILON = 0.5
RANDOM_DRAWS = 3
BATCH = 250


def some_images(test: Split, count: int, seed: int) -> Split:
    """Return a random subset of the test images, determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return test.subset(torch.randperm(len(test), generator=generator)[:count])


@torch.no_grad()
def heritage_diversity(model: nn.Module, test: Split, seed: int) -> Mapping[str, float]:
    """Measure heritage H, diversity D and H/D of neighboring branches, with features of norm 1.

    H is the sum of the inner products of corresponding channels. D is the sum of the absolute
    values of all other inner products, divided by C − 1 for C channels, so that both are sums of C
    numbers. Without the scaling to norm 1, a model could raise H by larger features or lower D by
    smaller ones.
    """
    assert isinstance(model, EquilibriumClassifier)
    solution = model.solve(some_images(test, FEATURE_IMAGES, seed).images)
    z = branch_features(model.layer.cell, solution.state, solution.context)
    norms = [branch.flatten(1).norm(dim=1).clamp_min(1e-12) for branch in z]
    unit = [branch / norm[:, None, None, None] for branch, norm in zip(z, norms, strict=True)]
    pairs = list(zip(unit, [*unit[1:], unit[0]], strict=True))
    H = torch.stack([heritage(first, second) for first, second in pairs]).mean()
    others = z[0].shape[1] - 1
    D = torch.stack([diversity(first, second) for first, second in pairs]).mean() / others
    return {"H": float(H), "D": float(D), "ratio": float(H / D)}


def robustness(model: nn.Module, test: Split, seed: int) -> Mapping[str, float]:
    """Measure the accuracy under PGD with perturbations of limited L∞ norm."""
    images = some_images(test, ATTACKED_IMAGES, seed)
    settings = AttackSettings(method="pgd", norm="linf", eps=BUDGET, steps=ATTACK_STEPS)
    result = measure_attack(model, images.images, images.labels, settings, BATCH)
    return {"pgd": result.robust_accuracy}


@torch.no_grad()
def perturbations(model: nn.Module, test: Split, seed: int) -> Mapping[str, float]:
    """Measure the accuracy for features g(x) − δ, δ reconstructed from the first branch, or random.

    The entries of the reconstructed and the "binomial" perturbation δ are ±ε, those of the
    "uniform" one lie between −ε and ε.
    """
    assert isinstance(model, EquilibriumClassifier)
    images = some_images(test, PERTURBED_IMAGES, seed)
    directions: dict[Direction, int] = {
        "reconstructed": 1,
        "binomial": RANDOM_DRAWS,
        "uniform": RANDOM_DRAWS,
    }
    shares: dict[str, float] = {}
    for direction, draws in directions.items():
        generator = torch.Generator().manual_seed(seed)
        correct = 0
        for x, labels in Batches(images, BATCH):
            for _ in range(draws):
                logits = perturbed_logits(
                    model, x, EPSILON, direction=direction, generator=generator
                )
                correct += int((predicted_classes(logits) == labels).sum())
        shares[direction] = correct / draws / len(images)
    return shares


MEASURES: dict[str, Measure] = {
    "heritage_diversity": heritage_diversity,
    "robustness": robustness,
    "perturbations": perturbations,
}
"""Measurements by the name before the dot: `robustness.pgd` is the entry `pgd` of `robustness`."""
