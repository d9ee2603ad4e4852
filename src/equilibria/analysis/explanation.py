"""Predictions of classifiers, and the reasons for them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.analysis.convergence import Convergence, follow_solve
from equilibria.analysis.features import (
    Relations,
    channel_correlation,
    feature_statistics,
    relations,
)
from equilibria.analysis.formulas import Formula, model_formula
from equilibria.analysis.saliency import grad_cam, input_gradient
from equilibria.certificates import Certificate, certifier
from equilibria.context.state import Packing
from equilibria.equilibrium import solving
from equilibria.equilibrium.layer import as_inputs
from equilibria.gradients import Implicit
from equilibria.images import images_of
from equilibria.models import (
    Contributions,
    EquilibriumClassifier,
    GEQCell,
    NoContributionsError,
    contributions,
)
from equilibria.models.base import predicted_classes
from equilibria.models.mopteq.models import branch_features
from equilibria.solvers import ConvergenceWarning, Picard

FOLLOWED: dict[str, Any] = {"tolerance": 1e-6, "max_iterations": 250}
"""Options of the solvers whose iterates are recorded."""
MAX_RECORDED_NUMBERS = 2**25
"""Largest number of values in all recorded iterates, which are kept in memory."""


@dataclass(frozen=True)
class ExplainedPredictions:
    """Predictions of a classifier for a batch of images, and the reasons for them.

    Attributes:
        images: The images, shape (B, C, H, W).
        class_names: Names of the classes.
        formula: Hidden objective, or the map whose fixed point the equilibrium is.
        prediction: Predicted class of each image, −1 if the logits are not finite.
        rival: Class with the second largest logit.
        confidence: Softmax probability of the prediction.
        margin: Logit of the prediction minus that of the rival.
        iterations: Number of iterations per image; None if the batch is solved as one problem.
        contributions: Effect of each term of the hidden objective on the margin.
        no_contributions: Why there are no contributions; empty if there are.
        certificate: Certificates of the predictions.
        convergence: Objective and residual along Picard iterations.
        comparison: The same for the solver of the model; None if that is Picard.
        saliency: Grad-CAM of the prediction, shape (B, H', W'); None if the feature is not a map.
        gradient: ∂margin/∂image through the equilibrium, shape (B, C, H, W).
        attention: GEQ's attention weight β of every patch, per branch, shape (B, channel groups,
            rows, columns).
        relations: Heritage and diversity of neighboring branches.
        correlation: |cos| between channels of the feature, over all images.
        statistics: Statistics that the feature regularizers penalize, by label.
        truths: True classes, None where unknown; empty if all are unknown.

    Examples:
        >>> images = eq.data.load_digits().test.images[:1]
        >>> explanation = eq.explain(eq.load("digits-opteq"), images)
        >>> explanation.name(explanation.prediction[0]), explanation.contributions.terms
        ('0', ('input', 'bias', 'quadratic'))
    """

    images: Tensor
    class_names: tuple[str, ...]
    formula: Formula
    prediction: Tensor
    rival: Tensor
    confidence: Tensor
    margin: Tensor
    iterations: Tensor | None
    contributions: Contributions | None
    no_contributions: str
    certificate: Certificate
    convergence: Convergence
    comparison: Convergence | None
    saliency: Tensor | None
    gradient: Tensor
    attention: tuple[Tensor, ...]
    relations: Relations | None
    correlation: Tensor | None
    statistics: dict[str, float]
    truths: tuple[int | None, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def truth(self, place: int) -> int | None:
        """Return the true class of the image with index `place`; None if unknown."""
        return self.truths[place] if self.truths else None

    @property
    def mistakes(self) -> int:
        """Number of misclassified images."""
        pairs = zip(self.truths, self.prediction.tolist(), strict=False)
        return sum(true is not None and true != predicted for true, predicted in pairs)

    def name(self, index: int) -> str:
        """Return the name of a class; "no answer" for a negative index."""
        return "no answer" if index < 0 else self.class_names[index]

    def pulls(self, place: int) -> list[tuple[str, float, float]]:
        """Return (term, ∂margin/∂term, share of the margin) of the image with index `place`.

        The last row has the biases of the head; empty without contributions.
        """
        parts = self.contributions
        if parts is None:
            return []
        pulls, sources = parts.pull[place].tolist(), parts.source[place].tolist()
        rows = list(zip(parts.terms, pulls, sources, strict=True))
        return [*rows, ("head biases", 0.0, float(parts.head[place]))]

    def margin_error(self, place: int) -> float | None:
        """Return a bound on the error of the margin of the image with index `place`, if known."""
        certificate, other = self.certificate, int(self.rival[place])
        if certificate.margin_error.shape[1] <= other or int(certificate.prediction[place]) < 0:
            return None
        error = float(certificate.margin_error[place, other])
        return error if torch.isfinite(torch.tensor(error)) else None

    def as_data(self) -> list[dict[str, Any]]:
        """Return JSON-compatible data with one object per image."""
        certificate = self.certificate
        return [
            {
                "prediction": self.name(int(self.prediction[i])),
                "rival": self.name(int(self.rival[i])),
                "confidence": float(self.confidence[i]),
                "margin": float(self.margin[i]),
                "margin_error": self.margin_error(i),
                "certified": bool(certificate.certified_class[i]),
                "radius": float(certificate.radius[i]),
                "iterations": None if self.iterations is None else int(self.iterations[i]),
                "terms": {
                    name: {"pull": pull, "source": source} for name, pull, source in self.pulls(i)
                },
                "why_no_terms": self.no_contributions,
            }
            for i in range(len(self))
        ]


def explain_predictions(
    model: nn.Module,
    images: Tensor,
    *,
    follow: Tensor | None = None,
    class_names: Sequence[str] | None = None,
) -> ExplainedPredictions:
    """Explain the predictions of a classifier; see `equilibria.report.explain`."""
    if not isinstance(model, EquilibriumClassifier):
        raise TypeError(
            f"{type(model).__name__} has no equilibrium layer to explain; use a classifier made by "
            "`eq.create_model`"
        )
    was_training = model.training
    model.eval()
    try:
        return _explained(model, images, images if follow is None else follow, class_names)
    finally:
        model.train(was_training)


def _explained(
    model: EquilibriumClassifier,
    images: Tensor,
    follow: Tensor,
    class_names: Sequence[str] | None,
) -> ExplainedPredictions:
    with torch.no_grad():
        solution = model.solve(images)
        feature = model.layer.output(solution)
        logits = model.head(feature)
    prediction = predicted_classes(logits)
    best = logits.nan_to_num(nan=-torch.inf).topk(min(2, logits.shape[1]), dim=1)
    first, second = best.indices[:, 0], best.indices[:, -1]
    known = images_of(model)
    names = class_names or (known.class_names if known else ()) or range(logits.shape[1])
    pulled, why_not = None, ""
    try:
        pulled = contributions(model, images, first, second)
    except NoContributionsError as error:
        why_not = str(error)
    own = model.layer.solver
    follow = follow[: affordable(model, images, MAX_RECORDED_NUMBERS // FOLLOWED["max_iterations"])]
    with warnings.catch_warnings():
        # Picard iterations need not converge; the page shows how far they get.
        warnings.simplefilter("ignore", ConvergenceWarning)
        convergence = follow_solve(model, follow, Picard(**FOLLOWED))
        comparison = None
        if not isinstance(own, Picard):
            comparison = follow_solve(model, follow, replace(own, **FOLLOWED))
    cell, is_map = model.layer.cell, feature.dim() == 4
    attention: tuple[Tensor, ...] = ()
    related = None
    with torch.no_grad(), suppress(TypeError):  # A model without branches.
        branches = branch_features(cell, solution.state, solution.context)
        related = relations(branches) if len(branches) > 1 else None
    with torch.no_grad():
        if isinstance(cell, GEQCell):
            attention = cell.attention(solution.state, solution.context)
    per_image = len(solution.iterations) == len(images)
    with solving(model, gradient=Implicit(tolerance=1e-6)):
        gradient = input_gradient(model, images, first, second)
    return ExplainedPredictions(
        images=images.detach().cpu(),
        class_names=tuple(map(str, names)),
        formula=model_formula(model),
        prediction=prediction.cpu(),
        rival=second.cpu(),
        confidence=logits.softmax(dim=1).amax(dim=1).cpu(),
        margin=(best.values[:, 0] - best.values[:, -1]).cpu(),
        iterations=solution.iterations.cpu() if per_image else None,
        contributions=pulled,
        no_contributions=why_not,
        certificate=certifier(model, tuple(images.shape[1:]))(images),
        convergence=convergence,
        comparison=comparison,
        saliency=grad_cam(model, images, first).cpu() if is_map else None,
        gradient=gradient.cpu(),
        attention=tuple(beta.cpu() for beta in attention),
        relations=related,
        correlation=channel_correlation(feature).cpu() if is_map else None,
        statistics=feature_statistics(feature),
    )


@torch.no_grad()
def affordable(model: nn.Module, images: Tensor, numbers: int) -> int:
    """Return how many images (at least 1) have states of at most `numbers` values in total."""
    size = images[0].numel() * 64
    if isinstance(model, EquilibriumClassifier):
        inputs = as_inputs(model.injected(images[:1]))
        context = model.layer.cell.inject(*inputs)
        size = Packing.of(model.layer.cell.initial_state(*inputs, context)).size
    return max(1, numbers // size)
