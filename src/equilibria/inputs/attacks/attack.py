"""The worst image near a given one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import run_eagerly
from equilibria.inputs.attacks.budget import Norm
from equilibria.inputs.attacks.guard import Guarded, guarded
from equilibria.inputs.attacks.losses import AttackLoss, attack_losses
from equilibria.inputs.attacks.methods import Worst, ascend, joint
from equilibria.inputs.attacks.result import AttackResult
from equilibria.inputs.attacks.settings import AttackSettings, Method


@run_eagerly
def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: Norm = "l2",
    method: Method = "pgd",
    steps: int | None = None,
    restarts: int = 1,
    step_size: float | None = None,
    random_start: bool = False,
    warm_start: bool = False,
    clip: tuple[float, float] | None = (0.0, 1.0),
    loss: AttackLoss = "cross_entropy",
    tolerance: float | None = None,
    joint_options: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> AttackResult:
    """Look for the image within `eps` of each given one that the model gets most wrong.

        found = attack(model, images, labels, norm="l2", eps=1.0, method="pgd", steps=20)
        found.robust_accuracy, found.images

    model: any classifier for "pgd" and "fgsm"; for "jiio" one that `optimize_input` takes, with a
        stem, an equilibrium layer and a head. It is attacked in evaluation mode and with its exact
        gradient, whatever rule it trains with, and left as it is.
    norm: "l2" or "linf", over all pixels of an image.
    method: "fgsm" is one step of length eps; "pgd" projected gradient ascent, for an equilibrium
        model a solve and a backward solve each step; "jiio" moves image, equilibrium and adjoint
        together (`optimize_input`).
    steps: 20 for PGD, 40 for JIIO if not given.
    restarts: the search runs so often and the worst image counts; all but the first begin at random
        points of the ball, and with `random_start` the first one does too.
    step_size: of PGD, by default eps/2 at first and eps/40 in the end, as a cosine; of JIIO the
        `step_size` of `optimize_input`.
    warm_start: start the solves of PGD where those of the step before ended.
    clip: the lowest and highest value of a pixel, which `images` must respect; None for no range.
    loss: what is made large, "cross_entropy" or "margin". The result reports cross-entropy.
    tolerance: of the solves; the model's own if not given.
    joint_options: for `optimize_input` (engine, sweeps, …).
    generator: of the random starts; torch's own if not given.

    Of all images that were seen the worst counts: a wrong prediction before a right one, then the
    higher loss.
    """
    settings = AttackSettings(
        eps=eps,
        norm=norm,
        method=method,
        steps=steps,
        restarts=restarts,
        step_size=step_size,
        random_start=random_start,
        warm_start=warm_start,
        clip=clip,
        loss=loss,
        tolerance=tolerance,
        joint_options=dict(joint_options or {}),
    )
    images, labels = _checked(images, labels, settings)
    with guarded(model, tolerance=tolerance, warm_start=warm_start) as held:
        initial = _logits(held, images, labels)
        before = held.effort
        found, status = _search(held, images, labels, settings, generator)
        effort = held.effort - before
        logits = _logits(held, found, labels)
    return AttackResult(
        images=found,
        labels=labels,
        initial_logits=initial,
        logits=logits,
        initial_loss=attack_losses("cross_entropy", initial, labels),
        loss=attack_losses("cross_entropy", logits, labels),
        distance=settings.budget.distance(images, found),
        evaluations=effort.evaluations,
        vjps=effort.vjps,
        settings=settings,
        status=status,
    )


@run_eagerly
def adversarial_images(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The adversarial images alone, as `attack` finds them: what adversarial training needs."""
    images, labels = _checked(images, labels, settings)
    with guarded(model, tolerance=settings.tolerance, warm_start=settings.warm_start) as held:
        return _search(held, images, labels, settings, generator)[0]


def _search(
    held: Guarded,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """The worst images, and how JIIO's last run ended."""
    worst = Worst(images, labels)
    status: Tensor | None = None
    if settings.eps == 0:
        return images, status

    def loss(logits: Tensor) -> Tensor:
        return attack_losses(settings.loss, logits, labels)

    for run in range(settings.restarts):
        at_random = settings.random_start or run > 0
        start = settings.budget.random_point(images, generator) if at_random else images
        if settings.method == "jiio":
            status = joint(held, images, start, settings, loss, worst).status
        else:
            ascend(held, images, start, settings, loss, worst)
    return worst.images, status


@torch.no_grad()
def _logits(held: Guarded, images: Tensor, labels: Tensor) -> Tensor:
    with held.cold():
        logits = held.logits(images).detach()
    if logits.dim() != 2 or len(logits) != len(images) or logits.shape[1] < 2:
        raise ValueError(
            "an attack needs a classifier, whose logits have shape (samples, classes), not "
            f"{tuple(logits.shape)}"
        )
    if int(labels.max()) >= logits.shape[1]:
        raise ValueError(
            f"label {int(labels.max())} is none of the model's {logits.shape[1]} classes"
        )
    return logits


def _checked(images: Tensor, labels: Tensor, settings: AttackSettings) -> tuple[Tensor, Tensor]:
    """Copies that nothing else shares, or an error that says what does not fit."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        raise TypeError("images must be a tensor of floating-point numbers")
    if images.dim() < 2 or len(images) == 0:
        raise ValueError(f"images must be a batch of at least one, not {tuple(images.shape)}")
    whole = isinstance(labels, Tensor) and not labels.is_floating_point()
    if not whole or labels.shape != (len(images),) or int(labels.min()) < 0:
        got = f"{tuple(labels.shape)} of {labels.dtype}" if isinstance(labels, Tensor) else labels
        raise ValueError(
            f"labels must be {len(images)} whole numbers from 0, one for each image, not {got}"
        )
    if not bool(torch.isfinite(images).all()):
        raise ValueError("images hold NaN or Inf: nothing can be said about what is near them")
    low, high = float(images.min()), float(images.max())
    if settings.clip is not None and not (settings.clip[0] <= low and high <= settings.clip[1]):
        raise ValueError(
            f"images go from {low:.3g} to {high:.3g}, outside the range {settings.clip}: attack "
            "images as they were before a normalization (create_model(..., normalize=(mean, std)) "
            "puts it into the model), or give the range as clip, None for no range"
        )
    with torch.inference_mode(False):
        return images.detach().clone(), labels.detach().to(images.device, torch.int64).clone()
