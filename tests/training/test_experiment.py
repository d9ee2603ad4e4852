"""Experiments: data, task and augmentation of a recipe."""

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
    """Return gray images with a bright rectangle, and label maps with one row to ignore."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.rand(samples, 3, 16, 16, generator=generator)
    labels = torch.zeros(samples, 16, 16, dtype=torch.long)
    for i in range(samples):
        top, left = torch.randint(2, 8, (2,), generator=generator).tolist()
        images[i, :, top : top + 6, left : left + 6] += 0.6
        labels[i, top : top + 6, left : left + 6] = 1
    labels[:, 0] = 255
    return Split(images, labels)


@pytest.fixture(autouse=True, scope="module")
def made_data() -> None:
    def load(kind: str) -> DataSet:
        validation = rectangles(8, 2)
        return DataSet(
            "rectangles",
            rectangles(24, 0),
            rectangles(8, 1),
            ("ground", "rectangle"),
            kind=kind,  # type: ignore[arg-type]
            validation=validation if kind == "segmentation" else None,
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


def test_a_segmentation_recipe_trains(tmp_path: Path) -> None:
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
    assert history[-1].validation_score != history[-1].validation_accuracy  # The score is the mIoU.
    result = experiment.evaluate()
    assert result.figures["mean_iou"] > 0.8
    assert result.samples == 8 * 15 * 16  # One row of each image is ignored.
    assert trained(tmp_path).evaluate().score == pytest.approx(result.score, abs=1e-6)
    best = trained(tmp_path, weights="best")
    best_result = best.task.evaluate(best.model, Batches(best.validation, 8))
    assert best_result.score == pytest.approx(max(m.validation_score for m in history), abs=1e-6)


def test_normalization_is_the_first_layer_of_the_model() -> None:
    experiment = Experiment.of(segmentation(validation="own", normalize=True))
    plain = Experiment.of(segmentation(validation="own"))
    images, _ = experiment.test.fetch(torch.arange(4))
    assert torch.equal(images, plain.test.fetch(torch.arange(4))[0])
    experiment.model.eval()
    plain.model.eval()
    torch.testing.assert_close(experiment.model(images), plain.model((images - 0.3) / 0.2))


def test_recipes_that_do_not_fit_their_data_raise() -> None:
    with pytest.raises(ValueError, match="no labels"):
        Experiment.of(segmentation(name="bare-rectangles"))
    smoothed = {**segmentation().as_data(), "task": {"label_smoothing": 0.1}}
    with pytest.raises(ValueError, match="label_smoothing is for classification"):
        Experiment.of(recipe_from_data(smoothed))
    with pytest.raises(ValueError, match="no published validation part"):
        Experiment.of(load_recipe("digits-opteq", ["data.validation=own"]))
    with pytest.raises(ValueError, match="did you mean 'flip'"):
        Experiment.of(segmentation(augmentation=["flp"]))


@pytest.mark.parametrize("task", ["generator", "autoencoder", "restoration"])
def test_tasks_that_produce_images_reject_normalization(task: str) -> None:
    data = {"model": {"name": "opteq-decoder"}, "data": {"name": "digits", "normalize": True}}
    data |= {"training": {"epochs": 1}, "task": {"name": task}}
    with pytest.raises(ValueError, match="produces images"):
        Experiment.of(recipe_from_data(data))


def test_searches_over_latents_reject_warm_starts() -> None:
    data = {"model": {"name": "opteq-decoder"}, "data": {"name": "digits"}}
    data |= {"training": {"epochs": 1, "warm_start": True}, "task": {"name": "generator"}}
    with pytest.raises(ValueError, match="warm_start has no effect"):
        Experiment.of(recipe_from_data(data))


def test_the_best_weights_need_validation_images(tmp_path: Path) -> None:
    recipe = load_recipe("digits-opteq", ["training.epochs=1", "data.options.train_samples=64"])
    run = RunFolder.opened(tmp_path, recipe.as_data())
    Experiment.of(recipe).train(run, torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="no validation images"):
        trained(tmp_path, weights="best")


def test_reading_into_memory_does_not_change_images(tmp_path: Path) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    paths = []
    for i in range(5):
        pixels = torch.randint(0, 256, (6, 7, 3), generator=generator, dtype=torch.uint8)
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    files = ImageFiles(tuple(paths), torch.tensor([3, 1, 400, 0, 2]), Framing.make(None))
    kept = read_into_memory(files, batch=2)
    assert kept.images.dtype == torch.uint8
    for in_memory, on_disk in zip(
        kept.fetch(torch.arange(5)), files.fetch(torch.arange(5)), strict=True
    ):
        assert torch.equal(in_memory, on_disk)


def test_label_smoothing_is_passed_to_the_task() -> None:
    recipe = load_recipe("digits-opteq", ["task.label_smoothing=0.1"])
    assert Experiment.of(recipe).task == Classification(label_smoothing=0.1)


@pytest.mark.parametrize("pair", [("camvid-deep-opteq", "camvid-fcn")])
def test_compared_recipes_have_the_same_data_and_training(pair: tuple[str, str]) -> None:
    first, second = (load_recipe(name) for name in pair)
    assert first.data == second.data
    solver = ("tolerance", "evaluation_tolerance")
    assert {k: v for k, v in vars(first.training).items() if k not in solver} == {
        k: v for k, v in vars(second.training).items() if k not in solver
    }


@pytest.mark.parametrize("size", ["quick", "cpu"])
def test_the_cifar_recipes_have_similar_numbers_of_parameters(size: str) -> None:
    from equilibria.models.registry import model_outline

    recipes = [
        load_recipe(f"cifar10-{family}-{size}")
        for family in ("mopteq", "deep-opteq", "geq", "resnet")
    ]
    counts = [parameter_count(model_outline(r.model.name, **r.model.options)) for r in recipes]
    assert max(counts) < 1.03 * min(counts)
    assert len({(r.training.epochs, r.training.learning_rate, str(r.data)) for r in recipes}) == 1


def test_adversarial_training_allows_normalization() -> None:
    """Normalization is a layer of the model, so that attacks act on pixels in [0, 1]."""

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


def test_the_option_pe_accepts_off() -> None:
    """YAML parses `off` as False."""
    for pe in ("off", "always"):
        model = Experiment.of(load_recipe("digits-mopteq", [f"model.options.pe={pe}"])).model
        assert (model.layer.cell.refresh_until > 0) is (pe == "always")
