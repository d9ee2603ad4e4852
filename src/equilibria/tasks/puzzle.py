"""Puzzles, whose answers are right only if every cell is right."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.equilibrium import solving
from equilibria.models.base import predicted_classes
from equilibria.registry import check_values
from equilibria.solvers import Solution
from equilibria.solvers.multistart import Pick
from equilibria.tasks.base import Task
from equilibria.tasks.evaluation import Outcome


@dataclass(frozen=True)
class Puzzle(Task):
    """Prediction of the class of every cell of a puzzle, by cross-entropy.

    A sample is correct if all its cells are. Evaluations also report whether the residual of the
    solve tells right answers from wrong ones, and with several starts whether the fixed point
    depends on the start.

    Args:
        starts: Number of starts per sample in evaluations.
        pick: Which solution of a sample is its answer: "residual" or "vote" (see `Solving`).
    """

    any_size: ClassVar[bool] = True
    names_classes: ClassVar[bool] = True

    starts: int = 1
    pick: Pick = "residual"

    def __post_init__(self) -> None:
        check_values(self, at_least_one=("starts",), one_of={"pick": get_args(Pick)})

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        return self._step(model(inputs), targets)

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Return losses and right answers, and the residual and agreement of the last solve."""
        several: AbstractContextManager[Any] = nullcontext()
        if self.starts > 1:
            several = solving(model, starts=self.starts, pick=self.pick)
        with several:
            values = dict(self._step(model(inputs).float(), targets).values)
        solution: Solution | None = getattr(model, "last_solution", None)
        if solution is not None and len(solution.residual) == len(inputs):
            values["residual"] = solution.residual.double()
            values["converged"] = solution.converged
            if solution.agreement is not None:
                values["agreement"] = solution.agreement.double()
        return Outcome(values)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        """Return the share of right answers, of right cells, and measures of trust.

        `accuracy_converged` is the share of right answers among the samples that converged.
        `residual_auc` is the probability that a right answer has a smaller residual than a wrong
        one. `path_independence` is the mean share of starts that end at the picked state, and
        `agreement_auc` the probability that this share is larger for a right answer.
        """
        values = outcome.values
        correct = values["correct"].bool()
        figures: dict[str, float | None] = {
            "accuracy": outcome.accuracy,
            "cell_accuracy": outcome.mean("cells"),
        }
        if "residual" in values:
            reached = values["converged"].bool()
            trusted = correct[reached].double()
            figures["accuracy_converged"] = float(trusted.mean()) if len(trusted) else None
            figures["residual_auc"] = area_under_curve(-values["residual"], correct)
        if "agreement" in values:
            figures["path_independence"] = outcome.mean("agreement")
            figures["agreement_auc"] = area_under_curve(values["agreement"], correct)
        return figures

    def _step(self, logits: Tensor, targets: Tensor) -> Outcome:
        if logits.dim() < 3 or logits.shape[2:] != targets.shape[1:]:
            raise ValueError(
                "a puzzle needs logits of shape (B, classes, ...) and one label per cell, got "
                f"{tuple(logits.shape)} and {tuple(targets.shape)}"
            )
        losses = F.cross_entropy(logits, targets.long(), reduction="none").flatten(1)
        right = (predicted_classes(logits) == targets).flatten(1)
        return Outcome(
            {
                "loss": losses.mean(dim=1),
                "correct": right.all(dim=1),
                "cells": right.to(losses.dtype).mean(dim=1),
            }
        )


def area_under_curve(scores: Tensor, positive: Tensor) -> float | None:
    """Return the area under the ROC curve: how often a positive sample has the larger score.

    Ties count one half.

    Args:
        scores: Score of each sample, shape (B,).
        positive: Which samples are positive, shape (B,).

    Returns:
        The area; None if all samples are positive, or none is.

    Examples:
        >>> from equilibria.tasks.puzzle import area_under_curve
        >>> area_under_curve(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True]))
        0.5
    """
    scores = scores.double().nan_to_num(nan=-torch.inf)
    yes, no = scores[positive], scores[~positive].sort().values
    if not len(yes) or not len(no):
        return None
    below = torch.searchsorted(no, yes) + torch.searchsorted(no, yes, right=True)
    return float(below.double().mean() / (2 * len(no)))
