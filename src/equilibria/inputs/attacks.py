"""Adversarial attacks: the worst image near a given one, by FGSM, PGD or JIIO."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context.context import run_eagerly
from equilibria.equilibrium import EquilibriumLayer, solving
from equilibria.inputs.attack_settings import AttackSettings, attack_losses
from equilibria.inputs.attacked_model import AttackedModel, under_attack
from equilibria.inputs.input_result import InputResult
from equilibria.inputs.optimize import optimize_input
from equilibria.inputs.search_settings import SearchSettings
from equilibria.models.base import predicted_classes
from equilibria.registry import check_at_least_one, check_options

COARSEST_CHECK = 1e-3
"""The largest residual at which `optimize_input` believes the loss of an image."""
MEASURE_SEED = 0
"""Of random starts where an attack is measured: the same attack gives the same figures."""


@dataclass(frozen=True)
class AttackResult:
    """Adversarial images with what the model says of them, sample by sample.

    Logits and losses before and after come from the same ordinary forward pass in evaluation mode,
    equilibria solved anew: what the model would say of the image, not what the search believed.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> found = eq.attack(model, digits.images[:4], digits.labels[:4], eps=0.5, steps=2)
        >>> found.robust_accuracy <= found.accuracy, found.success.shape
        (True, torch.Size([4]))
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
    cpu_seconds: float | None = None
    """Where `measure_attack` has taken it."""

    @property
    def initial_predictions(self) -> Tensor:
        """Predicted classes before the attack, shape (B,)."""
        return predicted_classes(self.initial_logits)

    @property
    def predictions(self) -> Tensor:
        """−1 where the model has no answer (`predicted_classes`), which is a wrong one."""
        return predicted_classes(self.logits)

    @property
    def unanswered(self) -> int:
        """For how many of the images as they were the model has no answer."""
        return int((self.initial_predictions < 0).sum())

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

    def figures(self) -> dict[str, Any]:
        """One method's row of a table; `low` and `high` are ends of a 95% interval (Wilson)."""
        count = len(self.labels)
        low, high = wilson_interval(int((~self.success).sum()), count)
        return {
            "method": self.settings.method,
            "norm": self.settings.norm,
            "eps": self.settings.eps,
            "steps": self.settings.chosen_steps,
            "restarts": self.settings.restarts,
            "samples": count,
            "unanswered": self.unanswered,
            "accuracy": self.accuracy,
            "robust_accuracy": self.robust_accuracy,
            "low": low,
            "high": high,
            "clean_loss": float(self.initial_loss.double().mean()),
            "loss": float(self.loss.double().mean()),
            "mean_distance": float(self.distance.mean()),
            "evaluations": self.evaluations,
            "vjps": self.vjps,
            "cpu_seconds": self.cpu_seconds,
        }

    def summary(self) -> str:
        """One line on all samples."""
        asked = self.settings
        return (
            f"{asked.method} ({asked.norm}, eps {asked.eps:g}): accuracy {self.accuracy:.1%} → "
            f"{self.robust_accuracy:.1%}, mean loss {float(self.initial_loss.mean()):.4g} → "
            f"{float(self.loss.mean()):.4g}, in {self.evaluations} evaluations of the map and "
            f"{self.vjps} pull-backs"
        )

    @classmethod
    def join(cls, results: Sequence[AttackResult]) -> AttackResult:
        """Join the results of several batches; evaluations are added up."""
        if not results:
            raise ValueError("there is nothing to join: no batch was attacked")

        def together(name: str, first: Any) -> Any:
            values = [getattr(result, name) for result in results]
            if isinstance(first, Tensor):
                return torch.cat(values)
            return sum(values) if isinstance(first, int) else first

        first = results[0]
        return cls(**{f.name: together(f.name, getattr(first, f.name)) for f in fields(first)})


@run_eagerly
def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings | None = None,
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> AttackResult:
    """Look for the image within `eps` of each given one that the model gets most wrong.

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
    step_size: of PGD, by default eps/2 at first and eps/40 in the end, as a cosine (longer where
        there are fewer than eight); of JIIO the `step_size` of `SearchSettings`.
    warm_start: start the solves of PGD where those of the step before ended.
    clip: the lowest and highest value of a pixel, which `images` must respect; None for no range.
    loss: what is made large, "cross_entropy" or "margin". The result reports cross-entropy.
    tolerance: of the solves; the model's own if not given.
    joint_options: of JIIO: engine, iterations, and the fields of `SearchSettings`.
    settings: all of these options in one object, in the place of keywords.
    generator: of the random starts; torch's own if not given.

    Of all images that were seen the worst counts: a wrong prediction before a right one, then the
    higher loss.

    Examples:
        >>> test = eq.data.load_digits().test
        >>> model = eq.load("digits-opteq")
        >>> found = eq.attack(model, test.images[:4], test.labels[:4], eps=0.5, steps=3)
        >>> bool((found.distance <= 0.5).all())
        True
    """
    if settings is None:
        check_options("attack", AttackSettings, options)
        settings = AttackSettings(**options)
    elif options:
        raise TypeError(f"{', '.join(options)} given beside the settings: set them there")
    images, labels = _checked(images, labels, settings)
    with under_attack(model, settings.tolerance, settings.warm_start) as attacked:
        initial = _logits(attacked, images, labels)
        before = attacked.evaluations, attacked.vjps
        search = _AttackSearch(attacked, images, labels, settings)
        found = search.run(generator)
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
        status=None if search.joint is None else search.joint.status,
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
    """The adversarial images alone, as `attack` finds them: what adversarial training needs.

    JIIO's images are those that its search ends at: what it would take to report on them is saved.
    Of its last search an iterate is told to `solving` blocks that record equilibria of the model
    (`InputResult.report_visited`).

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="linf", eps=0.1, steps=2)
        >>> images, labels = digits.images[:4], digits.labels[:4]
        >>> from equilibria.inputs.attacks import adversarial_images
        >>> near = adversarial_images(model, images, labels, settings)
        >>> bool(((near - images).abs() <= 0.1 + 1e-6).all())
        True
    """
    images, labels = _checked(images, labels, settings)
    with under_attack(model, settings.tolerance, settings.warm_start) as attacked:
        layer = getattr(model, "layer", None)
        heard = isinstance(layer, EquilibriumLayer) and layer.is_heard
        search = _AttackSearch(attacked, images, labels, settings, visit=heard, verify=False)
        found = search.run(generator)
    if search.joint is not None:
        search.joint.report_visited(model)
    return found


def measure_attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> AttackResult:
    """One method on all images, batch by batch, with the processor time it took.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="l2", eps=0.5, steps=2)
        >>> images, labels = digits.images[:6], digits.labels[:6]
        >>> eq.inputs.measure_attack(model, images, labels, settings, batch_size=3).labels.shape
        torch.Size([6])
    """
    check_at_least_one(batch_size=batch_size)
    generator = torch.Generator().manual_seed(MEASURE_SEED)
    started = time.process_time()
    results = []
    for first in range(0, len(images), batch_size):
        some = slice(first, first + batch_size)
        results.append(attack(model, images[some], labels[some], settings, generator=generator))
        on_batch()
    return replace(AttackResult.join(results), cpu_seconds=time.process_time() - started)


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Where the share of hits lies that `count` samples estimate, at 95% (Wilson, 1927)."""
    quantile = NormalDist().inv_cdf(0.975)
    share, squared = hits / count, quantile**2
    center = (share + squared / (2 * count)) / (1 + squared / count)
    spread = math.sqrt(share * (1 - share) / count + squared / (4 * count**2))
    half = quantile * spread / (1 + squared / count)
    # The ends are exact; rounding would leave them beside the share itself.
    low = 0.0 if hits == 0 else center - half
    return low, 1.0 if hits == count else center + half


@dataclass
class _AttackSearch:
    """Looks for the worst image near each, sample by sample.

    A wrong prediction counts for more than any loss; among equals the higher loss does.
    """

    attacked: AttackedModel
    images: Tensor
    labels: Tensor
    settings: AttackSettings
    visit: bool = False
    verify: bool = True
    """Whether JIIO's losses are to be true, and an image no better than the start not taken."""

    def __post_init__(self) -> None:
        self.joint: InputResult | None = None
        """JIIO's last run."""
        self.worst = self.images
        self.wrong = torch.zeros_like(self.labels, dtype=torch.bool)
        self.losses = self.images.new_full((len(self.images),), -torch.inf)

    def run(self, generator: torch.Generator | None) -> Tensor:
        settings = self.settings
        find = self._jointly if settings.method == "jiio" else self._ascend
        for run in range(settings.restarts if settings.eps > 0 else 0):
            at_random = settings.random_start or run > 0
            find(settings.random_point(self.images, generator) if at_random else self.images)
        return self.worst

    def _loss(self, logits: Tensor) -> Tensor:
        return attack_losses(self.settings.loss, logits, self.labels)

    def _see(self, images: Tensor, logits: Tensor, losses: Tensor) -> None:
        wrong = predicted_classes(logits) != self.labels
        worse = (wrong & ~self.wrong) | ((wrong == self.wrong) & (losses > self.losses))
        self.wrong = torch.where(worse, wrong, self.wrong)
        self.losses = torch.where(worse, losses.to(self.losses.dtype), self.losses)
        rows = worse.reshape(-1, *(1,) * (images.dim() - 1))
        self.worst = torch.where(rows, images, self.worst)

    @torch.no_grad()
    def _see_logits(self, images: Tensor) -> None:
        logits = self.attacked.logits(images)
        self._see(images, logits, self._loss(logits))

    def _ascend(self, start: Tensor) -> None:
        """Projected gradient ascent (Madry et al., 2018); FGSM is one long step of it."""
        settings = self.settings
        region = settings.constraint(self.images).region(self.images)
        point = start
        for step in range(settings.chosen_steps):
            logits, losses, gradient = self.attacked.gradient(point, self._loss)
            self._see(point, logits, losses)
            move = settings.step_length(step) * settings.steepest(gradient.nan_to_num())
            point = region.project((point + move).flatten(1)).reshape(start.shape)
        self._see_logits(point)

    def _jointly(self, start: Tensor) -> None:
        """JIIO (Eq. 26): −loss minimized over the image together with its equilibrium."""
        settings, attacked = self.settings, self.attacked
        tolerances = [layer.solver.tolerance for layer in attacked.layers]
        options: dict[str, Any] = {"iterations": settings.chosen_steps, **settings.joint_options}
        search: dict[str, Any] = {
            "step_size": settings.step_size,
            "check_tolerance": min([COARSEST_CHECK, *tolerances]),
            # μ is for gradients of the optimum in the parameters; an attack needs the image alone.
            "polish": False,
            "verify": self.verify,
        }
        for field in fields(SearchSettings):
            if field.name in options:
                search[field.name] = options.pop(field.name)
        found = optimize_input(
            attacked.model,
            lambda logits: -self._loss(logits),
            start,
            constraint=settings.constraint(self.images),
            settings=SearchSettings(normalize=True, visit=self.visit, **search),
            **options,
        )
        attacked.search_evaluations += found.evaluations + found.check_evaluations
        attacked.search_vjps += found.vjps
        self.joint = found
        if settings.restarts == 1:
            self.worst = found.x
            return
        with solving(attacked.model, start={}):
            self._see_logits(found.x)


@torch.no_grad()
def _logits(attacked: AttackedModel, images: Tensor, labels: Tensor) -> Tensor:
    with solving(attacked.model, start={}):
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
    settings.check_eps(images.shape[1:])
    low, high = float(images.min()), float(images.max())
    if settings.clip is not None and not (settings.clip[0] <= low and high <= settings.clip[1]):
        raise ValueError(
            f"images go from {low:.3g} to {high:.3g}, outside the range {settings.clip}: attack "
            "images as they were before a normalization (create_model(..., normalize=(mean, std)) "
            "puts it into the model), or give the range as clip, None for no range"
        )
    with torch.inference_mode(False):
        return images.detach().clone(), labels.detach().to(images.device, torch.int64).clone()
