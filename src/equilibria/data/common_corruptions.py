"""Nineteen common corruptions of images, each in five severities.

Kinds and strengths are those published for CIFAR-10-C (Hendrycks and Dietterich, "Benchmarking
Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019). Lengths are pixels
of images of 32×32, and are not scaled for images of other sizes.

The results differ from the images of CIFAR-10-C: the noise is drawn anew, frost is a fractal
instead of photographs of ice, the rims of water drops are detected without Canny's method, and
filters replicate the border of an image.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from equilibria.data.image_files import BRIGHTEST, as_pixels, image_from_tensor, image_to_tensor
from equilibria.data.randaugment import equalize, gray
from equilibria.data.source import Source, known_labels
from equilibria.registry import nearest

if TYPE_CHECKING:
    from PIL.Image import Image

SEVERITIES = 5
FROST_COLOR, WATER_COLOR, MUD_COLOR = (200, 225, 255), (175, 238, 238), (63, 42, 20)
RIM_WIDTH = 20
"""Width of the shaded rim of a water drop, in pixels."""

Kind: TypeAlias = Callable[..., Tensor]
"""Function of an image, shape (1, C, H, W) in [0, 1], a generator and strengths."""


# --- Noise --------------------------------------------------------------------------------------


def gaussian_noise(x: Tensor, rng: Generator, deviation: float) -> Tensor:
    """Add Gaussian noise."""
    return x + deviation * torch.randn(x.shape, generator=rng)


def shot_noise(x: Tensor, rng: Generator, photons: float) -> Tensor:
    """Apply Poisson noise; `photons` is the number of photons per unit of brightness."""
    return torch.poisson(x * photons, generator=rng) / photons


def impulse_noise(x: Tensor, rng: Generator, share: float) -> Tensor:
    """Replace a share of the values by 0 or 1, independently per channel."""
    hit, salt = (torch.rand(x.shape, generator=rng) for _ in range(2))
    return torch.where(hit < share, (salt < 0.5).to(x.dtype), x)


def speckle_noise(x: Tensor, rng: Generator, deviation: float) -> Tensor:
    """Add Gaussian noise proportional to the brightness."""
    return x + x * deviation * torch.randn(x.shape, generator=rng)


# --- Blur ---------------------------------------------------------------------------------------


def gaussian_blur(x: Tensor, rng: Generator, width: float) -> Tensor:
    """Blur with a Gaussian of standard deviation `width` pixels."""
    return smooth(x, width)


def glass_blur(x: Tensor, rng: Generator, width: float, reach: int, rounds: int) -> Tensor:
    """Replace pixels by random neighbors, between two blurs."""
    x = smooth(x, width)
    rows, columns = (torch.arange(side) for side in x.shape[2:])
    # Neighbors are above and to the left, so that pixels near these borders do not change.
    far = (rows > reach)[:, None] & (columns > reach)
    for _ in range(rounds):
        up, left = torch.randint(0, reach + 1, (2, *x.shape[2:]), generator=rng) * far
        x = x[:, :, rows[:, None] - up, columns - left]
    return smooth(x, width)


def defocus_blur(x: Tensor, rng: Generator, radius: float, softness: float) -> Tensor:
    """Average over a disk with a soft rim."""
    steps = torch.arange(-math.ceil(radius) - 1.0, math.ceil(radius) + 2)
    disk = (steps.square() + steps.square()[:, None] <= radius**2).float()
    rim = torch.exp(-torch.arange(-1.0, 2).square() / (2 * softness**2))
    kernel = F.conv2d(disk[None, None], torch.outer(rim, rim)[None, None], padding=1)
    return _filtered(x, kernel[0, 0] / kernel.sum())


def motion_blur(
    x: Tensor, rng: Generator, radius: int, width: float, angles: tuple[int, int] = (-45, 45)
) -> Tensor:
    """Average along a line in a random direction, with the weights of half a Gaussian."""
    low, high = angles
    angle = math.radians(low + (high - low) * float(torch.rand((), generator=rng)))
    steps = torch.arange(2 * radius + 1.0)
    weights = torch.exp(-steps.square() / (2 * width**2))
    height, across = x.shape[2:]
    moved = torch.zeros_like(x)
    for step, weight in zip(steps.tolist(), (weights / weights.sum()).tolist(), strict=True):
        rows = torch.arange(height) + round(step * math.sin(angle))
        columns = torch.arange(across) + round(step * math.cos(angle))
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, across - 1)
        moved += weight * x[:, :, rows][..., columns]
    return moved


def zoom_blur(x: Tensor, rng: Generator, max_percent: int) -> Tensor:
    """Average the image and its enlargements by 0 to `max_percent` percent."""
    zoomed = [_enlarged(x, 1 + percent / 100) for percent in range(max_percent + 1)]
    return torch.stack([x, *zoomed]).mean(dim=0)


# --- Weather ------------------------------------------------------------------------------------


def fog(x: Tensor, rng: Generator, strength: float, decay: float) -> Tensor:
    """Add a fractal haze and rescale to the original range."""
    brightest = x.amax()
    return (x + strength * _plasma(x, rng, decay)) * brightest / (brightest + strength)


def frost(x: Tensor, rng: Generator, share: float, ice: float) -> Tensor:
    """Add the ridges of a fractal in bluish white."""
    ridges = 1 - (2 * _plasma(x, rng, 1.6) - 1).abs()
    return share * x + ice * _color(x, FROST_COLOR) * ridges


def snow(
    x: Tensor,
    rng: Generator,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: int,
    width: float,
    share: float,
) -> Tensor:
    """Add flakes that fall in a random direction, and make the image paler."""
    flakes = mean + deviation * torch.randn((1, 1, *x.shape[2:]), generator=rng)
    flakes = _enlarged(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    flakes = motion_blur(flakes, rng, radius, width, (-135, -45))
    pale = torch.maximum(x, 1.5 * gray(x) + 0.5)
    return share * x + (1 - share) * pale + flakes + flakes.flip(2, 3)


def spatter(
    x: Tensor,
    rng: Generator,
    mean: float,
    deviation: float,
    width: float,
    threshold: float,
    strength: float,
    is_mud: bool,
) -> Tensor:
    """Add drops of water or mud."""
    layer = mean + deviation * torch.randn((1, 1, *x.shape[2:]), generator=rng)
    layer = smooth(layer, width)
    drops = (layer > threshold).to(x.dtype)
    if is_mud:
        mud = smooth(drops, strength)
        mud = torch.where(mud < 0.8, 0, mud)
        return x * (1 - mud) + _color(x, MUD_COLOR) * mud
    shine = (drops * layer) * _relief(_depth(drops))
    brightest = shine.amax()
    shine = shine / brightest if brightest > 0 else shine
    return x + strength * shine * _color(x, WATER_COLOR)


def brightness(x: Tensor, rng: Generator, more: float) -> Tensor:
    """Raise the value of HSV."""
    value = x.amax(dim=1, keepdim=True)
    raised = (value + more).clamp_max(1)
    return torch.where(value > 0, x * raised / value.clamp_min(1e-12), raised.expand_as(x))


# --- Digital ------------------------------------------------------------------------------------


def contrast(x: Tensor, rng: Generator, share: float) -> Tensor:
    """Scale deviations from the mean of each channel."""
    mean = x.mean(dim=(2, 3), keepdim=True)
    return (x - mean) * share + mean


def saturate(x: Tensor, rng: Generator, factor: float, more: float) -> Tensor:
    """Change the saturation of HSV. Gray pixels have the hue red; gray images do not change."""
    if x.shape[1] == 1:
        return x
    value, lowest = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)
    spread = value - lowest
    saturation = torch.where(value > 0, spread / value.clamp_min(1e-12), 0)
    changed = (factor * saturation + more).clamp(0, 1)
    is_gray = spread <= 0
    red = torch.tensor([0.0, 1.0, 1.0])[:, None, None].expand_as(x)
    lacking = torch.where(is_gray, red, (value - x) / torch.where(is_gray, 1, spread))
    return value * (1 - changed * lacking)


def elastic_transform(
    x: Tensor, rng: Generator, strength: float, width: float, turn: float
) -> Tensor:
    """Apply a random affine map and a smooth random displacement; lengths are in image sides."""
    height, across = x.shape[2:]
    side = min(height, across)
    middle, arm = torch.tensor([across, height]) // 2, side // 3
    corners = middle + arm * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    moved = corners + turn * side * (2 * torch.rand((3, 2), generator=rng) - 1)
    ones = torch.ones(3, 1)
    back = torch.linalg.solve(torch.cat([moved, ones], dim=1), corners)
    rows, columns = torch.meshgrid(
        torch.arange(height, dtype=x.dtype), torch.arange(across, dtype=x.dtype), indexing="ij"
    )
    x = _sampled(x, torch.stack([columns, rows, torch.ones_like(rows)], dim=-1) @ back)
    if strength == 0:
        return x
    shifts = 2 * torch.rand((2, 1, height, across), generator=rng) - 1
    shifts = strength * side * smooth(shifts, width * side)
    return _sampled(x, torch.stack([columns + shifts[0, 0], rows + shifts[1, 0]], dim=-1))


def pixelate(x: Tensor, rng: Generator, share: float) -> Tensor:
    """Reduce the resolution and enlarge the image again."""
    from PIL.Image import Resampling

    height, across = x.shape[2:]
    image = image_from_tensor(x[0])
    small = image.resize((max(1, int(across * share)), max(1, int(height * share))), Resampling.BOX)
    return _tensor(small.resize((across, height), Resampling.BOX))


def jpeg_compression(x: Tensor, rng: Generator, quality: int) -> Tensor:
    """Compress as JPEG and decompress."""
    import PIL.Image

    file = io.BytesIO()
    image_from_tensor(x[0]).save(file, "JPEG", quality=quality)
    with PIL.Image.open(file) as image:
        return _tensor(image)


STRENGTHS: dict[str, tuple[Kind, tuple[tuple[float, ...], ...]]] = {
    "gaussian_noise": (gaussian_noise, ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,))),
    "shot_noise": (shot_noise, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": (impulse_noise, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "defocus_blur": (defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (
        glass_blur,
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": (motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (zoom_blur, ((5,), (10,), (15,), (20,), (25,))),
    "snow": (
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": (frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "contrast": (contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic_transform": (
        elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg_compression": (jpeg_compression, ((80,), (65,), (58,), (50,), (40,))),
    "speckle_noise": (speckle_noise, ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,))),
    "gaussian_blur": (gaussian_blur, ((0.4,), (0.6,), (0.7,), (0.8,), (1.0,))),
    "spatter": (
        spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
    ),
    "saturate": (saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
"""Function and strengths of severities 1 to 5 of each corruption, in the order of the paper."""


def corrupt(image: Tensor, name: str, severity: int, rng: Generator) -> Tensor:
    """Corrupt an image, shape (C, H, W) in [0, 1], and round it to multiples of 1/255."""
    kind, strengths = STRENGTHS[name]
    x = kind(image[None], rng, *strengths[severity - 1])[0]
    return (x.clamp(0, 1) * BRIGHTEST).floor() / BRIGHTEST


@dataclass(frozen=True)
class CorruptedImages:
    """Source of corrupted images. The random numbers of an image depend only on its index.

    Attributes:
        source: The images to corrupt.
        name: Corruption, a key of `STRENGTHS`.
        severity: Severity, 1 to 5. None gives all images in severity 1, then in severity 2, and so
            on, as in the files of CIFAR-10-C.

    Examples:
        >>> from equilibria.data.common_corruptions import CorruptedImages
        >>> foggy = CorruptedImages(eq.data.load_digits().test, "fog", severity=3)
        >>> len(foggy)
        450
    """

    source: Source
    name: str
    severity: int | None = None

    def __post_init__(self) -> None:
        if self.name not in STRENGTHS:
            raise ValueError(
                f"there is no corruption {self.name!r}{nearest(self.name, STRENGTHS)} Available: "
                f"{', '.join(STRENGTHS)}"
            )
        if self.severity not in (None, *range(1, SEVERITIES + 1)):
            raise ValueError(
                f"severity must be an integer from 1 to {SEVERITIES}, got {self.severity}"
            )

    @classmethod
    def of(cls, source: Source, text: str) -> CorruptedImages:
        """Parse "fog:3", or "fog" for all severities."""
        name, colon, severity = text.partition(":")
        if colon and not severity.isdecimal():
            raise ValueError(
                f"a corruption must be a name, or name:severity as in fog:3, got {text!r}"
            )
        return cls(source, name, int(severity) if colon else None)

    def __len__(self) -> int:
        return len(self.source) * (SEVERITIES if self.severity is None else 1)

    @property
    def labels(self) -> Tensor | None:
        """Labels, if they are known without reading images."""
        labels = known_labels(self.source)
        return None if labels is None else labels[torch.arange(len(self)) % len(self.source)]

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return corrupted images and their labels by index."""
        images, labels = self.source.fetch(indices % len(self.source))
        corrupted = [
            self._corrupt(image, index)
            for image, index in zip(images, indices.tolist(), strict=True)
        ]
        return torch.stack(corrupted) if corrupted else images, labels

    def _corrupt(self, image: Tensor, index: int) -> Tensor:
        repetition, position = divmod(index, len(self.source))
        severity = repetition + 1 if self.severity is None else self.severity
        seed = zlib.crc32(f"{self.name}:{severity}:{position}".encode())
        return corrupt(image, self.name, severity, Generator().manual_seed(seed))


# --- Building blocks ----------------------------------------------------------------------------


def smooth(x: Tensor, width: float) -> Tensor:
    """Filter with a Gaussian of standard deviation `width` pixels."""
    reach = max(1, round(4 * width))
    weights = torch.exp(-torch.arange(-reach, reach + 1.0).square() / (2 * width**2))
    weights = weights / weights.sum()
    return _filtered(_filtered(x, weights[:, None]), weights[None])


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Correlate with a kernel of odd sides; the border of the image is replicated."""
    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(x, (left, left, up, up), mode="replicate")
    return F.conv2d(padded.flatten(0, 1)[:, None], kernel[None, None]).reshape(x.shape)


def _enlarged(x: Tensor, zoom: float) -> Tensor:
    """Enlarge the middle of the image to the original size."""
    height, across = (math.ceil(side / zoom) for side in x.shape[2:])
    top, left = (x.shape[2] - height) // 2, (x.shape[3] - across) // 2
    middle = x[:, :, top : top + height, left : left + across]
    return F.interpolate(middle, x.shape[2:], mode="bilinear", align_corners=True)


def _sampled(x: Tensor, places: Tensor) -> Tensor:
    """Sample at positions (column, row), shape (H, W, 2); the image is mirrored at its border."""
    sides = torch.tensor([x.shape[3], x.shape[2]], dtype=x.dtype)
    grid = 2 * places / (sides - 1).clamp_min(1) - 1
    return F.grid_sample(x, grid[None], padding_mode="reflection", align_corners=True)


def _plasma(like: Tensor, rng: Generator, decay: float) -> Tensor:
    """Draw a fractal in [0, 1], shape (1, 1, H, W), by the diamond-square algorithm."""
    side = 2 ** math.ceil(math.log2(max(2, *like.shape[2:])))
    heights, step, roughness = torch.zeros(side, side), side, 1.0

    def around(total: Tensor) -> Tensor:
        drawn = 2 * torch.rand(total.shape, generator=rng) - 1
        return total / 4 + roughness * drawn

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        rows = corners + corners.roll(-1, 0)
        heights[half::step, half::step] = around(rows + rows.roll(-1, 1))
        centers = heights[half::step, half::step]
        above, beside = centers + centers.roll(1, 0), centers + centers.roll(1, 1)
        heights[::step, half::step] = around(above + corners + corners.roll(-1, 1))
        heights[half::step, ::step] = around(beside + corners + corners.roll(-1, 0))
        step, roughness = half, roughness / decay**2
    heights = heights - heights.amin()
    return (heights / heights.amax())[None, None, : like.shape[2], : like.shape[3]]


def _depth(drops: Tensor) -> Tensor:
    """Return the distance of each pixel from the rim of a drop, in units of `RIM_WIDTH`."""
    outside = F.max_pool2d(1 - drops, 3, stride=1, padding=1)
    near = drops * outside
    depth = torch.zeros_like(drops)
    for _ in range(RIM_WIDTH):
        depth += 1 - near
        near = F.max_pool2d(near, 3, stride=1, padding=1)
    return depth / RIM_WIDTH


def _relief(depth: Tensor) -> Tensor:
    """Shade a height map as if lit from one side."""
    even = torch.full((3, 3), 1 / 9)
    light = torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])
    return _filtered(_filtered(equalize(_filtered(depth, even)), light).clamp(0, 1), even)


def _color(like: Tensor, color: tuple[int, int, int]) -> Tensor:
    """Return a color as an image of one pixel, gray for gray images."""
    pixel = torch.tensor(color, dtype=like.dtype)[None, :, None, None] / BRIGHTEST
    return pixel if like.shape[1] == 3 else gray(pixel)


def _tensor(image: Image) -> Tensor:
    return as_pixels(image_to_tensor(image))[None]
