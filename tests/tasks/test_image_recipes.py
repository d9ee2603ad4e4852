"""The recipes of generators, autoencoders and restorers fit the images of their data sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equilibria.training import load_recipe
from equilibria.training.experiment import Experiment

SMALL = ("data.options.train_samples=10", "data.options.test_samples=4", "threads=null")
RECIPES = {
    "mnist-generator": ("task.options.evaluation_iterations=2",),
    "cifar10-generator": ("task.options.evaluation_iterations=2",),
    "cifar10-vae": (),
    "mnist-vae": (),
    "mnist-rae": (),
    "mnist-ae": (),
    "mnist-mdeq-vae": (),
    "mnist-restore-ae-denoise": (),
    "mnist-restore-ae-inpaint": (),
    "mnist-restore-mdeq-ae-denoise": (),
    "mnist-restore-deq-denoise": (),
    "mnist-restore-jiio-denoise": ("task.options.evaluation_iterations=2",),
    "mnist-restore-jiio-inpaint": ("task.options.evaluation_iterations=2",),
    "cifar10-restore-dncnn-denoise": (),
    "cifar10-restore-deq-denoise": (),
    "cifar10-restore-ae-inpaint": ("data.validation=0",),
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipe_trains_and_evaluates(name: str, real_data: Path) -> None:
    experiment = Experiment.of(load_recipe(name, [*SMALL, *RECIPES[name]]))
    images, labels = experiment.training.fetch(torch.arange(10))
    step = experiment.task.training_step(experiment.model, images, labels)
    step.loss.backward()
    assert step.correct is None
    evaluation = experiment.evaluate()
    assert evaluation.samples == 4
    assert evaluation.figures["psnr"] is not None
    assert evaluation.figures["psnr"] > 0
