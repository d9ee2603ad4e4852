"""Adversarial attacks: the worst image near a given one, by FGSM, PGD or JIIO."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import run_eagerly
from equilibria.inputs.attack_result import AttackFigures, AttackResult, joined, wilson_interval
from equilibria.inputs.attack_settings import (
    AttackLoss,
    AttackSettings,
    Method,
    Norm,
    attack_losses,
)
from equilibria.inputs.attacked_model import AttackedModel, under_attack
from equilibria.inputs.optimize import optimize_input
from equilibria.inputs.result import InputResult

Loss = Callable[[Tensor], Tensor]

FIRST_STEP, LAST_STEP = 0.5, 0.025
"""Lengths of PGD's first and last steps as shares of eps; a cosine lies between them."""

COARSEST_CHECK = 1e-3
"""The largest residual at which `optimize_input` believes the loss of an image."""
MEASURE_SEED = 0
"""Of random starts where an attack is measured: the same attack gives the same figures."""


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
    with under_attack(model, tolerance=tolerance, warm_start=warm_start) as attacked:
        initial = _logits(attacked, images, labels)
        before = attacked.evaluations, attacked.vjps
        found, status = _search(attacked, images, labels, settings, generator)
        evaluations, vjps = attacked.evaluations - before[0], attacked.vjps - before[1]
        logits = _logits(attacked, found, labels)
    return AttackResult(
        images=found,
        labels=labels,
        initial_logits=initial,
        logits=logits,
        initial_loss=attack_losses("cross_entropy", initial, labels),
        loss=attack_losses("cross_entropy", logits, labels),
        distance=settings.distance(images, found),
        evaluations=evaluations,
        vjps=vjps,
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
    with under_attack(
        model, tolerance=settings.tolerance, warm_start=settings.warm_start
    ) as attacked:
        return _search(attacked, images, labels, settings, generator)[0]


def measure_attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> tuple[AttackFigures, AttackResult]:
    """One method on all images, batch by batch."""
    generator = torch.Generator().manual_seed(MEASURE_SEED)
    started = time.process_time()
    results = []
    for first in range(0, len(images), batch_size):
        some = slice(first, first + batch_size)
        results.append(
            attack(model, images[some], labels[some], generator=generator, **settings.as_options())
        )
        on_batch()
    result = joined(results)
    withstood, count = int((~result.success).sum()), len(result.labels)
    low, high = wilson_interval(withstood, count)
    figures = AttackFigures(
        method=settings.method,
        norm=settings.norm,
        eps=settings.eps,
        steps=settings.chosen_steps,
        restarts=settings.restarts,
        samples=count,
        accuracy=result.accuracy,
        robust_accuracy=result.robust_accuracy,
        low=low,
        high=high,
        clean_loss=float(result.initial_loss.double().mean()),
        loss=float(result.loss.double().mean()),
        mean_distance=float(result.distance.mean()),
        evaluations=result.evaluations,
        vjps=result.vjps,
        cpu_seconds=time.process_time() - started,
    )
    return figures, result


def _search(
    attacked: AttackedModel,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """The worst images, and how JIIO's last run ended."""
    worst = WorstImages(images, labels)
    status: Tensor | None = None
    if settings.eps == 0:
        return images, status

    def loss(logits: Tensor) -> Tensor:
        return attack_losses(settings.loss, logits, labels)

    for run in range(settings.restarts):
        at_random = settings.random_start or run > 0
        start = settings.random_point(images, generator) if at_random else images
        if settings.method == "jiio":
            status = _joint(attacked, images, start, settings, loss, worst).status
        else:
            _ascend(attacked, images, start, settings, loss, worst)
    return worst.images, status


class WorstImages:
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


def _ascend(
    attacked: AttackedModel,
    images: Tensor,
    start: Tensor,
    settings: AttackSettings,
    loss: Loss,
    worst: WorstImages,
) -> None:
    """Projected gradient ascent of the loss (Madry et al., 2018); FGSM is one long step of it."""
    region = settings.constraint(images).region(images)
    point = start
    for step in range(settings.chosen_steps):
        logits, losses, gradient = attacked.gradient(point, loss)
        worst.see(point, logits, losses)
        move = _step_length(settings, step) * settings.steepest(gradient.nan_to_num())
        point = region.project((point + move).flatten(1)).reshape(images.shape)
    with torch.no_grad():
        logits = attacked.logits(point)
        worst.see(point, logits, loss(logits))


def _step_length(settings: AttackSettings, step: int) -> float:
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


def _joint(
    attacked: AttackedModel,
    images: Tensor,
    start: Tensor,
    settings: AttackSettings,
    loss: Loss,
    worst: WorstImages,
) -> InputResult:
    """JIIO (Eq. 26): −loss minimized over the image together with the equilibrium it leads to."""
    tolerance = min([COARSEST_CHECK, *(layer.solver.tolerance for layer in attacked.layers)])
    options: dict[str, Any] = {
        "iterations": settings.chosen_steps,
        "step_size": settings.step_size,
        "check_tolerance": tolerance,
        # μ is for gradients of the optimum in the parameters; an attack is done with the image.
        "polish": False,
        **settings.joint_options,
    }
    found = optimize_input(
        attacked.model,
        lambda logits: -loss(logits),
        start,
        constraint=settings.constraint(images),
        normalize=True,
        **options,
    )
    attacked.search_evaluations += found.evaluations + found.check_evaluations
    attacked.search_vjps += found.vjps
    if settings.restarts == 1:
        worst.images = found.x
        return found
    with torch.no_grad(), attacked.cold():
        logits = attacked.logits(found.x)
        worst.see(found.x, logits, loss(logits))
    return found


@torch.no_grad()
def _logits(attacked: AttackedModel, images: Tensor, labels: Tensor) -> Tensor:
    with attacked.cold():
        logits = attacked.logits(images).detach()
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
