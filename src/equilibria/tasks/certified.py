"""Classification of images with certified robustness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.certificates import certifier
from equilibria.models.base import predicted_classes
from equilibria.registry import check_positive, check_values
from equilibria.tasks.classification import Classification
from equilibria.tasks.evaluation import Outcome


@dataclass(frozen=True)
class CertifiedClassification(Classification):
    """Classification by the cross-entropy of the worst logits within a distance `eps`.

    With w the logits, and L_kj a Lipschitz constant of the margin w_k − w_j in the pixels (in L2),
    the logits of any image within ε of x are at worst w_j + εL_kj for the class k of x. The loss is
    the cross-entropy of these logits times `temperature`; it rewards a certified radius of ε. The
    model provides the Lipschitz constants as `margin_slopes`, as reflection networks do.

    Args:
        label_smoothing: Weight of the uniform distribution in the targets of training.
        eps: Distance ε of training; pixels are in [0, 1]. Choose it larger than `radius`, because
            training stops improving a radius just beyond ε.
        radius: Distance of the score, the fraction of images that are certified to be right within
            it; by default `eps`.
        temperature: Factor of the logits in the loss.
        radii: Further distances to report.

    Examples:
        >>> task = eq.tasks.CertifiedClassification(eps=0.5, radii=(0.1, 0.5))
        >>> model, data = eq.load("digits-certified"), eq.data.load_digits().test
        >>> figures = task.evaluate(model, [(data.images[:50], data.labels[:50])]).figures
        >>> figures["certified_at_0.1"] >= figures["certified_at_0.5"]
        True
    """

    score: ClassVar[str] = "certified_accuracy"

    eps: float = 0.5
    radius: float | None = None
    temperature: float = 4.0
    radii: Sequence[float] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, not_negative=("eps",))
        check_positive(temperature=self.temperature, radius=self.radius)
        if any(radius <= 0 for radius in self._radii):
            raise ValueError(f"radii must be positive, got {list(self._radii)}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        slopes = getattr(model, "margin_slopes", None)
        if slopes is None:
            raise TypeError(
                "the task 'certified' needs a model with Lipschitz constants of its margins "
                f"(margin_slopes), such as reflection-small, got {type(model).__name__}"
            )
        logits = model(inputs)
        worst = self.temperature * (logits + self.eps * slopes()[targets])
        losses = F.cross_entropy(
            worst, targets, label_smoothing=self.label_smoothing, reduction="none"
        )
        return Outcome({"loss": losses, "correct": predicted_classes(logits) == targets})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Add the certified radius of each image; 0 if its class is wrong or not certified."""
        outcome = super().evaluation_step(model, inputs, targets, generator)
        certificate = certifier(model, tuple(inputs.shape[1:]))(inputs)
        correct = certificate.certified_class & (certificate.prediction == targets)
        radii = torch.where(correct, certificate.radius, 0.0)
        return Outcome({**outcome.values, "radius": radii}, outcome.counts)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        radii = outcome.values["radius"]

        def share(radius: float) -> float:
            return float((radii >= radius).double().mean())

        others = {f"certified_at_{radius:g}": share(radius) for radius in self.radii}
        return {
            **super().figures(outcome),
            "certified_accuracy": share(self._radii[0]),
            **others,
            "mean_radius": outcome.mean("radius"),
        }

    @property
    def _radii(self) -> tuple[float, ...]:
        return (self.eps if self.radius is None else self.radius, *self.radii)
