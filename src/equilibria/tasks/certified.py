"""Telling the classes of images so that nearby images provably have the same class."""

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
    """Cross-entropy of logits that an adversary of reach `eps` has done its worst to.

    Where w_k − w_j is at most L_kj-steep in the pixels (in L2), no image within ε of x has logits
    worse for its class k than w_j + εL_kj: the loss is the cross-entropy of those, times
    `temperature`, and what it asks for is a certified radius of ε. The model says how steep it is
    (`margin_slopes`: reflection networks).

    eps: ε, in pixels of [0, 1]; larger than what is asked for later, since the loss is satisfied
        just beyond it. A model is judged by the share of images that are right within `radius`.
    radii: other radii, for the report.

    Examples:
        >>> task = eq.tasks.CertifiedClassification(eps=0.5, radii=(0.1, 0.5))
        >>> model, data = eq.load("digits-certified"), eq.data.load_digits().test
        >>> found = task.evaluate(model, [(data.images[:50], data.labels[:50])]).figures
        >>> found["certified_at_0.1"] >= found["certified_at_0.5"]
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
            raise ValueError(f"radii are positive numbers, not {list(self._radii)}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        slopes = getattr(model, "margin_slopes", None)
        if slopes is None:
            raise TypeError(
                f"the task 'certified' trains models that know how steep their margins are, such "
                f"as reflection-small, not a {type(model).__name__}"
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
        """Also the certified radius of every image, 0 where its class is wrong or not certain."""
        found = super().evaluation_step(model, inputs, targets, generator)
        sure = certifier(model, tuple(inputs.shape[1:]))(inputs)
        right = sure.certified_class & (sure.prediction == targets)
        radii = torch.where(right, sure.radius, 0.0)
        return Outcome({**found.values, "radius": radii}, found.counts)

    def figures(self, found: Outcome) -> dict[str, float | None]:
        radii = found.values["radius"]

        def share(radius: float) -> float:
            return float((radii >= radius).double().mean())

        others = {f"certified_at_{radius:g}": share(radius) for radius in self.radii}
        return {
            **super().figures(found),
            "certified_accuracy": share(self._radii[0]),
            **others,
            "mean_radius": found.mean("radius"),
        }

    @property
    def _radii(self) -> tuple[float, ...]:
        return (self.eps if self.radius is None else self.radius, *self.radii)
