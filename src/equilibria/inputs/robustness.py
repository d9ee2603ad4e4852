"""Curves of the accuracy under attack, over the distance and over the number of steps."""

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

FOOLBOX_ATTACKS = {
    "l2": {"foolbox pgd": "L2PGD", "foolbox deepfool": "L2DeepFoolAttack"},
    "linf": {"foolbox pgd": "LinfPGD", "foolbox deepfool": "LinfDeepFoolAttack"},
}
"""Attacks of Foolbox, an optional package, by norm."""
ITERATIVE_METHODS = ("pgd", "jiio", "foolbox pgd")
"""Methods with a curve over the number of steps."""
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Measured distances, in units of the largest one."""
FOOLBOX_STEPS = 50
STEP_COUNTS = (1, 2, 5, 10, 20, 40)


@dataclass(frozen=True)
class CurvePoint:
    """Accuracy at one distance and number of steps.

    Attributes:
        eps: Largest distance of the adversarial images.
        steps: Number of steps of the attack.
        accuracy: Accuracy under attack.
        low: Lower end of the 95 % interval of the accuracy.
        high: Upper end of the 95 % interval.
    """

    eps: float
    steps: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class RobustnessCurves:
    """Accuracy of each attack method over the distance and over the number of steps.

    Attributes:
        norm: Norm of the attacks, "l2" or "linf".
        samples: Number of images.
        accuracy: Accuracy without an attack.
        over_eps: Curve over the distance for each method.
        over_steps: Curve over the number of steps for each iterative method.
        step_eps: Distance of the curves over the number of steps.
        passed_over: Methods that do not support the model or are not installed, with the reason.
        certified: Points (distance, share of images that are certified to be right up to there).
        why_not_certified: Reason why there is no certified curve.

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
    over_eps: dict[str, tuple[CurvePoint, ...]]
    over_steps: dict[str, tuple[CurvePoint, ...]]
    step_eps: float
    passed_over: tuple[str, ...] = ()
    certified: tuple[tuple[float, float], ...] = ()
    why_not_certified: str = field(default="")


def curve_methods(norm: str) -> tuple[str, ...]:
    """Return the names of all methods that can have a curve.

    Examples:
        >>> from equilibria.inputs.robustness import curve_methods
        >>> "pgd" in curve_methods("l2")
        True
    """
    return (*get_args(AttackMethod), *FOOLBOX_ATTACKS[norm])


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
    """Measure the accuracy at distances up to `settings.eps`, and at half of it with 1 to 40 steps.

    An attack that succeeds within a distance also succeeds within every larger one, so such images
    are not attacked again.

    Args:
        model: Classifier, as for `attack`.
        images: Original images, shape (B, ...).
        labels: Labels, integers of shape (B,).
        settings: Norm, eps, restarts, loss and clip of all attacks, and `steps` of the curve over
            the distance.
        methods: Names from `curve_methods`. By default all that support the model and are
            installed.
        batch_size: Number of images per batch.
        on_measured: Called with the name of the method after each measurement, at most
            `len(methods) * (len(SHARES) + len(STEP_COUNTS))` times.

    Returns:
        The curves of all methods.

    Raises:
        ValueError: If no method supports the model.

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
    selected = curve_methods(settings.norm) if methods is None else tuple(methods)
    correct = _correct(model, images, labels, batch_size)
    over_eps: dict[str, tuple[CurvePoint, ...]] = {}
    over_steps: dict[str, tuple[CurvePoint, ...]] = {}
    passed_over = []
    for method in selected:
        search = _RadiusSearch(method, model, images, labels, settings, batch_size, on_measured)
        try:
            over_eps[method] = tuple(search.along_eps(correct))
            if method in ITERATIVE_METHODS:
                over_steps[method] = tuple(search.along_steps(correct))
        except (ImportError, TypeError, ValueError) as error:
            if methods is not None and len(selected) == 1:
                raise
            over_eps.pop(method, None)
            passed_over.append(f"{method}: {error}")
    if not over_eps:
        raise ValueError("; ".join(passed_over))
    return RobustnessCurves(
        norm=settings.norm,
        samples=len(labels),
        accuracy=float(correct.double().mean()),
        over_eps=over_eps,
        over_steps=over_steps,
        step_eps=settings.eps / 2,
        passed_over=tuple(passed_over),
    )


def certified_curve(
    radii: Tensor, right: Tensor, count: int = 60
) -> tuple[tuple[float, float], ...]:
    """Return the share of images that are certified to be right up to each distance.

    Args:
        radii: Certified radius of each image; zero if there is none.
        right: Whether each prediction is right.
        count: Largest number of points of the curve.

    Examples:
        >>> radii, right = torch.tensor([0.0, 0.5]), torch.tensor([True, True])
        >>> from equilibria.inputs.robustness import certified_curve
        >>> certified_curve(radii, right)
        ((0.0, 0.5), (0.5, 0.5), (0.5, 0.0))
    """
    held = torch.where(right.cpu(), radii.cpu().double(), 0.0)
    reached = held[held > 0].sort().values
    shares = torch.arange(len(reached), 0, -1, dtype=torch.float64) / len(held)
    keep = torch.linspace(0, max(0, len(reached) - 1), min(count, len(reached))).round().long()
    points = list(zip(reached[keep].tolist(), shares[keep].tolist(), strict=True))
    last = [(points[-1][0], 0.0)] if points else []
    start = len(reached) / max(1, len(held))
    return ((0.0, start), *points, *last)


@torch.no_grad()
def _correct(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    with under_attack(model, None, warm_start=False) as attacked:
        parts = torch.split(images, batch_size)
        predictions = [predicted_classes(attacked.model(part)) for part in parts]
    return torch.cat(predictions) == labels


@dataclass(frozen=True)
class _RadiusSearch:
    """Attacks of all images with one method.

    Masks named `standing` hold the images whose predictions are still right.
    """

    method: str
    model: nn.Module
    images: Tensor
    labels: Tensor
    settings: AttackSettings
    batch_size: int
    on_measured: Callable[[str], object]

    def along_eps(self, correct: Tensor) -> Iterator[CurvePoint]:
        standing = correct.clone()
        for share in SHARES:
            eps = share * self.settings.eps
            standing = self._withstood(standing, eps, self.settings.steps)
            yield self._point(standing, eps, self._steps(self.settings.steps))

    def along_steps(self, correct: Tensor) -> Iterator[CurvePoint]:
        eps = self.settings.eps / 2
        for steps in STEP_COUNTS:
            yield self._point(self._withstood(correct, eps, steps), eps, steps)

    def _steps(self, steps: int | None) -> int:
        is_builtin = self.method in get_args(AttackMethod)
        return self._attack(0.0, steps).chosen_steps if is_builtin else steps or FOOLBOX_STEPS

    def _point(self, standing: Tensor, eps: float, steps: int) -> CurvePoint:
        hits, count = int(standing.sum()), len(standing)
        return CurvePoint(eps, steps, hits / count, *wilson_interval(hits, count))

    def _attack(self, eps: float, steps: int | None) -> AttackSettings:
        fixed = self.method == "fgsm"
        method: Any = self.method
        return replace(self.settings, method=method, eps=eps, steps=None if fixed else steps)

    def _withstood(self, standing: Tensor, eps: float, steps: int | None) -> Tensor:
        """Attack the standing images, and return a mask of those that are still right."""
        rows = standing.nonzero().squeeze(1)
        result = standing.clone()
        if len(rows):
            images, labels = self.images[rows], self.labels[rows]
            if self.method in get_args(AttackMethod):
                settings = self._attack(eps, steps)
                attacked = measure_attack(self.model, images, labels, settings, self.batch_size)
                result[rows] = ~attacked.success
            else:
                result[rows] = self._withstood_foolbox(images, labels, eps, steps)
        self.on_measured(self.method)
        return result

    def _withstood_foolbox(
        self, images: Tensor, labels: Tensor, eps: float, steps: int | None
    ) -> Tensor:
        """Attack by Foolbox, which gets the exact gradient; its images are verified."""
        foolbox = _foolbox()
        name = FOOLBOX_ATTACKS[self.settings.norm][self.method]
        count = FOOLBOX_STEPS if steps is None else steps
        # The default length of its steps is too short for a small number of steps.
        length = {"rel_stepsize": 2.5 / count} if name.endswith("PGD") else {}
        foolbox_attack = getattr(foolbox.attacks, name)(steps=count, **length)
        withstood = []
        with under_attack(self.model, self.settings.tolerance, warm_start=False) as attacked:
            torch.manual_seed(MEASURE_SEED)
            low, high = self.settings.clip or (0.0, 1.0)
            model = foolbox.PyTorchModel(attacked.model, bounds=(low, high), device=images.device)
            batches = (torch.split(tensor, self.batch_size) for tensor in (images, labels))
            for batch, targets in zip(*batches, strict=True):
                _, adversarial, _ = foolbox_attack(model, batch, targets, epsilons=eps)
                with torch.no_grad():
                    predictions = predicted_classes(attacked.model(adversarial))
                is_near = self.settings.distance(batch, adversarial) <= eps * (1 + 1e-5)
                withstood.append((predictions == targets) | ~is_near)
        return torch.cat(withstood)


def _foolbox() -> Any:
    with warnings.catch_warnings():
        # Foolbox imports from a deprecated module of SciPy.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import foolbox
        except ImportError:
            raise ImportError("Foolbox is not installed; run `pip install foolbox`") from None
    return foolbox
