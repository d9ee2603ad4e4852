"""Samples and reconstructions of a generator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from equilibria.analysis.generation import generate
from equilibria.data import DataSet, DataSetCard, load_digits
from equilibria.data.registry import register_dataset
from equilibria.data.source import evenly_spread
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
    ("data", "features"), [("bare-digits", "rotations"), ("digits", "trained on digits")]
)
def test_fid_does_not_need_classes(
    data: str, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equilibria.analysis.generation.FEATURE_IMAGES", 200)
    result, *_ = generate(experiment(data), torch.device("cpu"), samples=8, latents=30, images=20)
    assert result.features is not None
    assert features in result.features
    assert result.sample_fid is not None
    assert result.sample_fid > 0
    (by_search,) = result.reconstructions
    assert by_search.fid is not None


def test_density_is_that_of_the_recipe_by_default() -> None:
    own = {"name": "vae-gmm", "hidden": 16, "codes": 4, "steps": 20, "components": 3}
    options: dict[str, Any] = {"samples": 8, "latents": 30, "images": 20, "judge": False}
    device = torch.device("cpu")
    result, *_ = generate(experiment("digits", density=own), device, **options)
    assert result.density == "vae-gmm"
    result, *_ = generate(experiment("digits", density=own), device, density="gmm", **options)
    assert result.density == "gmm"
    with pytest.raises(ValueError, match="no option 'width'"):
        experiment("digits", density={"name": "vae-gmm", "width": 3})
    with pytest.raises(ValueError, match="density must be one of"):
        experiment("digits", density="flow")


def test_known_latents_are_not_searched_again() -> None:
    """Known latents give the same samples in fewer steps, if there are enough of them."""
    run = experiment("digits")
    images, _ = run.training.fetch(evenly_spread(run.training, 30))
    known = latents_of(run.model, run.task, images)
    steps: dict[str, list[tuple[str, int, int]]] = {"searched": [], "known": [], "too few": []}
    samples, reconstructed = {}, {}
    for name, given in (("searched", None), ("known", known), ("too few", known[:20])):
        _, samples[name], reconstructed[name] = generate(
            run,
            torch.device("cpu"),
            samples=8,
            latents=30,
            images=20,
            judge=False,
            known=given,
            on_step=lambda *step, name=name: steps[name].append(step),
        )
    searched, test = "latents of training images", "latents of test images"
    assert steps["searched"] == steps["too few"] == [(searched, 0, 2), (test, 1, 2)]
    assert steps["known"] == [(test, 0, 1)]
    for name in ("known", "too few"):
        torch.testing.assert_close(samples[name].images, samples["searched"].images)
        assert reconstructed[name].psnr == reconstructed["searched"].psnr
