"""The timed input optimizations: attacks on classifiers and latents of decoders."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from benchmarks.joint_models import LATENT, Images, load_images, trained
from benchmarks.peak import peak_mebibytes
from equilibria.inputs import Box, InputResult, L2Ball, SearchSettings, optimize_input
from equilibria.models import EquilibriumClassifier
from equilibria.solvers import Solver

EPSILON = 1.0
CHECK_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Setting:
    """Sources and sizes of data and models."""

    data: str | None
    cache: Path
    images: int = 64
    image_set: int = 1
    """Seed that selects the test images."""
    training_images: int = 6000
    steps: dict[str, int] = field(
        default_factory=lambda: {
            "MDEQ classifier": 120,
            "OptEq classifier": 150,
            "MDEQ decoder": 150,
            "OptEq decoder": 400,
        }
    )

    def load_images(self) -> Images:
        return load_images(self.data, self.training_images, self.images, self.image_set)


@dataclass(frozen=True)
class Method:
    """An engine with the settings of a run."""

    engine: str
    iterations: int
    step_size: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    solver: Solver[Any] | None = None
    """Solver that replaces the model's."""


class JointProblem:
    """minimize ℓ(model(x)) over x for a batch of test images."""

    def __init__(self, name: str, setting: Setting, images: Images | None = None) -> None:
        images = setting.load_images() if images is None else images
        self.name = name
        self.attack = "classifier" in name
        self.model: EquilibriumClassifier = trained(
            name, images, setting.steps[name], setting.cache
        )
        self.images, self.labels = images.test, images.test_labels
        count = len(self.images)
        self.x0 = self.images if self.attack else torch.zeros(count, LATENT)
        self.constraint = L2Ball(self.images, EPSILON) & Box(0.0, 1.0) if self.attack else None

    def loss(self, outputs: Tensor) -> Tensor:
        """Negative cross-entropy for an attack, squared error for a reconstruction."""
        if self.attack:
            return -F.cross_entropy(outputs, self.labels, reduction="none")
        return (outputs - self.images).square().sum(dim=(1, 2, 3))

    def run(self, method: Method) -> InputResult:
        """Optimize x without the work that only serves the report."""
        with eq.solving(self.model, solver=method.solver):
            return optimize_input(
                self.model,
                self.loss,
                self.x0,
                constraint=self.constraint,
                engine={"name": method.engine, **method.options},
                iterations=method.iterations,
                settings=SearchSettings(
                    normalize=self.attack,
                    step_size=method.step_size,
                    # Use the whole budget.
                    tolerance=1e-12,
                    verify=False,
                    polish=False,
                ),
            )

    @torch.no_grad()
    def true_loss(self, x: Tensor) -> float:
        """Mean loss over the images, at equilibria that are solved again from zero."""
        layer = self.model.layer
        precise = type(layer.solver)(tolerance=CHECK_TOLERANCE, max_iterations=500)
        solution = layer.solve(self.model.stem(x), solver=precise)
        outputs = self.model.head(layer.output(solution))
        return float(self.loss(outputs).mean())


def peak_memory(name: str, setting: Setting, method: Method) -> float:
    """MiB that a run adds, measured in a separate process that has freed nothing before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_probe, args=(name, setting, method, sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def _probe(name: str, setting: Setting, method: Method, sender: Any) -> None:
    torch.set_num_threads(1)
    problem = JointProblem(name, setting)
    sender.send(peak_mebibytes(lambda: problem.run(method)))
