"""Train, load, evaluate, predict: one call for one command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.data import Batches, load_dataset, load_digits
from equilibria.tasks import Segmentation
from equilibria.training import (
    ClassMap,
    EpochMetrics,
    Prediction,
    evaluate,
    load,
    load_recipe,
    predict,
    train,
)

SHORT = ("training.epochs=1", "data.options.train_samples=128", "data.options.test_samples=40")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "run"
    train("digits-opteq", *SHORT, output=folder, device="cpu")
    return folder


def test_train_returns_what_load_loads(run: Path, tmp_path: Path) -> None:
    epochs: list[EpochMetrics] = []
    recipe = load_recipe("digits-opteq", SHORT)
    model = train(recipe, output=tmp_path / "again", device="cpu", on_epoch=epochs.append)
    assert [metrics.epoch for metrics in epochs] == [1]
    images = load_digits().test.images[:5]
    assert not model.training
    assert torch.equal(model(images), load(run)(images))
    with pytest.raises(TypeError, match="overrides are for"):
        train(recipe, "training.epochs=2", output=tmp_path / "other")


def test_progress_is_printed_to_stderr_unless_it_is_turned_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("digits-opteq", *SHORT, output=tmp_path / "told", device="cpu")
    printed = capsys.readouterr()
    assert printed.out == ""
    *summary, epoch = printed.err.splitlines()
    assert [line.split()[0] for line in summary] == [
        *("Model", "Data", "Schedule", "Solver", "Output")
    ]
    assert "opteq-small, 33,098 parameters" in summary[0]
    assert "128 training and 40 test images of 1×8×8, 10 classes" in summary[1]
    assert "1 epoch, batches of 64, adamw, learning rate 0.02 (cosine)" in summary[2]
    assert "Auto to a tolerance of 0.01, gradient OneStep, on cpu" in summary[3]
    assert summary[4].endswith("told (all settings: config.yaml)")
    assert epoch.startswith("epoch 1/1  loss ")
    train("digits-opteq", *SHORT, output=tmp_path / "silent", device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_loaded_model_knows_its_images(run: Path) -> None:
    model = load(run)
    assert model.images.class_names == load_digits().class_names
    assert model.images.image_shape == (1, 8, 8)
    assert model.images.normalization is None
    with pytest.raises(FileNotFoundError, match="had no validation images"):
        load(run, weights="best")


def test_a_run_goes_on_only_with_its_own_recipe(run: Path) -> None:
    before = load(run).state_dict()
    after = train("digits-opteq", *SHORT, output=run, resume=True, device="cpu").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="another recipe"):
        train("digits-opteq", output=run, resume=True)


def test_evaluating_a_run_is_evaluating_its_model(run: Path) -> None:
    of_run = evaluate(run)
    model, test = load(run), load_dataset("digits", test_samples=40).test
    for data in (test, Batches(test, 16)):
        of_model = evaluate(model, data)
        assert (of_model.accuracy, of_model.samples) == (of_run.accuracy, 40)
        assert of_model.loss == pytest.approx(of_run.loss, rel=1e-6)
    assert evaluate(run, "digits").samples == len(load_digits().test)
    assert evaluate(model, "digits").samples == len(load_digits().test)
    with pytest.raises(TypeError, match="name the data"):
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
    for i, (one, other) in enumerate(zip(from_tensor, from_files, strict=True)):
        assert isinstance(one, Prediction)
        assert isinstance(other, Prediction)
        assert one.label == other.label == model.images.class_names[int(labels[i])]
        assert one.confidence == pytest.approx(other.confidence, abs=0.01)
        assert (one.file, other.file) == ("", str(tmp_path / f"{i}.png"))
        assert one.converged
        assert one.iterations == other.iterations > 0
    with pytest.raises(ValueError, match="does not say what size"):
        predict(eq.create_model("opteq-small", in_channels=1), [tmp_path / "0.png"])


def test_a_model_without_names_says_the_number_of_a_class() -> None:
    logits = torch.tensor([[0.0, 3.0], [3.0, 0.0]])
    found = predict(nn.Sequential(nn.Linear(2, 2)), logits)
    assert {prediction.label for prediction in found} <= {"0", "1"}  # type: ignore[union-attr]
    assert all(prediction.iterations is None for prediction in found)


def test_a_segmenter_gives_a_class_to_every_pixel() -> None:
    model = eq.create_model("fcn-segmentation", num_classes=3, in_channels=3)
    (found,) = predict(model, torch.rand(1, 3, 32, 48))
    assert isinstance(found, ClassMap)
    assert found.classes.shape == (32, 48)
    assert model.training
    with pytest.raises(ValueError, match="no labelled pixel"):
        evaluate(model, [], task=Segmentation())
