"""From a recipe to a trained model in a run folder, and back from the folder to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equilibria.data import (
    Augmentation,
    Batches,
    Chain,
    DataSet,
    Source,
    build_augmentation,
    load_dataset,
    stratified_split,
)
from equilibria.models import create_model, model_options
from equilibria.tasks import Classification, Evaluation, evaluate
from equilibria.training.checkpoint import Checkpoints, load_weights
from equilibria.training.loop import EVALUATION_BATCH, set_tolerance, train
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.recipe import Recipe, load_recipe
from equilibria.training.run import RunFolder

VALIDATION_SEED = 20220613
"""Fixed, so that runs of different seeds are compared on the same held-out images."""


@dataclass(frozen=True)
class Experiment:
    """What a recipe stands for, ready to train."""

    recipe: Recipe
    model: nn.Module
    data: DataSet[Source]
    task: Classification
    augmentation: Augmentation | None
    training: Source
    validation: Source | None

    @classmethod
    def of(cls, recipe: Recipe) -> Experiment:
        """Load the data and make the model, its initial weights drawn with the recipe's seed."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        data = load_dataset(recipe.data.name, root=recipe.data.root, **recipe.data.options)
        torch.manual_seed(recipe.training.seed)
        model = build_model(recipe, data)
        training: Source = data.train
        validation: Source | None = None
        if recipe.data.validation:
            training, validation = stratified_split(
                data.train, recipe.data.validation, VALIDATION_SEED
            )
        steps = tuple(build_augmentation(step) for step in recipe.data.augmentation)
        return cls(
            recipe=recipe,
            model=model,
            data=data,
            task=Classification(label_smoothing=recipe.task.label_smoothing),
            augmentation=Chain(steps) if steps else None,
            training=training,
            validation=validation,
        )

    def train(
        self,
        run: RunFolder,
        device: torch.device,
        *,
        on_epoch: Callable[[EpochMetrics], None] | None = None,
        on_step: Callable[[StepProgress], None] | None = None,
    ) -> list[EpochMetrics]:
        """Train, keeping checkpoints and metrics in the run's folder; go on where it was left."""

        def record(metrics: EpochMetrics) -> None:
            run.append_metrics(metrics)
            if on_epoch is not None:
                on_epoch(metrics)

        history = train(
            self.model,
            self.task,
            self.training,
            self.recipe.training,
            augmentation=self.augmentation,
            validation=self.validation,
            device=device,
            checkpoints=Checkpoints(run.checkpoints),
            on_epoch=record,
            on_step=on_step,
        )
        run.save_weights(self.model, {"model": self.recipe.model.name})
        return history

    def evaluate(self) -> Evaluation:
        """On the test images."""
        return evaluate(self.model, Batches(self.data.test, EVALUATION_BATCH))


def build_model(recipe: Recipe, data: DataSet[Source]) -> nn.Module:
    """The recipe's model for these images."""
    options: dict[str, Any] = {
        "in_channels": data.channels,
        "num_classes": len(data.class_names),
    }
    known = model_options(recipe.model.name)
    fitting = {name: value for name, value in options.items() if name in known}
    return create_model(recipe.model.name, **{**fitting, **recipe.model.options})


def trained(folder: Path, *, device: torch.device | str = "cpu") -> Experiment:
    """The experiment of a finished run, its model with the weights of the run."""
    run = RunFolder(folder)
    for path in (run.config, run.weights):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: name the folder of a finished run, as `equilibria train` "
                "writes one"
            )
    experiment = Experiment.of(load_recipe(run.config))
    try:
        load_weights(experiment.model, run.weights)
    except RuntimeError as error:
        name = experiment.recipe.model.name
        raise ValueError(f"{run.weights} does not fit {name!r}: {error}") from None
    set_tolerance(experiment.model, experiment.recipe.training.evaluation_tolerance)
    experiment.model.to(device).eval()
    return experiment
