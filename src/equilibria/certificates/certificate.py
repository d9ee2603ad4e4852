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

    Attributes:
        contraction: Upper bound q on the Lipschitz constant of the map, shape (B,); ∞ if none is
            known.
        unique: Whether there is exactly one equilibrium, shape (B,).
        residual: ‖T(y) − y‖ at the state y that the model computed, shape (B,).
        error: Upper bound on ‖T(y) − y*‖, shape (B,), in the variables of the hidden objective if
            there is one.
        contraction_error: q‖T(y) − y‖/(1 − q), shape (B,), in the variables of the state; ∞ if q
            is not known to be less than 1.
        convexity_error: ‖∂G‖/m, shape (B,), with m the modulus of strong convexity, in the
            variables of G; ∞ if no m > 0 is known.
        prediction: Class at T(y), shape (B,); −1 if its logits are not finite.
        certified_class: Whether the exact equilibrium has that class and the model predicts it,
            shape (B,).
        margin: Logit of the predicted class minus the logit of every class, shape (B, classes).
        margin_error: Upper bound on the distance of each margin from its value at the exact
            equilibrium, shape (B, classes).
        radius: Certified radius in L2, in pixel values, shape (B,): no closer image has another
            class. 0 if nothing is certified.
        radii: The radius by each bound, by name: global, weighted, and with `refine` pattern
            (`radii.py`).
        radius_linf: Certified radius in L∞, shape (B,): no image whose pixels all differ by less
            has another class. 0 if nothing is certified. At least `radius`/√n for n pixels times
            channels; larger if the stem is affine (`radii.py`).
        radius_linf_in_range: As `radius_linf`, but only among images with pixels in [0, 1]. With
            `refine` it is larger, the more so the more pixels are black or white
            (`pixel_range.py`).
        checks: Quantities that vanish at an equilibrium, by name (`checks.py`): stationarity ‖∂G‖,
            the Fenchel gap, by how much σ fails to be firmly nonexpansive, and for a Deep OptEq
            the residual of Theorem 2's inclusion. For MOptEqs also the quotient of both sides of
            Proposition 2, at least 1.
        reasons: Why a sample has no certified class or no radius; empty if it has both.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> len(certificate), certificate.share_certified, certificate.reasons
        (2, 1.0, ['', ''])
    """

    contraction: Tensor
    unique: Tensor
    residual: Tensor
    error: Tensor
    contraction_error: Tensor
    convexity_error: Tensor
    prediction: Tensor
    certified_class: Tensor
    margin: Tensor
    margin_error: Tensor
    radius: Tensor
    radii: dict[str, Tensor]
    radius_linf: Tensor
    radius_linf_in_range: Tensor
    checks: dict[str, Tensor]
    reasons: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.contraction)

    @property
    def share_certified(self) -> float:
        """Share of the images whose class is certified."""
        return float(self.certified_class.double().mean()) if len(self) else 0.0

    def gains(self) -> dict[str, float]:
        """Return the median factor by which the radius of each bound exceeds the global one.

        Returns:
            Factors by name of the bound; empty if no sample has a global radius.
        """
        has_radius = self.radii[GLOBAL] > 0 if GLOBAL in self.radii else self.certified_class[:0]
        if not bool(has_radius.any()):
            return {}
        reference = self.radii[GLOBAL][has_radius]
        quotients = {name: radius[has_radius] / reference for name, radius in self.radii.items()}
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
            raise ValueError("join needs at least one certificate, got an empty sequence")

        def joined(name: str) -> Any:
            values = [getattr(certificate, name) for certificate in certificates]
            if isinstance(values[0], Tensor):
                return torch.cat(values)
            if isinstance(values[0], dict):
                return {key: torch.cat([value[key] for value in values]) for key in values[0]}
            return [item for value in values for item in value]

        return cls(**{f.name: joined(f.name) for f in fields(cls)})


class NoCertificateError(ValueError):
    """Raised if nothing about a model can be certified; the message gives the reason."""


Progress: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps a sequence of work items to show progress: `rich.progress.track`, `tqdm`, or `iter`, which
shows nothing."""


@dataclass(frozen=True)
class SolvedBatch:
    """The equilibria that a model has computed for a batch, and its logits.

    `Certifier.solve` returns it and `Certifier.judge` takes it, so that one solve serves both a
    prediction and its certificate. A certificate holds for any state: one that is far from the
    equilibrium, or of other images, only proves less.

    Attributes:
        solutions: One solution per equilibrium layer, in the order in which the model applies them.
        logits: Output of the model for these equilibria, shape (B, classes).

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
    logits: Tensor

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
        >>> certify = eq.certificates.certifier(eq.load("digits-opteq"), (1, 8, 8))
        >>> certify.can_refine
        True
    """

    @property
    def can_refine(self) -> bool:
        """Whether `refine` can make an L2 radius of this model larger."""
        ...

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Certify a batch: `judge(images, solve(images))`.

        Args:
            images: Batch of images, shape (B, channels, height, width).
            refine: As for `certify`.
            progress: As for `certify`.
        """
        ...

    def solve(self, images: Tensor) -> SolvedBatch:
        """Compute the equilibria and the logits of a batch, in evaluation mode.

        Args:
            images: Batch of images, shape (B, channels, height, width).
        """
        ...

    def judge(
        self,
        images: Tensor,
        solved: SolvedBatch,
        *,
        refine: bool = False,
        progress: Progress = iter,
    ) -> Certificate:
        """Certify the predictions of a batch that has been solved already.

        Args:
            images: Batch of images, shape (B, channels, height, width).
            solved: Result of `solve` for these images.
            refine: As for `certify`.
            progress: As for `certify`.
        """
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
            NoCertificateError: If no bound on the margins is known.
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
        f"{type(model).__name__} cannot be certified, because it has no equilibrium layer: pass a "
        "model with a stem, an equilibrium layer and a head"
    )


def certify(
    model: nn.Module, images: Tensor, *, refine: bool = False, progress: Progress = iter
) -> Certificate:
    """Certify the predictions of a classifier.

    For each image, bounds the error of the computed equilibrium and the largest perturbation that
    provably cannot change the predicted class. The model solves as it is set up (use
    `with eq.solving(model, tolerance=1e-3)` for another tolerance); the certificate is computed in
    float64 from the state that the solve returns.

    Args:
        model: Classifier with an equilibrium layer.
        images: Batch of images, shape (B, channels, height, width), pixels in [0, 1].
        refine: Also compute radii by the activation pattern of each image, which are larger and
            cost dozens of evaluations of the map per image. Only images with a certified class
            and a positive radius are refined, as long as the radius can grow by more than 1 %
            (`radii.MIN_RADIUS_GAIN`). Also enlarge `radius_linf_in_range`, by a few solves. Classes
            and error bars do not depend on it.
        progress: Wraps the sequence of batches that are refined, to show a progress bar, for
            example `rich.progress.track`.

    Returns:
        Bounds for each image; `radius` is 0 where nothing is certified, and `reasons` says why.

    Raises:
        NoCertificateError: If the model has no equilibrium layer.
        ValueError: If the images are not of the shape that the model was prepared for.

    Examples:
        >>> images = eq.data.load_digits().test.images[:3]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> certificate.certified_class, (certificate.radius > 0.1).all()
        (tensor([True, True, True]), tensor(True))
    """
    prepared = certifier(model, tuple(images.shape[1:]))
    return prepared(images, refine=refine, progress=progress)


def check_shape(images: Tensor, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if images are not of this shape."""
    if tuple(images.shape[1:]) != shape:
        raise ValueError(f"expected images of shape {shape}, got {tuple(images.shape[1:])}")
