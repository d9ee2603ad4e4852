"""Telling classes apart although somebody changes the images: adversarial training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.inputs import (
    AttackResult,
    AttackSettings,
    Method,
    Norm,
    adversarial_images,
    attack,
)
from equilibria.tasks.base import TrainingStep
from equilibria.tasks.classification import Evaluation, evaluate
from equilibria.tasks.solve_statistics import SolveStatistics

TrainingMethod = Literal["clean", "fgsm", "pgd", "jiio"]
EVALUATION_SEED = 0


@dataclass(frozen=True)
class AdversarialClassification:
    """minimize Σᵢ max_{‖δᵢ‖ ≤ eps} ℓ(h(xᵢ + δᵢ), yᵢ) (JIIO Eq. 25).

    A step looks for the worst images near those of the batch, the model in evaluation mode and with
    its exact gradient (`attack`), and trains on what it finds by cross-entropy. The
    gradient there is that of Eq. 19, by the layer's own rule: an envelope needs no more.

    eps, norm: the budget, in the units of the images as the model takes them.
    method: what finds the images to train on; "clean" takes them as they are.
    steps, step_size, random_start, warm_start, joint_options: of that search, as for `attack`.
    clip: the range of the images.
    label_smoothing: softens the targets of training.
    attack_method, attack_steps, attack_restarts: the attack under which a model is evaluated.
    attack_share: the share of each batch that is attacked in an evaluation.
    """

    eps: float
    norm: Norm = "l2"
    method: TrainingMethod = "pgd"
    steps: int | None = None
    step_size: float | None = None
    random_start: bool = False
    warm_start: bool = False
    joint_options: Mapping[str, Any] = field(default_factory=dict)
    clip: tuple[float, float] | None = (0.0, 1.0)
    label_smoothing: float = 0.0
    attack_method: Method = "pgd"
    attack_steps: int | None = None
    attack_restarts: int = 1
    attack_share: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in get_args(TrainingMethod):
            known = ", ".join(get_args(TrainingMethod))
            raise ValueError(f"method must be one of {known}, not {self.method!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), not {self.label_smoothing}")
        if not 0 < self.attack_share <= 1:
            raise ValueError(f"attack_share must be in (0, 1], not {self.attack_share}")
        self._search_settings()
        self._attack_settings()

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        settings = self._search_settings()
        images = (
            inputs if settings is None else adversarial_images(model, inputs, targets, settings)
        )
        logits = model(images)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        correct = (logits.detach().argmax(dim=1) == targets).sum()
        return TrainingStep(
            loss=loss, samples=torch.full_like(correct, len(targets)), correct=correct
        )

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> AdversarialEvaluation:
        """Without and under the attack; its random starts are the same every time."""
        chance = torch.Generator().manual_seed(EVALUATION_SEED)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        options = self._attack_settings().as_options()
        found: list[AttackResult] = []

        def attacked() -> Iterator[tuple[Tensor, Tensor]]:
            for images, labels in batches:
                count = math.ceil(self.attack_share * len(images))
                some, theirs = images[:count].to(device), labels[:count].to(device)
                found.append(attack(model, some, theirs, generator=chance, **options))
                yield images, labels

        clean = evaluate(model, attacked())
        return AdversarialEvaluation(
            clean=clean,
            attacked=sum(len(result.labels) for result in found),
            withstood=sum(int((~result.success).sum()) for result in found),
            loss=float(torch.cat([result.loss for result in found]).double().mean()),
        )

    def _search_settings(self) -> AttackSettings | None:
        """How images to train on are looked for; None where they are taken as they are."""
        if self.method == "clean":
            return None
        return AttackSettings(
            eps=self.eps,
            norm=self.norm,
            method=self.method,
            steps=self.steps,
            step_size=self.step_size,
            random_start=self.random_start,
            warm_start=self.warm_start,
            clip=self.clip,
            joint_options=self.joint_options,
        )

    def _attack_settings(self) -> AttackSettings:
        return AttackSettings(
            eps=self.eps,
            norm=self.norm,
            method=self.attack_method,
            steps=self.attack_steps,
            restarts=self.attack_restarts,
            clip=self.clip,
        )


@dataclass(frozen=True)
class AdversarialEvaluation:
    """How a classifier does on images as they are, and on those that an attack made of them."""

    clean: Evaluation
    attacked: int
    """How many images were attacked."""
    withstood: int
    """How many of them were classified right all the same."""
    loss: float
    """Mean cross-entropy under the attack."""

    @property
    def samples(self) -> int:
        return self.clean.samples

    @property
    def solves(self) -> SolveStatistics:
        """Those on the images as they are."""
        return self.clean.solves

    @property
    def accuracy(self) -> float:
        """On the images as they are."""
        return self.clean.accuracy

    @property
    def robust_accuracy(self) -> float:
        """Under the attack."""
        return self.withstood / self.attacked

    @property
    def score(self) -> float:
        """The robust accuracy."""
        return self.robust_accuracy

    @property
    def figures(self) -> dict[str, float | None]:
        return {"accuracy": self.accuracy, "robust_accuracy": self.robust_accuracy}

    def with_solves(self, solves: SolveStatistics) -> AdversarialEvaluation:
        return replace(self, clean=self.clean.with_solves(solves))

    def pooled(self, total: Callable[[Tensor], Tensor]) -> AdversarialEvaluation:
        """Losses and counts over all processes; all else stays that of this one."""
        own = (self.attacked, self.withstood, self.attacked * self.loss)
        attacked, withstood, loss = total(torch.tensor(own, dtype=torch.float64)).tolist()
        return replace(
            self,
            clean=self.clean.pooled(total),
            attacked=round(attacked),
            withstood=round(withstood),
            loss=loss / attacked,
        )
