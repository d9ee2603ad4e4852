"""The report of a run: formulas, test results, certificates, and examples.

`html.py` renders the page from the templates in this folder.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from equilibria.analysis.calibration import Calibration, calibration
from equilibria.analysis.convergence import Convergence
from equilibria.analysis.explanation import ExplainedPredictions, affordable, explain_predictions
from equilibria.certificates import Certificate, NoCertificateError, certifier
from equilibria.data import Batches, DataSet
from equilibria.inputs import AttackSettings, RobustnessCurves, measure_robustness
from equilibria.inputs.attack_settings import AttackMethod
from equilibria.inputs.robustness import certified_curve
from equilibria.models import EquilibriumClassifier
from equilibria.models.base import predicted_classes
from equilibria.models.registry import parameter_count
from equilibria.report.labels import certificate_rows, figure_rows
from equilibria.tasks import Classification, Evaluation
from equilibria.training import EpochMetrics
from equilibria.training.experiment import Experiment

UNKNOWN = "not known"
CANDIDATES, CERTIFIED, FOLLOWED, ATTACKED = 360, 64, 64, 100
"""Largest number of test images for the choice of examples, for certification, for recorded solves,
and for attacks."""
MAX_STATE_NUMBERS = 2**23
"""Largest number of values in the states of these images; it limits their number for large
models."""
CERTIFIED_PER_BATCH = 32
EXAMPLES, MISTAKES = 9, 4
"""Number of example images, and of misclassified images among them."""
MAIN_ROWS = ("Class certified", "Certified and right", "Radius")
"""Prefixes of the labels of certificate rows that are always visible."""
MAX_DISTANCE = 1.0
"""Largest L2 distance of attacks on images of up to 1000 values; it grows as √values beyond."""


@dataclass(frozen=True)
class Certified:
    """Certificates of some test images."""

    certificate: Certificate
    labels: Tensor
    can_gain: bool = False
    """Whether `refine=True` can give larger radii."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def count(self) -> int:
        """Number of images whose class is certified."""
        return int(self.certificate.certified_class.sum())

    @property
    def wrong(self) -> int:
        """Number of images whose class is certified and is not the true one."""
        differs = self.certificate.prediction.cpu() != self.labels.cpu()
        return int((self.certificate.certified_class.cpu() & differs).sum())

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Certified classes and radii, as (label, value)."""
        return [row for row in self._all_rows() if row[0].startswith(MAIN_ROWS)]

    @property
    def details(self) -> list[tuple[str, str]]:
        """All other measures of the certificates, as (label, value)."""
        return [row for row in self._all_rows() if not row[0].startswith(MAIN_ROWS)]

    def _all_rows(self) -> list[tuple[str, str]]:
        return certificate_rows(self.certificate, self.labels.tolist())

    def curve(self, norm: str = "l2", numbers: int = 1) -> tuple[tuple[float, float], ...]:
        """Return certified accuracy over the distance, for images of `numbers` values."""
        right = self.certificate.prediction.cpu() == self.labels.cpu()
        return certified_curve(norm, self.certificate.radius, right, numbers)

    def added_to(self, curves: RobustnessCurves, numbers: int) -> RobustnessCurves:
        """Return robustness curves with certified accuracy, or the reason for its absence."""
        if not bool(self.certificate.radius.any()):
            reasons = Counter(self.certificate.reasons).most_common(1)
            return replace(curves, why_not_certified=reasons[0][0])
        return replace(curves, certified=self.curve(curves.norm, numbers))


@dataclass(frozen=True)
class RunReport:
    """Contents of a report page; parts that do not apply to the run are None or empty.

    Attributes:
        name: Name of the run.
        model_name: Name of the model.
        data_name: Name of the data set.
        class_names: Names of the classes.
        parameters: Number of trainable parameters.
        evaluation: Evaluation on the test images.
        history: Metrics of the epochs.
        unit: Name of the samples that the evaluation counts, in the singular.
        calibration: Accuracy by confidence.
        explanation: Explanation of some test images.
        certified: Certificates of some test images.
        robustness: Accuracy under attack.
        left_out: Parts that were not measured, as "part: command that measures it".
    """

    name: str
    model_name: str
    data_name: str
    class_names: Sequence[str]
    parameters: int
    evaluation: Evaluation
    history: Sequence[EpochMetrics]
    unit: str = "test image"
    calibration: Calibration | None = None
    explanation: ExplainedPredictions | None = None
    certified: Certified | None = None
    robustness: RobustnessCurves | None = None
    left_out: Sequence[str] = ()

    @property
    def confusion(self) -> list[list[int]]:
        """Confusion matrix as nested lists; empty without one."""
        confusion = self.evaluation.counts.get("confusion")
        return [] if confusion is None else confusion.tolist()

    @property
    def wrong(self) -> int:
        """Number of misclassified test images, or of their pixels."""
        return self.evaluation.samples - (self.evaluation.correct or 0)

    @property
    def confused(self) -> list[tuple[str, str, int]]:
        """(true class, predicted class, number of images) of errors, most frequent first."""
        pairs = [
            (count, true, predicted)
            for true, counts in enumerate(self.confusion)
            for predicted, count in enumerate(counts)
            if count and predicted != true
        ]
        names = self.class_names
        pairs.sort(key=lambda pair: (-pair[0], *pair[1:]))
        return [(names[true], names[predicted], count) for count, true, predicted in pairs]

    @property
    def convergence(self) -> Convergence | None:
        """Recorded convergence of the explained images, if any."""
        return None if self.explanation is None else self.explanation.convergence

    def rows(self) -> list[tuple[str, str]]:
        """Return the page's table of measured values, such as the accuracy, as (label, value)."""
        evaluation, solves = self.evaluation, self.evaluation.solves
        right = f"{evaluation.correct} of {evaluation.samples}"
        rows = [
            ("Test accuracy", f"{value} ({right})") if label == "Accuracy" else (label, value)
            for label, value in figure_rows(evaluation.figures)
            if value
        ]
        facts: list[tuple[str, Any, str]] = [
            ("Loss", evaluation.loss, ".4f"),
            ("Parameters", self.parameters, ","),
        ]
        if solves.mean_iterations is not None:
            facts += [
                ("Iterations, mean", solves.mean_iterations, ".1f"),
                ("Share converged", solves.share_converged, ".1%"),
                ("Relative residual, max", solves.max_residual, ".1e"),
            ]
        if self.convergence is not None:
            facts.append(("Contraction bound q", self.convergence.contraction, ".3f"))
            if self.convergence.objective is not None:
                for label, iteration in (("first step", 0), ("equilibrium", -1)):
                    mean = float(self.convergence.objective[iteration].mean())
                    facts.append((f"Hidden objective, {label}", mean, ",.2f"))
        if self.calibration is not None:
            facts.append(("Expected calibration error", self.calibration.error, ".3f"))
        if self.certified is not None:
            count, of = self.certified.count, len(self.certified)
            facts.append(("Class certified", f"{count / of:.1%} ({count} of {of})", ""))
            radius = float(self.certified.certificate.radius.median())
            facts.append(("Certified radius (L2), median", radius or None, ".3g"))
        if self.history:
            seconds = sum(metrics.seconds for metrics in self.history)
            facts.append(("Training time", f"{seconds:,.1f} s", ""))
        return rows + [
            (label, UNKNOWN if v is None else format(v, form)) for label, v, form in facts
        ]


def certified_images(
    model: nn.Module, images: Tensor, labels: Tensor, *, refine: bool = False
) -> Certified:
    """Certify images in batches of `CERTIFIED_PER_BATCH`; see `certify` for the certificates."""
    certify = certifier(model, tuple(images.shape[1:]))
    parts = torch.split(images, CERTIFIED_PER_BATCH)
    certificate = Certificate.join([certify(part, refine=refine) for part in parts])
    return Certified(certificate, labels.cpu(), can_gain=certify.can_refine and not refine)


def with_certified(
    model: nn.Module, images: Tensor, labels: Tensor, curves: RobustnessCurves
) -> RobustnessCurves:
    """Return robustness curves with the certified accuracy on the same images.

    If nothing can be certified, `why_not_certified` gives the reason.

    Examples:
        >>> model, digits = eq.load("digits-certified"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="l2", eps=0.5, steps=1)
        >>> batch = digits.images[:4], digits.labels[:4]
        >>> curves = eq.inputs.measure_robustness(model, *batch, settings, methods=["fgsm"])
        >>> from equilibria.report.page import with_certified
        >>> with_certified(model, *batch, curves).certified[0]
        (0.0, 1.0)
    """
    try:
        certified = certified_images(model, images, labels)
    except NoCertificateError as error:
        return replace(curves, why_not_certified=str(error))
    return certified.added_to(curves, images[0].numel())


def run_report(
    experiment: Experiment,
    history: Sequence[EpochMetrics],
    *,
    name: str = "",
    evaluation: Evaluation | None = None,
    robustness: RobustnessCurves | None = None,
    quick: bool = True,
    refine: bool = False,
    on_step: Callable[[str], object] | None = None,
) -> RunReport:
    """Measure a trained model on its test images, for `report_page`.

    Args:
        experiment: The trained model with its data.
        history: Metrics of the epochs.
        name: Name of the run, which the page shows.
        evaluation: Evaluation on all test images; computed if not given.
        robustness: Accuracy under attack as `equilibria attack --curve` has measured it.
        quick: Finish in seconds. Otherwise use more images, and measure accuracy under attack.
        refine: Also compute radii from activation patterns (see `certify`).
        on_step: Called with a description of each step before it starts.

    Returns:
        The report; parts that do not apply to the model are None or empty.

    Examples:
        >>> from equilibria.training.experiment import trained
        >>> report = eq.report.run_report(trained("digits-opteq"), [], name="digits")
        >>> report.parameters, report.evaluation.samples
        (33098, 450)
        >>> eq.report.report_page([report])[:15]
        '<!DOCTYPE html>'
    """
    on_step = on_step or (lambda step: None)
    if evaluation is None:
        on_step(f"evaluating {len(experiment.test):,} test images")
        evaluation = experiment.evaluate()
    model, data = experiment.model.eval(), experiment.data
    bare = RunReport(
        name=name,
        model_name=experiment.recipe.model.name,
        data_name=data.name,
        class_names=data.class_names,
        parameters=parameter_count(model),
        evaluation=evaluation,
        history=history,
        unit="test " + ("image" if (unit := experiment.task.unit) == "sample" else unit),
    )
    if data.kind != "classification" or not experiment.task.names_classes:
        return bare
    if "confusion" not in evaluation.counts:
        bare = replace(bare, evaluation=_with_confusion(experiment, evaluation))
    values = bare.evaluation.values
    bare = replace(bare, calibration=calibration(values["confidence"], values["correct"]))
    with warnings.catch_warnings(), experiment.solving():
        # The figures of the page report failed solves.
        warnings.simplefilter("ignore")
        return _Measurements(experiment, model, data, quick, refine, on_step).add_to(
            bare, robustness
        )


def _with_confusion(experiment: Experiment, evaluation: Evaluation) -> Evaluation:
    """Add a confusion matrix to the evaluation of a task without one, as adversarial training."""
    batches = Batches(experiment.test, experiment.recipe.training.evaluation_batch_size)
    with experiment.solving():
        plain = Classification().evaluate(experiment.model, batches)
    return replace(evaluation, counts=plain.counts, values=plain.values)


@dataclass(frozen=True)
class _Measurements:
    experiment: Experiment
    model: nn.Module
    data: DataSet
    quick: bool
    refine: bool
    on_step: Callable[[str], object]

    def add_to(self, report: RunReport, robustness: RobustnessCurves | None) -> RunReport:
        device = next(self.model.parameters()).device
        first, _ = self.experiment.some_test_images(1)
        most = affordable(self.model, first.to(device), MAX_STATE_NUMBERS)
        images, labels = self.experiment.some_test_images(min(CANDIDATES, max(EXAMPLES, most)))
        images, labels = images.to(device), labels.to(device)
        left_out = []
        command = f"equilibria report {report.name}".rstrip()
        if robustness is None and not self.quick:
            robustness = self._robustness(images[: min(ATTACKED, most)], labels)
        if robustness is None:
            left_out.append(f"accuracy under attack: {command}")
        certified = explanation = None
        if isinstance(self.model, EquilibriumClassifier):
            chosen = self._examples(images, labels)
            count = min(most, len(images), CERTIFIED if self.quick else CANDIDATES)
            self.on_step(f"certifying {count} test images")
            certified = certified_images(
                self.model, images[:count], labels[:count], refine=self.refine
            )
            self.on_step(f"explaining {len(chosen)} test images")
            explanation = explain_predictions(
                self.model,
                images[chosen],
                follow=images[:FOLLOWED],
                class_names=self.data.class_names,
            )
            explanation = replace(explanation, truths=tuple(labels[chosen].tolist()))
            if certified.can_gain and certified.certificate.certified_class.any():
                left_out.append(f"larger radii, from activation patterns: {command} --refine")
        if robustness is not None and certified is not None and not robustness.certified:
            robustness = certified.added_to(robustness, first[0].numel())
        return replace(
            report,
            explanation=explanation,
            certified=certified,
            robustness=robustness,
            left_out=left_out,
        )

    def _robustness(self, images: Tensor, labels: Tensor) -> RobustnessCurves:
        eps = MAX_DISTANCE * max(1.0, images[0].numel() / 1000) ** 0.5
        methods = get_args(AttackMethod)

        def announce(method: str) -> None:
            self.on_step(f"attacking {len(images)} test images by {method}")

        announce(methods[0])
        return measure_robustness(
            self.model,
            images,
            labels[: len(images)],
            AttackSettings(eps=eps),
            methods=methods,
            on_measured=announce,
        )

    @torch.no_grad()
    def _examples(self, images: Tensor, labels: Tensor) -> Tensor:
        predictions = torch.cat(
            [
                predicted_classes(self.model(part))
                for part in torch.split(images, CERTIFIED_PER_BATCH)
            ]
        )
        return choose_examples(labels.cpu(), predictions.cpu()).to(images.device)


def choose_examples(
    labels: Tensor, predictions: Tensor, *, count: int = EXAMPLES, mistakes: int = MISTAKES
) -> Tensor:
    """Choose example images: at most `mistakes` errors, then correct ones spread over the classes.

    There are more errors only if there are too few correct predictions.

    Args:
        labels: True classes, shape (B,).
        predictions: Predicted classes, shape (B,).
        count: Number of examples.
        mistakes: Largest number of errors among them.

    Returns:
        Indices of the examples, the errors first.

    Examples:
        >>> labels, predictions = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 0])
        >>> from equilibria.report.page import choose_examples
        >>> choose_examples(labels, predictions, count=3, mistakes=1)
        tensor([2, 0, 1])
    """
    right = predictions == labels
    # The first image of every class, then the second of every class, and so on.
    ranks: dict[int, int] = {}
    keyed = []
    for index in right.nonzero().squeeze(1).tolist():
        label = int(labels[index])
        ranks[label] = ranks.get(label, 0) + 1
        keyed.append((ranks[label], label, index))
    wrong = (~right).nonzero().squeeze(1).tolist()[: max(mistakes, count - len(keyed))]
    chosen = wrong + [index for _, _, index in sorted(keyed)][: count - len(wrong)]
    return torch.tensor(chosen, dtype=torch.int64)
