"""Measurements on images that differ from the training data, and saliency (GEQ, 4.3 and 4.4)."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from equilibria.analysis.saliency import grad_cam
from equilibria.data import Batches, Selection, Source, data_root, dataset_card, load_dataset
from equilibria.data.common_corruptions import STRENGTHS, CorruptedImages
from equilibria.data.source import evenly_spread
from equilibria.training.experiment import Experiment

Numbers = dict[str, float | None]

CORRUPTED_IMAGES = 100
"""Number of test images to corrupt in a quick setting; otherwise all."""
CORRUPTED_FILES = "cifar10-c"


def unseen(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure the accuracy on subclasses that are not in the training data (GEQ, Table 3)."""
    data = experiment.recipe.data
    options = {k: v for k, v in data.options.items() if not k.endswith("_samples")}
    other = load_dataset(data.name, data.root, **{**options, "subclasses": "unseen"})
    accuracy = _accuracy(experiment, other.test)
    return {"unseen_accuracy": accuracy, "unseen_samples": float(len(other.test))}


def corruptions(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure the accuracy under 19 corruptions, each averaged over 5 severities (GEQ, Figure 2).

    Uses the files of CIFAR-10-C if they are available and the setting is not quick. Otherwise it
    corrupts the test images itself.
    """
    is_whole = "test_samples" not in experiment.recipe.data.options
    files = _corrupted_files(experiment) if is_whole else None
    images = experiment.test
    if not is_whole:
        images = Selection(images, evenly_spread(images, CORRUPTED_IMAGES))
    measured: Numbers = {}
    for name in STRENGTHS:
        source: Source = CorruptedImages(images, name)
        if files is not None:
            source = load_dataset(CORRUPTED_FILES, files, corruption=name).test
        measured[f"corrupted_{name}"] = _accuracy(experiment, source)
    accuracies = [value for value in measured.values() if value is not None]
    measured["corrupted_accuracy"] = statistics.fmean(accuracies)
    measured["uncorrupted_accuracy"] = _accuracy(experiment, images)
    measured["corrupted_here"] = float(files is None)
    return measured


def _corrupted_files(experiment: Experiment) -> Path | None:
    """Return the data root if it contains CIFAR-10-C and the run uses CIFAR-10, else None."""
    if experiment.recipe.data.name != "cifar10":
        return None
    root = data_root(experiment.recipe.data.root)
    return None if dataset_card(CORRUPTED_FILES).find(root) is None else root


def _accuracy(experiment: Experiment, source: Source) -> float | None:
    batches = Batches(source, experiment.recipe.training.evaluation_batch_size)
    return experiment.task.evaluate(experiment.model, batches).accuracy


SALIENT_IMAGES = 100


def saliency(experiment: Experiment, device: torch.device) -> Numbers:
    """Measure the share of an image that contains half of its Grad-CAM (GEQ, Figure 3).

    Smaller is more concentrated. The map of the predicted class has the resolution of the feature;
    the result is the median over test images. A map that is zero everywhere counts as uniform.
    """
    images, _ = experiment.some_test_images(SALIENT_IMAGES)
    maps = grad_cam(experiment.model, images.to(device)).flatten(1).double()
    maps = torch.where(maps.sum(dim=1, keepdim=True) > 0, maps, 1.0)
    shares = (maps / maps.sum(dim=1, keepdim=True)).sort(dim=1, descending=True).values
    needed = (shares.cumsum(dim=1) < 0.5).sum(dim=1) + 1
    return {"salient_share": float((needed / shares.shape[1]).median())}
