"""The restoration tasks by name: one class per kind of damage, with all that is special to it.

A class says which measurement operator A describes the damage, how damage is simulated, what the
defaults are, and what the program prints. What depends on the operator (a part of it, its first
guess) is a method of the operator: `equilibria.operators.measurements`.

To add a task: write a subclass of `Damage` and register it at the end of this file. With a
`photo_task` the command `equilibria restore` offers it too.
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
"""The side of the hidden window in the paper, 20 pixels of 64."""
MOST_FACTOR = 16
"""The largest factor of super-resolution."""


class Damage(ABC):
    """A kind of damage: a measurement, and noise of a standard deviation `noise`.

    Attributes:
        noise: Standard deviation, as a fraction of the pixel range.
        photo_task: Name of the task in `equilibria restore`; "" if it is not offered there.
        photo_noise: Standard deviation of the noise that is simulated on photographs by default.
        simulated_hole: For damage that hides pixels, which are hidden in a simulation; "" for
            other damage, which takes no mask.

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
        """Description of the damage."""
        return str(self)

    @property
    def _and_noise(self) -> str:
        return f", noise of {self.noise:g}" if self.noise else ""

    @property
    def assumption(self) -> str:
        """What is assumed of the damage where no option gives it, and the option to change it."""
        return ""

    @property
    def scale(self) -> int:
        """How many times lower the resolution of the measured values is."""
        return 1

    @abstractmethod
    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        """A for these images."""

    def corrupt(
        self, images: Tensor, generator: torch.Generator | None = None
    ) -> RestorationProblem:
        """Measure images, with masks and noise drawn from `generator` (torch's own if None)."""
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
        """The problem of restoring a picture that was damaged in this way.

        Args:
            picture: What was measured, (1, 1 or 3, H, W), as it was read from a file.
            noise: Standard deviation of its noise; estimated from the picture if None.
            hidden: Which pixels are missing, (1, H, W); for damage that hides pixels.

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
                f"the mask is {hidden.shape[2]}×{hidden.shape[1]} pixels and the picture "
                f"{picture.shape[3]}×{picture.shape[2]}: a mask has the size of its picture"
            )
        level = noise_level(picture) if noise is None else noise
        return RestorationProblem(about(measurement).only_measured(picture), measurement, level)

    def cropped(self, images: Tensor) -> Tensor:
        """The largest part of images, from their upper left corner, that can be damaged."""
        return images

    def padded(self, images: Tensor) -> Tensor:
        """Images, continued to the right and below to a size that can be damaged."""
        return images


@dataclass(frozen=True)
class Denoising(Damage):
    """Gaussian noise of standard deviation `noise` on every pixel.

    Examples:
        >>> seen = eq.restoration.Denoising(noise=0.1).corrupt(torch.zeros(1, 1, 8, 8))
        >>> seen.measured.shape, seen.noise
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
    """A square window of every image is hidden, somewhere else in each.

    window: its side, as a share of the image's shorter one below 1, or in pixels from 1.

    Examples:
        >>> seen = eq.restoration.Inpainting(window=4).corrupt(torch.ones(1, 1, 8, 8))
        >>> seen.measured.sum()  # 16 of 64 pixels are hidden
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
        return f"window of {side} a side hidden{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        """Masks `(samples, 1, height, width)`: 0 in the window, 1 outside."""
        samples, _, height, width = images.shape
        side = self.pixels(min(height, width))
        rows, columns = (
            _window(samples, size, side, images.device, generator) for size in (height, width)
        )
        return Mask((~(rows[:, None, :, None] & columns[:, None, None, :])).to(images.dtype))

    def pixels(self, size: int) -> int:
        """The side of the window in an image of `size` pixels."""
        side = round(self.window if self.window >= 1 else self.window * size)
        if not 1 <= side < size:
            raise ValueError(
                f"a window of {self.window:g} hides {side} of {size} pixels a side: choose one "
                "that hides some and leaves some"
            )
        return side


@dataclass(frozen=True)
class Deblurring(Damage):
    """A Gaussian blur of standard deviation `width` pixels, and noise.

    Examples:
        >>> seen = eq.restoration.Deblurring(width=1.0, noise=0.0).corrupt(torch.ones(1, 1, 8, 8))
        >>> seen.measured.mean().round(decimals=3)
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
                f"a blur of {self.width:g} pixels reaches {reach} far, beyond a picture of "
                f"{width}×{height}"
            )
        return super().problem_of(picture, noise, hidden)

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return Blur(self.width)


@dataclass(frozen=True)
class SuperResolution(Damage):
    """The mean over blocks of `factor`×`factor` pixels, and noise.

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
        if self.factor > MOST_FACTOR:
            raise ValueError(
                f"factor must be at most {MOST_FACTOR}, got {self.factor}; the restored image has "
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
    """A share of the pixels of every image is missing, here and there, and noise on the others.

    Examples:
        >>> seen = eq.restoration.Scattering(share=0.5).corrupt(torch.ones(1, 1, 8, 8))
        >>> 0 < seen.measured.mean() < 1
        tensor(True)
    """

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
    """One color a pixel, as a camera's sensor sees it (Bayer's pattern, red first), and noise.

    Examples:
        >>> seen = eq.restoration.Demosaicing().corrupt(torch.ones(1, 3, 4, 4))
        >>> seen.measured.sum()  # a third of 48
        tensor(16.)
    """

    photo_task: ClassVar[str] = "demosaic"

    noise: float = 0.0

    @property
    def words(self) -> str:
        return f"one color a pixel{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        _, channels, height, width = images.shape
        if channels != 3:
            raise ValueError(f"a mosaic is made of a picture of three colors, not {channels}")
        return bayer_mosaic(height, width, images)

    def problem_of(
        self, picture: Tensor, noise: float | None = None, hidden: Tensor | None = None
    ) -> RestorationProblem:
        if picture.shape[1] == 3 and not bool((picture == picture[:, :1]).all()):
            raise ValueError(
                "a mosaic has one number a pixel, and this is a picture in colors: --simulate "
                "makes a mosaic of it first"
            )
        level = noise_level(picture[..., ::2, ::2]) if noise is None else noise
        return super().problem_of(picture[:, :1].expand(-1, 3, -1, -1), level, hidden)


def bayer_mosaic(height: int, width: int, like: Tensor) -> Mask:
    """Bayer's pattern: red and green in even rows, green and blue in odd ones."""
    known = like.new_zeros(1, 3, height, width)
    for row, column, color in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        known[:, color, row::2, column::2] = 1
    return Mask(known)


@dataclass(frozen=True)
class Measured(Damage):
    """Any differentiable measurement, with noise.

    Examples:
        >>> damage = eq.restoration.Measured(lambda y: y.mean(dim=(2, 3)))
        >>> damage.corrupt(torch.ones(1, 1, 4, 4)).measured
        tensor([[1.]])
    """

    measurement: Measurement
    noise: float = 0.0

    def __post_init__(self) -> None:
        # A measurement need not consist of pixels.
        check_values(self, not_negative=("noise",))

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return self.measurement


_damages: Registry[Damage] = Registry(
    "damage",
    Damage,
    {
        "denoise": Denoising,
        "deblur": Deblurring,
        "inpaint": Inpainting,
        "scatter": Scattering,
        "superres": SuperResolution,
        "demosaic": Demosaicing,
    },
)


register_damage = _damages.register
list_damages = _damages.names
get_damage = _damages.create
"""The damage of a name, with its options as keywords."""


def photo_tasks() -> dict[str, type[Damage]]:
    """The kinds of damage that `equilibria restore` undoes, by the name of the task."""
    kinds = map(_damages.factory, list_damages())
    offered = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Damage)]
    return {kind.photo_task: kind for kind in offered if kind.photo_task}


def _window(
    samples: int, size: int, side: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Which of `size` places lie in the window of each sample, whose start is drawn."""
    places = size - side + 1
    share = _drawn(torch.rand, (samples,), device, generator)
    starts = (share * places).long().clamp_max(places - 1)
    offset = torch.arange(size, device=device)[None] - starts[:, None]
    return (offset >= 0) & (offset < side)


def _drawn(
    draw: Callable[..., Tensor],
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    """Random numbers, drawn where the generator is: its numbers are then those of any device."""
    where = device if generator is None else generator.device
    return draw(shape, generator=generator, device=where).to(device)
