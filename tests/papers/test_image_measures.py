"""Measurements for Table 3 and Figures 2 and 3 of GEQ, on small data."""

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
    """Register digits as data whose odd classes are the unseen subclasses."""

    def load(subclasses: str = "all") -> DataSet:
        digits = load_digits()
        assert isinstance(digits.test, Split)
        unseen = digits.test.labels % 2 == (subclasses == "unseen")
        return replace(digits, name="grouped", test=digits.test.subset(unseen.nonzero()[:, 0]))

    register_dataset(DataSetCard("grouped"), load)
    yield
    del registry._cards["grouped"], registry._loaders._factories["grouped"]


def test_unseen_accuracy_uses_the_unseen_subclasses(grouped: None) -> None:
    run = experiment("grouped", subclasses="known", test_samples=50)
    measured = EXTRAS["unseen"](run, CPU)
    odd = eq.data.load_dataset("grouped", subclasses="unseen")
    assert measured["unseen_samples"] == len(odd.test) > 200
    assert measured["unseen_accuracy"] == eq.evaluate(run.model, odd).accuracy


def test_corrupted_accuracy_is_the_mean_over_five_severities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {name: image_measures.STRENGTHS[name] for name in ("contrast", "fog")}
    monkeypatch.setattr(image_measures, "STRENGTHS", chosen)
    monkeypatch.setattr(image_measures, "CORRUPTED_IMAGES", 60)
    run = experiment("digits", test_samples=60)
    measured = EXTRAS["corruptions"](run, CPU)
    for name in chosen:
        mean = eq.evaluate(run.model, "digits", test_samples=60, corrupted=name).accuracy
        assert measured[f"corrupted_{name}"] == mean
    values = [measured[f"corrupted_{name}"] for name in chosen]
    assert measured["corrupted_accuracy"] == pytest.approx(np.mean(values))
    assert measured["uncorrupted_accuracy"] == run.evaluate().accuracy
    assert measured["corrupted_here"] == 1


def test_files_of_cifar10_c_are_used_if_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    (tmp_path / "CIFAR-10-C").mkdir()
    for name in image_measures.STRENGTHS:
        pixels = generator.integers(256, size=(10, 32, 32, 3), dtype=np.uint8)
        np.save(tmp_path / "CIFAR-10-C" / f"{name}.npy", pixels)
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.zeros(10, dtype=np.uint8))
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for number in range(1, 7):
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        rows = generator.integers(10, size=(2, 3073), dtype=np.uint8)
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows.tobytes())
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    run = experiment("cifar10")
    measured = EXTRAS["corruptions"](run, CPU)
    assert measured["corrupted_here"] == 0
    fog = eq.data.load_dataset("cifar10-c", tmp_path, corruption="fog")
    assert measured["corrupted_fog"] == eq.evaluate(run.model, fog).accuracy


@pytest.mark.parametrize(
    ("maps", "share"),
    [
        (torch.ones(3, 4, 4), 8 / 16),  # uniform: half of the map contains half of the sum
        (torch.eye(4).expand(3, 4, 4), 2 / 16),
        (torch.zeros(3, 4, 4), 8 / 16),
    ],
)
def test_salient_share_is_the_smallest_area_with_half_of_the_map(
    maps: torch.Tensor, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_measures, "grad_cam", lambda model, images: maps)
    assert EXTRAS["saliency"](experiment("digits"), CPU)["salient_share"] == share


def test_saliency_picture_is_a_png() -> None:
    assert PICTURES["saliency"](experiment("digits"), CPU).startswith(b"\x89PNG")


def test_column_whose_measure_depends_on_the_row_keeps_its_title(tmp_path: Path) -> None:
    planned = plan(find_table("mopteqs-f3a"), "quick", [0], tmp_path)
    for job in {job.folder: job for job in planned.jobs.values()}.values():  # the rows share a run
        _write_result(job, {})
    heading, *_ = cells(planned, findings(planned, []))
    assert heading[1:3] == ["ε = 0", "ε = 0.1"]


def test_turned_table_lists_its_columns_below_each_other(tmp_path: Path) -> None:
    table = find_table("geq-f2")
    planned = plan(table, "quick", [0, 1], tmp_path)
    for job in planned.jobs.values():
        _write_result(job, dict.fromkeys(image_measures.STRENGTHS, 0.25))
    results = findings(planned, [])
    heading, *lines = cells(planned, results)
    assert heading == ["row", "GEQ", "MOptEqs", "ResNet"]
    by_name = {line[0]: line[1:] for line in lines}
    assert by_name["fog (%)"] == 3 * ["25.0 ± 0.0"]
    assert by_name["parameters"] == 3 * ["9"]
    facts = {"date": "", "commit": None}
    figure = table_figure(table, as_data(planned, results, "", facts))
    (part,) = figure.subfigs
    (ours,) = part.axes
    assert [label.get_text() for label in ours.get_yticklabels()] == list(table.picture[0].show)
    (legend,) = part.legends
    assert [text.get_text() for text in legend.get_texts()] == ["GEQ", "MOptEqs", "ResNet"]


def _write_result(job: Job, accuracies: dict[str, float]) -> None:
    """Write the results of a finished run."""
    import json

    job.folder.mkdir(parents=True)
    numbers = {f"corrupted_{name}": value for name, value in accuracies.items()}
    means = {"corrupted_accuracy": 0.25, "uncorrupted_accuracy": 0.5, "corrupted_here": 1.0}
    (job.folder / "result.json").write_text(json.dumps({"parameters": 9}))
    (job.folder / "corruptions.json").write_text(json.dumps(numbers | means))
