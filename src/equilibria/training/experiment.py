"""From a recipe to a trained model in a run folder, and back from the folder to the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.data import (
    Augmentation,
    Batches,
    Chain,
    DataSet,
    Source,
    build_augmentation,
    evenly_spread,
    load_dataset,
    read_into_memory,
    stratified_split,
)
from equilibria.equilibrium import Record, solving
from equilibria.models import create_model, model_options
from equilibria.tasks import (
    Classification,
    Evaluation,
    Segmentation,
    Task,
    create_task,
)
from equilibria.training.files import Checkpoints, RunFolder, load_weights, save_weights
from equilibria.training.loop import fit
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.processes import ALONE, Processes, choose_device
from equilibria.training.recipe import Recipe, load_recipe, told_where

VALIDATION_SEED = 20220613
"""Fixed, so that runs of different seeds are compared on the same held-out images."""


@dataclass(frozen=True)
class Experiment:
    """What a recipe stands for, ready to train."""

    recipe: Recipe
    model: nn.Module
    data: DataSet
    task: Task
    augmentation: Augmentation
    training: Source
    validation: Source | None
    test: Source

    @classmethod
    def of(cls, recipe: Recipe) -> Experiment:
        """Load the data and make the model, its initial weights drawn with the recipe's seed."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        with told_where("data.options"):
            data = load_dataset(recipe.data.name, root=recipe.data.root, **recipe.data.options)
        with told_where("task.options"):
            task = _task(recipe, data)
        _check_fit(recipe, data)
        normalization = (data.mean, data.std) if recipe.data.normalize else None
        options = {**fitting_options(recipe.model.name, data), **recipe.model.options}
        if normalization is not None:
            if None in normalization:
                raise ValueError(
                    f"no mean and variance are published for {data.name}: set data.normalize to "
                    "false"
                )
            options["normalize"] = normalization
        torch.manual_seed(recipe.training.seed)
        with told_where("model.options"):
            model = create_model(recipe.model.name, **options)
        facts = {  # `load` describes them.
            "class_names": data.class_names,
            "image_shape": data.image_shape,
            "frame": data.frame,
            "normalization": normalization,
        }
        for name, value in facts.items():
            setattr(model, name, value)
        with told_where("data.augmentation"):
            augmentation = Chain(tuple(map(build_augmentation, recipe.data.augmentation)))
        training, validation = _parts(recipe, data)
        if recipe.data.in_memory:
            training = read_into_memory(training)
        return cls(
            recipe=recipe,
            model=model,
            data=data,
            task=task,
            augmentation=augmentation,
            training=training,
            validation=validation,
            test=data.test,
        )

    def train(
        self,
        run: RunFolder,
        device: torch.device,
        *,
        processes: Processes = ALONE,
        on_epoch: Callable[[EpochMetrics], None] | None = None,
        on_step: Callable[[StepProgress], None] | None = None,
    ) -> list[EpochMetrics]:
        """Train, keeping checkpoints and metrics in the run's folder; go on where it was left."""

        def record(metrics: EpochMetrics) -> None:
            run.append_metrics(metrics)
            if on_epoch is not None:
                on_epoch(metrics)

        history = fit(
            self.model,
            self.task,
            self.training,
            self.recipe.training,
            augmentation=self.augmentation,
            validation=self.validation,
            device=device,
            checkpoints=Checkpoints(run.checkpoints),
            processes=processes,
            on_epoch=record,
            on_step=on_step,
        )
        if processes.leads:
            save_weights(self.model, run.weights, {"model": self.recipe.model.name})
        return history

    def evaluate(self, processes: Processes = ALONE) -> Evaluation:
        """On the test images, of which each process takes its share if there are enough."""
        if len(self.test) < processes.count:
            processes = ALONE
        batches = Batches(processes.part_of(self.test), self.recipe.training.evaluation_batch_size)
        with self.solving():
            return self.task.evaluate(self.model, batches, processes.gathered)

    def solving(self) -> AbstractContextManager[Record]:
        """The layers of the model as they solve in an evaluation."""
        return solving(self.model, tolerance=self.recipe.training.evaluation_tolerance)

    def some_test_images(self, count: int) -> tuple[Tensor, Tensor]:
        """Images and labels, spread evenly over the test images."""
        return self.data.test.fetch(evenly_spread(self.data.test, count))


def _task(recipe: Recipe, data: DataSet) -> Task:
    if recipe.task.name is not None:
        task = create_task(recipe.task.name, **recipe.task.options)
        if recipe.data.normalize and task.draws_pictures:
            raise ValueError(
                f"the task {recipe.task.name!r} draws pictures with values in [0, 1]: set "
                "data.normalize to false"
            )
        if recipe.training.warm_start and task.starts_at_zero:
            raise ValueError(
                "training.warm_start has nothing to start: the task searches every latent from "
                "zero, and the equilibrium with it; turn it off"
            )
        return task
    smoothing = recipe.task.label_smoothing
    if data.kind == "classification":
        return Classification(label_smoothing=smoothing)
    if data.kind == "segmentation":
        if smoothing:
            raise ValueError("task.label_smoothing is for classification: remove it")
        return Segmentation() if data.ignore_index is None else Segmentation(data.ignore_index)
    if data.kind == "episodes":
        raise ValueError(
            f"{data.name} holds episodes: set task.name to few-shot, maml, reptile or imaml"
        )
    raise ValueError(
        f"{data.name} has no labels: name a task that needs none (task.name), or take one of the "
        "data sets with labels that `equilibria datasets` lists"
    )


def _check_fit(recipe: Recipe, data: DataSet) -> None:
    """Channels and classes that the recipe itself gives: training would stumble over them."""
    options = recipe.model.options
    if options.get("in_channels", data.channels) != data.channels:
        raise ValueError(
            f"{data.name} has images of {data.channels} channels: remove model.options.in_channels"
        )
    classes = options.get("num_classes", data.num_classes)
    if recipe.task.name is None and classes < data.num_classes:
        raise ValueError(
            f"{data.name} has {data.num_classes} classes: remove model.options.num_classes"
        )


def _parts(recipe: Recipe, data: DataSet) -> tuple[Source, Source | None]:
    """What is trained on, and what is evaluated after every epoch."""
    share = recipe.data.validation
    if share == "own":
        if data.validation is None:
            raise ValueError(
                f"{data.name} has no validation part of its own: give data.validation a share of "
                "the training images, e.g. 0.1"
            )
        return data.train, data.validation
    if not share:
        return data.train, None
    return stratified_split(data.train, share, VALIDATION_SEED)


def fitting_options(model: str, data: DataSet) -> dict[str, Any]:
    """The options of a model that follow from the data, as far as it has them."""
    channels, height, _ = data.image_shape
    options = {"in_channels": channels, "num_classes": data.num_classes, "image_size": height}
    known = model_options(model)
    return {name: value for name, value in options.items() if name in known}


def trained(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    weights: Literal["last", "best"] = "last",
) -> Experiment:
    """The experiment of a finished run, its model with the weights of the run.

    "best" are those of the epoch that did best on the validation images.
    """
    run, place = RunFolder(Path(folder)), choose_device(device)
    file = run.weights if weights == "last" else Checkpoints(run.checkpoints).best
    if run.weights.is_file() and not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing: the run had no validation images (data.validation) to find the "
            "best epoch with"
        )
    for path in (run.config, file):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: name the folder of a finished run, as `equilibria train` "
                "writes one"
            )
    recipe = load_recipe(run.config)
    tolerance = recipe.training.evaluation_tolerance
    if tolerance is not None and "tolerance" in model_options(recipe.model.name):
        options = {**recipe.model.options, "tolerance": tolerance}
        recipe = replace(recipe, model=replace(recipe.model, options=options))
    experiment = Experiment.of(recipe)
    try:
        load_weights(experiment.model, file)
    except RuntimeError as error:
        name = experiment.recipe.model.name
        raise ValueError(f"{file} does not fit {name!r}: {error}") from None
    experiment.model.to(place).eval()
    return experiment
