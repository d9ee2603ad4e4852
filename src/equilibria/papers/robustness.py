"""How a trained classifier does under attack, and what finding the attacks costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.attacks import AttackSettings, Method, measure
from equilibria.papers.clocks import clock_of
from equilibria.tasks import AdversarialClassification
from equilibria.training import Experiment

ATTACKED = 500
"""Test images that are attacked, at most."""
TIMED = 32
BATCH = 100
PGD_STEPS = 20


def robustness(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """The accuracy under PGD and under JIIO, within the budget that the run was trained for."""
    images, labels = _some(experiment, ATTACKED, device)
    found: dict[str, float | None] = {}
    for name in ("pgd", "jiio"):
        figures, _ = measure(
            experiment.model_of_pixels(), images, labels, _settings(experiment, name), BATCH
        )
        found[f"{name}_accuracy"] = figures.robust_accuracy
    return found


def attack_times(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """Seconds an image of PGD with cold and warm solves and of JIIO, with the losses they reach."""
    images, labels = _some(experiment, TIMED, device)
    clock = clock_of(device)
    ways: dict[str, dict[str, Any]] = {
        "pgd": {},
        "warm_pgd": {"method": "pgd", "warm_start": True},
        "jiio": {},
        "official": {"method": "jiio", "steps": 80, "joint_options": {"engine": "official"}},
    }
    found: dict[str, float | None] = {}
    # Whoever comes first pays for what torch sets up once: not one of those that are compared.
    first = _settings(experiment, "pgd")
    measure(experiment.model_of_pixels(), images, labels, first, len(images))
    for name, options in ways.items():
        settings = _settings(experiment, options.pop("method", name), **options)
        begin = clock()
        figures, _ = measure(experiment.model_of_pixels(), images, labels, settings, len(images))
        found[f"{name}_seconds"] = (clock() - begin) / len(images)
        found[f"{name}_loss"] = figures.loss
        found[f"{name}_evaluations"] = float(figures.evaluations)
    return found


def _settings(experiment: Experiment, method: Method, **options: Any) -> AttackSettings:
    task = experiment.task
    if not isinstance(task, AdversarialClassification):
        raise TypeError("robustness is measured of runs of the task 'adversarial'")
    steps = PGD_STEPS if method == "pgd" else None
    chosen: dict[str, Any] = {"eps": task.eps, "norm": task.norm, "steps": steps, **options}
    return AttackSettings(method=method, **chosen)


def _some(experiment: Experiment, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images, labels = experiment.some_test_images(count)
    return images.to(device), labels.to(device)
