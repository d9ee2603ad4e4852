"""What the program does in one command, in one call: train, load, evaluate, predict."""

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
from equilibria.training.elsewhere import fitting_test
from equilibria.training.experiment import (
    Experiment,
    RecipeModel,
    trained,
    trained_model,
)
from equilibria.training.folder import RunFolder
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.planning import open_run, plan_run
from equilibria.training.processes import choose_device, denormals_as_zero
from equilibria.training.progress import TrainingDisplay, both, notes, summary
from equilibria.training.recipe import Recipe, given_to, recipe_for
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
    """Train a model as a recipe describes, and return it as `load` does.

        model = eq.train("digits-opteq", "training.epochs=2", output="runs/mine")
        model = eq.train("photos/", output="runs/mine")
        model = eq.train(data=dataset, output="runs/mine")

    Args:
        recipe: A recipe by its name, a YAML file, or an object; or a folder of images, one folder
            per class, or a table of files and labels (CSV), for which a recipe is chosen. None,
            without `data` and with `resume`: the recipe of the run in `output`.
        overrides: Changes to the recipe, as "key=value".
        data: Data to train on instead of the recipe's; without a recipe one is chosen. A map-style
            `Dataset` of torch, or a `DataSet`, as `eq.data.from_dataset` makes it.
        output: Folder of the run.
        resume: Go on from the last checkpoint in `output`. A run that was ended before its first
            checkpoint starts from the beginning.
        overwrite: Replace the run in `output`.
        epochs: Number of epochs in all; "+5" gives the run in `output` five more
            (`TrainingSettings` describes the learning rate there).
        start_from: Folder of a run whose weights the new run starts with; for another number of
            classes, its last layer is new.
        device: Where to train; "auto" takes an accelerator if there is one.
        imports: Files or modules with custom parts, imported first (`equilibria.plugins`).
        progress: Print a summary of the run and its progress to stderr: a bar on a terminal,
            elsewhere one line per epoch.
        on_epoch: Called with the metrics of every epoch; an exception it raises ends the training.
        on_step: Called after every step; an exception it raises ends the training.

    Returns:
        The trained model, in evaluation mode.

    Raises:
        RunError: If `output` cannot be used as requested, for example without `resume` or
            `overwrite` where it holds a run.
        RecipeError: If the recipe is not valid.

    Examples:
        >>> few = ["data.options.train_samples=64", "training.epochs=1"]
        >>> model = eq.train("digits-opteq", *few, output="runs/mine", progress=False)
        >>> model.images.class_names[:3]
        ('0', '1', '2')
    """
    from rich.console import Console

    import_parts(imports)
    folder, is_more = Path(output), str(epochs).startswith("+")
    goes_on = recipe is None and (resume or is_more) and RunFolder(folder).is_run()
    given = from_dataset(data) if isinstance(data, Dataset) else data
    if isinstance(recipe, Recipe):
        recipe = recipe if given is None else given_to(recipe)
    elif given is not None and not goes_on:
        recipe, overrides = recipe_for(given, recipe, overrides), ()
    where = choose_device(device)
    plan = plan_run(recipe, overrides, folder, resume=resume, overwrite=overwrite, epochs=epochs)
    experiment = Experiment.of(plan.recipe, given)
    run = open_run(plan, experiment, folder, overwrite=overwrite, start_from=start_from)
    console = Console(stderr=True, highlight=False, quiet=not progress)
    for line in (*notes(plan, run), *summary(experiment, run, where)):
        console.print(line, markup=False, soft_wrap=True)
    display = TrainingDisplay(console, plan.recipe.training.epochs)
    with display.progress:
        experiment.train(
            run,
            where,
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
    """The model of a run, in evaluation mode; the data of the run are not needed.

    It takes pixels in [0, 1]. `model.images`, an `ImageSpec`, says what it expects of them: the
    names of the classes, the channels, height and width, how image files are brought to that size,
    and the normalization. Of a run that was interrupted the newest checkpoint counts, with a
    `CheckpointWarning`.

    weights: "best" are those of the epoch that did best on the validation images.
    imports: what the run was trained with, besides what comes with Equilibria; `run.json` names it,
        but nothing is imported that is not named here.
    max_gigabytes: memory that the model may need for its parameters and one image, estimated
        before it is built; 10 if not set. A run that needs more is refused.

    Raises:
        ModelSizeError: If the model would need more memory, or is absurdly deep.
        DamagedFileError: If a file of the run is not as it was written, is no regular file, or is
            a link that leads out of the folder.

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
    """How a model does on samples that it was not trained on.

        eq.evaluate("runs/mine").accuracy
        eq.evaluate(model, "digits").figures
        eq.evaluate("runs/mine", "cifar10", corrupted="fog:3").accuracy

    run_or_model: the folder of a run, by default judged on its test images, or a model.
    data: a data set, or its name, of which the test images count; a source, a map-style `Dataset`
        of torch, or batches. Images of a data set are framed as those of the run; it must have
        as many classes. The run's own data are then not needed.
    options: of the data set that is named, as `load_dataset` takes them.
    task: what is judged; by default that of the run, and classification for a model.
    root: the folder of data sets; by default where the run, or EQUILIBRIA_DATA, has it.
    certified: of a run, solve each image until its class is certain (`CertifiedExit`).

    Examples:
        >>> found = eq.evaluate("digits-opteq")
        >>> found.samples, found.accuracy > 0.9
        (450, True)
    """
    if isinstance(data, str):
        data = load_dataset(data, root, **options)
    elif options:
        raise TypeError(f"{', '.join(options)}: options are those of a data set that is named")
    if isinstance(run_or_model, nn.Module):
        if data is None:
            raise TypeError("name the data to evaluate the model on, e.g. 'digits'")
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
    """What a model says of one image.

    Examples:
        >>> (answer,) = eq.predict("digits-opteq", eq.data.load_digits().test.images[:1])
        >>> answer.label, answer.confidence > 0.5, answer.converged
        ('0', True, True)
    """

    file: str
    """Empty for an image that came as a tensor."""
    label: str | None
    """None where the model has no answer: its logits are NaN or infinite."""
    confidence: float
    iterations: int | None
    """None for a model without an equilibrium, as is `converged`."""
    converged: bool | None
    top: dict[str, float]
    """The most likely classes with their confidences, the first one first; as many as asked for."""
    certified: bool | None = None
    """Whether the class is certain; None where nobody asked."""


@dataclass(frozen=True)
class ClassMap:
    """What a model says of the pixels of one image."""

    file: str
    classes: Tensor
    """The index of a class for each pixel, shape `(height, width)`; −1 where it has no answer."""
    confidence: float
    """The mean over the pixels."""
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
    """The classes of images, or of their pixels where the model segments.

        eq.predict("runs/mine", "digit.png")[0].label

    images: a batch with values in [0, 1], or image files and folders of them, which are framed as
        the images of the training were.
    top: how many of the most likely classes are told with their confidences.
    certified: solve each image until its class is certain (`CertifiedExit`).
    on_unreadable: is told of a file that cannot be read, which is then left out; without it, that
        is an error.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> [answer.label for answer in eq.predict("digits-opteq", images)]
        ['0', '3']
    """
    found = predictions(
        run_or_model,
        images,
        weights=weights,
        device=device,
        batch_size=batch_size,
        top=top,
        certified=certified,
        on_unreadable=on_unreadable,
    )
    return cast("list[Prediction] | list[ClassMap]", list(found))


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
    """What `predict` gives, one by one: files are read when their turn comes, and none is kept.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> [answer.label for answer in eq.training.predictions("digits-opteq", images)]
        ['0', '3']
    """
    check_at_least_one(batch_size=batch_size, top=top)
    if isinstance(run_or_model, nn.Module):
        model = run_or_model
    else:
        model = load(run_or_model, device=device, weights=weights)
        known = images_of(model)
        if known is not None and not known.names_classes:
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
    return (said for names, batch in batches for said in _said(model, batch, names, top))


def _read(
    files: Sequence[Path],
    read: Callable[[Path], Tensor],
    batch_size: int,
    on_unreadable: Callable[[Exception], None] | None,
) -> Iterator[tuple[Sequence[str], Tensor]]:
    for start in range(0, len(files), batch_size):
        some = list(readable(files[start : start + batch_size], read, on_unreadable))
        if some:
            names, images = zip(*some, strict=True)
            yield [str(name) for name in names], torch.stack(images)


@torch.no_grad()
def _said(
    model: nn.Module, batch: Tensor, files: Sequence[str], top: int
) -> list[Prediction | ClassMap]:
    was_training, place = model.training, next(model.parameters()).device
    model.eval()
    try:
        with solving(model, record=True) as record:
            logits = model(batch.to(place)).float().cpu()
    finally:
        model.train(was_training)
    solution = record.solutions[-1] if record.solutions else None
    return answers_of(model, logits, solution, files, top)


def answers_of(
    model: nn.Module, logits: Tensor, solution: Solution | None, files: Sequence[str], top: int
) -> list[Prediction | ClassMap]:
    """Return the predictions that belong to logits of a model.

    Args:
        model: The model, which knows the names of its classes.
        logits: Its outputs for a batch, float32 on the CPU.
        solution: The solve that led to them, if the model has an equilibrium.
        files: A file name per image, or an empty string.
        top: Number of the most likely classes to return.
    """
    shares, classes = logits.softmax(dim=1), predicted_classes(logits)
    confidences = shares.amax(dim=1)
    images = images_of(model)
    names = images.class_names if images else ()
    names = names or tuple(map(str, range(logits.shape[1])))
    found: list[Prediction | ClassMap] = []
    for i, file in enumerate(files):
        # Samples that are coupled are one problem.
        problem = 0 if solution is None or len(solution.iterations) == 1 else i
        iterations = None if solution is None else int(solution.iterations[problem])
        converged = None if solution is None else bool(solution.converged[problem])
        confidence = float(confidences[i].mean())
        if classes.dim() > 1:
            found.append(ClassMap(file, classes[i], confidence, iterations, converged))
            continue
        label = None if classes[i] < 0 else names[int(classes[i])]
        order = shares[i].argsort(descending=True, stable=True)[: 0 if label is None else top]
        likely = {names[int(j)]: float(shares[i, j]) for j in order}
        sure = bool(model.certified[i]) if isinstance(model, CertifiedExit) else None
        found.append(Prediction(file, label, confidence, iterations, converged, likely, sure))
    return found


def _batches(
    data: Data | Iterable[tuple[Tensor, Tensor]], model: nn.Module, batch_size: int
) -> Iterable[tuple[Tensor, Tensor]]:
    if isinstance(data, DataSet):
        data = fitting_test(data, model)
    elif isinstance(data, Dataset):
        images = images_of(model)
        data = Items(data) if images is None else Items(data, images.frame, images.is_gray)
    # Batches themselves are iterable and have no `fetch`.
    return Batches(cast(Source, data), batch_size) if hasattr(data, "fetch") else data


def _reader(model: nn.Module) -> Callable[[Path], Tensor]:
    images = _images_of(model)
    return partial(read_pixels, framing=images.frame, is_gray=images.is_gray)


def _images_of(model: nn.Module) -> ImageSpec:
    images = images_of(model)
    if images is None:
        raise ValueError(
            "the model does not say what size its images have: give images as a tensor, or a model "
            "from eq.load"
        )
    return images
