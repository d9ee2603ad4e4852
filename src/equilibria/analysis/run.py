"""Measures of a run: test results, certificates, accuracy under attack, and examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn

from equilibria.analysis.calibration import Calibration, calibration
from equilibria.analysis.certified import CERTIFIED_PER_BATCH, Certified, certified_images
from equilibria.analysis.convergence import Convergence
from equilibria.analysis.disk import PER_BATCH, CertifiedDisk, disk_of_median
from equilibria.analysis.examples import EXAMPLES, choose_examples
from equilibria.analysis.explanation import ExplainedPredictions, affordable, explain_predictions
from equilibria.data import Batches, DataSet
from equilibria.inputs import AttackSettings, RobustnessCurves, measure_robustness
from equilibria.inputs.attack_settings import AttackMethod
from equilibria.models import EquilibriumClassifier
from equilibria.models.base import predicted_classes
from equilibria.models.registry import parameter_count
from equilibria.tasks import Classification, Evaluation
from equilibria.training import EpochMetrics
from equilibria.training.experiment import Experiment

CANDIDATES, CERTIFIED, FOLLOWED, ATTACKED = 360, 64, 64, 100
"""Largest number of test images for the choice of examples, for certification, for recorded solves,
and for attacks."""
MAX_STATE_NUMBERS = 2**23
"""Largest number of values in the states of these images; it limits their number for large
models."""
MAX_DISTANCE = 1.0
"""Largest L2 distance of attacks on images of up to 1000 values; it grows as √values beyond."""


@dataclass(frozen=True)
class RunFindings:
    """Measures of a run, for `report_page`; parts that do not apply to it are None or empty.

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
        disk: Classes around one of these images, in a plane.
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
    disk: CertifiedDisk | None = None
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


def measure_run(
    experiment: Experiment,
    history: Sequence[EpochMetrics],
    *,
    name: str = "",
    evaluation: Evaluation | None = None,
    robustness: RobustnessCurves | None = None,
    quick: bool = True,
    refine: bool = False,
    on_step: Callable[[str], object] | None = None,
) -> RunFindings:
    """Measure a trained model on its test images, for `report_page`.

    Args:
        experiment: The trained model with its data.
        history: Metrics of the epochs.
        name: Name of the run, which a page shows.
        evaluation: Evaluation on all test images; computed if not given.
        robustness: Accuracy under attack as `equilibria attack --curve` has measured it.
        quick: Finish in seconds. Otherwise use more images, and measure accuracy under attack.
        refine: Also compute radii from activation patterns (see `certify`).
        on_step: Called with a description of each step before it starts.

    Returns:
        The measures; parts that do not apply to the model are None or empty.

    Examples:
        >>> from equilibria.training.experiment import trained
        >>> findings = eq.analysis.measure_run(trained("digits-opteq"), [], name="digits")
        >>> findings.parameters, findings.evaluation.samples
        (33098, 450)
        >>> eq.report.report_page([findings])[:15]
        '<!DOCTYPE html>'
    """
    on_step = on_step or (lambda step: None)
    if evaluation is None:
        on_step(f"evaluating {len(experiment.test):,} test images")
        evaluation = experiment.evaluate()
    model, data = experiment.model.eval(), experiment.data
    bare = RunFindings(
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

    def add_to(self, findings: RunFindings, robustness: RobustnessCurves | None) -> RunFindings:
        device = next(self.model.parameters()).device
        first, _ = self.experiment.some_test_images(1)
        most = affordable(self.model, first.to(device), MAX_STATE_NUMBERS)
        images, labels = self.experiment.some_test_images(min(CANDIDATES, max(EXAMPLES, most)))
        images, labels = images.to(device), labels.to(device)
        left_out = []
        command = f"equilibria report {findings.name}".rstrip()
        if robustness is None and not self.quick:
            robustness = self._robustness(images[: min(ATTACKED, most)], labels)
        if robustness is None:
            left_out.append(f"accuracy under attack: {command}")
        certified = explanation = disk = None
        if isinstance(self.model, EquilibriumClassifier):
            chosen = self._examples(images, labels)
            count = min(most, len(images), CERTIFIED if self.quick else CANDIDATES)
            self.on_step(f"certifying {count} test images")
            certified = certified_images(
                self.model, images[:count], labels[:count], refine=self.refine
            )
            if most >= PER_BATCH:
                disk = disk_of_median(self.model, images, certified.certificate.radius)
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
            robustness = certified.added_to(robustness)
        return replace(
            findings,
            explanation=explanation,
            certified=certified,
            disk=disk,
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
