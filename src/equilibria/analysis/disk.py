"""The certified disk of an image, and where the class changes, in a plane of images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

RAYS = 48
STEPS = 24
REACH = 2.5
"""Half of the width of the plane, in certified radii."""
SHAPE = 0.7
"""Height of the plane, as a share of its width."""
PER_BATCH = 256


@dataclass(frozen=True)
class CertifiedDisk:
    """Rays from an image in a plane, with the distances at which the class changes.

    The first axis of the plane is the direction in which the smallest margin of the image falls
    fastest; the second is a random one, orthogonal to it.

    Attributes:
        index: Index of the image.
        radius: Certified radius r in L2.
        boundary: For each ray, the first sampled point with another class, or the end of the ray at
            the edge of the plane; in pixel distances from the image, the first point repeated.
        changed: Number of rays on which the class changes.
    """

    index: int
    radius: float
    boundary: tuple[tuple[float, float], ...]
    changed: int

    @property
    def circle(self) -> tuple[tuple[float, float], ...]:
        """Points of the circle around the image with the certified radius."""
        angles = (2 * math.pi * i / 90 for i in range(91))
        return tuple((self.radius * math.cos(a), self.radius * math.sin(a)) for a in angles)

    @property
    def frame(self) -> tuple[tuple[float, float], ...]:
        """Corners of the sampled part of the plane, the first repeated."""
        x, y = REACH * self.radius, REACH * SHAPE * self.radius
        return ((x, y), (-x, y), (-x, -y), (x, -y), (x, y))


def certified_disk(model: nn.Module, images: Tensor, radii: Tensor, index: int) -> CertifiedDisk:
    """Sample the classes around an image in a plane that contains its steepest direction.

    Args:
        model: Classifier in evaluation mode.
        images: Images with pixels in [0, 1]; the points of the plane may leave this range.
        radii: Certified radius of each image.
        index: Index of the image; its radius must be positive.

    Examples:
        >>> model, images = eq.load("digits-certified"), eq.data.load_digits().test.images[:2]
        >>> import math
        >>> from equilibria.analysis.disk import certified_disk
        >>> disk = certified_disk(model, images, eq.certify(model, images).radius, 0)
        >>> all(math.hypot(*point) > disk.radius for point in disk.boundary)
        True
    """
    image, radius = images[index], float(radii[index])
    leaf = image[None].detach().clone().requires_grad_()
    with torch.enable_grad():
        first, second = model(leaf)[0].topk(2).values
        (slope,) = torch.autograd.grad(second - first, leaf)
    plane = torch.stack([slope.flatten(), _random(image)]).double()
    plane[1] -= plane[0] * (plane[0] @ plane[1]) / plane[0].square().sum()
    plane = plane / torch.linalg.vector_norm(plane, dim=1, keepdim=True)

    angles = 2 * math.pi * torch.arange(RAYS, dtype=torch.float64) / RAYS
    directions = torch.stack([angles.cos(), angles.sin()], dim=1)
    sides = torch.tensor([1.0, SHAPE]) / directions.abs().clamp(min=1e-9)
    ends = REACH * radius * sides.amin(dim=1)
    lengths = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)[1:]
    points = directions[:, None] * (ends[:, None] * lengths)[:, :, None]
    moved = (points.reshape(-1, 2).to(plane.device) @ plane).to(image)
    with torch.no_grad():
        batches = (image + part.view(-1, *image.shape) for part in moved.split(PER_BATCH))
        classes = torch.cat([model(batch).argmax(dim=1) for batch in batches]).cpu()
        own = int(model(image[None]).argmax())
    differs = classes.view(RAYS, STEPS) != own
    changed = differs.any(dim=1)
    where = torch.where(changed, differs.int().argmax(dim=1), STEPS - 1)
    edge = [(float(x), float(y)) for x, y in points[torch.arange(RAYS), where]]
    return CertifiedDisk(index, radius, (*edge, edge[0]), int(changed.sum()))


def disk_of_median(model: nn.Module, images: Tensor, radii: Tensor) -> CertifiedDisk | None:
    """Return the disk of the image with the median of all positive radii; None if there is none.

    Args:
        model: Classifier in evaluation mode.
        images: Images with pixels in [0, 1].
        radii: Certified radius of each image.
    """
    positive = torch.nonzero(radii > 0).flatten()
    if not len(positive):
        return None
    order = radii[positive].argsort()
    return certified_disk(model, images, radii, int(positive[order[len(order) // 2]]))


def _random(image: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(image.numel(), generator=generator).to(image)
