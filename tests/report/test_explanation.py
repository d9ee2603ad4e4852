"""The page of an explanation."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.report import Explanation
from tests.analysis.classifiers import MODELS, small_classifier
from tests.report.pages import Checker


@pytest.mark.parametrize("name", MODELS)
def test_page_is_complete_and_self_contained(name: str) -> None:
    explanation = eq.explain(small_classifier(name), torch.rand(5, 1, 8, 8))
    assert isinstance(explanation, Explanation)
    html = explanation.html("<a title>", "footer")
    page = Checker(html)
    assert "<a title>" in page.text
    assert html.count("<article") == 5
    assert all(reference.startswith("data:image/") for reference in page.references)
    assert not {"script", "link"} & {*page.tags}
    for term, _, _ in explanation.pulls(0):
        assert term.replace(" of ", ", ") in page.text
