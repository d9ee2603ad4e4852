"""Labels and formats of measures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from equilibria.certificates import Certificate

FIGURES: dict[str, tuple[str, str]] = {
    "accuracy": ("Accuracy", ".2%"),
    "top5_accuracy": ("Top-5 accuracy", ".2%"),
    "mean_iou": ("mIoU", ".2%"),
    "mean_accuracy": ("mAcc", ".2%"),
    "robust_accuracy": ("Robust accuracy", ".2%"),
    "interval": ("95 % interval, ±", ".2%"),
    "psnr": ("PSNR, mean (dB)", ".2f"),
    "median_psnr": ("PSNR, median (dB)", ".2f"),
    "measured_psnr": ("PSNR of measurements, median (dB)", ".2f"),
}
"""Label and format by key of an evaluation; other keys are labelled by their name."""


def figure_rows(figures: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return the measures of an evaluation, with readable labels, as (label, value).

    Examples:
        >>> from equilibria.report.labels import figure_rows
        >>> figure_rows({"accuracy": 0.98, "loss": 0.1})
        [('Accuracy', '98.00%'), ('Loss', '0.1')]
    """
    labels = {
        name: (
            name.replace("_", " ").capitalize(),
            ".2%" if name.startswith("certified_") else ".4g",
        )
        for name in figures
    } | FIGURES
    return [
        (labels[name][0], "" if value is None else format(value, labels[name][1]))
        for name, value in figures.items()
    ]


def certificate_rows(
    certificate: Certificate, true: Sequence[int | None] | None = None
) -> list[tuple[str, str]]:
    """Return measures of the certificates of a batch as (label, value); unknown values are empty.

    Args:
        certificate: Certificates of a batch.
        true: True classes, None where unknown.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> from equilibria.report.labels import certificate_rows
        >>> certificate_rows(certificate)[0]
        ('Class certified', '100.00% (2 of 2)')
    """
    count, gains = len(certificate), certificate.gains()
    certified = int(certificate.certified_class.sum())
    right = [
        is_certified and predicted == label
        for is_certified, predicted, label in zip(
            certificate.certified_class.tolist(),
            certificate.prediction.tolist(),
            true or [],
            strict=False,
        )
        if label is not None
    ]

    has_gain = bool((certificate.radius_linf_in_range > certificate.radius_linf).any())

    def median(values: Tensor) -> str:
        return known(float(values.median()))

    def known(value: float, form: str = ".3g") -> str:
        return format(value, form) if math.isfinite(value) else ""

    in_range = median(certificate.radius_linf_in_range) if has_gain else ""
    return [
        ("Class certified", f"{certified / count:.2%} ({certified} of {count})"),
        ("Certified and right", f"{sum(right) / len(right):.2%}" if right else ""),
        ("Unique equilibrium", f"{float(certificate.unique.double().mean()):.1%}"),
        ("Contraction q, largest", known(float(certificate.contraction.max()), ".4g")),
        ("Residual ‖T(y) − y‖, median", median(certificate.residual)),
        ("Error by contraction, median", median(certificate.contraction_error)),
        ("Error by convexity, median", median(certificate.convexity_error)),
        *(
            (f"Radius, {name}, median", f"{median(radii)} (× {gains.get(name, 1):.2f})")
            for name, radii in certificate.radii.items()
        ),
        ("Radius in L∞, median", median(certificate.radius_linf)),
        ("… with pixels in [0, 1]", in_range),
        *(
            (name.replace("_", " ").capitalize(), median(v))
            for name, v in certificate.checks.items()
        ),
    ]


def certificate_reasons(certificate: Certificate) -> list[str]:
    """Return the reasons for missing certificates or radii, with their frequencies.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> from equilibria.report.labels import certificate_reasons
        >>> certificate_reasons(certificate)  # both have a certificate
        []
    """
    counted = Counter(filter(None, certificate.reasons)).most_common()
    return [f"{times} of {len(certificate)}: {reason}" for reason, times in counted]
