"""Trained models: `load` and `evaluate`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from equilibria.data import Batches, DataSet, Source, load_dataset
from equilibria.data.items import Items
from equilibria.images import images_of
from equilibria.plugins import Paths, import_parts
from equilibria.tasks import Classification, Evaluation, Task
from equilibria.training.experiment import RecipeModel, trained, trained_model
from equilibria.training.other_data import matching_test_images
from equilibria.training.sizes import size_limit
from equilibria.training.weights_source import Weights

Data: TypeAlias = "DataSet | Source | Dataset[Any]"


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
