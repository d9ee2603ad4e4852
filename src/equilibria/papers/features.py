"""How large the features of a model are, over its test images."""

from __future__ import annotations

import torch

from equilibria.data import Batches
from equilibria.models import EquilibriumClassifier
from equilibria.training import Experiment


@torch.no_grad()
def features(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """The means of |z| and z² over the whole feature tensor, as OptEq's Table 3 takes them."""
    model = experiment.model
    if not isinstance(model, EquilibriumClassifier):
        return {"feature_size": None, "feature_energy": None}
    model.eval()
    count, size, energy = 0, 0.0, 0.0
    for images, _ in Batches(experiment.test, experiment.recipe.training.batch_size):
        z = model.features(images.to(device)).double()
        count += z.numel()
        size += float(z.abs().sum())
        energy += float(z.square().sum())
    return {"feature_size": size / count, "feature_energy": energy / count}
