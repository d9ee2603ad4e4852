"""How a run does on other images than those of its training, and where it looks (GEQ, 4.3, 4.4)."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from equilibria.data import Batches, Selection, Source, data_root, dataset_card, load_dataset
from equilibria.data.common_corruptions import STRENGTHS, CorruptedImages
from equilibria.data.source import evenly_spread
from equilibria.report.saliency import grad_cam
from equilibria.training.experiment import Experiment

Numbers = dict[str, float | None]

CORRUPTED_IMAGES = 100
"""Test images that are corrupted in a quick setting; otherwise all are."""
CORRUPTED_FILES = "cifar10-c"


def unseen(experiment: Experiment, device: torch.device) -> Numbers:
    """The accuracy on subclasses that the run has not seen (GEQ, Table 3)."""
    data = experiment.recipe.data
    options = {k: v for k, v in data.options.items() if not k.endswith("_samples")}
    other = load_dataset(data.name, data.root, **{**options, "subclasses": "unseen"})
    found = _judged(experiment, other.test)
    return {"unseen_accuracy": found, "unseen_samples": float(len(other.test))}


def corruptions(experiment: Experiment, device: torch.device) -> Numbers:
    """The accuracy under each of nineteen corruptions, the mean over five severities (GEQ, F2).

    On the files of CIFAR-10-C where they are here; otherwise, and in a quick setting, on images
    that are corrupted here.
    """
    whole = "test_samples" not in experiment.recipe.data.options
    files = _corrupted_files(experiment) if whole else None
    images = experiment.test
    if not whole:
        images = Selection(images, evenly_spread(images, CORRUPTED_IMAGES))
    found: Numbers = {}
    for name in STRENGTHS:
        source: Source = CorruptedImages(images, name)
        if files is not None:
            source = load_dataset(CORRUPTED_FILES, files, corruption=name).test
        found[f"corrupted_{name}"] = _judged(experiment, source)
    accuracies = [value for value in found.values() if value is not None]
    found["corrupted_accuracy"] = statistics.fmean(accuracies)
    found["uncorrupted_accuracy"] = _judged(experiment, images)
    found["corrupted_here"] = float(files is None)
    return found


def _corrupted_files(experiment: Experiment) -> Path | None:
    """The folder of data sets, if it has the files of CIFAR-10-C and the run is on CIFAR-10."""
    if experiment.recipe.data.name != "cifar10":
        return None
    root = data_root(experiment.recipe.data.root)
    return None if dataset_card(CORRUPTED_FILES).find(root) is None else root


def _judged(experiment: Experiment, source: Source) -> float | None:
    batches = Batches(source, experiment.recipe.training.evaluation_batch_size)
    return experiment.task.evaluate(experiment.model, batches).accuracy


SALIENT_IMAGES = 100


def saliency(experiment: Experiment, device: torch.device) -> Numbers:
    """How much of an image holds half of its Grad-CAM: the less, the more concentrated (GEQ, F3).

    At the resolution of the feature; the median over test images, of the class that is said. A
    map that vanishes, as none of the feature speaks for the class, counts as even.
    """
    images, _ = experiment.some_test_images(SALIENT_IMAGES)
    maps = grad_cam(experiment.model, images.to(device)).flatten(1).double()
    maps = torch.where(maps.sum(dim=1, keepdim=True) > 0, maps, 1.0)
    shares = (maps / maps.sum(dim=1, keepdim=True)).sort(dim=1, descending=True).values
    needed = (shares.cumsum(dim=1) < 0.5).sum(dim=1) + 1
    return {"salient_share": float((needed / shares.shape[1]).median())}
