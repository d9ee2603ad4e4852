"""Accuracy under attack as a curve: over the distance, and over the steps of a search."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from equilibria.inputs.attack_settings import AttackMethod, AttackSettings
from equilibria.inputs.attacked_model import under_attack
from equilibria.inputs.attacks import MEASURE_SEED, measure_attack, wilson_interval
from equilibria.models.base import predicted_classes
from equilibria.registry import check_at_least_one, check_positive

OUTSIDE = {
    "l2": {"foolbox pgd": "L2PGD", "foolbox deepfool": "L2DeepFoolAttack"},
    "linf": {"foolbox pgd": "LinfPGD", "foolbox deepfool": "LinfDeepFoolAttack"},
}
"""Attacks of other people, where they are installed."""
STEPPED = ("pgd", "jiio", "foolbox pgd")
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of the largest distance, that are measured."""
OUTSIDE_STEPS = 50
STEP_COUNTS = (1, 2, 5, 10, 20, 40)


@dataclass(frozen=True)
class CurvePoint:
    """The accuracy at one distance and number of steps; `low` and `high`: its 95% interval."""

    eps: float
    steps: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class RobustnessCurves:
    """By method, the accuracy over the distance and over the steps.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="l2", eps=0.5, steps=1)
        >>> batch = digits.images[:4], digits.labels[:4]
        >>> curves = eq.inputs.measure_robustness(model, *batch, settings, methods=["fgsm"])
        >>> [round(point.eps, 3) for point in curves.over_eps["fgsm"]][-1], curves.samples
        (0.5, 4)
    """

    norm: str
    samples: int
    accuracy: float
    """Without an attack."""
    over_eps: dict[str, tuple[CurvePoint, ...]]
    over_steps: dict[str, tuple[CurvePoint, ...]]
    step_eps: float
    """The distance at which steps were varied."""
    passed_over: tuple[str, ...] = ()
    """Methods that do not take the model, or are not installed, and why."""
    certified: tuple[tuple[float, float], ...] = ()
    """(distance, share of the images that are right for certain up to there)."""
    why_not_certified: str = field(default="")


def curve_methods(norm: str) -> tuple[str, ...]:
    """The names of all methods that may have a curve.

    Examples:
        >>> from equilibria.inputs.robustness import curve_methods
        >>> "pgd" in curve_methods("l2")
        True
    """
    return (*get_args(AttackMethod), *OUTSIDE[norm])


def measure_robustness(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    *,
    methods: Sequence[str] | None = None,
    batch_size: int = 250,
    on_measured: Callable[[str], object] = lambda method: None,
) -> RobustnessCurves:
    """Attack at distances up to `settings.eps`, and at half of it with 1 to 40 steps.

    settings: norm, eps, restarts, loss and clip of all attacks; `steps` of those over the distance.
    methods: of `curve_methods`; all by default, of which those that do not take the model, or that
        are not installed, are passed over.
    on_measured: is told of every measurement, of `len(methods) * (len(SHARES) + len(STEP_COUNTS))`
        at most.

    An image that was changed within a distance was changed within every larger one: it is not
    attacked again.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="l2", eps=0.5, steps=2)
        >>> batch = digits.images[:4], digits.labels[:4]
        >>> curves = eq.inputs.measure_robustness(model, *batch, settings, methods=["fgsm"])
        >>> list(curves.over_eps)
        ['fgsm']
    """
    check_positive(eps=settings.eps)
    settings.check_eps(images.shape[1:])
    check_at_least_one(batch_size=batch_size)
    chosen = curve_methods(settings.norm) if methods is None else tuple(methods)
    right = _right(model, images, labels, batch_size)
    over_eps: dict[str, tuple[CurvePoint, ...]] = {}
    over_steps: dict[str, tuple[CurvePoint, ...]] = {}
    passed_over = []
    for method in chosen:
        search = _RadiusSearch(method, model, images, labels, settings, batch_size, on_measured)
        try:
            over_eps[method] = tuple(search.along_eps(right))
            if method in STEPPED:
                over_steps[method] = tuple(search.along_steps(right))
        except (ImportError, TypeError, ValueError) as error:
            if methods is not None and len(chosen) == 1:
                raise
            over_eps.pop(method, None)
            passed_over.append(f"{method}: {error}")
    if not over_eps:
        raise ValueError("; ".join(passed_over))
    return RobustnessCurves(
        norm=settings.norm,
        samples=len(labels),
        accuracy=float(right.double().mean()),
        over_eps=over_eps,
        over_steps=over_steps,
        step_eps=settings.eps / 2,
        passed_over=tuple(passed_over),
    )


def certified_curve(
    norm: str, radii: Tensor, right: Tensor, numbers: int, count: int = 60
) -> tuple[tuple[float, float], ...]:
    """The share of images whose class is right up to each distance, for certain.

    radii: in L2, zero where there is none; an image of `numbers` pixels that is moved by ε in L∞ is
        moved by at most ε√numbers in L2. At most `count` points of the curve are kept.

    Examples:
        >>> radii, right = torch.tensor([0.0, 0.5]), torch.tensor([True, True])
        >>> from equilibria.inputs.robustness import certified_curve
        >>> certified_curve("l2", radii, right, numbers=64)
        ((0.0, 0.5), (0.5, 0.5), (0.5, 0.0))
    """
    scale = 1.0 if norm == "l2" else numbers**0.5
    held = torch.where(right.cpu(), radii.cpu().double() / scale, 0.0)
    reached = held[held > 0].sort().values
    shares = torch.arange(len(reached), 0, -1, dtype=torch.float64) / len(held)
    keep = torch.linspace(0, max(0, len(reached) - 1), min(count, len(reached))).round().long()
    points = list(zip(reached[keep].tolist(), shares[keep].tolist(), strict=True))
    last = [(points[-1][0], 0.0)] if points else []
    start = len(reached) / max(1, len(held))
    return ((0.0, start), *points, *last)


@torch.no_grad()
def _right(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    with under_attack(model, None, warm_start=False) as attacked:
        said = [predicted_classes(attacked.model(part)) for part in torch.split(images, batch_size)]
    return torch.cat(said) == labels


@dataclass(frozen=True)
class _RadiusSearch:
    """One method on all images."""

    method: str
    model: nn.Module
    images: Tensor
    labels: Tensor
    settings: AttackSettings
    batch_size: int
    on_measured: Callable[[str], object]

    def along_eps(self, right: Tensor) -> Iterator[CurvePoint]:
        standing = right.clone()
        for share in SHARES:
            eps = share * self.settings.eps
            standing = self._withstood(standing, eps, self.settings.steps)
            yield self._point(standing, eps, self._steps(self.settings.steps))

    def along_steps(self, right: Tensor) -> Iterator[CurvePoint]:
        eps = self.settings.eps / 2
        for steps in STEP_COUNTS:
            yield self._point(self._withstood(right, eps, steps), eps, steps)

    def _steps(self, steps: int | None) -> int:
        own = self.method in get_args(AttackMethod)
        return self._attack(0.0, steps).chosen_steps if own else steps or OUTSIDE_STEPS

    def _point(self, standing: Tensor, eps: float, steps: int) -> CurvePoint:
        hits, count = int(standing.sum()), len(standing)
        return CurvePoint(eps, steps, hits / count, *wilson_interval(hits, count))

    def _attack(self, eps: float, steps: int | None) -> AttackSettings:
        fixed = self.method == "fgsm"
        method: Any = self.method
        return replace(self.settings, method=method, eps=eps, steps=None if fixed else steps)

    def _withstood(self, standing: Tensor, eps: float, steps: int | None) -> Tensor:
        """Which of the images that stand keep their class."""
        places = standing.nonzero().squeeze(1)
        kept = standing.clone()
        if len(places):
            images, labels = self.images[places], self.labels[places]
            if self.method in get_args(AttackMethod):
                asked = self._attack(eps, steps)
                found = measure_attack(self.model, images, labels, asked, self.batch_size)
                kept[places] = ~found.success
            else:
                kept[places] = self._withstood_outside(images, labels, eps, steps)
        self.on_measured(self.method)
        return kept

    def _withstood_outside(
        self, images: Tensor, labels: Tensor, eps: float, steps: int | None
    ) -> Tensor:
        """Under an attack of Foolbox, which sees the exact gradient; what it finds is looked at."""
        foolbox = _foolbox()
        name = OUTSIDE[self.settings.norm][self.method]
        count = OUTSIDE_STEPS if steps is None else steps
        # Its own steps are too short for few of them.
        length = {"rel_stepsize": 2.5 / count} if name.endswith("PGD") else {}
        made = getattr(foolbox.attacks, name)(steps=count, **length)
        kept = []
        with under_attack(self.model, self.settings.tolerance, warm_start=False) as attacked:
            torch.manual_seed(MEASURE_SEED)
            low, high = self.settings.clip or (0.0, 1.0)
            model = foolbox.PyTorchModel(attacked.model, bounds=(low, high), device=images.device)
            parts = (torch.split(some, self.batch_size) for some in (images, labels))
            for some, true in zip(*parts, strict=True):
                _, found, _ = made(model, some, true, epsilons=eps)
                with torch.no_grad():
                    said = predicted_classes(attacked.model(found))
                near = self.settings.distance(some, found) <= eps * (1 + 1e-5)
                kept.append((said == true) | ~near)
        return torch.cat(kept)


def _foolbox() -> Any:
    with warnings.catch_warnings():
        # It imports a part of scipy by an old name.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import foolbox
        except ImportError:
            raise ImportError("Foolbox is not installed: pip install foolbox") from None
    return foolbox
