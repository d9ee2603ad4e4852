"""Samples and reconstructions of a generator: where images have no classes, and by recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from equilibria.data import DataSet, DataSetCard, load_digits
from equilibria.data.registry import register_dataset
from equilibria.data.source import evenly_spread
from equilibria.report import generate
from equilibria.tasks.images import latents_of
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data


@pytest.fixture(scope="module", autouse=True)
def digits_without_classes() -> None:
    def load() -> DataSet:
        return replace(load_digits(), name="bare-digits", class_names=(), kind="unlabelled")

    register_dataset(DataSetCard("bare-digits"), load, replace=True)


def experiment(data: str, **task: Any) -> Experiment:
    options = {"latent_dim": 8, "channels": 8, "width": 8, "head_channels": 8}
    return Experiment.of(
        recipe_from_data(
            {
                "model": {"name": "opteq-decoder", "options": options},
                "data": {"name": data},
                "training": {"epochs": 1},
                "task": {"name": "generator", "options": {"evaluation_iterations": 3, **task}},
            }
        )
    )


@pytest.mark.parametrize(
    ("data", "told"), [("bare-digits", "turned"), ("digits", "trained on digits")]
)
def test_the_fid_needs_no_classes(data: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equilibria.report.generation.FEATURE_IMAGES", 200)
    found, *_ = generate(experiment(data), torch.device("cpu"), samples=8, latents=30, images=20)
    assert found.features is not None
    assert told in found.features
    assert found.sample_fid is not None
    assert found.sample_fid > 0
    (by_search,) = found.reconstructions
    assert by_search.fid is not None


def test_the_recipe_chooses_the_density() -> None:
    own = {"name": "vae-gmm", "hidden": 16, "codes": 4, "steps": 20, "components": 3}
    options: dict[str, Any] = {"samples": 8, "latents": 30, "images": 20, "judge": False}
    device = torch.device("cpu")
    found, *_ = generate(experiment("digits", density=own), device, **options)
    assert found.density == "vae-gmm"
    found, *_ = generate(experiment("digits", density=own), device, density="gmm", **options)
    assert found.density == "gmm"
    with pytest.raises(ValueError, match="no option 'width'"):
        experiment("digits", density={"name": "vae-gmm", "width": 3})
    with pytest.raises(ValueError, match="density must be one of"):
        experiment("digits", density="flow")


def test_latents_that_are_known_are_not_searched_again() -> None:
    """They give the same samples with fewer steps; as many as are asked for, or they do not do."""
    one = experiment("digits")
    images, _ = one.training.fetch(evenly_spread(one.training, 30))
    known = latents_of(one.model, one.task, images)
    told: dict[str, list[tuple[str, int, int]]] = {"searched": [], "known": [], "too few": []}
    sheets = {}
    for name, given in (("searched", None), ("known", known), ("too few", known[:20])):
        _, sheets[name], _ = generate(
            one,
            torch.device("cpu"),
            samples=8,
            latents=30,
            images=20,
            judge=False,
            known=given,
            on_step=lambda *step, name=name: told[name].append(step),
        )
    searched, test = "latents of training images", "latents of test images"
    assert told["searched"] == told["too few"] == [(searched, 0, 2), (test, 1, 2)]
    assert told["known"] == [(test, 0, 1)]
    for name in ("known", "too few"):
        for row, other in zip(sheets[name].rows, sheets["searched"].rows, strict=True):
            torch.testing.assert_close(row.images, other.images)
