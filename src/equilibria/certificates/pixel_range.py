"""The certified radius in L∞ among images with pixels in [0, 1].

Such images within ε of x in L∞ are a box: pixel i is between max(x_i − ε, 0) and min(x_i + ε, 1).
Let c be its center and h its half widths. The box lies within ‖h‖₂ of c in L2. So if the class of c
is certified within ‖h‖₂ and is that of x, then no image of the box has another class.

A black or white pixel has the half width ε/2 instead of ε, so that an image of such pixels can gain
a factor of about 2 over the L2 radius divided by √n. In return the network is evaluated at c for
every trial ε. Each trial that succeeds is a proof by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equilibria.certificates.certificate import Certificate, Progress
from equilibria.operators.rounding import NORM_SLACK

TRIALS = 4
"""Number of trial radii."""
STEP = 0.995
"""Share of the next trial radius that the last one predicts, so that most trials succeed."""


@torch.no_grad()
def radius_in_range(
    certify: Callable[[Tensor], Certificate],
    images: Tensor,
    certificate: Certificate,
    progress: Progress = iter,
) -> Tensor:
    """Compute certified radii in L∞ among images with pixels in [0, 1].

    Args:
        certify: Certifies a batch of images.
        images: Images. Those with other pixels keep `radius_linf`.
        certificate: Their certificate.
        progress: Wraps the sequence of trials.

    Returns:
        Radii of at least `certificate.radius_linf`, shape (B,).
    """
    flat = images.flatten(1)
    is_in_range = (flat >= 0).all(dim=1) & (flat <= 1).all(dim=1)
    rows = (is_in_range & (certificate.radius_linf > 0)).nonzero().flatten()
    result = certificate.radius_linf.clone()
    if not len(rows):
        return result
    x, classes = images[rows], certificate.prediction[rows]
    best = result[rows]
    _, length = _box(x, best)
    trial = STEP * best * certificate.radius[rows] / length
    for _ in progress(range(TRIALS)):
        center, length = _box(x, trial)
        at_center = certify(center)
        reached = torch.where(at_center.prediction == classes, at_center.radius, 0.0)
        best = torch.where(reached >= length, torch.maximum(best, trial), best)
        predicted = STEP * trial * reached / length
        trial = torch.where(predicted > best, predicted, 0.5 * (best + trial))
    result[rows] = best
    return result


def _box(images: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centers of the boxes, in the type of the images, and ‖h‖₂."""
    exact, wide = images.double(), eps.double().view(-1, *[1] * (images.dim() - 1))
    low, high = (exact - wide).clamp_min(0), (exact + wide).clamp_max(1)
    center = (0.5 * (low + high)).to(images.dtype)
    half = torch.maximum(high - center, center - low).flatten(1)
    return center, torch.linalg.vector_norm(half, dim=1) * (1 + NORM_SLACK)
