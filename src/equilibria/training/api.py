"""The commands of the program as functions: train, load, evaluate and predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from equilibria.certificates import CertifiedExit
from equilibria.data import (
    Batches,
    DataSet,
    Source,
    find_images,
    from_dataset,
    load_dataset,
    read_pixels,
)
from equilibria.data.image_files import readable
from equilibria.data.items import Items
from equilibria.equilibrium import solving
from equilibria.images import ImageSpec, images_of
from equilibria.models.base import predicted_classes
from equilibria.plugins import import_parts
from equilibria.registry import check_at_least_one
from equilibria.solvers import Solution
from equilibria.tasks import Classification, Evaluation, Task
from equilibria.training.experiment import (
    Experiment,
    RecipeModel,
    trained,
    trained_model,
)
from equilibria.training.folder import RunFolder
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.other_data import matching_test_images
from equilibria.training.planning import open_run, plan_run
from equilibria.training.processes import choose_device, denormals_as_zero
from equilibria.training.progress import TrainingDisplay, both, notes, summary
from equilibria.training.recipe import Recipe, recipe_for, with_given_data
from equilibria.training.sizes import size_limit
from equilibria.training.weights_source import Weights

Data: TypeAlias = "DataSet | Source | Dataset[Any]"
Paths: TypeAlias = "str | Path | Sequence[str | Path]"


@denormals_as_zero()
def train(
    recipe: str | Path | Recipe | None = None,
    *overrides: str,
    data: DataSet | Dataset[Any] | None = None,
    output: str | Path = "equilibria-run",
    resume: bool = False,
    overwrite: bool = False,
    epochs: int | str | None = None,
    start_from: str | Path | None = None,
    device: str = "auto",
    imports: Paths = (),
    progress: bool = True,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> nn.Module:
    """Train a model according to a recipe, or on a folder of images or a data set.

        model = eq.train("digits-opteq", "training.epochs=2", output="runs/mine")
        model = eq.train("photos/", output="runs/mine")
        model = eq.train(data=dataset, output="runs/mine")

    Args:
        recipe: Recipe: its name, a YAML file, or an object. Alternatively a folder of images with
            one folder per class, or a table of files and labels (CSV), for which a recipe is
            chosen. None with `resume` and without `data` uses the recipe of the run in `output`.
        overrides: Changes of the recipe, as "key=value".
        data: Data that replace those of the recipe; without a recipe one is chosen. A map-style
            `torch.utils.data.Dataset`, or a `DataSet`, for example from `eq.data.from_dataset`.
        output: Folder of the run.
        resume: Continue from the last checkpoint in `output`. A run that ended before its first
            checkpoint starts from the beginning.
        overwrite: Replace the run in `output`.
        epochs: Total number of epochs, or "+5" for five epochs more than the run in `output` has
            (see `continued_at` of `TrainingSettings` for the learning rate).
        start_from: Folder of a run whose weights initialize the model. If the number of classes
            differs, the last layer is initialized at random.
        device: Device to train on; "auto" uses an accelerator if there is one.
        imports: Files or modules with custom parts, which are imported first
            (`equilibria.plugins`).
        progress: Print a summary of the run and its progress to stderr: a bar on a terminal,
            otherwise one line per epoch.
        on_epoch: Callback with the metrics of an epoch; an exception it raises ends the training.
        on_step: Callback after each step; an exception it raises ends the training.

    Returns:
        The trained model in evaluation mode, as returned by `load`.

    Raises:
        RunError: If `output` cannot be used as requested, for example if it holds a run but neither
            `resume` nor `overwrite` is set.
        RecipeError: If the recipe is not valid.

    Examples:
        >>> few = ["data.options.train_samples=64", "training.epochs=1"]
        >>> model = eq.train("digits-opteq", *few, output="runs/mine", progress=False)
        >>> model.images.class_names[:3]
        ('0', '1', '2')
    """
    from rich.console import Console

    import_parts(imports)
    folder, adds_epochs = Path(output), str(epochs).startswith("+")
    continues = recipe is None and (resume or adds_epochs) and RunFolder(folder).is_run()
    dataset = from_dataset(data) if isinstance(data, Dataset) else data
    if isinstance(recipe, Recipe):
        recipe = recipe if dataset is None else with_given_data(recipe)
    elif dataset is not None and not continues:
        recipe, overrides = recipe_for(dataset, recipe, overrides), ()
    chosen_device = choose_device(device)
    plan = plan_run(recipe, overrides, folder, resume=resume, overwrite=overwrite, epochs=epochs)
    experiment = Experiment.of(plan.recipe, dataset)
    run = open_run(plan, experiment, folder, overwrite=overwrite, start_from=start_from)
    console = Console(stderr=True, highlight=False, quiet=not progress)
    for line in (*notes(plan, run), *summary(experiment, run, chosen_device)):
        console.print(line, markup=False, soft_wrap=True)
    display = TrainingDisplay(console, plan.recipe.training.epochs)
    with display.progress:
        experiment.train(
            run,
            chosen_device,
            on_epoch=both(display.on_epoch, on_epoch),
            on_step=both(display.on_step, on_step),
            on_read=display.on_read,
        )
    return load(output, device=device)


def load(
    folder: str | Path,
    *,
    weights: Weights = "last",
    device: str | torch.device = "cpu",
    imports: Paths = (),
    max_gigabytes: float | None = None,
) -> nn.Module:
    """Load the model of a run; its data are not needed.

    The model takes pixels in [0, 1]. `model.images`, an `ImageSpec`, describes the images that it
    expects: class names, channels, height and width, the scaling of image files, and the
    normalization. For an interrupted run the newest checkpoint is loaded, with a
    `CheckpointWarning`.

    Args:
        folder: Folder of a run, a file written by `pack`, or the name of a pretrained model.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        device: Device of the model; "auto" uses an accelerator if there is one.
        imports: Files or modules with the custom parts that the run was trained with. `run.json`
            lists them, but only parts that are named here are imported.
        max_gigabytes: Limit for the memory of the parameters and one image, estimated before the
            model is built; 10 by default.

    Returns:
        The model in evaluation mode.

    Raises:
        ModelSizeError: If the model would exceed the memory limit, or has an absurd number of
            layers.
        DamagedFileError: If a file of the run was changed, is not a regular file, or is a link to a
            place outside the folder.

    Examples:
        >>> model = eq.load("digits-opteq")
        >>> model.images.class_names, model.images.image_shape
        (('0', '1', '2', '3', '4', '5', '6', '7', '8', '9'), (1, 8, 8))
    """
    import_parts(imports)
    with size_limit(max_gigabytes):
        return trained_model(folder, device=device, weights=weights).model


def evaluate(
    run_or_model: str | Path | nn.Module,
    data: str | Data | Iterable[tuple[Tensor, Tensor]] | None = None,
    *,
    task: Task | None = None,
    weights: Weights = "last",
    device: str | torch.device = "cpu",
    batch_size: int = 256,
    root: str | Path | None = None,
    certified: bool = False,
    **options: Any,
) -> Evaluation:
    """Evaluate a model on test samples.

        eq.evaluate("runs/mine").accuracy
        eq.evaluate(model, "digits").figures
        eq.evaluate("runs/mine", "cifar10", corrupted="fog:3").accuracy

    Args:
        run_or_model: Model, folder of a run, or name of a pretrained model.
        data: Data set or its name, whose test images are used; or a source, a map-style
            `torch.utils.data.Dataset`, or batches (images, labels). By default the test images of
            the run. Images of a data set are scaled like those of the run, and it must have the
            same number of classes.
        task: Task that computes the measures. By default that of the run, or classification for a
            model.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        device: Device for the model of a run.
        batch_size: Number of images per batch.
        root: Folder of all data sets; by default that of the run, or the environment variable
            EQUILIBRIA_DATA.
        certified: For a run, solve each image only until its class is certain (`CertifiedExit`).
        options: Options of the data set if `data` is a name, as for `load_dataset`.

    Returns:
        The loss, the measures of the task, and statistics of the solves.

    Examples:
        >>> result = eq.evaluate("digits-opteq")
        >>> result.samples, result.accuracy > 0.9
        (450, True)
    """
    if isinstance(data, str):
        data = load_dataset(data, root, **options)
    elif options:
        raise TypeError(
            f"unexpected options {', '.join(options)}: options are for data given by name"
        )
    if isinstance(run_or_model, nn.Module):
        if data is None:
            raise TypeError("data is missing: pass data to evaluate the model on, e.g. 'digits'")
        if certified:
            raise TypeError(
                "certified is for runs: evaluate eq.certificates.CertifiedExit(model, shape)"
            )
        batches = _batches(data, run_or_model, batch_size)
        return (task or Classification()).evaluate(run_or_model, batches)
    run: RecipeModel
    if data is None:
        experiment = trained(run_or_model, device=device, weights=weights, root=root)
        experiment = experiment.until_certain() if certified else experiment
        if task is None:
            return experiment.evaluate()
        run, data = experiment, experiment.test
    else:
        run = trained_model(run_or_model, device=device, weights=weights)
        run = run.until_certain() if certified else run
    batches = _batches(data, run.model, batch_size)
    with run.solving():
        return (task or run.task).evaluate(run.model, batches)


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image.

    Attributes:
        file: Image file; empty for an image from a tensor.
        label: Predicted class; None if the logits are NaN or infinite.
        confidence: Softmax probability of the class.
        iterations: Iterations of the solve; None for a model without an equilibrium.
        converged: Whether the solve converged; None for a model without an equilibrium.
        top: Most likely classes with their probabilities, in descending order.
        certified: Whether the class is certain; None if this was not requested.

    Examples:
        >>> (prediction,) = eq.predict("digits-opteq", eq.data.load_digits().test.images[:1])
        >>> prediction.label, prediction.confidence > 0.5, prediction.converged
        ('0', True, True)
    """

    file: str
    label: str | None
    confidence: float
    iterations: int | None
    converged: bool | None
    top: dict[str, float]
    certified: bool | None = None


@dataclass(frozen=True)
class ClassMap:
    """Predicted class of every pixel of an image.

    Attributes:
        file: Image file; empty for an image from a tensor.
        classes: Index of the class of each pixel, shape (H, W); −1 if the logits are NaN or
            infinite.
        confidence: Mean softmax probability of the predicted classes.
        iterations: Iterations of the solve; None for a model without an equilibrium.
        converged: Whether the solve converged; None for a model without an equilibrium.

    Examples:
        >>> classes = torch.zeros(4, 6, dtype=torch.long)
        >>> eq.training.ClassMap("street.png", classes, 0.9, 12, True).classes.shape
        torch.Size([4, 6])
    """

    file: str
    classes: Tensor
    confidence: float
    iterations: int | None
    converged: bool | None


def predict(
    run_or_model: str | Path | nn.Module,
    images: Tensor | Paths,
    *,
    weights: Weights = "last",
    device: str | torch.device = "cpu",
    batch_size: int = 64,
    top: int = 1,
    certified: bool = False,
    on_unreadable: Callable[[Exception], None] | None = None,
) -> list[Prediction] | list[ClassMap]:
    """Predict the classes of images, or of their pixels if the model segments.

        eq.predict("runs/mine", "digit.png")[0].label

    Args:
        run_or_model: Model, folder of a run, or name of a pretrained model.
        images: Batch of shape (B, C, H, W) with values in [0, 1], or image files and folders.
            Image files are scaled and cropped like the training images.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        device: Device for the model of a run.
        batch_size: Number of images per batch.
        top: Number of most likely classes to return per image.
        certified: Solve each image only until its class is certain (`CertifiedExit`).
        on_unreadable: Callback for the error of a file that cannot be read, which is then skipped.
            Without it, the error is raised.

    Returns:
        One `Prediction` or `ClassMap` per image.

    Raises:
        ValueError: If the task of the run has no classes.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> [prediction.label for prediction in eq.predict("digits-opteq", images)]
        ['0', '3']
    """
    results = predictions(
        run_or_model,
        images,
        weights=weights,
        device=device,
        batch_size=batch_size,
        top=top,
        certified=certified,
        on_unreadable=on_unreadable,
    )
    return cast("list[Prediction] | list[ClassMap]", list(results))


def predictions(
    run_or_model: str | Path | nn.Module,
    images: Tensor | Paths,
    *,
    weights: Weights = "last",
    device: str | torch.device = "cpu",
    batch_size: int = 64,
    top: int = 1,
    certified: bool = False,
    on_unreadable: Callable[[Exception], None] | None = None,
) -> Iterator[Prediction | ClassMap]:
    """Yield the results of `predict` one by one; files are read when needed, and not kept.

    Args:
        run_or_model: Model, folder of a run, or name of a pretrained model.
        images: Batch of shape (B, C, H, W) with values in [0, 1], or image files and folders.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        device: Device for the model of a run.
        batch_size: Number of images per batch.
        top: Number of most likely classes to return per image.
        certified: Solve each image only until its class is certain (`CertifiedExit`).
        on_unreadable: Callback for the error of a file that cannot be read, which is then skipped.
            Without it, the error is raised.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> results = eq.training.predictions("digits-opteq", images)
        >>> [prediction.label for prediction in results]
        ['0', '3']
    """
    check_at_least_one(batch_size=batch_size, top=top)
    if isinstance(run_or_model, nn.Module):
        model = run_or_model
    else:
        model = load(run_or_model, device=device, weights=weights)
        spec = images_of(model)
        if spec is not None and not spec.names_classes:
            raise ValueError(f"the task of the run {run_or_model} has no classes to predict")
    read = None if isinstance(images, Tensor) else _reader(model)
    if certified:
        shape = images.shape[1:] if isinstance(images, Tensor) else _images_of(model).image_shape
        model = CertifiedExit(model, tuple(shape))
    batches: Iterable[tuple[Sequence[str], Tensor]]
    if isinstance(images, Tensor):
        parts = torch.split(images, batch_size) if len(images) else ()
        batches = (([""] * len(part), part) for part in parts)
    else:
        paths = [images] if isinstance(images, str | Path) else images
        files = find_images([Path(path) for path in paths])
        assert read is not None
        batches = _read(files, read, batch_size, on_unreadable)
    return (result for names, batch in batches for result in _predict(model, batch, names, top))


def _read(
    files: Sequence[Path],
    read: Callable[[Path], Tensor],
    batch_size: int,
    on_unreadable: Callable[[Exception], None] | None,
) -> Iterator[tuple[Sequence[str], Tensor]]:
    for start in range(0, len(files), batch_size):
        batch = list(readable(files[start : start + batch_size], read, on_unreadable))
        if batch:
            names, images = zip(*batch, strict=True)
            yield [str(name) for name in names], torch.stack(images)


@torch.no_grad()
def _predict(
    model: nn.Module, batch: Tensor, files: Sequence[str], top: int
) -> list[Prediction | ClassMap]:
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with solving(model, record=True) as record:
            logits = model(batch.to(device)).float().cpu()
    finally:
        model.train(was_training)
    solution = record.solutions[-1] if record.solutions else None
    return answers_of(model, logits, solution, files, top)


def answers_of(
    model: nn.Module, logits: Tensor, solution: Solution | None, files: Sequence[str], top: int
) -> list[Prediction | ClassMap]:
    """Convert the logits of a model to predictions.

    Args:
        model: The model.
        logits: Its output for a batch, float32 on the CPU.
        solution: Result of its solve, if it has an equilibrium.
        files: One file name per image, or an empty string.
        top: Number of the most likely classes to return.
    """
    shares, classes = logits.softmax(dim=1), predicted_classes(logits)
    confidences = shares.amax(dim=1)
    images = images_of(model)
    names = images.class_names if images else ()
    names = names or tuple(map(str, range(logits.shape[1])))
    results: list[Prediction | ClassMap] = []
    for i, file in enumerate(files):
        # Coupled samples are solved as one problem.
        problem = 0 if solution is None or len(solution.iterations) == 1 else i
        iterations = None if solution is None else int(solution.iterations[problem])
        converged = None if solution is None else bool(solution.converged[problem])
        confidence = float(confidences[i].mean())
        if classes.dim() > 1:
            results.append(ClassMap(file, classes[i], confidence, iterations, converged))
            continue
        label = None if classes[i] < 0 else names[int(classes[i])]
        order = shares[i].argsort(descending=True, stable=True)[: 0 if label is None else top]
        likely = {names[int(j)]: float(shares[i, j]) for j in order}
        certified = bool(model.certified[i]) if isinstance(model, CertifiedExit) else None
        results.append(
            Prediction(file, label, confidence, iterations, converged, likely, certified)
        )
    return results


def _batches(
    data: Data | Iterable[tuple[Tensor, Tensor]], model: nn.Module, batch_size: int
) -> Iterable[tuple[Tensor, Tensor]]:
    if isinstance(data, DataSet):
        data = matching_test_images(data, model)
    elif isinstance(data, Dataset):
        images = images_of(model)
        data = Items(data) if images is None else Items(data, images.frame, images.is_gray)
    # Sources have `fetch`; batches are only iterable.
    return Batches(cast(Source, data), batch_size) if hasattr(data, "fetch") else data


def _reader(model: nn.Module) -> Callable[[Path], Tensor]:
    images = _images_of(model)
    return partial(read_pixels, framing=images.frame, is_gray=images.is_gray)


def _images_of(model: nn.Module) -> ImageSpec:
    images = images_of(model)
    if images is None:
        raise ValueError(
            "the model does not describe its images (model.images): pass images as a tensor, or a "
            "model from eq.load"
        )
    return images
