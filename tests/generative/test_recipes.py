"""The recipes of generators fit the images of their data sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equilibria.training import Experiment, load_recipe

SMALL = ("data.options.train_samples=10", "data.options.test_samples=4", "threads=null")
RECIPES = {
    "mnist-generator": ("task.options.evaluation_iterations=2",),
    "cifar10-generator": ("task.options.evaluation_iterations=2",),
    "cifar10-vae": (),
    "mnist-vae": (),
    "mnist-rae": (),
    "mnist-ae": (),
    "mnist-mdeq-vae": (),
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_trains_and_evaluates_on_its_images(name: str, real_data: Path) -> None:
    experiment = Experiment.of(load_recipe(name, [*SMALL, *RECIPES[name]]))
    images, labels = experiment.training.fetch(torch.arange(10))
    step = experiment.task.training_step(experiment.model, images, labels)
    step.loss.backward()
    assert step.correct is None
    found = experiment.evaluate()
    assert found.samples == 4
    assert found.figures["psnr"] is not None
    assert found.figures["psnr"] > 0
