"""Explanations of predictions that render themselves: `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from equilibria.analysis import ExplainedPredictions
from equilibria.analysis.explanation import explain_predictions
from equilibria.report.html import explanation_page


@dataclass(frozen=True)
class Explanation(ExplainedPredictions):
    """Predictions of a classifier and the reasons for them, with an HTML page.

    All values are attributes of `equilibria.analysis.ExplainedPredictions`.

    Examples:
        >>> images = eq.data.load_digits().test.images[:1]
        >>> explanation = eq.explain(eq.load("digits-opteq"), images)
        >>> explanation.html("my model")[:15]
        '<!DOCTYPE html>'
    """

    def html(self, title: str, footer: str = "") -> str:
        """Return a self-contained HTML page with a title and a last line `footer`."""
        return explanation_page(self, title, footer)


def explain(
    model: nn.Module,
    images: Tensor,
    *,
    follow: Tensor | None = None,
    class_names: Sequence[str] | None = None,
) -> Explanation:
    """Explain the predictions of a classifier with an equilibrium layer.

    The result has predictions with certificates, the contribution of each term of the hidden
    objective, saliency maps, and the convergence of the solves. `Explanation.html` renders it.

    Args:
        model: Classifier with an equilibrium layer.
        images: Batch of images, shape (B, C, H, W), pixels in [0, 1].
        follow: Images whose solves are recorded; by default the first of `images`, as many as fit
            into memory.
        class_names: Names of the classes; by default those stored with the model (`eq.load`), or
            their indices.

    Returns:
        The explanation.

    Raises:
        TypeError: If the model is not a classifier with an equilibrium layer.

    Examples:
        >>> images = eq.data.load_digits().test.images[:1]
        >>> explanation = eq.explain(eq.load("digits-opteq"), images)
        >>> explanation.contributions.terms
        ('input', 'bias', 'quadratic')
        >>> explanation.html("my model")[:15]
        '<!DOCTYPE html>'
    """
    return Explanation(
        **vars(explain_predictions(model, images, follow=follow, class_names=class_names))
    )
