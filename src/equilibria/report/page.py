"""The report of a trained classifier: what it minimizes, how it did, and the page that shows it.

The page itself is the template `page.html.jinja`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.data import Batches, Split
from equilibria.models import DeepOptEqCell, EquilibriumClassifier, OptEqCell, parameter_count
from equilibria.report.convergence import (
    Convergence,
    ObjectiveChange,
    follow_solve,
    objective_change,
)
from equilibria.report.figures import convergence_figure, image_png, training_figure
from equilibria.solvers import Picard
from equilibria.tasks import Evaluation
from equilibria.training import EpochMetrics, Experiment

UNKNOWN = "not known"
FOLLOWED_IMAGES = 64
FOLLOWED: dict[str, Any] = {"tolerance": 1e-6, "max_iterations": 500}
"""Of the solves that the report follows step by step."""


@dataclass(frozen=True)
class Formula:
    """What a model minimizes, where it stops, and how to read this."""

    objective: str
    equilibrium: str
    reading: str


@dataclass(frozen=True)
class Summary:
    """A trained classifier on its test set, in a few numbers."""

    evaluation: Evaluation
    parameters: int
    contraction: float | None
    objective: ObjectiveChange | None
    training_seconds: float

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        evaluation, solves = self.evaluation, self.evaluation.solves
        rows = [
            (
                "Test accuracy",
                f"{evaluation.accuracy:.2%} ({evaluation.correct} of {evaluation.samples})",
            ),
            ("Parameters", f"{self.parameters:,}"),
            ("Iterations, mean", _number(solves.mean_iterations, ".1f")),
            ("Share converged", _number(solves.share_converged, ".1%")),
            ("Relative residual, max", _number(solves.max_residual, ".1e")),
            ("Contraction bound q", _number(self.contraction, ".3f")),
        ]
        if self.objective is not None:
            rows += [
                ("Hidden objective, first step", f"{self.objective.first:,.2f}"),
                ("Hidden objective, equilibrium", f"{self.objective.equilibrium:,.2f}"),
            ]
        return [*rows, ("Training time", f"{self.training_seconds:.1f} s")]


@dataclass(frozen=True)
class Example:
    """One image with what the model says of it."""

    image: Tensor
    label: int
    prediction: int
    confidence: float
    iterations: int | None

    @property
    def is_right(self) -> bool:
        return self.label == self.prediction


@dataclass(frozen=True)
class ClassifierReport:
    """Everything that the report shows."""

    model_name: str
    data_name: str
    class_names: Sequence[str]
    formula: Formula
    summary: Summary
    picard: Convergence
    comparison: Convergence | None
    examples: Sequence[Example]
    history: Sequence[EpochMetrics]
    footer: str = ""

    def html(self) -> str:
        """One self-contained HTML page."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("equilibria", "report"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"data_uri": _data_uri, "image_png": image_png}
        return environment.get_template("page.html.jinja").render(
            report=self,
            evaluation=self.summary.evaluation,
            picard=self.picard,
            convergence_figure=convergence_figure(self.picard, self.comparison),
            training_figure=training_figure(self.history),
        )

    def headline(self) -> list[tuple[str, str]]:
        """The few numbers to be seen first, as (label, value)."""
        solves = self.summary.evaluation.solves
        facts = [("test accuracy", f"{self.summary.evaluation.accuracy:.2%}")]
        if solves.mean_iterations is not None and solves.share_converged is not None:
            facts.append(("iterations, mean", f"{solves.mean_iterations:.1f}"))
            facts.append(("of the solves converged", f"{solves.share_converged:.1%}"))
        facts.append(("parameters", f"{self.summary.parameters:,}"))
        return facts


def classifier_report(
    experiment: Experiment, history: Sequence[EpochMetrics], device: torch.device, footer: str = ""
) -> ClassifierReport:
    """Evaluate a trained equilibrium classifier on its test images, and follow some solves."""
    model, name = experiment.model, experiment.recipe.model.name
    if not isinstance(model, EquilibriumClassifier) or experiment.data.kind != "classification":
        raise TypeError(
            f"the report is of a classifier with an equilibrium layer, which {name!r} is not"
        )
    test = Split(*experiment.test.fetch(torch.arange(len(experiment.test))))
    evaluation = experiment.evaluate()
    bound = model.contraction_bound(test.images[:1].to(device))
    with experiment.solving():
        batches = Batches(test, experiment.recipe.training.evaluation_batch_size)
        change = objective_change(model, batches)
    followed, own = test.images[:FOLLOWED_IMAGES], model.layer.solver
    return ClassifierReport(
        model_name=name,
        data_name=experiment.data.name,
        class_names=experiment.data.class_names,
        formula=model_formula(model),
        summary=Summary(
            evaluation=evaluation,
            parameters=parameter_count(model),
            contraction=None if bound is None else float(bound.max()),
            objective=change,
            training_seconds=sum(metrics.seconds for metrics in history),
        ),
        picard=follow_solve(model, followed, Picard(**FOLLOWED)),
        comparison=(
            None
            if isinstance(own, Picard)
            else follow_solve(model, followed, replace(own, **FOLLOWED))
        ),
        examples=choose_examples(test, evaluation),
        history=history,
        footer=footer,
    )


def choose_examples(
    split: Split, evaluation: Evaluation, *, count: int = 12, mistakes: int = 6
) -> list[Example]:
    """Mistakes first, up to `mistakes` of them, then right ones, class after class."""
    predictions, confidences = (evaluation.values[n] for n in ("prediction", "confidence"))
    right = predictions == split.labels
    wrong = (~right).nonzero().squeeze(1).tolist()[:mistakes]
    # The first of every class, then the second of every class, and so on.
    seen: dict[int, int] = {}
    keyed = []
    for index in right.nonzero().squeeze(1).tolist():
        label = int(split.labels[index])
        seen[label] = seen.get(label, 0) + 1
        keyed.append((seen[label], label, index))
    chosen = wrong + [index for _, _, index in sorted(keyed)][: count - len(wrong)]
    iterations = evaluation.solves.iterations
    # A batch whose samples are coupled is one problem: it has no iterations of a single sample.
    per_sample = len(iterations) == len(split)
    return [
        Example(
            image=split.images[index],
            label=int(split.labels[index]),
            prediction=int(predictions[index]),
            confidence=float(confidences[index]),
            iterations=int(iterations[index]) if per_sample else None,
        )
        for index in chosen
    ]


def model_formula(model: EquilibriumClassifier) -> Formula:
    """The formula of the hidden objective of this model's cell."""
    cell = model.layer.cell
    if isinstance(cell, OptEqCell):
        over_mu, half_over_mu = ("", "½‖Wᵀy‖²") if cell.mu == 1 else ("/μ", "‖Wᵀy‖²/2μ")
        return Formula(
            f"G(y; x) = 1ᵀf(y) + ½‖y‖² − ⟨Ux + b, y⟩ − {half_over_mu}",
            f"y* = argmin G(y; x)   ⇔   y* = σ(WWᵀy*{over_mu} + Ux + b)",
            "f is the penalty whose proximal operator is the activation σ (for ReLU: y ≥ 0), and x "
            "the image after the stem. One iteration of the layer is one step of proximal gradient "
            "descent on G.",
        )
    if isinstance(cell, DeepOptEqCell):
        return _deep_formula(len(cell.units()))
    if cell.formula is not None:
        return Formula(
            cell.formula,
            "0 ∈ ∂G(y*)   ⇔   y* = σ(−∇E(y*)),   E = G − 1ᵀf − ½‖·‖²",
            "f is the penalty whose proximal operator is the activation σ, and x the image after "
            "the stem. The equilibrium is a stationary point of G.",
        )
    return Formula(
        "y* = T(y*; x)",
        "",
        "This layer is an equilibrium without a hidden objective: its residual ‖y − T(y)‖ is all "
        "that can be watched.",
    )


def _deep_formula(layers: int) -> Formula:
    if layers == 1:
        return Formula(
            "Φ(z) = α M(z),   M the Moreau envelope of the convex φ",
            "z* = argmin Φ(z)   ⇔   z* = αWᵀσ(Wz* + Ux + b) + (1 − α)z*",
            "The layer is the proximal operator of Φ, so one iteration is one proximal step on it.",
        )
    if layers == 2:
        return Formula(
            "Φ(z₁, z₂) = α M₁(z₁) + α M₂(z₂) + ½‖z₁ − z₂‖²",
            "(z₁*, z₂*) = argmin Φ   ⇔   z₁* = f₁(z₂*),  z₂* = f₂(z₁*)",
            "M₁ and M₂ are the Moreau envelopes of the two layers' convex functions. One iteration "
            "minimizes over z₁ and then over z₂, so the objective cannot rise.",
        )
    return Formula(
        "0 = ∇Φ(z̃*) + (I − P) z̃*,   Φ(z̃) = Σ α Mᵢ(zᵢ)",
        f"z* = f_{layers}(… f₂(f₁(z*)))",
        f"With more than two layers (here {layers}) no objective exists: the equilibrium solves a "
        "monotone inclusion, P shifting the blocks by one. The curves below therefore show how far "
        "each iterate is from solving it, ‖z − T(z)‖, and no objective.",
    )


def _data_uri(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
