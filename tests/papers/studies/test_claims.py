"""Studies of claims: intervals, verdicts, sizes, plateaus and kept runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria.data import load_digits
from equilibria.models.registry import parameter_count
from equilibria.papers import Study
from equilibria.papers.studies import comparing
from equilibria.papers.studies import protocol as protocol_module
from equilibria.papers.studies.claims import CLAIM_STUDIES, ClaimStudy, Comparison, Value
from equilibria.papers.studies.comparing import carry_out, check_sizes, claims_table, find
from equilibria.papers.studies.contestants import MOPTEQ, PLAIN, POPTEQ
from equilibria.papers.studies.family import Contestant
from equilibria.papers.studies.measures import heritage_diversity, perturbations, robustness
from equilibria.papers.studies.paired import Difference, deviation, half_width
from equilibria.papers.studies.protocol import (
    EVALUATION_TOLERANCE,
    ContestantRun,
    Plateau,
    Protocol,
    Runs,
    accuracy_on,
    check_matched,
    draw,
    small_images,
)
from equilibria.papers.studies.study import Work

DIGITS = Protocol(
    data="digits", side=8, training_images=96, validation_images=64, rates=(1e-2,), first_rate=0
)
SHORT = replace(DIGITS, most_epochs=2)


def test_paired_differences() -> None:
    from scipy.stats import ttest_rel

    model = {0: 0.91, 1: 0.88, 2: 0.93, 3: 0.9}
    reference = {3: 0.9, 2: 0.9, 1: 0.89, 0: 0.9, 9: 0.1}
    difference = Difference.between(model, reference)
    assert difference.values == pytest.approx((0.01, -0.01, 0.03, 0.0))
    assert difference.mean == pytest.approx(0.0075)
    assert difference.signs == (2, 1, 1)
    expected = ttest_rel(list(model.values()), [reference[seed] for seed in model])
    interval = expected.confidence_interval(0.95)
    assert difference.interval == pytest.approx((interval.low, interval.high))
    assert Difference((0.3,)).interval == (-math.inf, math.inf)
    assert math.isnan(deviation([1.0]))


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ((1.0, 1.2, 0.8, 1.1), "holds"),
        ((0.11, 0.12, 0.1, 0.11), "holds"),  # small, but above zero
        ((-1.0, -1.2, -0.8, -1.1), "does not"),
        ((0.1, -0.1, 0.05, -0.05), "does not"),  # within the margin
        ((1.0, -0.5, 2.0, 0.3), "undecided"),
        ((0.3, 0.9, -0.1, 0.4), "undecided"),
        ((5.0,), "undecided"),
    ],
)
def test_verdict_follows_from_the_interval(values: tuple[float, ...], answer: str) -> None:
    assert Difference(values).answer(margin=0.5) == answer


def test_interval_contains_the_mean_in_95_percent_of_samples() -> None:
    """Uses 2,000 samples of six seeds and a tolerance of 5 standard deviations of the share."""
    generator = np.random.default_rng(0)
    samples = generator.normal(0.7, 1.3, size=(2000, 6))
    inside = [low < 0.7 < high for low, high in (Difference(tuple(s)).interval for s in samples)]
    assert np.mean(inside) == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / 2000))


@pytest.mark.parametrize("mean", [0.0, 0.2, 0.45, 3.0])
def test_seeds_needed_is_the_smallest_number_that_decides(mean: float) -> None:
    values = tuple(mean + d for d in (-1.0, 1.0, -1.0, 1.0))
    difference = Difference(values)
    count = difference.seeds_needed(margin=0.5)

    def decided(seeds: int) -> bool:
        reach = half_width(difference.deviation, seeds)
        return reach < abs(mean) or reach < 0.5 - abs(mean)

    assert decided(count)
    assert count == 2 or not decided(count - 1)


def test_sizes_may_differ_by_ten_percent() -> None:
    check_matched({"one": 1000, "two": 1100})
    with pytest.raises(ValueError, match="one 1,000, two 1,101"):
        check_matched({"one": 1000, "two": 1101})


@pytest.mark.parametrize("study", CLAIM_STUDIES.values(), ids=lambda study: study.name)
def test_models_of_every_study_have_equal_sizes(study: ClaimStudy) -> None:
    counts = {}
    for contestant in study.contestants:
        model = contestant.build(in_channels=1, num_classes=10)
        counts[contestant.title] = parameter_count(model)
    check_matched(counts)


def test_curve_is_flat_after_its_plateaus() -> None:
    plateau = Plateau(patience=2, decays=2)
    values = [0.1, 0.3, 0.3, 0.2, 0.4, 0.4, 0.4]  # two plateaus of two epochs
    assert [plateau.better(value) for value in values] == [
        True,
        True,
        *[False] * 2,
        True,
        *[False] * 2,
    ]
    assert plateau.flat
    assert plateau.best == 0.4
    rising = Plateau(patience=2, decays=1)
    assert all(rising.better(value) for value in (0.1, 0.2, 0.3, 0.4))
    assert not rising.flat


def test_seed_determines_disjoint_training_and_validation_images() -> None:
    data = load_digits()
    images, again, other = (draw(data, seed, DIGITS) for seed in (0, 0, 1))
    assert torch.equal(images.training.images, again.training.images)
    assert torch.equal(images.validation.labels, again.validation.labels)
    assert not torch.equal(images.training.images, other.training.images)

    def pixels(split: object) -> set[bytes]:
        return {image.numpy().tobytes() for image in split.images}

    assert not pixels(images.training) & pixels(images.validation)
    assert (len(images.training), len(images.validation)) == (96, 64)


def test_small_images_are_padded_and_averaged() -> None:
    images = torch.rand(2, 1, 28, 28)
    small = small_images(images, 16)
    assert small.shape == (2, 1, 16, 16)
    assert small[:, :, 1, 1] == pytest.approx(images[:, :, :2, :2].mean(dim=(2, 3)))
    assert small.sum() == pytest.approx(float(images.sum()) / 4, rel=1e-5)


def ignored(_: str) -> protocol_module.Follow:
    return lambda epoch, accuracy: None


def test_kept_run_is_reused_and_its_weights_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path, load_digits(), SHORT)
    first = runs.run(PLAIN, 3, 1e-2, ignored)
    assert (first.epochs, first.flat) == (2, False)
    assert first.accuracy is not None

    def untrained(*_: object) -> None:
        raise AssertionError("a kept run was repeated")

    monkeypatch.setattr(protocol_module, "train_until_flat", untrained)
    assert Runs(tmp_path, load_digits(), SHORT).run(PLAIN, 3, 1e-2, ignored) == first
    measured = runs.measured(
        PLAIN,
        first,
        "again",
        lambda model, test, _: {"accuracy": accuracy_on(test, model, EVALUATION_TOLERANCE)},
    )
    assert measured.measures["again.accuracy"] == first.accuracy
    assert Runs(tmp_path, load_digits(), SHORT).run(PLAIN, 3, 1e-2, ignored) == measured
    with pytest.raises(ValueError, match="another protocol"):
        Runs(tmp_path, load_digits(), DIGITS)


def test_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    folders = [Runs(tmp_path / name, load_digits(), SHORT) for name in ("one", "two")]
    first, second = (runs.run(PLAIN, 0, 1e-2, ignored) for runs in folders)
    assert first.accuracy == second.accuracy
    assert first.validation_accuracy == second.validation_accuracy


@pytest.mark.parametrize(
    ("best", "tried"), [(2, [2, 1, 3]), (3, [2, 1, 3, 4]), (0, [2, 1, 3, 0]), (4, [2, 1, 3, 4])]
)
def test_rates_are_tried_until_both_neighbors_are_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int, tried: list[int]
) -> None:
    protocol = replace(SHORT, rates=(1.0, 2.0, 3.0, 4.0, 5.0), first_rate=2)
    runs = Runs(tmp_path, load_digits(), protocol)
    attempts = []

    def run(
        contestant: Contestant, seed: int, rate: float, *_: object, **__: object
    ) -> ContestantRun:
        attempts.append(protocol.rates.index(rate))
        score = -abs(protocol.rates.index(rate) - best)
        return ContestantRun(contestant.name, seed, rate, 1, score, 1, True, 1.0)

    monkeypatch.setattr(runs, "run", run)
    assert runs.rate(PLAIN, ignored) == protocol.rates[best]
    assert attempts == tried


def test_finding_uses_paired_seeds() -> None:
    def run(name: str, seed: int, accuracy: float) -> ContestantRun:
        return ContestantRun(name, seed, 1e-2, 1, 0.5, 1, True, 36.0, accuracy)

    results = {
        "mopteq": [run("mopteq", seed, 0.8 + 0.01 * seed) for seed in range(3)],
        "popteq": [run("popteq", seed, 0.8) for seed in range(3)],
    }
    finding = find(Comparison("more", Value(MOPTEQ), Value(POPTEQ)), results)
    assert finding.difference == pytest.approx(1.0)
    assert finding.deviation == pytest.approx(1.0)
    assert finding.answer == "undecided"
    assert finding.hours_needed == pytest.approx(finding.seeds_needed * 72 / 3600)
    assert f"needs {finding.hours_needed:.1f} core-hours" in finding.verdict


def test_measurements_of_branches_have_valid_ranges() -> None:
    torch.manual_seed(0)
    test = load_digits().test
    model = MOPTEQ.build(in_channels=1, num_classes=10).eval()
    measured = heritage_diversity(model, test, 0)
    assert -1 <= measured["H"] <= 1
    assert measured["ratio"] == pytest.approx(measured["H"] / measured["D"])
    shares = perturbations(model, test, 0)
    assert set(shares) == {"reconstructed", "binomial", "uniform"}
    assert all(0 <= share <= 1 for share in shares.values())
    subset = test.subset(torch.arange(40))
    assert 0 <= robustness(model, subset, 0)["pgd"] <= 1
    with pytest.raises(TypeError, match="no branches"):
        heritage_diversity(eq.create_model("opteq-small", in_channels=1).eval(), subset, 0)


def test_study_is_written_and_continues_from_kept_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(PLAIN, name="narrow", title="Narrow network")
    claims = ClaimStudy(
        "plain", "One over another", "No paper", (Comparison("A > B", Value(PLAIN), Value(narrow)),)
    )
    monkeypatch.setattr(comparing, "QUICK", SHORT)
    study = Study(
        "plain",
        claims.paper,
        claims.title,
        comparing.ComparisonSettings,
        partial(carry_out, claims),
    )
    settings = study.configure(quick=True, seeds=2)
    result = study.carry_out(settings, Work(tmp_path))
    assert "A > B" in result.text
    assert "One over another" in result.text
    content = json.loads((tmp_path / "plain-quick.json").read_text(encoding="utf-8"))
    assert content["command"] == "equilibria reproduce plain --quick --seeds 2"
    assert content["findings"][0]["difference"] == 0  # the same model under two names
    assert len(content["runs"]) == 4
    assert "plain-quick.md) | **" in claims_table(tmp_path, [claims])
    assert "4 of 4 runs reached the limit of epochs" in (tmp_path / "plain-quick.md").read_text(
        "utf-8"
    )

    def untrained(*_: object) -> None:
        raise AssertionError("a kept run was repeated")

    monkeypatch.setattr(protocol_module, "train_until_flat", untrained)
    assert study.carry_out(settings, Work(tmp_path)).record["findings"] == content["findings"]
    with pytest.raises(ValueError, match="at least 2 for an interval"):
        study.configure(seeds=1)


def test_models_of_different_sizes_raise(tmp_path: Path) -> None:
    wide = replace(PLAIN, name="wide", options={**PLAIN.options, "widths": (20,) * 5})
    study = ClaimStudy("s", "S", "P", (Comparison("A > B", Value(PLAIN), Value(wide)),))
    with pytest.raises(ValueError, match="equal sizes within 10 %"):
        check_sizes(study, Runs(tmp_path, load_digits(), SHORT))
