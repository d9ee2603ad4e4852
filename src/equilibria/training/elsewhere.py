"""A trained run on other data than its own."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from equilibria.data import DataSet, Source
from equilibria.data.augment import Chain
from equilibria.data.reframing import reframed
from equilibria.images import ImageSpec, images_of
from equilibria.training.experiment import Experiment, RecipeModel


def on_other_data(run: RecipeModel, data: DataSet) -> Experiment:
    """The run as an experiment on another data set, with its test images as the run frames them.

    Normalization is a layer of the model, and stays that of the run.

    Examples:
        >>> from equilibria.training.elsewhere import on_other_data
        >>> from equilibria.training.experiment import trained_model
        >>> run = trained_model("digits-opteq")
        >>> other = on_other_data(run, eq.data.load_dataset("digits", train_samples=10))
        >>> len(other.test)
        450
    """
    test = fitting_test(data, run.model)
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


def fitting_test(data: DataSet, model: nn.Module) -> Source:
    """The test images of a data set as a model from `load` takes them.

    A model of one's own says nothing of its images, and gets them as they are.
    """
    images = images_of(model)
    if images is not None:
        _check_kind(data, images)
    if not len(data.test):
        raise ValueError(f"{data.name} has no test images")
    if images is None or data.kind == "episodes":
        return data.test
    return reframed(data.test, images.frame, images.image_shape)


def _check_kind(data: DataSet, known: ImageSpec) -> None:
    """Refuse data whose labels mean something else than those the model was trained on."""
    are_episodes = (data.kind == "episodes", known.kind == "episodes")
    if (any(are_episodes) and not all(are_episodes)) or (
        known.names_classes and data.kind != known.kind
    ):
        raise ValueError(
            f"{data.name} is a data set of the kind {data.kind!r}, but the run's own is one of "
            f"{known.kind!r}: name one of that kind"
        )
    if known.names_classes and data.num_classes != len(known.class_names):
        raise ValueError(
            f"{data.name} has {data.num_classes} classes, but the run knows "
            f"{len(known.class_names)}: name a data set with the same classes in the same order"
        )
    if known.names_classes and data.ignore_index != known.ignore_index:
        raise ValueError(
            f"pixels without a class have the label {data.ignore_index} in {data.name}, but "
            f"{known.ignore_index} in the run's own data: give them that label"
        )
