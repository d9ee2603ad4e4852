"""Kinds of damage by name, one class per kind.

A class defines the measurement operator A of the damage, its simulation, the defaults, and the
texts that the program prints. Methods that depend on the operator, such as its first guess, are in
`equilibria.operators.measurements`.

To add a kind, write a subclass of `Damage` and register it at the end of this file. If it has a
`photo_task`, the command `equilibria restore` offers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.inputs.latents import Measurement
from equilibria.operators import AveragePool, Blur, Identity, Mask
from equilibria.operators.measurements import about
from equilibria.registry import Registry, check_at_least, check_open_share, check_values
from equilibria.restoration.noise import noise_level
from equilibria.restoration.problem import RestorationProblem

GRAY_LEVEL = 1 / 255
PAPER_WINDOW = 20 / 64
"""Side of the hidden window in the paper, relative to the image: 20 of 64 pixels."""
MAX_FACTOR = 16
"""Largest factor of super-resolution."""


class Damage(ABC):
    """A kind of damage: a measurement with additive noise.

    Attributes:
        noise: Standard deviation of the noise that `corrupt` simulates, as a fraction of the pixel
            range. `problem_of` takes or estimates the noise of a given picture instead.
        photo_task: Name of the task in `equilibria restore`; "" if it is not offered there.
        photo_noise: Default noise of simulations on photographs.
        simulated_hole: What a simulation hides, in words; "" for damage that hides no pixels.

    Examples:
        >>> damage = eq.restoration.get_damage("denoise", noise=0.1)
        >>> isinstance(damage, eq.restoration.Damage), damage.noise
        (True, 0.1)
    """

    noise: float
    photo_task: ClassVar[str] = ""
    photo_noise: ClassVar[float] = GRAY_LEVEL
    simulated_hole: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_values(self, pixels=("noise",))

    @property
    def words(self) -> str:
        """Description of the damage in words."""
        return str(self)

    @property
    def _and_noise(self) -> str:
        return f", noise of {self.noise:g}" if self.noise else ""

    @property
    def assumption(self) -> str:
        """Default assumption about the damage, and the option that changes it."""
        return ""

    @property
    def scale(self) -> int:
        """Factor by which the resolution of the measured values is lower than that of the image."""
        return 1

    @abstractmethod
    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        """Return the measurement operator A for a batch of images.

        Args:
            images: Images, shape (B, C, H, W).
            generator: Source of random masks; None uses torch's global generator.
        """

    def corrupt(
        self, images: Tensor, generator: torch.Generator | None = None
    ) -> RestorationProblem:
        """Simulate the damage.

        Args:
            images: Images, shape (B, C, H, W), pixels in [0, 1].
            generator: Source of random masks and noise; None uses torch's global generator.

        Returns:
            The problem with the images as ground truth.
        """
        measurement = self.measurement_of(images, generator)
        measured = measurement(images)
        if self.noise:
            drawn = _drawn(torch.randn, tuple(measured.shape), images.device, generator)
            measured = measured + self.noise * drawn.to(measured.dtype)
        measured = about(measurement).only_measured(measured)
        return RestorationProblem(measured, measurement, self.noise, images)

    def problem_of(
        self, picture: Tensor, noise: float | None = None, hidden: Tensor | None = None
    ) -> RestorationProblem:
        """Return the problem of restoring a damaged picture.

        Args:
            picture: Damaged picture, shape (1, 1 or 3, H, W).
            noise: Standard deviation of its noise; None estimates it from the picture.
            hidden: Mask of the missing pixels, shape (1, H, W), for damage that hides pixels.

        Returns:
            The problem, without a ground truth.

        Raises:
            ValueError: If the picture cannot have been damaged in this way.
        """
        if hidden is None:
            measurement = self.measurement_of(picture, None)
        elif hidden.shape[1:] == picture.shape[2:]:
            measurement = Mask((~hidden).to(picture)[None])
        else:
            raise ValueError(
                f"the mask must have the size of the picture, {picture.shape[3]}×"
                f"{picture.shape[2]} pixels, got {hidden.shape[2]}×{hidden.shape[1]}"
            )
        noise = noise_level(picture) if noise is None else noise
        return RestorationProblem(about(measurement).only_measured(picture), measurement, noise)

    def cropped(self, images: Tensor) -> Tensor:
        """Crop images to a size that the measurement supports, from the upper left corner.

        Args:
            images: Images, shape (B, C, H, W).
        """
        return images

    def padded(self, images: Tensor) -> Tensor:
        """Pad images on the right and at the bottom to a size that the measurement supports.

        Args:
            images: Images, shape (B, C, H, W).
        """
        return images


@dataclass(frozen=True)
class Denoising(Damage):
    """Gaussian noise on every pixel.

    Args:
        noise: Standard deviation, as a fraction of the pixel range.

    Examples:
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.zeros(1, 1, 8, 8))
        >>> problem.measured.shape, problem.noise
        (torch.Size([1, 1, 8, 8]), 0.1)
    """

    photo_task: ClassVar[str] = "denoise"
    photo_noise: ClassVar[float] = 0.1

    noise: float = 0.2

    def __post_init__(self) -> None:
        check_values(self, positive_pixels=("noise",))

    @property
    def words(self) -> str:
        return f"noise of {self.noise:g}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return Identity()


@dataclass(frozen=True)
class Inpainting(Damage):
    """A hidden square window, at a random position in each image.

    Args:
        window: Side of the window: a fraction of the image's shorter side if below 1, otherwise
            pixels.
        noise: Standard deviation of the noise on the other pixels.

    Examples:
        >>> problem = eq.restoration.Inpainting(window=4).corrupt(torch.ones(1, 1, 8, 8))
        >>> problem.measured.sum()  # 16 of 64 pixels are hidden
        tensor(48.)
    """

    simulated_hole: ClassVar[str] = "a window"

    window: float = PAPER_WINDOW
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_values(self, positive=("window",), pixels=("noise",))

    @property
    def words(self) -> str:
        side = f"{self.window:.0%}" if self.window < 1 else f"{self.window:g} pixels"
        return f"a hidden window of {side} per side{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        """Return masks of shape (B, 1, H, W): 0 in the window, 1 outside."""
        samples, _, height, width = images.shape
        side = self.pixels(min(height, width))
        rows, columns = (
            _window(samples, size, side, images.device, generator) for size in (height, width)
        )
        return Mask((~(rows[:, None, :, None] & columns[:, None, None, :])).to(images.dtype))

    def pixels(self, size: int) -> int:
        """Return the side of the window in pixels.

        Args:
            size: Shorter side of the image in pixels.

        Raises:
            ValueError: If the window hides nothing, or a whole side of the image.
        """
        side = round(self.window if self.window >= 1 else self.window * size)
        if not 1 <= side < size:
            raise ValueError(
                f"window must hide at least one and at most {size - 1} of {size} pixels per side, "
                f"got window={self.window:g}, which hides {side}"
            )
        return side


@dataclass(frozen=True)
class Deblurring(Damage):
    """A Gaussian blur, and noise.

    Args:
        width: Standard deviation of the blur in pixels.
        noise: Standard deviation of the noise, as a fraction of the pixel range.

    Examples:
        >>> damage = eq.restoration.Deblurring(width=1.0, noise=0.0)
        >>> damage.corrupt(torch.ones(1, 1, 8, 8)).measured.mean().round(decimals=3)
        tensor(1.)
    """

    photo_task: ClassVar[str] = "deblur"
    photo_noise: ClassVar[float] = 0.01

    width: float = 1.5
    noise: float = 0.02

    def __post_init__(self) -> None:
        check_values(self, positive=("width",), pixels=("noise",))

    @property
    def words(self) -> str:
        return f"blur of {self.width:g} pixels{self._and_noise}"

    @property
    def assumption(self) -> str:
        return (
            f"a Gaussian blur with a standard deviation of {self.width:g} pixels; --blur changes it"
        )

    def problem_of(
        self, picture: Tensor, noise: float | None = None, hidden: Tensor | None = None
    ) -> RestorationProblem:
        height, width = picture.shape[2:]
        reach = Blur(self.width).reach
        if min(height, width) <= reach:
            raise ValueError(
                f"a blur of {self.width:g} pixels needs a picture of more than {reach} pixels per "
                f"side, got {width}×{height}; lower the blur"
            )
        return super().problem_of(picture, noise, hidden)

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return Blur(self.width)


@dataclass(frozen=True)
class SuperResolution(Damage):
    """Lower resolution by the mean over square blocks of pixels, and noise.

    Args:
        factor: Side of the blocks in pixels, at least 2.
        noise: Standard deviation of the noise, as a fraction of the pixel range.

    Examples:
        >>> eq.restoration.SuperResolution(factor=2).corrupt(torch.ones(1, 1, 8, 8)).measured.shape
        torch.Size([1, 1, 4, 4])
    """

    photo_task: ClassVar[str] = "superres"

    factor: int = 2
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, factor=self.factor)
        if self.factor > MAX_FACTOR:
            raise ValueError(
                f"factor must be at most {MAX_FACTOR}, got {self.factor}; the restored image has "
                "factor² times as many pixels"
            )

    @property
    def words(self) -> str:
        return f"1/{self.factor} of the resolution{self._and_noise}"

    @property
    def assumption(self) -> str:
        return f"a resolution that is {self.factor} times lower; --factor changes it"

    @property
    def scale(self) -> int:
        return self.factor

    def cropped(self, images: Tensor) -> Tensor:
        height, width = (size // self.factor * self.factor for size in images.shape[2:])
        return images[..., :height, :width]

    def padded(self, images: Tensor) -> Tensor:
        below, right = (-size % self.factor for size in images.shape[2:])
        return F.pad(images, (0, right, 0, below), mode="replicate")

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return AveragePool(self.factor)


@dataclass(frozen=True)
class Scattering(Damage):
    """Randomly missing pixels, and noise on the others.

    Args:
        share: Fraction of the pixels that is missing, between 0 and 1.
        noise: Standard deviation of the noise, as a fraction of the pixel range.

    Examples:
        >>> problem = eq.restoration.Scattering(share=0.5).corrupt(torch.ones(1, 1, 8, 8))
        >>> 0 < problem.measured.mean() < 1
        tensor(True)
    """

    # The name "inpaint" of the registry is `Inpainting`, which hides a window, as in the paper.
    photo_task: ClassVar[str] = "inpaint"
    simulated_hole: ClassVar[str] = "some"

    share: float = 0.7
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_open_share(share=self.share)

    @property
    def words(self) -> str:
        return f"{self.share:.0%} of the pixels missing{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        samples, _, height, width = images.shape
        drawn = _drawn(torch.rand, (samples, 1, height, width), images.device, generator)
        return Mask((drawn >= self.share).to(images.dtype))


@dataclass(frozen=True)
class Demosaicing(Damage):
    """One color per pixel, as measured by a camera's sensor (Bayer pattern RGGB), and noise.

    Args:
        noise: Standard deviation of the noise, as a fraction of the pixel range.

    Examples:
        >>> problem = eq.restoration.Demosaicing().corrupt(torch.ones(1, 3, 4, 4))
        >>> problem.measured.sum()  # a third of 48
        tensor(16.)
    """

    photo_task: ClassVar[str] = "demosaic"

    noise: float = 0.0

    @property
    def words(self) -> str:
        return f"one color per pixel{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        _, channels, height, width = images.shape
        if channels != 3:
            raise ValueError(f"a mosaic needs a picture with 3 channels, got {channels}")
        return bayer_mosaic(height, width, images)

    def problem_of(
        self, picture: Tensor, noise: float | None = None, hidden: Tensor | None = None
    ) -> RestorationProblem:
        if picture.shape[1] == 3 and not bool((picture == picture[:, :1]).all()):
            raise ValueError(
                "a mosaic has one value per pixel, but this is a color picture; add --simulate to "
                "turn it into a mosaic first"
            )
        level = noise_level(picture[..., ::2, ::2]) if noise is None else noise
        return super().problem_of(picture[:, :1].expand(-1, 3, -1, -1), level, hidden)


def bayer_mosaic(height: int, width: int, like: Tensor) -> Mask:
    """Return the Bayer pattern: red and green in even rows, green and blue in odd rows."""
    known = like.new_zeros(1, 3, height, width)
    for row, column, color in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        known[:, color, row::2, column::2] = 1
    return Mask(known)


@dataclass(frozen=True)
class Measured(Damage):
    """Any differentiable measurement, and noise.

    Args:
        measurement: A, a differentiable map of images.
        noise: Standard deviation of the noise, in the unit of the measured values.

    Examples:
        >>> damage = eq.restoration.Measured(lambda y: y.mean(dim=(2, 3)))
        >>> damage.corrupt(torch.ones(1, 1, 4, 4)).measured
        tensor([[1.]])
    """

    measurement: Measurement
    noise: float = 0.0

    def __post_init__(self) -> None:
        # Measured values need not be pixels, so the noise may exceed 1.
        check_values(self, not_negative=("noise",))

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return self.measurement


_damages: Registry[Damage] = Registry(
    "damage",
    Damage,
    {
        "denoise": Denoising,
        "deblur": Deblurring,
        "inpaint": Inpainting,  # the task "inpaint" of photographs is `Scattering`
        "scatter": Scattering,
        "superres": SuperResolution,
        "demosaic": Demosaicing,
    },
)


register_damage = _damages.register
list_damages = _damages.names
get_damage = _damages.create
"""Create a damage by name, with its options as keyword arguments."""


def photo_tasks() -> dict[str, type[Damage]]:
    """Return the kinds of damage that `equilibria restore` offers, by the name of the task."""
    kinds = map(_damages.factory, list_damages())
    offered = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Damage)]
    return {kind.photo_task: kind for kind in offered if kind.photo_task}


def _window(
    samples: int, size: int, side: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw a window per sample; return a mask of its positions, shape (samples, size)."""
    count = size - side + 1
    share = _drawn(torch.rand, (samples,), device, generator)
    starts = (share * count).long().clamp_max(count - 1)
    offset = torch.arange(size, device=device)[None] - starts[:, None]
    return (offset >= 0) & (offset < side)


def _drawn(
    draw: Callable[..., Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw random numbers on the generator's device, which makes them independent of `device`."""
    source = device if generator is None else generator.device
    return draw(shape, generator=generator, device=source).to(device)
