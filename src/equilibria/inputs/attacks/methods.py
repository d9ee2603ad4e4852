"""FGSM, PGD and JIIO: from a start to a worse image."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.attacks.guard import Guarded
from equilibria.inputs.attacks.settings import AttackSettings
from equilibria.inputs.joint import InputResult, optimize_input

Loss = Callable[[Tensor], Tensor]

FIRST_STEP, LAST_STEP = 0.5, 0.025
"""Lengths of PGD's first and last steps as shares of eps; a cosine lies between them."""

COARSEST_CHECK = 1e-3
"""The largest residual at which `optimize_input` believes the loss of an image."""


class Worst:
    """The worst image seen so far, sample by sample.

    A wrong prediction counts for more than any loss; among equals the higher loss does.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels
        self.wrong = torch.zeros_like(labels, dtype=torch.bool)
        self.losses = images.new_full((len(images),), -torch.inf)

    def see(self, images: Tensor, logits: Tensor, losses: Tensor) -> None:
        wrong = logits.argmax(dim=1) != self.labels
        worse = (wrong & ~self.wrong) | ((wrong == self.wrong) & (losses > self.losses))
        worse &= torch.isfinite(logits).all(dim=1)
        self.wrong = torch.where(worse, wrong, self.wrong)
        self.losses = torch.where(worse, losses.to(self.losses.dtype), self.losses)
        rows = worse.reshape(-1, *(1,) * (images.dim() - 1))
        self.images = torch.where(rows, images, self.images)


def ascend(
    held: Guarded, images: Tensor, start: Tensor, settings: AttackSettings, loss: Loss, worst: Worst
) -> None:
    """Projected gradient ascent of the loss (Madry et al., 2018); FGSM is one long step of it."""
    budget, steps = settings.budget, settings.chosen_steps
    region = budget.constraint(images).region(images)
    point = start
    for step in range(steps):
        logits, losses, gradient = held.gradient(point, loss)
        worst.see(point, logits, losses)
        move = step_length(settings, step) * budget.steepest(gradient.nan_to_num())
        point = region.project((point + move).flatten(1)).reshape(images.shape)
    with torch.no_grad():
        logits = held.logits(point)
        worst.see(point, logits, loss(logits))


def step_length(settings: AttackSettings, step: int) -> float:
    """eps for FGSM; what was asked for; or a cosine from long steps to short ones."""
    if settings.method == "fgsm":
        return settings.eps
    if settings.step_size is not None:
        return settings.step_size
    steps = settings.chosen_steps
    if steps == 1:
        return settings.eps
    share = (1 + math.cos(math.pi * step / (steps - 1))) / 2
    return settings.eps * (LAST_STEP + (FIRST_STEP - LAST_STEP) * share)


def joint(
    held: Guarded, images: Tensor, start: Tensor, settings: AttackSettings, loss: Loss, worst: Worst
) -> InputResult:
    """JIIO (Eq. 26): −loss minimized over the image together with the equilibrium it leads to."""
    tolerance = min([COARSEST_CHECK, *(layer.solver.tolerance for layer in held.layers)])
    options: dict[str, Any] = {
        "iterations": settings.chosen_steps,
        "step_size": settings.step_size,
        "check_tolerance": tolerance,
        # μ is for gradients of the optimum in the parameters; an attack is done with the image.
        "polish": False,
        **settings.joint_options,
    }
    found = optimize_input(
        held.model,
        lambda logits: -loss(logits),
        start,
        constraint=settings.budget.constraint(images),
        normalize=True,
        **options,
    )
    held.others.evaluations += found.evaluations + found.check_evaluations
    held.others.vjps += found.vjps
    if settings.restarts == 1:
        worst.images = found.x
        return found
    with torch.no_grad(), held.cold():
        logits = held.logits(found.x)
        worst.see(found.x, logits, loss(logits))
    return found
