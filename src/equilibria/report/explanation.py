"""Why a classifier says what it says: `explain`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

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
from equilibria.report.convergence import Convergence, follow_solve
from equilibria.report.features import (
    Relations,
    channel_correlation,
    feature_statistics,
    relations,
)
from equilibria.report.formulas import Formula, model_formula
from equilibria.report.saliency import grad_cam, input_gradient
from equilibria.solvers import ConvergenceWarning, Picard

FOLLOWED: dict[str, Any] = {"tolerance": 1e-6, "max_iterations": 250}
"""Of the solves that are followed step by step."""
FOLLOWED_NUMBERS = 2**25
"""In all iterates that are kept of them, and are held in memory."""


@dataclass(frozen=True)
class Explanation:
    """What a classifier says of images, and why. Tensors have the images first.

    Examples:
        >>> found = eq.explain(eq.load("digits-opteq"), eq.data.load_digits().test.images[:1])
        >>> found.name(found.prediction[0]), found.contributions.terms
        ('0', ('input', 'bias', 'quadratic'))
    """

    images: Tensor
    class_names: tuple[str, ...]
    formula: Formula
    """The hidden objective, or the map that is solved."""
    prediction: Tensor
    """−1 where there is no answer."""
    rival: Tensor
    """The class that comes next."""
    confidence: Tensor
    margin: Tensor
    """The logit of the prediction less that of the rival."""
    iterations: Tensor | None
    """Of the solves; None where the images of a batch are one problem."""
    contributions: Contributions | None
    """What each term of the hidden objective does to the margin."""
    no_contributions: str
    """Why there are none; empty if there are."""
    certificate: Certificate
    convergence: Convergence
    """Objective and residual along a plain solve."""
    comparison: Convergence | None
    """The same by the solver of the model, unless that is the plain one."""
    saliency: Tensor | None
    """Grad-CAM of the prediction, (images, h, w); None where the feature is no map."""
    gradient: Tensor
    """∂margin/∂image, through the equilibrium."""
    attention: tuple[Tensor, ...]
    """GEQ's β of every patch: per branch (images, groups of channels, rows, columns)."""
    relations: Relations | None
    """Heritage and diversity of neighboring branches."""
    correlation: Tensor | None
    """|cos| of the channels of the feature, over all images."""
    statistics: dict[str, float]
    """What the feature regularizers weigh."""
    truths: tuple[int | None, ...] = ()
    """What the images show, where that is known."""

    def __len__(self) -> int:
        return len(self.images)

    def truth(self, place: int) -> int | None:
        """Return the label of an image, if labels are known."""
        return self.truths[place] if self.truths else None

    @property
    def mistakes(self) -> int:
        """How many images show another class than is said."""
        pairs = zip(self.truths, self.prediction.tolist(), strict=False)
        return sum(true is not None and true != said for true, said in pairs)

    def name(self, index: int) -> str:
        """Return the name of a class; "no answer" for a negative index."""
        return "no answer" if index < 0 else self.class_names[index]

    def pulls(self, place: int) -> list[tuple[str, float, float]]:
        """(term, ∂margin/∂term, what it brings of the margin) for an image, the head last."""
        found = self.contributions
        if found is None:
            return []
        pulls, sources = found.pull[place].tolist(), found.source[place].tolist()
        rows = list(zip(found.terms, pulls, sources, strict=True))
        return [*rows, ("head biases", 0.0, float(found.head[place]))]

    def margin_error(self, place: int) -> float | None:
        """How far the margin may be from that of the exact equilibrium; None: not known."""
        found, rival = self.certificate, int(self.rival[place])
        if found.margin_error.shape[1] <= rival or int(found.prediction[place]) < 0:
            return None
        error = float(found.margin_error[place, rival])
        return error if torch.isfinite(torch.tensor(error)) else None

    def as_data(self) -> list[dict[str, Any]]:
        """An object an image, for other programs."""
        found = self.certificate
        return [
            {
                "prediction": self.name(int(self.prediction[i])),
                "rival": self.name(int(self.rival[i])),
                "confidence": float(self.confidence[i]),
                "margin": float(self.margin[i]),
                "margin_error": self.margin_error(i),
                "certified": bool(found.certified_class[i]),
                "radius": float(found.radius[i]),
                "iterations": None if self.iterations is None else int(self.iterations[i]),
                "terms": {
                    name: {"pull": pull, "source": source} for name, pull, source in self.pulls(i)
                },
                "why_no_terms": self.no_contributions,
            }
            for i in range(len(self))
        ]

    def html(self, title: str, footer: str = "") -> str:
        """One self-contained page."""
        from equilibria.report.html import explanation_page

        return explanation_page(self, title, footer)


def explain(
    model: nn.Module,
    images: Tensor,
    *,
    follow: Tensor | None = None,
    class_names: Sequence[str] | None = None,
) -> Explanation:
    """Why a classifier with an equilibrium layer says what it says of images.

        found = eq.explain(model, images)
        found.contributions.pull, found.gradient, found.certificate.margin_error
        Path("why.html").write_text(found.html("my model"))

    follow: the images whose solves are followed; by default the first of `images`, as many as there
        is memory for.
    class_names: those that the model knows (`eq.load`) if not given, else their numbers.

    Examples:
        >>> images = eq.data.load_digits().test.images[:1]
        >>> found = eq.explain(eq.load("digits-opteq"), images)
        >>> found.contributions.terms
        ('input', 'bias', 'quadratic')
    """
    if not isinstance(model, EquilibriumClassifier):
        raise TypeError(
            f"{type(model).__name__} has no equilibrium to explain: take a classifier with a stem, "
            "an equilibrium layer and a head, as `eq.create_model` makes them"
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
) -> Explanation:
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
    follow = follow[: affordable(model, images, FOLLOWED_NUMBERS // FOLLOWED["max_iterations"])]
    with warnings.catch_warnings():
        # A plain iteration need not converge; where it got to is what is shown.
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
    return Explanation(
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
    """How many images have states of so many numbers, or fewer; one at least."""
    size = images[0].numel() * 64
    if isinstance(model, EquilibriumClassifier):
        inputs = as_inputs(model.injected(images[:1]))
        context = model.layer.cell.inject(*inputs)
        size = Packing.of(model.layer.cell.initial_state(*inputs, context)).size
    return max(1, numbers // size)
