"""Evaluation of a trained run on other data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import equilibria as eq
from equilibria.data import DataSet, DataSetCard, Split, load_digits, register_dataset
from equilibria.data import registry as internals
from equilibria.registry import Registry
from equilibria.training.experiment import trained_model
from equilibria.training.other_data import on_other_data
from tests.program import invoke

RECIPE = """
model: {name: opteq-small, options: {channels: 8, width: 8}}
data: {name: digits, normalize: true, options: {train_samples: 600}}
training: {epochs: 2, batch_size: 32, learning_rate: 0.01}
threads: 1
"""


@pytest.fixture(scope="module", autouse=True)
def variants() -> Iterator[None]:
    """Register variants of the digits: RGB, larger, one more class, other names, unlabelled."""
    digits = load_digits()
    assert isinstance(digits.test, Split)
    large = F.interpolate(digits.test.images, scale_factor=2.0, mode="nearest")
    colored, enlarged = (
        Split(images.expand(-1, 3, -1, -1), digits.test.labels)
        for images in (digits.test.images, large)
    )
    sets = {
        "digits-colored": replace(digits, name="digits-colored", test=colored),
        "digits-large": replace(digits, name="digits-large", test=enlarged),
        "digits-eleven": replace(
            digits, name="digits-eleven", class_names=(*digits.class_names, "ten")
        ),
        "digits-renamed": replace(digits, name="digits-renamed", class_names=tuple("abcdefghij")),
        "digits-unlabelled": replace(digits, name="digits-unlabelled", kind="unlabelled"),
    }
    loaders: Registry[DataSet] = Registry("data set")
    loaders._factories.update(internals._loaders._factories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "_loaders", loaders)
        patch.setattr(internals, "_cards", dict(internals._cards))
        for name, data in sets.items():
            register_dataset(DataSetCard(name), partial(replace, data))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other-data")
    (folder / "recipe.yaml").write_text(RECIPE)
    result = invoke("train", folder / "recipe.yaml", "--output", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run"


def evaluated(run: Path, *arguments: object) -> dict[str, float]:
    result = invoke("evaluate", run, *arguments, "--json")
    assert result.exit_code == 0, result.output
    figures: dict[str, float] = json.loads(result.stdout)
    return figures


def test_naming_the_data_of_the_run_gives_the_same_result(run: Path) -> None:
    default, named = evaluated(run), evaluated(run, "--data", "digits")
    assert default == named
    assert default["accuracy"] > 0.5


def test_corrupted_digits_have_a_lower_accuracy(run: Path) -> None:
    clean = evaluated(run)["accuracy"]
    options = ("--data", "digits", "corrupted=gaussian_noise:1", "test_samples=200")
    mild = evaluated(run, *options)
    assert mild["samples"] == 200
    hard = evaluated(run, "--data", "digits", "corrupted=contrast:5")
    assert hard["accuracy"] < clean - 0.2
    in_python = eq.evaluate(run, "digits", corrupted="contrast:5")
    assert in_python.accuracy == hard["accuracy"]
    assert hard["data"] == "digits (corrupted here: contrast:5)"


def test_images_are_converted_to_the_size_and_channels_of_the_run(run: Path) -> None:
    """RGB images are converted to gray, and larger images are scaled."""
    colored = evaluated(run, "--data", "digits-colored")
    assert colored["accuracy"] == pytest.approx(evaluated(run)["accuracy"], abs=0.01)
    assert eq.evaluate(eq.load(run), "digits-colored").accuracy == colored["accuracy"]
    assert evaluated(run, "--data", "digits-large")["samples"] == len(load_digits().test)
    large = eq.data.load_dataset("digits-large")
    framed = on_other_data(trained_model(run), large).test
    images, labels = framed.fetch(torch.arange(5))
    originals, same = load_digits().test.fetch(torch.arange(5))
    assert torch.equal(labels, same)
    assert images.shape == (5, 1, 8, 8)
    assert (images - originals).abs().mean() < 0.1


def test_data_that_do_not_fit_raise(run: Path) -> None:
    for name, message in {
        "digits-eleven": "has 11 classes, but the run has 10",
        "digits-unlabelled": "of kind 'unlabelled', but the run was trained on kind",
        "digitz": "digitz",
    }.items():
        result = invoke("evaluate", run, "--data", name)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
        with pytest.raises(ValueError, match=message.split(",")[0]):
            eq.evaluate(run, name)
    alone = invoke("evaluate", run, "corrupted=fog")
    assert alone.exit_code == 2
    assert "give its name with --data" in alone.output
    wrong = invoke("evaluate", run, "--data", "digits", "severity=3")
    assert wrong.exit_code == 2
    assert "severity" in wrong.output
    with pytest.raises(TypeError, match="options are for data given by name"):
        eq.evaluate(run, load_digits(), corrupted="fog")


def test_classes_with_other_names_are_matched_by_order(run: Path) -> None:
    result = invoke("evaluate", run, "--data", "digits-renamed")
    assert result.exit_code == 0, result.output
    assert "matched by order" in result.output
