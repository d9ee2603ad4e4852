"""`certify`, its result, and how a family of models provides its certifier.

The certifier of a model is chosen by its class: `certifier` is a `functools.singledispatch`
function. `layer.py` registers the certifier of models with one equilibrium layer, `reflection.py`
that of reflection networks. A model class that needs another proof registers its own:

    @eq.certificates.certifier.register
    def _(model: MyModel, image_shape: tuple[int, ...]) -> MyCertifier: ...

`certify`, `CertifiedExit` and `certificate_constants` then use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import singledispatch
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from equilibria.solvers import Solution

GLOBAL, WEIGHTED, PATTERN = "global", "weighted", "pattern"
"""Names of the bounds behind a radius, each sharper than the one before (`radii.py`)."""


@dataclass(frozen=True)
class Certificate:
    """Proven statements about each prediction of a batch.

    All tensors are float64 with the batch first. The statements are about the exact equilibrium:
    that of the model in exact arithmetic, with the weights it has stored (effective weights are
    what float64 computes from those). The norm bounds are computed from the weights, and rounding
    is accounted for.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> len(certificate), certificate.share_certified, certificate.reasons
        (2, 1.0, ['', ''])
    """

    contraction: Tensor
    """Upper bound q of the Lipschitz constant of the map; ∞ if none is known."""
    unique: Tensor
    """Whether there is exactly one equilibrium."""
    residual: Tensor
    """‖T(y) − y‖ at the state y that the model computed."""
    error: Tensor
    """Upper bound of ‖T(y) − y*‖, in the variables of the hidden objective if there is one."""
    contraction_error: Tensor
    """q‖T(y) − y‖/(1 − q), in the variables of the state; ∞ if nothing is known."""
    convexity_error: Tensor
    """‖∂G‖/m, m the modulus of strong convexity, in the variables of G; ∞ if nothing is known."""
    prediction: Tensor
    """Class at T(y); −1 if there is none."""
    certified_class: Tensor
    """Whether the exact equilibrium has that class, and the model predicts it."""
    margin: Tensor
    """Logit of that class minus the logit of every class, (samples, classes)."""
    margin_error: Tensor
    """Upper bound on the distance of each margin from that at the exact equilibrium."""
    radius: Tensor
    """No image that is closer (in L2, in pixels) has another class; 0 if nothing is known."""
    radii: dict[str, Tensor]
    """The radius by each bound: global, weighted, and with `refine` pattern (`radii.py`)."""
    radius_linf: Tensor
    """No image whose pixels all differ by less than this has another class; 0 if nothing is known.
    At least `radius`/√n for n pixels times channels; larger if the stem is affine (`radii.py`)."""
    checks: dict[str, Tensor]
    """Quantities that vanish at an equilibrium (`checks.py`): stationarity ‖∂G‖, the Fenchel gap,
    by how much σ fails to be firmly nonexpansive, and for a Deep OptEq the residual of Theorem 2's
    inclusion. For MOptEqs also the quotient of both sides of Proposition 2, at least 1."""
    reasons: list[str] = field(default_factory=list)
    """Why a sample has no certified class, or no radius; empty if it has both."""

    def __len__(self) -> int:
        return len(self.contraction)

    @property
    def share_certified(self) -> float:
        """Share of the images whose class is certified."""
        return float(self.certified_class.double().mean()) if len(self) else 0.0

    def gains(self) -> dict[str, float]:
        """Median factor by which the radius of each bound exceeds the global one."""
        sure = self.radii[GLOBAL] > 0 if GLOBAL in self.radii else self.certified_class[:0]
        if not bool(sure.any()):
            return {}
        quotients = {
            name: radius[sure] / self.radii[GLOBAL][sure] for name, radius in self.radii.items()
        }
        return {name: float(quotient.median()) for name, quotient in quotients.items()}

    @classmethod
    def join(cls, certificates: Sequence[Certificate]) -> Certificate:
        """Join the certificates of several batches.

        Args:
            certificates: At least one certificate, in the order of the batches.

        Returns:
            The certificate of all samples.

        Raises:
            ValueError: If there is no certificate to join.
        """
        if not certificates:
            raise ValueError("there is nothing to join: no batch was certified")

        def together(name: str) -> Any:
            values = [getattr(one, name) for one in certificates]
            if isinstance(values[0], Tensor):
                return torch.cat(values)
            if isinstance(values[0], dict):
                return {key: torch.cat([value[key] for value in values]) for key in values[0]}
            return [item for value in values for item in value]

        return cls(**{f.name: together(f.name) for f in fields(cls)})


class NoCertificateError(ValueError):
    """Nothing about the model can be certified; the message says why."""


Progress: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps a sequence of work items to show progress: `rich.progress.track`, `tqdm`, or `iter`, which
shows nothing."""


@dataclass(frozen=True)
class SolvedBatch:
    """The equilibria that a model has computed for a batch, and its logits.

    `Certifier.solve` returns it and `Certifier.judge` takes it, so that one solve serves both a
    prediction and its certificate. A certificate holds for any state: one that is far from the
    equilibrium, or of other images, only proves less.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> certify = eq.certificates.certifier(model, images.shape[1:])
        >>> solved = certify.solve(images)
        >>> solved.logits.argmax(dim=1), solved.solution.converged
        (tensor([0, 3]), tensor([True, True]))
        >>> certify.judge(images, solved).certified_class
        tensor([True, True])
    """

    solutions: tuple[Solution, ...]
    """One per equilibrium layer, in the order in which the model applies them."""
    logits: Tensor
    """Output of the model for these equilibria, (samples, classes)."""

    @property
    def solution(self) -> Solution:
        """Solution of the last equilibrium layer."""
        return self.solutions[-1]


Exit: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes images; returns their logits, and for which of them the class is certain."""


@dataclass(frozen=True)
class MarginConstants:
    """Constants that bound every margin of a model, for any image of one shape."""

    margin_error: Tensor
    """(classes, classes): error of a margin per unit of the residual."""
    margin_slope: Tensor | None = None
    """(classes, classes): Lipschitz constant of a margin in the pixels (L2)."""
    why_no_slope: str = ""
    """Why `margin_slope` is missing."""


class Certifier(Protocol):
    """An object that certifies batches of images of one shape; `certifier` returns it.

    Examples:
        >>> by = eq.certificates.certifier(eq.load("digits-opteq"), (1, 8, 8))
        >>> by.can_refine
        True
    """

    @property
    def can_refine(self) -> bool:
        """Whether `refine` can make a radius of this model larger."""
        ...

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Return `judge(images, solve(images))`; the arguments are those of `certify`."""
        ...

    def solve(self, images: Tensor) -> SolvedBatch:
        """Compute the equilibria and the logits of a batch, in evaluation mode."""
        ...

    def judge(
        self,
        images: Tensor,
        solved: SolvedBatch,
        *,
        refine: bool = False,
        progress: Progress = iter,
    ) -> Certificate:
        """Certify the predictions of a batch that has been solved already."""
        ...

    def exit(self) -> Exit:
        """Return the solve that stops each image when its class is certain.

        Raises:
            NoCertificateError: If the model has no early exit.
        """
        ...

    def constants(self) -> MarginConstants:
        """Return constants that hold for every image.

        Raises:
            NoCertificateError: If no bound of the margins is known.
        """
        ...


@singledispatch
def certifier(model: nn.Module, image_shape: tuple[int, ...]) -> Certifier:
    """Prepare a model to certify many batches of images of one shape.

    Everything that depends on parameters only (norms, the resolvent of the readout, a copy of the
    model in float64) is computed here, once. Call it again after the parameters have changed.

    Args:
        model: Classifier with an equilibrium layer.
        image_shape: Shape of one image, (channels, height, width).

    Returns:
        A function of a batch of images, with the arguments and the result of `certify`. Its
        methods `solve` and `judge` separate the solve from the proof.

    Raises:
        NoCertificateError: If the model has no equilibrium layer.

    Examples:
        >>> images = eq.data.load_digits().test.images
        >>> certify = eq.certificates.certifier(eq.load("digits-certified"), images.shape[1:])
        >>> [certify(batch).share_certified for batch in images[:4].split(2)]
        [1.0, 1.0]
    """
    raise NoCertificateError(
        f"a {type(model).__name__} has no equilibrium: certificates are for models with a "
        "stem, an equilibrium layer and a head"
    )


def certify(
    model: nn.Module, images: Tensor, *, refine: bool = False, progress: Progress = iter
) -> Certificate:
    """Certify the predictions of a classifier.

    For each image, bounds the error of the computed equilibrium and the largest perturbation that
    provably cannot change the predicted class. The model solves as it is set up (use
    `with eq.solving(model, tolerance=1e-3)` for another tolerance); the certificate is computed in
    float64 from the state that it found.

    Args:
        model: Classifier with an equilibrium layer.
        images: Batch of images, shape (B, channels, height, width), pixels in [0, 1].
        refine: Also compute radii by the activation pattern of each image, which are larger and
            cost dozens of evaluations of the map per image. Only images whose answer this can
            change are refined: those with a certified class and a radius, as long as the radius can
            still grow by more than 1 % (`radii.WORTHWHILE`). Classes and error bars do not depend
            on it.
        progress: Wraps the sequence of batches that are refined, to show a progress bar, for
            example `rich.progress.track`.

    Returns:
        Bounds for each image; `radius` is 0 where nothing is certified, and `reasons` says why.

    Raises:
        NoCertificateError: If the model has no equilibrium layer.
        ValueError: If the images are not of the shape that the model was prepared for.

    Examples:
        >>> images = eq.data.load_digits().test.images[:3]
        >>> found = eq.certify(eq.load("digits-certified"), images)
        >>> found.certified_class, (found.radius > 0.1).all()
        (tensor([True, True, True]), tensor(True))
    """
    by = certifier(model, tuple(images.shape[1:]))
    return by(images, refine=refine, progress=progress)


def check_shape(images: Tensor, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if images are not of this shape."""
    if tuple(images.shape[1:]) != shape:
        raise ValueError(f"expected images of shape {shape}, not {tuple(images.shape)}")
