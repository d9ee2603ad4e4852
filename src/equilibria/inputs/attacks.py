"""Adversarial attacks: the worst image near a given one, found by FGSM, PGD or JIIO."""

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

MAX_CHECK_TOLERANCE = 1e-3
"""Largest tolerance of the solves for the true losses of JIIO."""
MEASURE_SEED = 0
"""Seed of the random starts in measurements, which makes them repeatable."""


@dataclass(frozen=True)
class AttackResult:
    """Adversarial images with the logits and losses of the model, sample by sample.

    All logits and losses come from ordinary forward passes in evaluation mode, not from the states
    of the search.

    Attributes:
        images: Adversarial images, exactly within `eps` and `clip`.
        labels: Labels of the images, shape (B,).
        initial_logits: Logits of the original images, shape (B, classes).
        logits: Logits of the adversarial images, shape (B, classes).
        initial_loss: Cross-entropy of the original images, shape (B,).
        loss: Cross-entropy of the adversarial images, shape (B,).
        distance: Distance of each adversarial image to the original, in the norm of the attack.
        evaluations: Evaluations of the map in the search, each for the whole batch. For a model
            without an equilibrium layer, forward passes.
        vjps: Vector-Jacobian products in the search, or backward passes.
        settings: Settings of the attack.
        status: `Status` codes of JIIO, of the last restart; None for other methods.
        cpu_seconds: Processor time, if `measure_attack` measured it.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> result = eq.attack(model, digits.images[:4], digits.labels[:4], eps=0.5, steps=2)
        >>> result.robust_accuracy <= result.accuracy, result.success.shape
        (True, torch.Size([4]))
    """

    images: Tensor
    labels: Tensor
    initial_logits: Tensor
    logits: Tensor
    initial_loss: Tensor
    loss: Tensor
    distance: Tensor
    evaluations: int
    vjps: int
    settings: AttackSettings
    status: Tensor | None = None
    cpu_seconds: float | None = None

    @property
    def initial_predictions(self) -> Tensor:
        """Predicted classes of the original images, shape (B,); −1 without a valid prediction."""
        return predicted_classes(self.initial_logits)

    @property
    def predictions(self) -> Tensor:
        """Predicted classes of the adversarial images, shape (B,).

        −1 marks logits that are not finite (see `predicted_classes`) and counts as wrong.
        """
        return predicted_classes(self.logits)

    @property
    def unanswered(self) -> int:
        """Number of original images without a valid prediction."""
        return int((self.initial_predictions < 0).sum())

    @property
    def success(self) -> Tensor:
        """Whether each prediction is wrong after the attack, shape (B,).

        Images that are misclassified without an attack count as well.
        """
        return self.predictions != self.labels

    @property
    def accuracy(self) -> float:
        """Accuracy on the original images."""
        return float((self.initial_predictions == self.labels).double().mean())

    @property
    def robust_accuracy(self) -> float:
        """Accuracy on the adversarial images."""
        return float((~self.success).double().mean())

    def figures(self) -> dict[str, Any]:
        """Return the measured numbers of the attack by name, for a table row.

        `low` and `high` are the ends of the 95 % Wilson interval of the robust accuracy.
        """
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
        """Return one line on all samples."""
        settings = self.settings
        return (
            f"{settings.method} ({settings.norm}, eps {settings.eps:g}): accuracy "
            f"{self.accuracy:.1%} → {self.robust_accuracy:.1%}, mean loss "
            f"{float(self.initial_loss.mean()):.4g} → {float(self.loss.mean()):.4g}, in "
            f"{self.evaluations} evaluations of the map and {self.vjps} vector-Jacobian products"
        )

    @classmethod
    def join(cls, results: Sequence[AttackResult]) -> AttackResult:
        """Join the results of several batches; evaluations are added up.

        Args:
            results: Results with the same settings, at least one.
        """
        if not results:
            raise ValueError("results must hold the result of at least one batch, got none")

        def joined(name: str, first: Any) -> Any:
            values = [getattr(result, name) for result in results]
            if isinstance(first, Tensor):
                return torch.cat(values)
            return sum(values) if isinstance(first, int) else first

        first = results[0]
        return cls(**{f.name: joined(f.name, getattr(first, f.name)) for f in fields(first)})


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
    """Search for the worst image within a distance `eps` of each given image.

    The model is attacked in evaluation mode and with its exact gradient, whatever gradient rule it
    trains with, and is not changed. The result is the worst image of the search: a wrong prediction
    is worse than a right one, then the higher loss is.

    Args:
        model: Any classifier for "pgd" and "fgsm". For "jiio" one with a stem, an equilibrium layer
            and a head, as for `optimize_input`.
        images: Original images, shape (B, ...), with pixels within `clip`.
        labels: Labels, integers of shape (B,).
        settings: Settings of the attack, instead of keyword options.
        generator: Source of the random starts; by default torch's global generator.
        **options: Fields of `AttackSettings`, such as `eps`, `norm`, `method` and `steps`.

    Returns:
        The adversarial images with logits and losses before and after.

    Raises:
        TypeError: If an option is unknown, or `settings` and options are given together.
        ValueError: If an option is out of range, or the images do not fit `clip` or the labels.

    Examples:
        >>> test = eq.data.load_digits().test
        >>> model = eq.load("digits-opteq")
        >>> result = eq.attack(model, test.images[:4], test.labels[:4], eps=0.5, steps=3)
        >>> bool((result.distance <= 0.5).all())
        True
    """
    if settings is None:
        check_options("attack", AttackSettings, options)
        settings = AttackSettings(**options)
    elif options:
        raise TypeError(
            f"pass either settings or options, got settings and {', '.join(options)}; set the "
            "options in AttackSettings"
        )
    images, labels = _checked(images, labels, settings)
    with under_attack(model, settings.tolerance, settings.warm_start) as attacked:
        initial = _logits(attacked, images, labels)
        initial_counts = attacked.evaluations, attacked.vjps
        search = _AttackSearch(attacked, images, labels, settings)
        adversarial = search.run(generator)
        evaluations = attacked.evaluations - initial_counts[0]
        vjps = attacked.vjps - initial_counts[1]
        logits = _logits(attacked, adversarial, labels)
    return AttackResult(
        images=adversarial,
        labels=labels,
        initial_logits=initial,
        logits=logits,
        initial_loss=attack_losses("cross_entropy", initial, labels),
        loss=attack_losses("cross_entropy", logits, labels),
        distance=settings.distance(images, adversarial),
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
    """Return only the adversarial images of `attack`, for adversarial training.

    JIIO returns the last iterate, without the solves that a report would need. One iterate of its
    last search is reported to `solving` blocks that record equilibria of the model
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
        visit = isinstance(layer, EquilibriumLayer) and layer.is_heard
        search = _AttackSearch(attacked, images, labels, settings, visit=visit, verify=False)
        adversarial = search.run(generator)
    if search.joint is not None:
        search.joint.report_visited(model)
    return adversarial


def measure_attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> AttackResult:
    """Attack all images with one method, in batches, and measure the processor time.

    Args:
        model: Classifier, as for `attack`.
        images: Original images, shape (B, ...).
        labels: Labels, integers of shape (B,).
        settings: Settings of the attack.
        batch_size: Number of images per batch.
        on_batch: Called after each batch, for example to advance a progress bar.

    Returns:
        The result for all images, with `cpu_seconds`.

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
        rows = slice(first, first + batch_size)
        results.append(attack(model, images[rows], labels[rows], settings, generator=generator))
        on_batch()
    return replace(AttackResult.join(results), cpu_seconds=time.process_time() - started)


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of the share of hits among samples (Wilson, 1927)."""
    quantile = NormalDist().inv_cdf(0.975)
    share, squared = hits / count, quantile**2
    center = (share + squared / (2 * count)) / (1 + squared / count)
    spread = math.sqrt(share * (1 - share) / count + squared / (4 * count**2))
    half = quantile * spread / (1 + squared / count)
    # Rounding must not exclude the shares 0 and 1.
    low = 0.0 if hits == 0 else center - half
    return low, 1.0 if hits == count else center + half


@dataclass
class _AttackSearch:
    """Search for the worst image near each original, sample by sample.

    A wrong prediction is worse than a right one, then the higher loss is.

    Attributes:
        visit: Whether JIIO keeps one of its iterates.
        verify: Whether JIIO computes true losses and rejects images that are not worse.
    """

    attacked: AttackedModel
    images: Tensor
    labels: Tensor
    settings: AttackSettings
    visit: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        self.joint: InputResult | None = None
        """Result of the last run of JIIO."""
        self.worst = self.images
        self.wrong = torch.zeros_like(self.labels, dtype=torch.bool)
        self.losses = self.images.new_full((len(self.images),), -torch.inf)

    def run(self, generator: torch.Generator | None) -> Tensor:
        settings = self.settings
        search = self._optimize_jointly if settings.method == "jiio" else self._ascend
        for run in range(settings.restarts if settings.eps > 0 else 0):
            is_random = settings.random_start or run > 0
            search(settings.random_point(self.images, generator) if is_random else self.images)
        return self.worst

    def _loss(self, logits: Tensor) -> Tensor:
        return attack_losses(self.settings.loss, logits, self.labels)

    def _keep_worst(self, images: Tensor, logits: Tensor, losses: Tensor) -> None:
        wrong = predicted_classes(logits) != self.labels
        worse = (wrong & ~self.wrong) | ((wrong == self.wrong) & (losses > self.losses))
        self.wrong = torch.where(worse, wrong, self.wrong)
        self.losses = torch.where(worse, losses.to(self.losses.dtype), self.losses)
        rows = worse.reshape(-1, *(1,) * (images.dim() - 1))
        self.worst = torch.where(rows, images, self.worst)

    @torch.no_grad()
    def _evaluate(self, images: Tensor) -> None:
        logits = self.attacked.logits(images)
        self._keep_worst(images, logits, self._loss(logits))

    def _ascend(self, start: Tensor) -> None:
        """Run projected gradient ascent (Madry et al., 2018); FGSM is a single long step."""
        settings = self.settings
        region = settings.constraint(self.images).region(self.images)
        point = start
        for step in range(settings.chosen_steps):
            logits, losses, gradient = self.attacked.gradient(point, self._loss)
            self._keep_worst(point, logits, losses)
            move = settings.step_length(step) * settings.steepest(gradient.nan_to_num())
            point = region.project((point + move).flatten(1)).reshape(start.shape)
        self._evaluate(point)

    def _optimize_jointly(self, start: Tensor) -> None:
        """Run JIIO (Eq. 26): minimize −loss over the image together with its equilibrium."""
        settings, attacked = self.settings, self.attacked
        tolerances = [layer.solver.tolerance for layer in attacked.layers]
        options: dict[str, Any] = {"iterations": settings.chosen_steps, **settings.joint_options}
        search: dict[str, Any] = {
            "step_size": settings.step_size,
            "check_tolerance": min([MAX_CHECK_TOLERANCE, *tolerances]),
            # An exact μ is only needed for gradients of the optimum in the parameters.
            "polish": False,
            "verify": self.verify,
        }
        for field in fields(SearchSettings):
            if field.name in options:
                search[field.name] = options.pop(field.name)
        result = optimize_input(
            attacked.model,
            lambda logits: -self._loss(logits),
            start,
            constraint=settings.constraint(self.images),
            settings=SearchSettings(normalize=True, visit=self.visit, **search),
            **options,
        )
        attacked.search_evaluations += result.evaluations + result.check_evaluations
        attacked.search_vjps += result.vjps
        self.joint = result
        if settings.restarts == 1:
            self.worst = result.x
            return
        with solving(attacked.model, start={}):
            self._evaluate(result.x)


@torch.no_grad()
def _logits(attacked: AttackedModel, images: Tensor, labels: Tensor) -> Tensor:
    with solving(attacked.model, start={}):
        logits = attacked.logits(images).detach()
    if logits.dim() != 2 or len(logits) != len(images) or logits.shape[1] < 2:
        raise ValueError(
            "attacks need a classifier with logits of shape (samples, classes), got "
            f"{tuple(logits.shape)}"
        )
    if int(labels.max()) >= logits.shape[1]:
        raise ValueError(
            f"labels must be below {logits.shape[1]}, the model's number of classes, got "
            f"{int(labels.max())}"
        )
    return logits


def _checked(images: Tensor, labels: Tensor, settings: AttackSettings) -> tuple[Tensor, Tensor]:
    """Return copies of images and labels; raise an error if they do not fit."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be a floating-point tensor, got {kind}")
    if images.dim() < 2 or len(images) == 0:
        raise ValueError(
            f"images must have shape (B, ...) with at least one image, got {tuple(images.shape)}"
        )
    is_integer = isinstance(labels, Tensor) and not labels.is_floating_point()
    if not is_integer or labels.shape != (len(images),) or int(labels.min()) < 0:
        got = f"{tuple(labels.shape)} of {labels.dtype}" if isinstance(labels, Tensor) else labels
        raise ValueError(
            f"labels must be {len(images)} non-negative integers, one per image, got {got}"
        )
    if not bool(torch.isfinite(images).all()):
        raise ValueError("images must be finite, got NaN or Inf")
    settings.check_eps(images.shape[1:])
    low, high = float(images.min()), float(images.max())
    if settings.clip is not None and not (settings.clip[0] <= low and high <= settings.clip[1]):
        raise ValueError(
            f"images must be within clip={settings.clip}, got values from {low:.3g} to {high:.3g}: "
            "pass images before normalization (create_model(..., normalize=(mean, std)) makes it a "
            "part of the model), or set clip to their range, or to None for no limits"
        )
    with torch.inference_mode(False):
        return images.detach().clone(), labels.detach().to(images.device, torch.int64).clone()
