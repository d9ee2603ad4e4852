"""From a recipe to a trained model in a run folder, and back from the folder to the model."""

from __future__ import annotations

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
from equilibria.images import ImageSpec, Kind
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
from equilibria.training.recipe import GIVEN, Recipe, explained, told_where
from equilibria.training.sizes import check_model_size
from equilibria.training.weights_source import Weights, source_of

KEPT_LATENTS = 2000
"""Of training images, that a run of a generator or an autoencoder keeps."""
READ_AT_ONCE = 32
"""Images that one worker reads into memory before the next one is asked."""
VALIDATION_SEED = 20220613
"""Fixed, so that runs of different seeds are compared on the same held-out images."""


AnyRun = TypeVar("AnyRun", bound="RecipeModel")


@dataclass(frozen=True)
class RecipeModel:
    """The model of a recipe with its task and what it must know of its images, without any data.

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
        """The layers of the model as they solve in an evaluation."""
        return solving(self.model, tolerance=self.recipe.training.evaluation_tolerance)

    def model_options(self) -> dict[str, Any]:
        """What `create_model` made the model with."""
        return _options(self.recipe, self.images)

    def until_certain(self: AnyRun) -> AnyRun:
        """The same with a model that solves each image until its class is certain."""
        if self.images.kind != "classification":
            raise ValueError("certificates are for runs that classify images")
        return replace(self, model=CertifiedExit(self.model, tuple(self.images.image_shape)))


@dataclass(frozen=True)
class Experiment(RecipeModel):
    """What a recipe stands for, ready to train.

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
        """Load the data and make the model, its initial weights drawn with the recipe's seed."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        if data is None:
            data = _data(recipe)
        with told_where("task.options"):
            task = _task(recipe, data.kind, data.ignore_index)
        training, validation = _parts(recipe, data)
        images = ImageSpec(
            class_names=data.class_names,
            image_shape=data.image_shape,
            frame=data.frame,
            normalization=_normalization(data, training) if recipe.data.normalize else None,
            names_classes=task.names_classes,
            kind=data.kind,
            ignore_index=data.ignore_index,
        )
        torch.manual_seed(recipe.training.seed)
        with told_where("model.options"):
            _check_fit(recipe, data)
            model = _model(recipe, images)
        with told_where("data.augmentation"):
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
        """Train, keeping checkpoints and metrics in the run's folder; go on where it was left.

        on_read: where images are read into memory first, is told how many of how many there are.
        """

        def record(metrics: EpochMetrics) -> None:
            run.settle()
            if on_epoch is not None:
                on_epoch(metrics)

        try:
            training, validation = self._to_be_read(processes, on_read)
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
        """Of some training images, for `generate` where there are none."""
        if isinstance(self.task, Autoencoding | Reconstruction):
            images, _ = fetch_readable(self.training, evenly_spread(self.training, KEPT_LATENTS))
            self.model.eval()
            with self.solving():
                latents = latents_of(self.model, self.task, images.to(device))
            save_tensors({"latents": latents}, run.latents)

    def _to_be_read(
        self, processes: Processes, on_read: Callable[[int, int], None] | None
    ) -> tuple[Source, Source | None]:
        """What is trained on and validated with: the files, or what was in them."""
        parts = [part for part in (self.training, self.validation) if part is not None]
        if self.recipe.data.in_memory:
            done, total = 0, sum(map(len, parts))
            for place, part in enumerate(parts):

                def tell(read: int, _: int, before: int = done) -> None:
                    if on_read is not None and processes.leads:
                        on_read(before + read, total)

                workers = self._workers(part, READ_AT_ONCE, processes)
                parts[place] = read_into_memory(
                    part, batch=READ_AT_ONCE, workers=workers, on_read=tell
                )
                done += len(part)
        return parts[0], parts[1] if self.validation is not None else None

    def _workers(self, source: Source, size: int, processes: Processes) -> int:
        given = self.recipe.data.workers
        return usual_workers(source, size, processes.count) if given is None else given

    def facts(self) -> dict[str, Any]:
        """What a run folder records: of the images, and a fingerprint of the training data."""
        data = {"samples": len(self.training), "fingerprint": fingerprint(self.data.train)}
        return {"images": self.images.as_data(), "data": data}

    def unreadable(self) -> dict[str, DataFileError]:
        """The images that were left out so far because they cannot be read, by path."""
        parts = (self.training, self.test, *([self.validation] if self.validation else []))
        return {path: why for part in parts for path, why in unreadable_images(part).items()}

    def evaluate(self, processes: Processes = ALONE) -> Evaluation:
        """On the test images, of which each process takes its share if there are enough."""
        if len(self.test) < processes.count:
            processes = ALONE
        own, size = processes.part_of(self.test), self.recipe.training.evaluation_batch_size
        batches = Batches(own, size, workers=self._workers(own, size, processes))
        with self.solving():
            return self.task.evaluate(self.model, batches, processes.gathered)

    def some_test_images(self, count: int) -> tuple[Tensor, Tensor]:
        """Images and labels, spread evenly over the test images that can be read."""
        return fetch_readable(self.data.test, evenly_spread(self.data.test, count))


def _data(recipe: Recipe) -> DataSet:
    if recipe.data.name == GIVEN:
        raise MissingDataError(
            "the data set was given in Python, and no file holds it: give it again, as in "
            "eq.evaluate(eq.load(RUN), data) or eq.train(RECIPE, data=data)"
        )
    with told_where("data.options"):
        return load_dataset(recipe.data.name, root=recipe.data.root, **recipe.data.options)


def _task(recipe: Recipe, kind: Kind, ignore_index: int | None) -> Task:
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
        f"{recipe.data.name} has no labels: name a task that needs none (task.name), or take one "
        "of the data sets with labels that `equilibria datasets` lists"
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


def _normalization(data: DataSet, training: Source) -> tuple[Any, Any]:
    """Mean and deviation of every channel: as published, or else of some training images."""
    if data.mean is not None and data.std is not None:
        return data.mean, data.std
    if data.kind == "episodes":
        raise ValueError(
            f"no mean and deviation are published for {data.name}: set data.normalize to false"
        )
    return mean_and_deviation(training)


def fitting_options(model: str, data: DataSet | ImageSpec) -> dict[str, Any]:
    """The options of a model that follow from the data, as far as it has them.

    Examples:
        >>> from equilibria.training.experiment import fitting_options
        >>> fitting_options("opteq-small", eq.data.load_digits())
        {'in_channels': 1, 'num_classes': 10}
    """
    channels, height, _ = data.image_shape
    options = {"in_channels": channels, "num_classes": data.num_classes, "image_size": height}
    known = model_options(model)
    return {name: value for name, value in options.items() if name in known}


def _model(recipe: Recipe, images: ImageSpec) -> nn.Module:
    """The recipe's model for these images, of which it knows what `load` describes."""
    options = _options(recipe, images)
    check_model_size(recipe.model.name, options, images.image_shape)
    return create_model(recipe.model.name, images=images, **options)


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
    """The experiment of a run, with its data, its model with the weights of the run.

    Of a run that was interrupted the newest checkpoint counts, with a `CheckpointWarning`.

    folder: of the run, or what `source_of` takes in its place.

    weights: "best" are those of the epoch that did best on the validation images.
    root: the folder of data sets, if it is not where the recipe says.

    Examples:
        >>> from equilibria.training.experiment import trained
        >>> experiment = trained("digits-opteq")
        >>> experiment.evaluate().accuracy > 0.9
        True
    """
    place = choose_device(device)
    source = source_of(folder, weights)
    recipe = source.recipe
    if root is not None:
        recipe = replace(recipe, data=replace(recipe.data, root=str(root)))
    experiment = Experiment.of(recipe)
    _load(experiment.model, recipe, source.file, place)
    return experiment


def trained_model(
    folder: str | Path, *, device: torch.device | str = "cpu", weights: Weights = "last"
) -> RecipeModel:
    """What `trained` gives, without the data set where the run says what its images are.

    Raises:
        ModelSizeError: If the model would need more memory than `size_limit` allows.
        ValueError: If the run does not say what its images are like.

    Examples:
        >>> from equilibria.training.experiment import trained_model
        >>> run = trained_model("digits-opteq")
        >>> run.recipe.model.name
        'opteq-small'
    """
    place = choose_device(device)
    source = source_of(folder, weights)
    recipe = source.recipe
    if not source.images:  # `run.json` is missing or damaged; the data set has the same facts.
        return trained(folder, device=device, weights=weights)
    try:
        images = ImageSpec.from_data(source.images)
    except ValidationError as error:
        raise ValueError(
            f"{folder} does not say what its images are like: {explained(error)}; take it from "
            "where it was trained again"
        ) from None
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    task = _task(recipe, images.kind, images.ignore_index)
    model = _model(recipe, images)
    _load(model, recipe, source.file, place)
    return RecipeModel(recipe, model, images, task)


def _load(model: nn.Module, recipe: Recipe, file: Path, device: torch.device) -> None:
    try:
        load_weights(model, file)
    except RuntimeError as error:
        raise ValueError(f"{file} does not fit {recipe.model.name!r}: {error}") from None
    model.to(device).eval()
