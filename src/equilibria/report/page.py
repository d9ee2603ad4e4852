"""The report of a trained classifier: what it minimizes, how it did, and the page that shows it.

The page itself is the template `page.html.jinja`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data import Split
from equilibria.models import DeepOptEqCell, EquilibriumClassifier, OptEqCell, parameter_count
from equilibria.report.convergence import Convergence, follow_solve
from equilibria.report.figures import ThemedFigure, convergence_figure, training_figure
from equilibria.report.sheets import image_png
from equilibria.solvers import Picard
from equilibria.tasks import Evaluation
from equilibria.training import EpochMetrics, Experiment

FORMULAS = Path(__file__).with_name("formulas.yaml")
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
    evaluation: Evaluation
    parameters: int
    contraction: float | None
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
            evaluation=self.evaluation,
            picard=self.picard,
            convergence_figure=self.convergence_figure(),
            training_figure=training_figure(self.history),
        )

    def convergence_figure(self) -> ThemedFigure:
        """Of the solves that were followed; README.md shows that of the demonstration."""
        return convergence_figure(self.picard, self.comparison)

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        evaluation, solves = self.evaluation, self.evaluation.solves
        right = f"{evaluation.accuracy:.2%} ({evaluation.correct} of {evaluation.samples})"
        facts: list[tuple[str, Any, str]] = [
            ("Test accuracy", right, ""),
            ("Parameters", self.parameters, ","),
            ("Iterations, mean", solves.mean_iterations, ".1f"),
            ("Share converged", solves.share_converged, ".1%"),
            ("Relative residual, max", solves.max_residual, ".1e"),
            ("Contraction bound q", self.contraction, ".3f"),
        ]
        if self.picard.objective is not None:
            first, last = (float(self.picard.objective[place].mean()) for place in (0, -1))
            facts.append(("Hidden objective, first step", first, ",.2f"))
            facts.append(("Hidden objective, equilibrium", last, ",.2f"))
        seconds = sum(metrics.seconds for metrics in self.history)
        facts.append(("Training time", f"{seconds:.1f} s", ""))
        return [(what, UNKNOWN if v is None else format(v, form)) for what, v, form in facts]


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
    followed, own = test.images[:FOLLOWED_IMAGES], model.layer.solver
    return ClassifierReport(
        model_name=name,
        data_name=experiment.data.name,
        class_names=experiment.data.class_names,
        formula=model_formula(model),
        evaluation=evaluation,
        parameters=parameter_count(model),
        contraction=None if bound is None else float(bound.max()),
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
    """What is said of this model's cell in `formulas.yaml`."""
    import yaml

    cell = model.layer.cell
    layers = len(cell.units()) if isinstance(cell, DeepOptEqCell) else 0
    if isinstance(cell, OptEqCell):
        kind = "opteq" if cell.mu == 1 else "opteq with mu"
    elif layers:
        kind = {1: "one layer", 2: "two layers"}.get(layers, "more layers")
    else:
        kind = "map" if cell.formula is None else "energy"
    texts = yaml.safe_load(FORMULAS.read_text(encoding="utf-8"))[kind]
    facts = {"layers": layers, "objective": cell.formula}
    return Formula(**{name: text.format(**facts) for name, text in texts.items()})


def _data_uri(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
