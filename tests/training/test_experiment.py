"""From a recipe to sources, task and augmentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equilibria.data import (
    Batches,
    DataSet,
    DataSetCard,
    Framing,
    ImageFiles,
    Split,
    load_digits,
    register_dataset,
)
from equilibria.data.batches import read_into_memory
from equilibria.models.registry import parameter_count
from equilibria.tasks import Classification, Segmentation
from equilibria.training import Recipe, RunFolder, load_recipe
from equilibria.training.experiment import Experiment, trained
from equilibria.training.recipe import recipe_from_data


def rectangles(samples: int, seed: int) -> Split:
    """Gray images with a bright rectangle, and the class of every pixel; a border of no class."""
    chance = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.rand(samples, 3, 16, 16, generator=chance)
    labels = torch.zeros(samples, 16, 16, dtype=torch.long)
    for i in range(samples):
        top, left = torch.randint(2, 8, (2,), generator=chance).tolist()
        images[i, :, top : top + 6, left : left + 6] += 0.6
        labels[i, top : top + 6, left : left + 6] = 1
    labels[:, 0] = 255
    return Split(images, labels)


@pytest.fixture(autouse=True, scope="module")
def made_data() -> None:
    def load(kind: str) -> DataSet:
        own = rectangles(8, 2)
        return DataSet(
            "rectangles",
            rectangles(24, 0),
            rectangles(8, 1),
            ("ground", "rectangle"),
            kind=kind,  # type: ignore[arg-type]
            validation=own if kind == "segmentation" else None,
            mean=(0.3, 0.3, 0.3),
            std=(0.2, 0.2, 0.2),
            ignore_index=255,
        )

    for name, kind in (("rectangles", "segmentation"), ("bare-rectangles", "unlabelled")):
        register_dataset(DataSetCard(name), lambda kind=kind: load(kind), replace=True)


def segmentation(**data: object) -> Recipe:
    return recipe_from_data(
        {
            "model": {
                "name": "deep-opteq-segmentation",
                "options": {"channels": 8, "widths": [8, 8], "stride": 2, "head_width": 8},
            },
            "data": {"name": "rectangles", **data},
            "training": {"epochs": 12, "batch_size": 8, "learning_rate": 0.02, "tolerance": 1e-2},
        }
    )


def test_segmentation_by_recipe(tmp_path: Path) -> None:
    recipe = segmentation(
        validation="own",
        normalize=True,
        augmentation=[{"scale_crop": {"size": [16, 16], "scales": [0.9, 1.1]}}, "flip"],
    )
    experiment = Experiment.of(recipe)
    assert experiment.task == Segmentation(255)
    assert len(experiment.validation) == 8
    run = RunFolder.opened(tmp_path, recipe.as_data())
    history = experiment.train(run, torch.device("cpu"))
    assert history[-1].loss < 0.5 * history[0].loss
    assert history[-1].validation_score != history[-1].validation_accuracy  # the mIoU
    result = experiment.evaluate()
    assert result.figures["mean_iou"] > 0.8
    assert result.samples == 8 * 15 * 16  # a row of each image has no class
    assert trained(tmp_path).evaluate().score == pytest.approx(result.score, abs=1e-6)
    best = trained(tmp_path, weights="best")
    found = best.task.evaluate(best.model, Batches(best.validation, 8))
    assert found.score == pytest.approx(max(m.validation_score for m in history), abs=1e-6)


def test_normalization_is_the_first_layer_of_the_model() -> None:
    experiment = Experiment.of(segmentation(validation="own", normalize=True))
    plain = Experiment.of(segmentation(validation="own"))
    images, _ = experiment.test.fetch(torch.arange(4))
    assert torch.equal(images, plain.test.fetch(torch.arange(4))[0])
    experiment.model.eval()
    plain.model.eval()
    torch.testing.assert_close(experiment.model(images), plain.model((images - 0.3) / 0.2))


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="no labels"):
        Experiment.of(segmentation(name="bare-rectangles"))
    smoothed = {**segmentation().as_data(), "task": {"label_smoothing": 0.1}}
    with pytest.raises(ValueError, match="label_smoothing is for classification"):
        Experiment.of(recipe_from_data(smoothed))
    with pytest.raises(ValueError, match="no validation part of its own"):
        Experiment.of(load_recipe("digits-opteq", ["data.validation=own"]))
    with pytest.raises(ValueError, match="did you mean 'flip'"):
        Experiment.of(segmentation(augmentation=["flp"]))


@pytest.mark.parametrize("task", ["generator", "autoencoder", "restoration"])
def test_who_draws_pictures_does_not_normalize(task: str) -> None:
    data = {"model": {"name": "opteq-decoder"}, "data": {"name": "digits", "normalize": True}}
    data |= {"training": {"epochs": 1}, "task": {"name": task}}
    with pytest.raises(ValueError, match="draws pictures"):
        Experiment.of(recipe_from_data(data))


def test_a_search_from_zero_takes_no_warm_start() -> None:
    data = {"model": {"name": "opteq-decoder"}, "data": {"name": "digits"}}
    data |= {"training": {"epochs": 1, "warm_start": True}, "task": {"name": "generator"}}
    with pytest.raises(ValueError, match="warm_start has nothing to start"):
        Experiment.of(recipe_from_data(data))


def test_the_best_weights_need_a_validation_part(tmp_path: Path) -> None:
    recipe = load_recipe("digits-opteq", ["training.epochs=1", "data.options.train_samples=64"])
    run = RunFolder.opened(tmp_path, recipe.as_data())
    Experiment.of(recipe).train(run, torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="no validation images"):
        trained(tmp_path, weights="best")


def test_files_read_into_memory_are_the_same(tmp_path: Path) -> None:
    from PIL import Image

    chance = torch.Generator().manual_seed(0)
    paths = []
    for i in range(5):
        pixels = torch.randint(0, 256, (6, 7, 3), generator=chance, dtype=torch.uint8)
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    files = ImageFiles(tuple(paths), torch.tensor([3, 1, 400, 0, 2]), Framing.make(None))
    kept = read_into_memory(files, batch=2)
    assert kept.images.dtype == torch.uint8
    for one, other in zip(kept.fetch(torch.arange(5)), files.fetch(torch.arange(5)), strict=True):
        assert torch.equal(one, other)


def test_classification_keeps_its_task() -> None:
    recipe = load_recipe("digits-opteq", ["task.label_smoothing=0.1"])
    assert Experiment.of(recipe).task == Classification(label_smoothing=0.1)


@pytest.mark.parametrize("pair", [("camvid-deep-opteq", "camvid-fcn")])
def test_recipes_that_are_compared_train_alike(pair: tuple[str, str]) -> None:
    ours, other = (load_recipe(name) for name in pair)
    assert ours.data == other.data
    solver = ("tolerance", "evaluation_tolerance")
    assert {k: v for k, v in vars(ours.training).items() if k not in solver} == {
        k: v for k, v in vars(other.training).items() if k not in solver
    }


@pytest.mark.parametrize("size", ["quick", "cpu"])
def test_the_four_cifar_recipes_are_of_one_size(size: str) -> None:
    from equilibria.models.registry import model_outline

    recipes = [
        load_recipe(f"cifar10-{family}-{size}")
        for family in ("mopteq", "deep-opteq", "geq", "resnet")
    ]
    counts = [parameter_count(model_outline(r.model.name, **r.model.options)) for r in recipes]
    assert max(counts) < 1.03 * min(counts)
    assert len({(r.training.epochs, r.training.learning_rate, str(r.data)) for r in recipes}) == 1


def test_adversarial_training_normalizes_inside_the_model() -> None:
    """Attacks move pixels in [0, 1]; it was an error to ask for both."""

    def load() -> DataSet:
        return replace(load_digits(), name="normalized-digits", mean=(0.3,), std=(0.4,))

    register_dataset(DataSetCard("normalized-digits"), load, replace=True)
    recipe = recipe_from_data(
        {
            "model": {"name": "opteq-small", "options": {"channels": 8, "width": 8}},
            "data": {"name": "normalized-digits", "normalize": True},
            "training": {"epochs": 1},
            "task": {"name": "adversarial", "options": {"eps": 0.5, "method": "jiio", "steps": 2}},
        }
    )
    experiment = Experiment.of(recipe)
    images, labels = experiment.some_test_images(8)
    outcome = experiment.task.training_step(experiment.model.train(), images, labels)
    assert bool(torch.isfinite(outcome.loss))


def test_off_is_a_word_for_perturbations() -> None:
    """YAML reads it as False."""
    for pe in ("off", "always"):
        model = Experiment.of(load_recipe("digits-mopteq", [f"model.options.pe={pe}"])).model
        assert (model.layer.cell.refresh_until > 0) is (pe == "always")
