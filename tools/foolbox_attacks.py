"""Attack certified radii by Foolbox: `python -m tools.foolbox_attacks [NAME|RUN …]`.

A change is measured in units of the certified radius r: the attacked model maps v to the logits at
x + r·v. The limits of v are so far out that they restrict no attack within the radius; pixels may
leave [0, 1]. A success at ‖v‖ ≤ 0.999 counts if float64 confirms it, and disproves the certificate.

The attacks are also run on a linear classifier of the digits, whose exact radius is known. They
must succeed there at 1.01 r for every image. Without names, all certified models of the package
are attacked. Data sets are read from EQUILIBRIA_DATA.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.inputs.attacked_model import under_attack
from equilibria.training.experiment import trained

WITHIN, BEYOND = 0.999, 1.01
"""Fractions of the radius: no attack may succeed at the first, and one must at the second if the
radius is exact."""
MODELS = ("digits-certified", "mnist-certified", "cifar10-certified")
REACH = 8.0
"""Largest change of a pixel in units of the radius, for attacks that need limits."""
SOLVE_TOLERANCE, CHECK_TOLERANCE = 1e-5, 1e-9
"""Tolerances of the solves of certificates and attacks, and of the check in float64."""
BATCH = 100
MARGIN = 8.0
"""Margin of the scaled logits at the original image."""


@dataclass(frozen=True)
class Target:
    """A classifier, images, and the radius within which their classes are said not to change."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    nearest: Tensor
    """Class that limits the radius of each image."""
    radius: Tensor

    def rows(self, rows: slice) -> Target:
        """Select some images."""
        parts = (self.images, self.labels, self.nearest, self.radius)
        return Target(self.model, *(part[rows] for part in parts))

    def batches(self) -> Iterator[Target]:
        """Split into batches."""
        for place in range(0, len(self.images), BATCH):
            yield self.rows(slice(place, place + BATCH))

    def in_float64(self) -> Target:
        """Return the same in float64."""
        model = copy.deepcopy(self.model).double().eval()
        return Target(model, self.images.double(), self.labels, self.nearest, self.radius.double())


@dataclass(frozen=True)
class Attacked:
    """Result of one attack.

    Attributes:
        distance: ‖v‖ of the image that the attack found, per image, if that has another class in
            float64; otherwise ∞.
    """

    distance: Tensor

    def count(self, fraction: float) -> int:
        """Return how many images have another class within a fraction of the radius."""
        return int((self.distance <= fraction).sum())


@dataclass(frozen=True)
class Settings:
    """Number of images and of steps of each attack."""

    images: int = 500
    slow_images: int = 50
    pgd_steps: int = 50
    ddn_steps: int = 300
    carlini_wagner_steps: int = 200
    boundary_steps: int = 2000


Attack = Callable[[Any, Target], Tensor]


class AroundImages(nn.Module):
    """The map v ↦ s·model(x + r·v) for a batch of images x with radii r.

    The factor s per image makes the margin over the nearest class at v = 0 equal to `MARGIN`, so
    that the losses of the attacks are neither flat nor steep.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.model, self.images = target.model, target.images
        self.radius = target.radius.to(target.images)[:, None, None, None]
        with torch.no_grad():
            logits = self.model(self.images)
            own, nearest = (logits.gather(1, c[:, None]) for c in (target.labels, target.nearest))
        self.factor = MARGIN / (own - nearest)

    def forward(self, v: Tensor) -> Tensor:
        logits: Tensor = self.factor * self.model(self.images + self.radius * v)
        return logits


def attacks(settings: Settings) -> dict[str, Attack]:
    """Return the attacks by name; each returns a change v per image."""
    fb = foolbox()
    steps = settings.pgd_steps

    def pgd(fraction: float, is_targeted: bool) -> Attack:
        attack = fb.attacks.L2PGD(steps=steps, rel_stepsize=0.2)

        def run(model: Any, target: Target) -> Tensor:
            criterion = target.labels
            if is_targeted:
                criterion = fb.criteria.TargetedMisclassification(target.nearest)
            return attack.run(model, start(target), criterion, epsilon=fraction * (1 - 1e-6))

        return run

    def ddn(model: Any, target: Target) -> Tensor:
        attack = fb.attacks.DDNAttack(steps=settings.ddn_steps, gamma=0.005)
        return attack.run(model, start(target), target.labels)

    def carlini_wagner(model: Any, target: Target) -> Tensor:
        # Adam moves every number by the step size, which here is 0.05 in total.
        size = 0.05 / (REACH * math.sqrt(target.images[0].numel()))
        attack = fb.attacks.L2CarliniWagnerAttack(
            binary_search_steps=7,
            steps=settings.carlini_wagner_steps,
            stepsize=size,
            initial_const=1,
        )
        return attack.run(model, start(target), target.labels)

    def boundary(model: Any, target: Target) -> Tensor:
        attack = fb.attacks.BoundaryAttack(steps=settings.boundary_steps, spherical_step=0.05)
        points = other_classes(target)
        return attack.run(model, start(target), target.labels, starting_points=points)

    return {
        "PGD": pgd(WITHIN, False),
        "PGD, targeted": pgd(WITHIN, True),
        f"PGD, {BEYOND} r": pgd(BEYOND, False),
        f"PGD, targeted, {BEYOND} r": pgd(BEYOND, True),
        "DDN": ddn,
        "C&W": carlini_wagner,
        "boundary": boundary,
    }


def foolbox() -> Any:
    """Import Foolbox."""
    with warnings.catch_warnings():
        # It imports from a deprecated module of SciPy.
        warnings.simplefilter("ignore", DeprecationWarning)
        import foolbox
    return foolbox


SLOW = ("C&W", "boundary")


def start(target: Target) -> Tensor:
    """Return v = 0 for every image."""
    return torch.zeros_like(target.images)


@torch.no_grad()
def other_classes(target: Target) -> Tensor:
    """Return for each image the v that leads to the closest image of another class."""
    distance = torch.cdist(target.images.flatten(1), target.images.flatten(1))
    distance[target.labels[:, None] == target.labels[None]] = math.inf
    nearest = distance.argmin(dim=1)
    change = target.images[nearest] - target.images
    return change / target.radius.to(change)[:, None, None, None]


def run_attack(name: str, target: Target, settings: Settings) -> Attacked:
    """Run one attack on all images, and check what it finds in float64."""
    results = []
    for batch in target.batches():
        with under_attack(batch.model, SOLVE_TOLERANCE, warm_start=False) as attacked:
            around = AroundImages(replace(batch, model=attacked.model)).eval()
            reach = REACH
            if name == "boundary":
                reach = max(reach, 1.01 * float(other_classes(batch).abs().max()))
            torch.manual_seed(0)
            wrapped = foolbox().PyTorchModel(around, bounds=(-reach, reach), device="cpu")
            result = attacks(settings)[name](wrapped, batch)
        results.append(checked(batch.in_float64(), result.detach().double()))
    return Attacked(torch.cat(results))


@torch.no_grad()
def checked(target: Target, v: Tensor) -> Tensor:
    """Return ‖v‖ where the class at x + r·v differs, and ∞ elsewhere; both in float64."""
    with eq.solving(target.model, tolerance=CHECK_TOLERANCE, max_iterations=5000):
        classes = AroundImages(target)(v).argmax(dim=1)
    return torch.where(classes != target.labels, v.flatten(1).norm(dim=1), math.inf)


def certified_target(name: str, count: int) -> Target:
    """Return a certified model with test images that have a radius, and their predictions."""
    experiment = trained(name)
    images, _ = experiment.some_test_images(count)
    with eq.solving(experiment.model, tolerance=SOLVE_TOLERANCE):
        certify = eq.certificates.certifier(experiment.model, tuple(images.shape[1:]))
        parts = [certify(part) for part in images.split(BATCH)]
    certificate = eq.certificates.Certificate.join(parts)
    kept, slopes = certificate.radius > 0, experiment.model.margin_slopes().double()
    distances = certificate.margin / slopes[certificate.prediction]
    nearest = distances.scatter(1, certificate.prediction[:, None], math.inf).argmin(dim=1)
    known = (images, certificate.prediction, nearest, certificate.radius)
    return Target(experiment.model, *(values[kept] for values in known))


def linear_target(count: int) -> Target:
    """Return a linear classifier of the digits with its exact radii: margins over ‖w_k − w_j‖."""
    digits = eq.data.load_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    linear = model[1]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = 1e-3 * linear.weight.square().sum()
        value: Tensor = F.cross_entropy(model(digits.train.images), digits.train.labels) + penalty
        value.backward()
        return value

    optimizer.step(loss)
    images = digits.test.images[:count]
    with torch.no_grad():
        logits, rows = model(images).double(), linear.weight.double()
        labels = logits.argmax(dim=1)
        margins = logits.gather(1, labels[:, None]) - logits
        distances = margins / torch.linalg.vector_norm(rows[labels][:, None] - rows, dim=2)
        radius, nearest = distances.scatter(1, labels[:, None], math.inf).min(dim=1)
    kept = radius > 1e-3
    return Target(model, *(part[kept] for part in (images, labels, nearest, radius)))


def attack_all(target: Target, settings: Settings, names: Any = None) -> dict[str, Attacked]:
    """Run all attacks, the slow ones on some images only."""
    result = {}
    for name in track(list(names or attacks(settings)), description="attacking"):
        count = settings.slow_images if name in SLOW else settings.images
        result[name] = run_attack(name, target.rows(slice(count)), settings)
    return result


def smallest(results: dict[str, Attacked]) -> Tensor:
    """Return the smallest confirmed ‖v‖ of each image over all attacks."""
    count = max(len(result.distance) for result in results.values())
    best = torch.full((count,), math.inf, dtype=torch.float64)
    for result in results.values():
        size = len(result.distance)
        best[:size] = torch.minimum(best[:size], result.distance)
    return best


def report(name: str, target: Target, results: dict[str, Attacked]) -> int:
    """Print the results of a model; return the number of successes within the radius."""
    print(f"{name}: {len(target.images)} images, median radius {float(target.radius.median()):.4f}")
    for attack, result in results.items():
        reached = result.distance[result.distance.isfinite()]
        median = f"{float(reached.median()):.3f} r" if len(reached) else "none"
        print(
            f"  {attack:24} {len(result.distance):4} images, {result.count(WITHIN)} "
            f"succeed within {WITHIN} r, {result.count(BEYOND)} within {BEYOND} r, "
            f"median of the smallest: {median}"
        )
    best = smallest(results)
    print(
        f"  smallest of all: median {float(best.median()):.3f} r, least {float(best.min()):.4f} r"
    )
    return int((best <= WITHIN).sum())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.foolbox_attacks", description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help="models of the package, or runs")
    parser.add_argument("--images", type=int, default=Settings.images)
    parser.add_argument("--slow-images", type=int, default=Settings.slow_images)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(images=options.images, slow_images=options.slow_images)
    target = linear_target(options.images)
    results = attack_all(target, settings)
    wrong = report("linear classifier of the digits", target, results)
    missed = int((smallest(results) > BEYOND).sum())
    print(f"  without a success within {BEYOND} r: {missed} images", flush=True)
    for name in options.models:
        target = certified_target(name, options.images)
        wrong += report(name, target, attack_all(target, settings))
        sys.stdout.flush()
    if wrong or missed:
        raise SystemExit(f"{wrong} attacks within a radius, {missed} missed on the linear model")


if __name__ == "__main__":
    main()
