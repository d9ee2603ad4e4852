"""Models for which certificates are likely to fail, and a search for false certificates."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.equilibrium.capabilities import potential
from equilibria.models import EquilibriumClassifier, OptEqCell
from equilibria.models.reflection.model import reflection_network
from equilibria.models.reflection.orthonormal import orthonormal_network

FAMILIES = (
    *("dense", "opteq-y", "opteq-z", "opteq-skip", "deep-opteq", "deep-opteq-five", "popteq"),
    *("mopteq", "geq", "geq-fixed", "leaky", "reflection", "orthonormal"),
)
CLASSES = 4
SIDE = 4
CONV = {"channels": 4, "in_channels": 1, "num_classes": CLASSES, "pool": 2, "init_scale": 2.0}
OPTIONS = {
    "opteq-y": ("opteq-small", {"width": 3, "space": "y", "stem_depth": 2}),
    "opteq-z": ("opteq-small", {"width": 6, "space": "z"}),
    "opteq-skip": ("opteq-small", {"width": 3, "space": "y", "alpha": 0.7}),
    "deep-opteq": ("deep-opteq-small", {"widths": (3, 5), "alpha": 0.8}),
    "deep-opteq-five": ("deep-opteq-small", {"widths": (2, 3, 3, 4, 2), "alpha": 0.5}),
    "popteq": ("popteq-small", {"widths": (2, 3), "scales": (1, 2)}),
    "mopteq": ("mopteq-small", {"widths": (2, 3), "scales": (1, 2), "diversity": 0.0}),
    "geq": ("geq-small", {"widths": (4, 4), "scales": (1, 2), "channel_split": 2, "hidden": 5}),
    "geq-fixed": ("geq-small", {"widths": (4,), "scales": (1,), "channel_split": 2, "hidden": None,
                                "gamma": 0.3}),
    "leaky": ("opteq-small", {"width": 3, "space": "y", "activation": "leaky_relu"}),
}  # fmt: skip


def images(count: int) -> Tensor:
    return torch.rand(count, 1, SIDE, SIDE)


def random_model(family: str, seed: int, zeta: float = 0.9) -> EquilibriumClassifier:
    """Return a model in float32 and evaluation mode, with statistics of random images."""
    torch.manual_seed(seed)
    if family == "dense":
        W = eq.Dense(5, 7, norm="bound", zeta=zeta)
        with torch.no_grad():
            W.kernel.mul_(3)
        cell = OptEqCell(W, eq.Dense(SIDE * SIDE, 7), bias=True)
        layer = eq.EquilibriumLayer(cell=cell, tolerance=1e-3)
        model = EquilibriumClassifier(nn.Flatten(), layer, nn.Linear(5, CLASSES))
        return model.eval()
    if family == "reflection":
        sizes = {"image_size": SIDE, "in_channels": 1, "num_classes": CLASSES, "units": (9, 7)}
        return reflection_network(**sizes, zeta=4 * zeta, solving=eq.Solving(tolerance=1e-3)).eval()
    if family == "orthonormal":
        sizes = {"image_size": SIDE, "in_channels": 1, "num_classes": CLASSES, "units": (9, 7)}
        return orthonormal_network(**sizes, stages=[(2, 6, 2)]).eval()
    name, options = OPTIONS[family]
    model = eq.create_model(
        name, **CONV, **options, zeta=zeta, tolerance=1e-3, normalize=((0.3,), (0.4,))
    )
    assert isinstance(model, EquilibriumClassifier)
    model.train()(images(8)).sum().backward()
    return model.eval()


@dataclass
class Exact:
    """Logits at the equilibria of a model in float64, solved to 1e-12."""

    logits: Tensor
    converged: Tensor

    @property
    def classes(self) -> Tensor:
        return self.logits.argmax(dim=1)

    @property
    def margins(self) -> Tensor:
        top = self.logits.topk(2, dim=1).values
        return top[:, 0] - top[:, 1]


@torch.no_grad()
def exact(model: nn.Module, x: Tensor) -> Exact:
    return solved(copy.deepcopy(model).double(), x.double())


@torch.no_grad()
def solved(wide: nn.Module, x: Tensor) -> Exact:
    """Solve a model in float64; where Anderson is slow, use Newton's method on the objective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        first = _solved(wide, x, eq.Anderson(tolerance=1e-12, max_iterations=200))
        rest = ~first.converged
        if potential(wide.layer.cell) is None or not bool(rest.any()):
            return first
        second = _solved(wide, x[rest], eq.solvers.Descent(tolerance=1e-12))
    logits, converged = first.logits, first.converged.clone()
    logits[rest], converged[rest] = second.logits, second.converged
    return Exact(logits, converged)


def _solved(wide: nn.Module, x: Tensor, solver: eq.solvers.Solver[Any]) -> Exact:
    with eq.solving(wide, solver=solver, record=True) as record:
        logits = wide(x)
    return Exact(logits, record.solutions[-1].converged)


@torch.no_grad()
def narrow_margins(model: EquilibriumClassifier, x: Tensor, margin: float) -> None:
    """Change the biases of the head so that the first image has this margin."""
    logits = exact(model, x[:1]).logits[0]
    first, second = logits.topk(2).indices
    head = getattr(model.head, "classifier", model.head)
    head.bias[second] += (logits[first] - logits[second] - margin).float()


def _early_exit(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predictions of an early exit, and whether they are certain."""
    quick = eq.certificates.CertifiedExit(model, tuple(x.shape[1:]))
    return quick(x).argmax(dim=1), quick.certified


@dataclass
class Hunt:
    """Counts of checked (sample, model) pairs and of false certificates."""

    pairs: int = 0
    certified: int = 0
    exits: int = 0
    attacked: int = 0
    false_classes: int = 0
    false_exits: int = 0
    false_radii: int = 0

    def check(self, model: EquilibriumClassifier, x: Tensor, *, attacked: int = 0) -> None:
        """Compare certificates with exact equilibria; attack some images within their radii."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            certificate = eq.certify(model, x, refine=False)
            early, is_certain = _early_exit(model, x)
        true = exact(model, x)
        # Ignore ties within the accuracy of the exact solve.
        distance = 1e-11 / (1 - certificate.contraction).clamp(1e-12, 1)
        decided = true.converged & (true.margins > distance * (1 + true.logits.abs().amax(dim=1)))
        wrong = decided & (certificate.prediction != true.classes)
        self.pairs += len(x)
        self.certified += int(certificate.certified_class.sum())
        self.false_classes += int((certificate.certified_class & wrong).sum())
        self.exits += int(is_certain.sum())
        self.false_exits += int((is_certain & decided & (early != true.classes)).sum())
        if attacked:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eq.ConvergenceWarning)
                self._attack(model, x[:attacked], eq.certify(model, x[:attacked], refine=True))

    def _attack(
        self,
        model: EquilibriumClassifier,
        x: Tensor,
        certificate: eq.certificates.Certificate,
        steps: int = 3,
    ) -> None:
        """Projected gradient descent on the smallest margin, in float64, within each radius."""
        has_radius = certificate.radius > 0
        if not bool(has_radius.any()):
            return
        wide = copy.deepcopy(model).double()
        center, radius = x[has_radius].double(), certificate.radius[has_radius]
        labels = certificate.prediction[has_radius]
        scale = radius[:, None, None, None]

        def projected(delta: Tensor) -> Tensor:
            norm = delta.flatten(1).norm(dim=1)[:, None, None, None]
            return delta * (scale / norm.clamp_min(1e-300)).clamp_max(1)

        delta = projected(torch.randn_like(center) * scale)
        for step in range(steps):
            point = (center + delta).requires_grad_()
            with eq.solving(wide, tolerance=1e-9, gradient=eq.Implicit(tolerance=1e-6)):
                logits = wide(point)
            own = logits.gather(1, labels[:, None])
            others = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1, keepdim=True)
            (gradient,) = torch.autograd.grad((own - others).sum(), point)
            size = gradient.flatten(1).norm(dim=1)[:, None, None, None].clamp_min(1e-300)
            delta = projected(delta - 2 * scale / (1 + step) * gradient / size).detach()
            reached = solved(wide, center + delta)
            self.false_radii += int((reached.converged & (reached.classes != labels)).sum())
        self.attacked += len(labels)
