"""Experiments: training a model according to a recipe, and loading it from a run folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from equilibria.certificates import CertifiedExit
from equilibria.data import (
    Augmentation,
    Batches,
    DataFileError,
    DataSet,
    MissingDataError,
    Source,
    fingerprint,
    load_dataset,
    stratified_split,
)
from equilibria.data.augment import Chain, build_augmentation
from equilibria.data.batches import fetch_readable, read_into_memory, unreadable_images
from equilibria.data.source import evenly_spread
from equilibria.data.survey import mean_and_deviation
from equilibria.data.workers import usual_workers
from equilibria.equilibrium import solving
from equilibria.equilibrium.solving import Record
from equilibria.images import AS_ON_DISK, ImageSpec, Kind
from equilibria.models import create_model, model_options
from equilibria.tasks import (
    Autoencoding,
    Classification,
    Evaluation,
    Reconstruction,
    Segmentation,
    Task,
    create_task,
)
from equilibria.tasks.images import latents_of
from equilibria.training.checkpoints import Checkpoints
from equilibria.training.files import load_weights, save_tensors, save_weights
from equilibria.training.folder import RunFolder
from equilibria.training.loop import fit
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.processes import ALONE, Processes, choose_device
from equilibria.training.recipe import (
    GIVEN,
    Recipe,
    errors_at,
    is_of_package,
    validation_messages,
)
from equilibria.training.sizes import DEFAULT_GIGABYTES, check_model_size, current_limit
from equilibria.training.weights_source import Weights, source_of

KEPT_LATENTS = 2000
"""Number of latents of training images that a run of a generator or an autoencoder keeps."""
SMALL_IMAGE, FEW_CLASSES = 3 * 256**2, 1000
"""Largest image (in numbers) and number of classes for which models of the package need no check of
their size. The check takes over a second, because PyTorch imports its compiler for it."""
READ_BATCH_SIZE = 32
"""Number of images per batch when images are read into memory."""
VALIDATION_SEED = 20220613
"""Fixed, so that runs with different seeds have the same held-out images."""


AnyRun = TypeVar("AnyRun", bound="RecipeModel")


@dataclass(frozen=True)
class RecipeModel:
    """Model of a recipe, with its task and the description of its images, but without data.

    Attributes:
        recipe: The recipe.
        model: The model.
        images: Description of the images that the model expects.
        task: The task.

    Examples:
        >>> from equilibria.training.experiment import RecipeModel, trained_model
        >>> run = trained_model("digits-opteq")
        >>> isinstance(run, RecipeModel), run.images.class_names[:2]
        (True, ('0', '1'))
    """

    recipe: Recipe
    model: nn.Module
    images: ImageSpec
    task: Task

    def solving(self) -> AbstractContextManager[Record]:
        """Return a context in which the layers solve to the tolerance of evaluation."""
        return solving(self.model, tolerance=self.recipe.training.evaluation_tolerance)

    def model_options(self) -> dict[str, Any]:
        """Return the options that were passed to `create_model`."""
        return _options(self.recipe, self.images)

    def until_certain(self: AnyRun) -> AnyRun:
        """Return a copy whose model solves each image only until its class is certain."""
        if self.images.kind != "classification":
            raise ValueError(
                "certificates need a run that classifies images, but the images are of kind "
                f"{self.images.kind!r}"
            )
        return replace(self, model=CertifiedExit(self.model, tuple(self.images.image_shape)))


@dataclass(frozen=True)
class Experiment(RecipeModel):
    """Model, task and data of a recipe, ready to train.

    Attributes:
        data: The data set.
        augmentation: Augmentation of training images.
        training: Training samples, without those that are held out.
        validation: Samples that are evaluated after every epoch.
        test: Test samples.

    Examples:
        >>> recipe = eq.training.load_recipe("digits-opteq")
        >>> from equilibria.training.experiment import Experiment
        >>> experiment = Experiment.of(recipe)
        >>> len(experiment.training), len(experiment.test), type(experiment.task).__name__
        (1347, 450, 'Classification')
    """

    data: DataSet
    augmentation: Augmentation
    training: Source
    validation: Source | None
    test: Source

    @classmethod
    def of(cls, recipe: Recipe, data: DataSet | None = None) -> Experiment:
        """Load the data and create the model, with initial weights from the seed of the recipe.

        Args:
            recipe: The recipe.
            data: Data set in place of the one that the recipe names.
        """
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        if data is None:
            data = _data(recipe)
        with errors_at("task.options"):
            task = _task(recipe, data.kind, data.ignore_index)
        training, validation = _parts(recipe, data)
        images = ImageSpec(
            class_names=data.class_names,
            image_shape=data.image_shape,
            frame=AS_ON_DISK if task.any_size else data.frame,
            normalization=_normalization(data, training) if recipe.data.normalize else None,
            names_classes=task.names_classes,
            kind=data.kind,
            ignore_index=data.ignore_index,
        )
        torch.manual_seed(recipe.training.seed)
        with errors_at("model.options"):
            _check_fit(recipe, data)
            model = _model(recipe, images)
        with errors_at("data.augmentation"):
            augmentation = Chain(tuple(map(build_augmentation, recipe.data.augmentation)))
        return cls(
            recipe=recipe,
            model=model,
            data=data,
            images=images,
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
        on_read: Callable[[int, int], None] | None = None,
    ) -> list[EpochMetrics]:
        """Train from the last checkpoint in the run's folder; write checkpoints and metrics there.

        Args:
            run: Folder of the run.
            device: Device to train on.
            processes: Processes that train together.
            on_epoch: Callback with the metrics of an epoch.
            on_step: Callback after each step.
            on_read: Callback while images are read into memory, with the number of images read and
                of all images.

        Returns:
            The metrics of all epochs.
        """

        def record(metrics: EpochMetrics) -> None:
            run.settle()
            if on_epoch is not None:
                on_epoch(metrics)

        try:
            training, validation = self._loaded_parts(processes, on_read)
            history = fit(
                self.model,
                self.task,
                training,
                self.recipe.training,
                augmentation=self.augmentation,
                validation=validation,
                device=device,
                checkpoints=Checkpoints(run.checkpoints, run.metrics if processes.leads else None),
                processes=processes,
                workers=self.recipe.data.workers,
                on_epoch=record,
                on_step=on_step,
            )
            if processes.leads:
                self._keep_latents(run, device)
                save_weights(self.model, run.weights, {"model": self.recipe.model.name})
        finally:
            run.abandon()
        return history

    def _keep_latents(self, run: RunFolder, device: torch.device) -> None:
        """Save latents of some training images, so that `generate` does not need the data."""
        if isinstance(self.task, Autoencoding | Reconstruction):
            images, _ = fetch_readable(self.training, evenly_spread(self.training, KEPT_LATENTS))
            self.model.eval()
            with self.solving():
                latents = latents_of(self.model, self.task, images.to(device))
            save_tensors({"latents": latents}, run.latents)

    def _loaded_parts(
        self, processes: Processes, on_read: Callable[[int, int], None] | None
    ) -> tuple[Source, Source | None]:
        """Return the training and validation parts, in memory with `data.in_memory`."""
        parts = [part for part in (self.training, self.validation) if part is not None]
        if self.recipe.data.in_memory:
            done, total = 0, sum(map(len, parts))
            for index, part in enumerate(parts):

                def report(read: int, _: int, before: int = done) -> None:
                    if on_read is not None and processes.leads:
                        on_read(before + read, total)

                workers = self._workers(part, READ_BATCH_SIZE, processes)
                parts[index] = read_into_memory(
                    part, batch=READ_BATCH_SIZE, workers=workers, on_read=report
                )
                done += len(part)
        return parts[0], parts[1] if self.validation is not None else None

    def _workers(self, source: Source, size: int, processes: Processes) -> int:
        workers = self.recipe.data.workers
        return usual_workers(source, size, processes.count) if workers is None else workers

    def facts(self) -> dict[str, Any]:
        """Return the facts for `run.json`: images, and a fingerprint of the training data."""
        data = {"samples": len(self.training), "fingerprint": fingerprint(self.data.train)}
        return {"images": self.images.as_data(), "data": data}

    def unreadable(self) -> dict[str, DataFileError]:
        """Return the errors of images that were skipped because they cannot be read, by path."""
        parts = (self.training, self.test, *([self.validation] if self.validation else []))
        return {path: error for part in parts for path, error in unreadable_images(part).items()}

    def evaluate(self, processes: Processes = ALONE) -> Evaluation:
        """Evaluate the model on the test images, which several processes share."""
        if len(self.test) < processes.count:
            processes = ALONE
        own, size = processes.part_of(self.test), self.recipe.training.evaluation_batch_size
        batches = Batches(own, size, workers=self._workers(own, size, processes))
        with self.solving():
            return self.task.evaluate(self.model, batches, processes.gathered)

    def some_test_images(self, count: int) -> tuple[Tensor, Tensor]:
        """Return images and labels of `count` evenly spaced test images that can be read."""
        return fetch_readable(self.data.test, evenly_spread(self.data.test, count))


def _data(recipe: Recipe) -> DataSet:
    if recipe.data.name == GIVEN:
        raise MissingDataError(
            "the data set was passed in Python and is not stored in a file: pass it again, as in "
            "eq.evaluate(eq.load(RUN), data) or eq.train(RECIPE, data=data)"
        )
    with errors_at("data.options"):
        return load_dataset(recipe.data.name, root=recipe.data.root, **recipe.data.options)


def _task(recipe: Recipe, kind: Kind, ignore_index: int | None) -> Task:
    if recipe.task.name is not None:
        task = create_task(recipe.task.name, **recipe.task.options)
        if recipe.data.normalize and task.draws_pictures:
            raise ValueError(
                f"the task {recipe.task.name!r} produces images with values in [0, 1]: set "
                "data.normalize to false"
            )
        if recipe.training.warm_start and task.starts_at_zero:
            raise ValueError(
                f"training.warm_start has no effect for the task {recipe.task.name!r}, whose "
                "search over latents starts at zero: set it to false"
            )
        return task
    smoothing = recipe.task.label_smoothing
    if kind == "classification":
        return Classification(label_smoothing=smoothing)
    if kind == "segmentation":
        if smoothing:
            raise ValueError("task.label_smoothing is for classification: remove it")
        return Segmentation() if ignore_index is None else Segmentation(ignore_index)
    if kind == "episodes":
        raise ValueError(
            f"{recipe.data.name} holds episodes: set task.name to few-shot, maml, reptile or imaml"
        )
    raise ValueError(
        f"{recipe.data.name} has no labels: set task.name to a task that needs none, or choose a "
        "data set with labels (`equilibria datasets` lists them)"
    )


def _check_fit(recipe: Recipe, data: DataSet) -> None:
    """Raise if channels or classes in the recipe contradict the data."""
    options = recipe.model.options
    if options.get("in_channels", data.channels) != data.channels:
        raise ValueError(
            f"model.options.in_channels is {options['in_channels']}, but the images of "
            f"{data.name} have {data.channels} channels: remove the option"
        )
    classes = options.get("num_classes", data.num_classes)
    if recipe.task.name is None and classes < data.num_classes:
        raise ValueError(
            f"model.options.num_classes is {classes}, but {data.name} has {data.num_classes} "
            "classes: remove the option"
        )


def _parts(recipe: Recipe, data: DataSet) -> tuple[Source, Source | None]:
    """Return the training samples, and those that are evaluated after every epoch."""
    share = recipe.data.validation
    if share == "own":
        if data.validation is None:
            raise ValueError(
                f"{data.name} has no published validation part: set data.validation to a share of "
                "the training images, e.g. 0.1"
            )
        return data.train, data.validation
    if not share:
        return data.train, None
    return stratified_split(data.train, share, VALIDATION_SEED)


def _normalization(data: DataSet, training: Source) -> tuple[Any, Any]:
    """Return mean and standard deviation per channel: published, or measured on a sample."""
    if data.mean is not None and data.std is not None:
        return data.mean, data.std
    if data.kind == "episodes":
        raise ValueError(
            f"{data.name} has no published mean and standard deviation: set data.normalize to false"
        )
    return mean_and_deviation(training)


def fitting_options(model: str, data: DataSet | ImageSpec) -> dict[str, Any]:
    """Return the options of a model that follow from the data, if the model has them.

    Args:
        model: Name of the model.
        data: Data set, or description of its images.

    Examples:
        >>> from equilibria.training.experiment import fitting_options
        >>> fitting_options("opteq-small", eq.data.load_digits())
        {'in_channels': 1, 'num_classes': 10}
    """
    channels, height, _ = data.image_shape
    options = {"in_channels": channels, "num_classes": data.num_classes, "image_size": height}
    supported = model_options(model)
    return {name: value for name, value in options.items() if name in supported}


def _model(recipe: Recipe, images: ImageSpec) -> nn.Module:
    options = _options(recipe, images)
    is_known = current_limit() >= DEFAULT_GIGABYTES and _is_small(images)
    if not (is_known and is_of_package(recipe.model)):
        check_model_size(recipe.model.name, options, images.image_shape)
    return create_model(recipe.model.name, images=images, **options)


def _is_small(images: ImageSpec) -> bool:
    return math.prod(images.image_shape) <= SMALL_IMAGE and images.num_classes <= FEW_CLASSES


def _options(recipe: Recipe, images: ImageSpec) -> dict[str, Any]:
    options = {**fitting_options(recipe.model.name, images), **recipe.model.options}
    if images.normalization is not None:
        options["normalize"] = images.normalization
    return options


def trained(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    weights: Weights = "last",
    root: str | Path | None = None,
) -> Experiment:
    """Load the experiment of a run: its data, and its model with the trained weights.

    For an interrupted run the newest checkpoint is loaded, with a `CheckpointWarning`.

    Args:
        folder: Folder of a run, a file written by `pack`, or the name of a pretrained model.
        device: Device of the model.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        root: Folder of all data sets, if it differs from the recipe's.

    Examples:
        >>> from equilibria.training.experiment import trained
        >>> experiment = trained("digits-opteq")
        >>> experiment.evaluate().accuracy > 0.9
        True
    """
    chosen_device = choose_device(device)
    source = source_of(folder, weights)
    recipe = source.recipe
    if root is not None:
        recipe = replace(recipe, data=replace(recipe.data, root=str(root)))
    experiment = Experiment.of(recipe)
    _load(experiment.model, recipe, source.file, chosen_device)
    return experiment


def trained_model(
    folder: str | Path, *, device: torch.device | str = "cpu", weights: Weights = "last"
) -> RecipeModel:
    """Load the model of a run without its data set.

    The data set is read only if `run.json`, which describes the images, is missing or damaged.

    Args:
        folder: Folder of a run, a file written by `pack`, or the name of a pretrained model.
        device: Device of the model.
        weights: "last", or "best" for the weights of the epoch with the best validation score.

    Raises:
        ModelSizeError: If the model would need more memory than `size_limit` allows.
        ValueError: If the description of the images is invalid.

    Examples:
        >>> from equilibria.training.experiment import trained_model
        >>> run = trained_model("digits-opteq")
        >>> run.recipe.model.name
        'opteq-small'
    """
    chosen_device = choose_device(device)
    source = source_of(folder, weights)
    recipe = source.recipe
    if not source.images:  # `run.json` is missing or damaged, but the data set has the same facts.
        return trained(folder, device=device, weights=weights)
    try:
        images = ImageSpec.from_data(source.images)
    except ValidationError as error:
        raise ValueError(
            f"the description of the images in {folder} is invalid: {validation_messages(error)}; "
            "copy the run again from its origin"
        ) from None
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    task = _task(recipe, images.kind, images.ignore_index)
    model = _model(recipe, images)
    _load(model, recipe, source.file, chosen_device)
    return RecipeModel(recipe, model, images, task)


def _load(model: nn.Module, recipe: Recipe, file: Path, device: torch.device) -> None:
    try:
        load_weights(model, file)
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {file} do not fit the model {recipe.model.name!r}: {error}"
        ) from None
    model.to(device).eval()
