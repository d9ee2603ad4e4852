"""Evaluation of a trained run on other data."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from equilibria.data import DataSet, Source
from equilibria.data.augment import Chain
from equilibria.data.reframing import reframed
from equilibria.images import ImageSpec, images_of
from equilibria.training.experiment import Experiment, RecipeModel


def on_other_data(run: RecipeModel, data: DataSet) -> Experiment:
    """Return an experiment with the model of a run and another data set.

    The test images are scaled and cropped like those of the run. The normalization is a layer of
    the model, and does not change.

    Args:
        run: The run.
        data: Data set with the same kind of labels and the same number of classes.

    Raises:
        ValueError: If the data set does not match the run.

    Examples:
        >>> from equilibria.training.other_data import on_other_data
        >>> from equilibria.training.experiment import trained_model
        >>> run = trained_model("digits-opteq")
        >>> other = on_other_data(run, eq.data.load_dataset("digits", train_samples=10))
        >>> len(other.test)
        450
    """
    test = matching_test_images(data, run.model)
    return Experiment(
        recipe=run.recipe,
        model=run.model,
        images=run.images,
        task=run.task,
        data=replace(data, test=test),
        augmentation=Chain(()),
        training=data.train,
        validation=None,
        test=test,
    )


def matching_test_images(data: DataSet, model: nn.Module) -> Source:
    """Return the test images of a data set in the size and channels that a model expects.

    They are unchanged for a custom model without `model.images`.
    """
    images = images_of(model)
    if images is not None:
        _check_kind(data, images)
    if not len(data.test):
        raise ValueError(f"{data.name} has no test images")
    if images is None or data.kind == "episodes":
        return data.test
    if images.frame.size is None and data.channels == images.image_shape[0]:
        return data.test
    return reframed(data.test, images.frame, images.image_shape)


def _check_kind(data: DataSet, expected: ImageSpec) -> None:
    """Raise if the labels of the data differ in meaning from those the model was trained on."""
    are_episodes = (data.kind == "episodes", expected.kind == "episodes")
    if (any(are_episodes) and not all(are_episodes)) or (
        expected.names_classes and data.kind != expected.kind
    ):
        raise ValueError(
            f"{data.name} is a data set of kind {data.kind!r}, but the run was trained on kind "
            f"{expected.kind!r}: choose a data set of that kind"
        )
    if expected.names_classes and data.num_classes != len(expected.class_names):
        raise ValueError(
            f"{data.name} has {data.num_classes} classes, but the run has "
            f"{len(expected.class_names)}: choose a data set with the same classes in the same "
            "order"
        )
    if expected.names_classes and data.ignore_index != expected.ignore_index:
        raise ValueError(
            f"pixels without a class have the label {data.ignore_index} in {data.name}, but "
            f"{expected.ignore_index} in the training data: change the label"
        )
