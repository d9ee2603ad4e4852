"""Explanations: their parts agree with the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.energies.branch_coupling import diversity, heritage
from equilibria.models.mopteq.models import branch_features
from equilibria.report import Explanation
from equilibria.report.calibration import calibration
from equilibria.report.features import channel_correlation, feature_statistics, relations
from equilibria.report.saliency import input_gradient, signed
from tests.report.pages import Checker

MODELS: dict[str, dict[str, Any]] = {
    "opteq-small": {"width": 8},
    "geq-small": {"widths": (8, 8)},
    "mopteq-small": {"widths": (4, 6), "scales": (1, 2)},
    "deep-opteq-small": {"widths": (4, 4)},
    "mdeq-small": {"channels": (4, 4)},
}


def model(name: str = "opteq-small") -> Any:
    torch.manual_seed(0)
    options = {"channels": 8, **MODELS[name]}
    return eq.create_model(name, in_channels=1, num_classes=4, **options).eval()


@pytest.fixture(scope="module", params=MODELS)
def explained(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor, Explanation]:
    classifier = model(request.param)
    images = torch.rand(5, 1, 8, 8)
    return classifier, images, eq.explain(classifier, images)


def test_predictions_and_margins_are_those_of_the_model(
    explained: tuple[Any, torch.Tensor, Explanation],
) -> None:
    classifier, images, explanation = explained
    with torch.no_grad():
        logits = classifier(images)
    best = logits.topk(2, dim=1)
    assert explanation.prediction.tolist() == best.indices[:, 0].tolist()
    assert explanation.rival.tolist() == best.indices[:, 1].tolist()
    torch.testing.assert_close(explanation.margin, best.values[:, 0] - best.values[:, 1])
    if explanation.contributions is not None:
        near = explanation.contributions.margin.float()
        torch.testing.assert_close(near, explanation.margin, rtol=0.05, atol=1e-2)
    assert (explanation.contributions is None) == bool(explanation.no_contributions)
    assert (explanation.relations is not None) == (
        len(explanation.attention) > 0 or "MOptEq" in repr(classifier)
    )
    assert explanation.gradient.shape == images.shape
    assert explanation.class_names == ("0", "1", "2", "3")


def test_page_is_complete_and_self_contained(
    explained: tuple[Any, torch.Tensor, Explanation],
) -> None:
    _, _, explanation = explained
    html = explanation.html("<a title>", "footer")
    page = Checker(html)
    assert "<a title>" in page.text
    assert html.count("<article") == 5
    assert all(reference.startswith("data:image/") for reference in page.references)
    assert not {"script", "link"} & {*page.tags}
    for term, _, _ in explanation.pulls(0):
        assert term.replace(" of ", ", ") in page.text


def test_data_has_numbers_for_every_term(
    explained: tuple[Any, torch.Tensor, Explanation],
) -> None:
    _, _, explanation = explained
    for index, row in enumerate(explanation.as_data()):
        assert row["prediction"] == str(int(explanation.prediction[index]))
        if explanation.contributions is not None and not explanation.contributions.why_not_sum:
            total = sum(term["source"] for term in row["terms"].values())
            assert total == pytest.approx(float(explanation.contributions.margin[index]), abs=1e-6)


def test_explain_does_not_change_the_model() -> None:
    classifier = model().train()
    eq.explain(classifier, torch.rand(2, 1, 8, 8), follow=torch.rand(1, 1, 8, 8))
    assert classifier.training
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_model_without_equilibrium_is_an_error() -> None:
    with pytest.raises(TypeError, match="no equilibrium layer to explain"):
        eq.explain(eq.create_model("resnet-small", in_channels=1), torch.rand(1, 1, 8, 8))


def test_input_gradient_matches_finite_differences_of_the_margin() -> None:
    classifier = model().double()
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    classes, rivals = torch.tensor([0, 3]), torch.tensor([2, 1])
    direction = torch.randn_like(images)

    def margins(at: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = classifier(at)
        return (logits.gather(1, classes[:, None]) - logits.gather(1, rivals[:, None]))[:, 0]

    with eq.solving(classifier, tolerance=1e-12, gradient=eq.Implicit(tolerance=1e-12)):
        gradient = input_gradient(classifier, images, classes, rivals)
        ends = [margins(images + step * direction) for step in (1e-6, -1e-6)]
    along = (gradient * direction).flatten(1).sum(dim=1)
    torch.testing.assert_close(along, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_signed_maps_are_red_and_blue() -> None:
    drawn = signed(torch.tensor([[2.0, 0.0], [-2.0, 1.0]]))
    assert drawn.shape == (3, 2, 2)
    assert torch.equal(drawn[:, 0, 1], torch.ones(3))
    assert drawn[0, 0, 0] > drawn[2, 0, 0]
    assert drawn[2, 1, 0] > drawn[0, 1, 0]


def test_relations_resample_branches_of_different_resolutions() -> None:
    classifier = model("mopteq-small")
    with torch.no_grad():
        solution = classifier.solve(torch.rand(3, 1, 8, 8))
        fine, coarse = branch_features(classifier.layer.cell, solution.state, solution.context)
        measured = relations([fine, coarse])
    up = torch.nn.functional.interpolate(coarse, scale_factor=2) / 4
    down = torch.nn.functional.avg_pool2d(fine, 2)
    similar = (heritage(fine, up) + heritage(coarse, down)) / (2 * 8)
    diverse = (diversity(fine, up) + diversity(coarse, down)) / (2 * 56)
    torch.testing.assert_close(measured.heritage, similar)
    torch.testing.assert_close(measured.diversity, diverse)
    assert float(measured.correlation.max()) == pytest.approx(1.0)


def test_feature_statistics_match_closed_forms() -> None:
    feature = torch.zeros(4, 2, 1, 1)
    feature[:, 0, 0, 0] = torch.tensor([3.0, -3.0, 3.0, -3.0])
    feature[:, 1, 0, 0] = torch.tensor([4.0, 4.0, -4.0, -4.0])
    statistics = feature_statistics(feature)
    assert statistics["Mean |z| (L1)"] == pytest.approx(3.5)
    assert statistics["Mean z² (L2)"] == pytest.approx(12.5)
    assert statistics["Length ‖z‖, mean (incay)"] == pytest.approx(5.0)
    assert statistics["cos² between channels, mean (decorrelation)"] == pytest.approx(
        0.0, abs=1e-12
    )
    assert statistics["Share of numbers next to zero"] == 0.0
    correlation = channel_correlation(feature)
    torch.testing.assert_close(correlation, torch.eye(2))
    doubled = feature_statistics(torch.cat([feature[:, :1], 2 * feature[:, :1]], dim=1))
    assert doubled["cos² between channels, mean (decorrelation)"] == pytest.approx(1.0)


def test_calibration_bins_predictions_by_confidence() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.55, 0.55, 1.0])
    correct = torch.tensor([True, True, True, False, True, False, True])
    result = calibration(confidence, correct)
    assert result.counts == (2, 5)
    assert result.points == (pytest.approx((0.55, 0.5)), pytest.approx((0.96, 0.8)))
    assert result.error == pytest.approx((2 * 0.05 + 5 * 0.16) / 7)
    sure = calibration(torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert sure.error == 0.0
