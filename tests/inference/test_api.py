"""The functions load, evaluate and predict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.data import Batches, load_dataset, load_digits
from equilibria.inference import ClassMap, Prediction, evaluate, load, predict
from equilibria.tasks import Segmentation
from equilibria.training import train

SHORT = ("training.epochs=1", "data.options.train_samples=128", "data.options.test_samples=40")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "run"
    train("digits-opteq", *SHORT, output=folder, device="cpu")
    return folder


def test_a_loaded_model_describes_its_images(run: Path) -> None:
    model = load(run)
    assert model.images.class_names == load_digits().class_names
    assert model.images.image_shape == (1, 8, 8)
    assert model.images.normalization is None
    with pytest.raises(FileNotFoundError, match="had no validation images"):
        load(run, weights="best")


def test_evaluation_of_a_run_equals_that_of_its_model(run: Path) -> None:
    of_run = evaluate(run)
    model, test = load(run), load_dataset("digits", test_samples=40).test
    for data in (test, Batches(test, 16)):
        of_model = evaluate(model, data)
        assert (of_model.accuracy, of_model.samples) == (of_run.accuracy, 40)
        assert of_model.loss == pytest.approx(of_run.loss, rel=1e-6)
    assert evaluate(run, "digits").samples == len(load_digits().test)
    assert evaluate(model, "digits").samples == len(load_digits().test)
    with pytest.raises(TypeError, match="data is missing"):
        evaluate(model)


def test_images_are_predicted_from_tensors_and_files(run: Path, tmp_path: Path) -> None:
    from PIL import Image

    images = load_digits().test.images[:3]
    for i, image in enumerate(images):
        pixels = (image[0] * 255).round().byte()
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{i}.png")
    model = load(run)
    from_tensor = predict(model, images, batch_size=2)
    from_files = predict(run, tmp_path)
    labels = model(images).argmax(dim=1)
    for i, (first, second) in enumerate(zip(from_tensor, from_files, strict=True)):
        assert isinstance(first, Prediction)
        assert isinstance(second, Prediction)
        assert first.label == second.label == model.images.class_names[int(labels[i])]
        assert first.confidence == pytest.approx(second.confidence, abs=0.01)
        assert (first.file, second.file) == ("", str(tmp_path / f"{i}.png"))
        assert first.converged
        assert first.iterations == second.iterations > 0
    with pytest.raises(ValueError, match="does not describe its images"):
        predict(eq.create_model("opteq-small", in_channels=1), [tmp_path / "0.png"])


def test_without_class_names_labels_are_numbers() -> None:
    logits = torch.tensor([[0.0, 3.0], [3.0, 0.0]])
    results = predict(nn.Sequential(nn.Linear(2, 2)), logits)
    assert {prediction.label for prediction in results} <= {"0", "1"}  # type: ignore[union-attr]
    assert all(prediction.iterations is None for prediction in results)


def test_a_segmentation_model_predicts_a_class_per_pixel() -> None:
    model = eq.create_model("fcn-segmentation", num_classes=3, in_channels=3)
    (results,) = predict(model, torch.rand(1, 3, 32, 48))
    assert isinstance(results, ClassMap)
    assert results.classes.shape == (32, 48)
    assert model.training
    with pytest.raises(ValueError, match="at least one labelled pixel, got none"):
        evaluate(model, [], task=Segmentation())
