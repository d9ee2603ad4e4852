"""Explanations: their parts agree with the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.analysis import ExplainedPredictions
from equilibria.analysis.explanation import explain_predictions
from tests.analysis.classifiers import MODELS, small_classifier


@pytest.fixture(scope="module", params=MODELS)
def explained(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor, ExplainedPredictions]:
    classifier = small_classifier(request.param)
    images = torch.rand(5, 1, 8, 8)
    return classifier, images, explain_predictions(classifier, images)


def test_predictions_and_margins_are_those_of_the_model(
    explained: tuple[Any, torch.Tensor, ExplainedPredictions],
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


def test_data_has_numbers_for_every_term(
    explained: tuple[Any, torch.Tensor, ExplainedPredictions],
) -> None:
    _, _, explanation = explained
    for index, row in enumerate(explanation.as_data()):
        assert row["prediction"] == str(int(explanation.prediction[index]))
        if explanation.contributions is not None and not explanation.contributions.why_not_sum:
            total = sum(term["source"] for term in row["terms"].values())
            assert total == pytest.approx(float(explanation.contributions.margin[index]), abs=1e-6)


def test_explain_does_not_change_the_model() -> None:
    classifier = small_classifier().train()
    explain_predictions(classifier, torch.rand(2, 1, 8, 8), follow=torch.rand(1, 1, 8, 8))
    assert classifier.training
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_model_without_equilibrium_is_an_error() -> None:
    with pytest.raises(TypeError, match="no equilibrium layer to explain"):
        explain_predictions(eq.create_model("resnet-small", in_channels=1), torch.rand(1, 1, 8, 8))
