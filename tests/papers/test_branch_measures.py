"""Measurements for the figures of MOptEqs, and plots of series."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from equilibria.models.mopteq.models import branch_features, mopteq, popteq
from equilibria.papers import Column, Panel, PaperTable, Row
from equilibria.papers.branch_measures import (
    ATTACK_ITERATIONS,
    STRENGTHS,
    attack_iterations,
    branch_relations,
    perturbations,
    solve_trace,
)
from equilibria.papers.plots import table_figure
from equilibria.papers.series_plots import series_of
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data

CPU = torch.device("cpu")


def experiment(name: str = "mopteq-small", **options: Any) -> Experiment:
    """Return an experiment with an untrained model."""
    options = {"channels": 4, "widths": [4, 6, 6], **options}
    given = {key: value for key, value in options.items() if value is not None}
    recipe = {
        "model": {"name": name, "options": given},
        "data": {"name": "digits", "options": {"train_samples": 30, "test_samples": 40}},
        "training": {"epochs": 1},
    }
    torch.manual_seed(0)
    return Experiment.of(recipe_from_data(recipe))


def test_relations_of_branches_match_their_definition() -> None:
    run = experiment(diversity=0.1)
    measured = branch_relations(run, CPU)
    images, _ = run.some_test_images(100)
    model = run.model
    solution = model.solve(images)  # type: ignore[operator]
    z = [t.flatten(2) for t in branch_features(model.layer.cell, solution.state, solution.context)]  # type: ignore[union-attr, arg-type]
    heritage, diversity = 0.0, 0.0
    for i in range(3):
        for j in range(3):
            if i != j:  # in a loop of three, all others are neighbors
                products = z[i][0] @ z[j][0].T
                heritage += float(products.trace()) / (3 * 4)
                diversity += float((products - products.diag().diag()).abs().sum()) / (3 * 12)
    assert measured["average_heritage@0"] == pytest.approx(heritage, rel=2e-3)
    assert measured["average_diversity@0"] == pytest.approx(diversity, rel=2e-3)
    mean = sum(series_of(measured, "average_heritage").values()) / 40
    assert measured["average_heritage"] == pytest.approx(mean, rel=1e-3)
    products = (z[1][0] @ z[0][0].T).abs()
    assert measured["correlation@2,3"] == pytest.approx(
        float(products[2, 3] / products.max()), rel=1e-3
    )
    assert len(series_of(measured, "correlation")) == 16


@pytest.mark.filterwarnings("ignore::equilibria.solvers.ConvergenceWarning")
def test_residual_of_a_contraction_decreases_to_rounding() -> None:
    measured = series_of(solve_trace(experiment(diversity=0.0), CPU), "residual")
    assert list(measured) == [str(place) for place in range(50)]
    assert measured["0"] > 1e3 * measured["20"]
    assert measured["49"] < 1e-5


def test_perturbed_accuracies_start_at_the_clean_accuracy() -> None:
    run = experiment(widths=[8], scales=[1])
    measured = perturbations(run, CPU)
    images, labels = run.some_test_images(40)
    clean = float((run.model.eval()(images).argmax(dim=1) == labels).double().mean())
    for direction in ("reconstructed", "binomial", "uniform"):
        shares = series_of(measured, f"{direction}_accuracy")
        assert [float(place) for place in shares] == [0.0, *STRENGTHS]
        assert shares["0.0"] == pytest.approx(100 * clean)
        assert all(0 <= share <= 100 for share in shares.values())


def test_accuracy_does_not_increase_with_more_attack_steps() -> None:
    shares = series_of(attack_iterations(experiment(), CPU), "pgd_iterations")
    assert [int(place) for place in shares] == [0, *ATTACK_ITERATIONS]
    assert shares["20"] <= shares["0"]


def test_models_without_branches_raise() -> None:
    run = experiment("opteq-small", widths=None, width=4)
    with pytest.raises(TypeError, match="has no branches"):
        branch_relations(run, CPU)


@pytest.mark.parametrize("make", [mopteq, popteq])
@pytest.mark.parametrize("space", ["y", "z"])
def test_features_of_branches_sum_to_the_output(make: Any, space: str) -> None:
    torch.manual_seed(0)
    options = {"space": space} if make is mopteq else {}
    model = make(channels=4, widths=(3, 4), scales=(1, 2), fusion="sum", **options)
    images = torch.randn(2, 3, 8, 8)
    solution = model.solve(images)
    fine, coarse = branch_features(model.layer.cell, solution.state, solution.context)
    doubled = coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(fine + doubled, model.layer.output(solution))


def record(**series: dict[str, float]) -> dict[str, Any]:
    run = {f"{name}@{place}": v for name, values in series.items() for place, v in values.items()}
    rows = [{"label": label, "paper": {}, "runs": [run, run]} for label in ("One", "Two")]
    return {"setting": "quick", "rows": [*rows, {"label": "None", "paper": {}, "runs": []}]}


@pytest.fixture
def table() -> PaperTable:
    rows = tuple(Row(label=label, paper={}, missing="no") for label in ("One", "Two", "None"))
    columns = (Column(title="10", measure="residual@10"),)
    return PaperTable(id="x-f1", paper="X", title="Figure 1", columns=columns, rows=rows)


def test_curves_panel_draws_one_curve_per_row(table: PaperTable) -> None:
    drawn = replace(table, picture=(Panel(show=("residual",), along="iteration", form="curves"),))
    values = {str(place): 10.0**-place for place in range(20)}
    (axis,) = table_figure(drawn, record(residual=values)).axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("iteration", "relative error")
    assert axis.get_yscale() == "log"
    assert [len(line.get_xdata()) for line in axis.lines] == [20, 20]
    assert axis.get_legend_handles_labels()[1] == ["One", "Two"]


def test_dots_and_maps_panels_draw_the_series(table: PaperTable) -> None:
    panels = (
        Panel(show=("average_heritage",), over="average_diversity", form="dots"),
        Panel(show=("correlation",), along="first / second", form="map"),
    )
    given = record(
        average_heritage={"0": 1.0, "1": 2.0},
        average_diversity={"0": 0.5, "1": 0.7},
        correlation={"0,0": 1.0, "0,1": 0.1, "1,0": 0.2, "1,1": 0.9},
    )
    dots, one, two, bar = table_figure(replace(table, picture=panels), given).axes
    assert list(dots.lines[0].get_xdata()) == [0.5, 0.7]
    assert list(dots.lines[0].get_ydata()) == [1.0, 2.0]
    assert one.images[0].get_array().tolist() == [[1.0, 0.1], [0.2, 0.9]]
    assert (two.get_title(), two.get_xlabel(), two.get_ylabel()) == ("Two", "first", "second")
    assert "÷" in bar.get_ylabel()
