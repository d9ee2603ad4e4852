"""What is measured of a trained model, besides its accuracy."""

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

SEEN = 500
"""Test images on which H and D are averaged."""
ATTACKED = 500
BUDGET = 8 / 255
ATTACK_STEPS = 10
PERTURBED = 2000
EPSILON = 0.5
RANDOM_DRAWS = 3
BATCH = 250


def some_images(test: Split, count: int, seed: int) -> Split:
    """Test images that belong to a seed."""
    chance = torch.Generator().manual_seed(seed)
    return test.subset(torch.randperm(len(test), generator=chance)[:count])


@torch.no_grad()
def heritage_diversity(model: nn.Module, test: Split, seed: int) -> Mapping[str, float]:
    """H and D of neighboring branches whose features are scaled to length 1, and H/D.

    H is the sum of the inner products of corresponding channels, D that of the sizes of all others
    divided by C − 1, so that both are sums of C numbers. Scaled, because a model could raise H, or
    lower D, by larger or smaller features alone.
    """
    assert isinstance(model, EquilibriumClassifier)
    solution = model.solve(some_images(test, SEEN, seed).images)
    z = branch_features(model.layer.cell, solution.state, solution.context)
    unit = [one / one.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None, None] for one in z]
    pairs = list(zip(unit, [*unit[1:], unit[0]], strict=True))
    H = torch.stack([heritage(one, two) for one, two in pairs]).mean()
    others = z[0].shape[1] - 1
    D = torch.stack([diversity(one, two) for one, two in pairs]).mean() / others
    return {"H": float(H), "D": float(D), "ratio": float(H / D)}


def robustness(model: nn.Module, test: Split, seed: int) -> Mapping[str, float]:
    """The accuracy under PGD, in the maximum norm."""
    images = some_images(test, ATTACKED, seed)
    settings = AttackSettings(method="pgd", norm="linf", eps=BUDGET, steps=ATTACK_STEPS)
    found = measure_attack(model, images.images, images.labels, settings, BATCH)
    return {"pgd": found.robust_accuracy}


@torch.no_grad()
def perturbations(model: nn.Module, test: Split, seed: int) -> Mapping[str, float]:
    """The accuracy at g(x) − δ: δ reconstructed from the first branch, or random.

    All entries of the reconstructed δ are ±ε, and so are those of the "binomial" one; those of the
    "uniform" one lie between.
    """
    assert isinstance(model, EquilibriumClassifier)
    images = some_images(test, PERTURBED, seed)
    ways: dict[Direction, int] = {
        "reconstructed": 1,
        "binomial": RANDOM_DRAWS,
        "uniform": RANDOM_DRAWS,
    }
    shares: dict[str, float] = {}
    for direction, draws in ways.items():
        chance = torch.Generator().manual_seed(seed)
        right = 0
        for x, labels in Batches(images, BATCH):
            for _ in range(draws):
                logits = perturbed_logits(model, x, EPSILON, direction=direction, generator=chance)
                right += int((predicted_classes(logits) == labels).sum())
        shares[direction] = right / draws / len(images)
    return shares


MEASURES: dict[str, Measure] = {
    "heritage_diversity": heritage_diversity,
    "robustness": robustness,
    "perturbations": perturbations,
}
"""By the name before the dot: `robustness.pgd` is what `robustness` calls `pgd`."""
