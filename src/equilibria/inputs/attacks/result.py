"""What an attack found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.attacks.settings import AttackSettings


@dataclass(frozen=True)
class AttackResult:
    """Adversarial images with what the model says of them, sample by sample.

    Logits and losses before and after come from the same ordinary forward pass in evaluation mode,
    equilibria solved anew: what the model would say of the image, not what the search believed.
    """

    images: Tensor
    """The adversarial images: within eps and the range to the last bit."""
    labels: Tensor
    initial_logits: Tensor
    logits: Tensor
    initial_loss: Tensor
    loss: Tensor
    distance: Tensor
    """‖δ‖ in the attack's norm."""
    evaluations: int
    """Calls of the map in the search, for the whole batch; of the model if it has no map."""
    vjps: int
    """Pull-backs through it."""
    settings: AttackSettings
    status: Tensor | None = None
    """How JIIO ended (`Status`); of its last run where there are restarts. None for others."""

    @property
    def initial_predictions(self) -> Tensor:
        return self.initial_logits.argmax(dim=1)

    @property
    def predictions(self) -> Tensor:
        return self.logits.argmax(dim=1)

    @property
    def success(self) -> Tensor:
        """Whether the prediction for the adversarial image is wrong (it may have been before)."""
        return self.predictions != self.labels

    @property
    def accuracy(self) -> float:
        """Before the attack."""
        return float((self.initial_predictions == self.labels).double().mean())

    @property
    def robust_accuracy(self) -> float:
        """Under the attack."""
        return float((~self.success).double().mean())

    def summary(self) -> str:
        """One line on all samples."""
        asked = self.settings
        return (
            f"{asked.method} ({asked.norm}, eps {asked.eps:g}): accuracy {self.accuracy:.1%} → "
            f"{self.robust_accuracy:.1%}, mean loss {float(self.initial_loss.mean()):.4g} → "
            f"{float(self.loss.mean()):.4g}, in {self.evaluations} evaluations of the map and "
            f"{self.vjps} pull-backs"
        )


def joined(results: list[AttackResult]) -> AttackResult:
    """The results of several batches as one; evaluations are added up."""
    if not results:
        raise ValueError("there is nothing to join: no batch was attacked")

    def together(name: str) -> Tensor:
        return torch.cat([getattr(result, name) for result in results])

    return AttackResult(
        images=together("images"),
        labels=together("labels"),
        initial_logits=together("initial_logits"),
        logits=together("logits"),
        initial_loss=together("initial_loss"),
        loss=together("loss"),
        distance=together("distance"),
        evaluations=sum(result.evaluations for result in results),
        vjps=sum(result.vjps for result in results),
        settings=results[0].settings,
        status=None if results[0].status is None else together("status"),
    )
