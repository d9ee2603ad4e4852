"""Certificates of test images, and certified accuracy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equilibria.certificates import Certificate, NoCertificateError, certifier
from equilibria.inputs import RobustnessCurves
from equilibria.inputs.robustness import certified_curve

CERTIFIED_PER_BATCH = 32
"""Number of images that are certified at the same time."""


@dataclass(frozen=True)
class Certified:
    """Certificates of some test images."""

    certificate: Certificate
    labels: Tensor
    can_gain: bool = False
    """Whether `refine=True` can give larger radii."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def count(self) -> int:
        """Number of images whose class is certified."""
        return int(self.certificate.certified_class.sum())

    @property
    def wrong(self) -> int:
        """Number of images whose class is certified and is not the true one."""
        differs = self.certificate.prediction.cpu() != self.labels.cpu()
        return int((self.certificate.certified_class.cpu() & differs).sum())

    def curve(self, norm: str = "l2") -> tuple[tuple[float, float], ...]:
        """Return certified accuracy over the distance in this norm, "l2" or "linf"."""
        right = self.certificate.prediction.cpu() == self.labels.cpu()
        radii = self.certificate.radius if norm == "l2" else self.certificate.radius_linf
        return certified_curve(radii, right)

    def added_to(self, curves: RobustnessCurves) -> RobustnessCurves:
        """Return robustness curves with certified accuracy, or the reason for its absence."""
        if not bool(self.certificate.radius.any()):
            reasons = Counter(self.certificate.reasons).most_common(1)
            return replace(curves, why_not_certified=reasons[0][0])
        return replace(curves, certified=self.curve(curves.norm))


def certified_images(
    model: nn.Module, images: Tensor, labels: Tensor, *, refine: bool = False
) -> Certified:
    """Certify images in batches of `CERTIFIED_PER_BATCH`; see `certify` for the certificates."""
    certify = certifier(model, tuple(images.shape[1:]))
    parts = torch.split(images, CERTIFIED_PER_BATCH)
    certificate = Certificate.join([certify(part, refine=refine) for part in parts])
    return Certified(certificate, labels.cpu(), can_gain=certify.can_refine and not refine)


def with_certified(
    model: nn.Module, images: Tensor, labels: Tensor, curves: RobustnessCurves
) -> RobustnessCurves:
    """Return robustness curves with the certified accuracy on the same images.

    If nothing can be certified, `why_not_certified` gives the reason.

    Examples:
        >>> model, digits = eq.load("digits-certified"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="l2", eps=0.5, steps=1)
        >>> batch = digits.images[:4], digits.labels[:4]
        >>> curves = eq.inputs.measure_robustness(model, *batch, settings, methods=["fgsm"])
        >>> from equilibria.analysis.certified import with_certified
        >>> with_certified(model, *batch, curves).certified[0]
        (0.0, 1.0)
    """
    try:
        certified = certified_images(model, images, labels)
    except NoCertificateError as error:
        return replace(curves, why_not_certified=str(error))
    return certified.added_to(curves)


def nearest_rival(certificate: Certificate, index: int) -> tuple[float, float] | None:
    """Return the smallest margin of an image to another class, and the bound on its error.

    Examples:
        >>> images = eq.data.load_digits().test.images[:1]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> from equilibria.analysis.certified import nearest_rival
        >>> margin, error = nearest_rival(certificate, 0)
        >>> margin > error
        True
    """
    predicted = int(certificate.prediction[index])
    if predicted < 0 or certificate.margin.shape[1] < 2:
        return None
    rivals = torch.arange(certificate.margin.shape[1]) != predicted
    margins = certificate.margin[index].cpu()[rivals]
    nearest = int(margins.argmin())
    return float(margins[nearest]), float(certificate.margin_error[index].cpu()[rivals][nearest])
