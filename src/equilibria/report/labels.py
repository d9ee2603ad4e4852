"""How measures are called and written for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
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
    "measured_psnr": ("PSNR of what was measured, median (dB)", ".2f"),
}
"""Of an evaluation; others are called by their own name."""


def figure_rows(figures: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """The measures of an evaluation as (label, value).

    Examples:
        >>> from equilibria.report.labels import figure_rows
        >>> figure_rows({"accuracy": 0.98, "loss": 0.1})
        [('Accuracy', '98.00%'), ('Loss', '0.1')]
    """
    usual = {name: (name.replace("_", " ").capitalize(), ".4g") for name in figures} | FIGURES
    return [
        (usual[name][0], "" if value is None else format(value, usual[name][1]))
        for name, value in figures.items()
    ]


def certificate_rows(
    found: Certificate, true: Sequence[int | None] | None = None
) -> list[tuple[str, str]]:
    """What is certain of a batch, as (label, value), empty where nothing is known.

    true: the classes, where they are known.

    Examples:
        >>> found = eq.certify(eq.load("digits-certified"), eq.data.load_digits().test.images[:2])
        >>> from equilibria.report.labels import certificate_rows
        >>> certificate_rows(found)[0]
        ('Class certified', '100.00% (2 of 2)')
    """
    count, gains = len(found), found.gains()
    certain = int(found.certified_class.sum())
    pairs = zip(found.certified_class.tolist(), found.prediction.tolist(), true or [], strict=False)
    right = [sure and said == label for sure, said, label in pairs if label is not None]

    def median(values: Tensor) -> str:
        return known(float(values.median()))

    def known(value: float, form: str = ".3g") -> str:
        return format(value, form) if math.isfinite(value) else ""

    return [
        ("Class certified", f"{certain / count:.2%} ({certain} of {count})"),
        ("Certified and right", f"{sum(right) / len(right):.2%}" if right else ""),
        ("Unique equilibrium", f"{float(found.unique.double().mean()):.1%}"),
        ("Contraction q, largest", known(float(found.contraction.max()), ".4g")),
        ("Residual ‖T(y) − y‖, median", median(found.residual)),
        ("Error by contraction, median", median(found.contraction_error)),
        ("Error by convexity, median", median(found.convexity_error)),
        *(
            (f"Radius, {name}, median", f"{median(radii)} (× {gains.get(name, 1):.2f})")
            for name, radii in found.radii.items()
        ),
        *((name.replace("_", " ").capitalize(), median(v)) for name, v in found.checks.items()),
    ]


def certificate_reasons(found: Certificate) -> list[str]:
    """Why there are no certificates, or no radii, with how often.

    Examples:
        >>> found = eq.certify(eq.load("digits-certified"), eq.data.load_digits().test.images[:2])
        >>> from equilibria.report.labels import certificate_reasons
        >>> certificate_reasons(found)  # both have a certificate
        []
    """
    counted = Counter(filter(None, found.reasons)).most_common()
    return [f"{times} of {len(found)}: {reason}" for reason, times in counted]


def nearest_rival(found: Certificate, place: int) -> tuple[float, float] | None:
    """The smallest margin of an image to another class, and how far it may be off.

    Examples:
        >>> found = eq.certify(eq.load("digits-certified"), eq.data.load_digits().test.images[:1])
        >>> from equilibria.report.labels import nearest_rival
        >>> margin, error = nearest_rival(found, 0)
        >>> margin > error
        True
    """
    said = int(found.prediction[place])
    if said < 0 or found.margin.shape[1] < 2:
        return None
    rivals = torch.arange(found.margin.shape[1]) != said
    margins = found.margin[place].cpu()[rivals]
    nearest = int(margins.argmin())
    return float(margins[nearest]), float(found.margin_error[place].cpu()[rivals][nearest])
