"""What GEQ's Table 3 and Figures 2 and 3 measure, on runs of seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria.data import DataSet, DataSetCard, Split, load_digits, register_dataset, registry
from equilibria.papers import find_table, image_measures, plan
from equilibria.papers.jobs import Job
from equilibria.papers.measures import EXTRAS
from equilibria.papers.pictures import PICTURES
from equilibria.papers.plots import table_figure
from equilibria.papers.report import as_data, cells
from equilibria.papers.runner import findings
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data

CPU = torch.device("cpu")


def experiment(data: str, **options: Any) -> Experiment:
    torch.manual_seed(0)
    return Experiment.of(
        recipe_from_data(
            {
                "model": {"name": "geq-small", "options": {"channels": 8, "widths": [8, 8]}},
                "data": {"name": data, "options": options},
                "training": {"epochs": 1},
            }
        )
    )


@pytest.fixture
def grouped() -> Iterator[None]:
    """Digits, of which the odd ones were not seen."""

    def load(subclasses: str = "all") -> DataSet:
        digits = load_digits()
        assert isinstance(digits.test, Split)
        unseen = digits.test.labels % 2 == (subclasses == "unseen")
        return replace(digits, name="grouped", test=digits.test.subset(unseen.nonzero()[:, 0]))

    register_dataset(DataSetCard("grouped"), load)
    yield
    del registry._cards["grouped"], registry._loaders._factories["grouped"]


def test_unseen_subclasses_are_those_that_are_judged(grouped: None) -> None:
    run = experiment("grouped", subclasses="known", test_samples=50)
    found = EXTRAS["unseen"](run, CPU)
    odd = eq.data.load_dataset("grouped", subclasses="unseen")
    assert found["unseen_samples"] == len(odd.test) > 200
    assert found["unseen_accuracy"] == eq.evaluate(run.model, odd).accuracy


def test_an_accuracy_under_a_corruption_is_the_mean_of_five_severities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = {name: image_measures.STRENGTHS[name] for name in ("contrast", "fog")}
    monkeypatch.setattr(image_measures, "STRENGTHS", some)
    monkeypatch.setattr(image_measures, "CORRUPTED_IMAGES", 60)
    run = experiment("digits", test_samples=60)
    found = EXTRAS["corruptions"](run, CPU)
    for name in some:
        mean = eq.evaluate(run.model, "digits", test_samples=60, corrupted=name).accuracy
        assert found[f"corrupted_{name}"] == mean
    values = [found[f"corrupted_{name}"] for name in some]
    assert found["corrupted_accuracy"] == pytest.approx(np.mean(values))
    assert found["uncorrupted_accuracy"] == run.evaluate().accuracy
    assert found["corrupted_here"] == 1


def test_the_files_of_cifar10_c_are_taken_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(0)
    (tmp_path / "CIFAR-10-C").mkdir()
    for name in image_measures.STRENGTHS:
        pixels = chance.integers(256, size=(10, 32, 32, 3), dtype=np.uint8)
        np.save(tmp_path / "CIFAR-10-C" / f"{name}.npy", pixels)
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.zeros(10, dtype=np.uint8))
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for number in range(1, 7):
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        rows = chance.integers(10, size=(2, 3073), dtype=np.uint8)
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows.tobytes())
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    run = experiment("cifar10")
    found = EXTRAS["corruptions"](run, CPU)
    assert found["corrupted_here"] == 0
    fog = eq.data.load_dataset("cifar10-c", tmp_path, corruption="fog")
    assert found["corrupted_fog"] == eq.evaluate(run.model, fog).accuracy


@pytest.mark.parametrize(
    ("maps", "share"),
    [
        (torch.ones(3, 4, 4), 8 / 16),  # even: half of the map holds half of it
        (torch.eye(4).expand(3, 4, 4), 2 / 16),
        (torch.zeros(3, 4, 4), 8 / 16),
    ],
)
def test_how_concentrated_a_map_is(
    maps: torch.Tensor, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_measures, "grad_cam", lambda model, images: maps)
    assert EXTRAS["saliency"](experiment("digits"), CPU)["salient_share"] == share


def test_maps_are_drawn() -> None:
    assert PICTURES["saliency"](experiment("digits"), CPU).startswith(b"\x89PNG")


def test_a_column_in_which_rows_measure_different_things_has_its_own_name(tmp_path: Path) -> None:
    made = plan(find_table("mopteqs-f3a"), "quick", [0], tmp_path)
    for job in {job.folder: job for job in made.jobs.values()}.values():  # The rows share a run.
        _pretend(job, {})
    heading, *_ = cells(made, findings(made, []))
    assert heading[1:3] == ["ε = 0", "ε = 0.1"]


def test_a_turned_table_has_its_columns_below_each_other(tmp_path: Path) -> None:
    table = find_table("geq-f2")
    made = plan(table, "quick", [0, 1], tmp_path)
    for job in made.jobs.values():
        _pretend(job, dict.fromkeys(image_measures.STRENGTHS, 0.25))
    found = findings(made, [])
    heading, *lines = cells(made, found)
    assert heading == ["row", "GEQ", "MOptEqs", "ResNet"]
    by_name = {line[0]: line[1:] for line in lines}
    assert by_name["fog (%)"] == 3 * ["25.0 ± 0.0"]
    assert by_name["parameters"] == 3 * ["9"]
    facts = {"date": "", "commit": None}
    figure = table_figure(table, as_data(made, found, "", facts))
    (part,) = figure.subfigs
    (ours,) = part.axes
    assert [label.get_text() for label in ours.get_yticklabels()] == list(table.picture[0].show)
    (legend,) = part.legends
    assert [text.get_text() for text in legend.get_texts()] == ["GEQ", "MOptEqs", "ResNet"]


def _pretend(job: Job, accuracies: dict[str, float]) -> None:
    """A finished run."""
    import json

    job.folder.mkdir(parents=True)
    kept = {f"corrupted_{name}": value for name, value in accuracies.items()}
    means = {"corrupted_accuracy": 0.25, "uncorrupted_accuracy": 0.5, "corrupted_here": 1.0}
    (job.folder / "result.json").write_text(json.dumps({"parameters": 9}))
    (job.folder / "corruptions.json").write_text(json.dumps(kept | means))
