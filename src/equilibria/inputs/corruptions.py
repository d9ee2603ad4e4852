"""Corruptions: how clean images become measurements, at random; and what a restorer gets of them.

A measurement A is applied to images `(samples, channels, height, width)`. Those here are linear
operators; any differentiable callable will do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.operators import AveragePool, Blur, Identity, Mask
from equilibria.registry import Registry, check_at_least, check_open_share, check_values

Measurement = Callable[[Tensor], Tensor]
"""A: from images to what is seen of them, sample by sample."""
PAPER_WINDOW = 20 / 64
"""The side of the hidden window in the paper, 20 pixels of 64."""


@dataclass(frozen=True)
class Corrupted:
    """What is seen of images, and how.

    Examples:
        >>> seen = eq.inputs.get_corruption("superres", factor=2).corrupt(torch.rand(1, 1, 8, 8))
        >>> seen.measured.shape == seen.measurement(torch.rand(1, 1, 8, 8)).shape == (1, 1, 4, 4)
        True
    """

    measured: Tensor
    """ŷ = Ay + noise."""
    measurement: Measurement
    """A, which may differ from sample to sample."""
    noise: float
    """The standard deviation of what was added."""

    def __post_init__(self) -> None:
        check_values(self, not_negative=("noise",))


class Corruption(ABC):
    """A way to damage images: a measurement, and noise of a standard deviation `noise`.

    Examples:
        >>> damage = eq.inputs.get_corruption("denoise", noise=0.1)
        >>> isinstance(damage, eq.inputs.Corruption), damage.noise
        (True, 0.1)
    """

    noise: float

    def __post_init__(self) -> None:
        check_values(self, pixels=("noise",))

    @property
    def words(self) -> str:
        """What is done to an image, for people."""
        return str(self)

    @property
    def _and_noise(self) -> str:
        return f", noise of {self.noise:g}" if self.noise else ""

    @abstractmethod
    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        """A for these images."""

    def corrupt(self, images: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        """Measure images, with masks and noise drawn from `generator` (torch's own if None)."""
        measurement = self.measurement_of(images, generator)
        measured = measurement(images)
        if self.noise:
            drawn = _drawn(torch.randn, tuple(measured.shape), images.device, generator)
            measured = measured + self.noise * drawn.to(measured.dtype)
        if isinstance(measurement, Mask):
            measured = measurement(measured)
        return Corrupted(measured, measurement, self.noise)


@dataclass(frozen=True)
class Denoising(Corruption):
    """Gaussian noise of standard deviation `noise` on every pixel.

    Examples:
        >>> seen = eq.inputs.Denoising(noise=0.1).corrupt(torch.zeros(1, 1, 8, 8))
        >>> seen.measured.shape, seen.noise
        (torch.Size([1, 1, 8, 8]), 0.1)
    """

    noise: float = 0.2

    def __post_init__(self) -> None:
        check_values(self, positive_pixels=("noise",))

    @property
    def words(self) -> str:
        return f"noise of {self.noise:g}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return Identity()


@dataclass(frozen=True)
class Inpainting(Corruption):
    """A square window of every image is hidden, somewhere else in each.

    window: its side, as a share of the image's shorter one below 1, or in pixels from 1.

    Examples:
        >>> seen = eq.inputs.Inpainting(window=4).corrupt(torch.ones(1, 1, 8, 8))
        >>> seen.measured.sum()  # 16 of 64 pixels are hidden
        tensor(48.)
    """

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
class Deblurring(Corruption):
    """A Gaussian blur of standard deviation `width` pixels, and noise.

    Examples:
        >>> seen = eq.inputs.Deblurring(width=1.0, noise=0.0).corrupt(torch.ones(1, 1, 8, 8))
        >>> seen.measured.mean().round(decimals=3)
        tensor(1.)
    """

    width: float = 1.5
    noise: float = 0.02

    def __post_init__(self) -> None:
        check_values(self, positive=("width",), pixels=("noise",))

    @property
    def words(self) -> str:
        return f"blur of {self.width:g} pixels{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return Blur(self.width)


@dataclass(frozen=True)
class SuperResolution(Corruption):
    """The mean over blocks of `factor`×`factor` pixels, and noise.

    Examples:
        >>> eq.inputs.SuperResolution(factor=2).corrupt(torch.ones(1, 1, 8, 8)).measured.shape
        torch.Size([1, 1, 4, 4])
    """

    factor: int = 2
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, factor=self.factor)

    @property
    def words(self) -> str:
        return f"1/{self.factor} of the resolution{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return AveragePool(self.factor)


@dataclass(frozen=True)
class Scattering(Corruption):
    """A share of the pixels of every image is missing, here and there, and noise on the others.

    Examples:
        >>> seen = eq.inputs.Scattering(share=0.5).corrupt(torch.ones(1, 1, 8, 8))
        >>> 0 < seen.measured.mean() < 1
        tensor(True)
    """

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
class Demosaicing(Corruption):
    """One color a pixel, as a camera's sensor sees it (Bayer's pattern, red first), and noise.

    Examples:
        >>> eq.inputs.Demosaicing().corrupt(torch.ones(1, 3, 4, 4)).measured.sum()  # a third of 48
        tensor(16.)
    """

    noise: float = 0.0

    @property
    def words(self) -> str:
        return f"one color a pixel{self._and_noise}"

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        _, channels, height, width = images.shape
        if channels != 3:
            raise ValueError(f"a mosaic is made of a picture of three colors, not {channels}")
        return bayer_mosaic(height, width, images)


def bayer_mosaic(height: int, width: int, like: Tensor) -> Mask:
    """Red and green in even rows, green and blue in odd ones.

    Examples:
        >>> mosaic = eq.inputs.bayer_mosaic(2, 2, like=torch.rand(1, 3, 2, 2))
        >>> mosaic.known[0, 1]  # where green is measured
        tensor([[0., 1.],
                [1., 0.]])
    """
    known = like.new_zeros(1, 3, height, width)
    for row, column, color in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        known[:, color, row::2, column::2] = 1
    return Mask(known)


@dataclass(frozen=True)
class Measured(Corruption):
    """Any differentiable measurement, with noise.

    Examples:
        >>> seen = eq.inputs.Measured(lambda y: y.mean(dim=(2, 3))).corrupt(torch.ones(1, 1, 4, 4))
        >>> seen.measured
        tensor([[1.]])
    """

    measurement: Measurement
    noise: float = 0.0

    def __post_init__(self) -> None:
        # A measurement need not consist of pixels.
        check_values(self, not_negative=("noise",))

    def measurement_of(self, images: Tensor, generator: torch.Generator | None) -> Measurement:
        return self.measurement


_corruptions: Registry[Corruption] = Registry(
    "corruption",
    Corruption,
    {
        "inpaint": Inpainting,
        "denoise": Denoising,
        "deblur": Deblurring,
        "superres": SuperResolution,
        "scatter": Scattering,
        "demosaic": Demosaicing,
    },
)


register_corruption = _corruptions.register
list_corruptions = _corruptions.names
get_corruption = _corruptions.create
"""The corruption of a name, with its options as keywords."""


def picture_of(measurement: Measurement, measured: Tensor, size: tuple[int, ...]) -> Tensor | None:
    """The measurement as an image of this height and width; None where it is no picture.

    Examples:
        >>> half = eq.operators.AveragePool(2)
        >>> eq.inputs.picture_of(half, torch.rand(1, 1, 4, 4), (8, 8)).shape
        torch.Size([1, 1, 8, 8])
    """
    picture = getattr(measurement, "picture", None)
    if callable(picture):
        shown: Tensor = picture(measured)
        return shown
    is_picture = measured.dim() == 4 and tuple(measured.shape[2:]) == tuple(size)
    return measured if is_picture else None


def answer(model: nn.Module, seen: Corrupted) -> Tensor:
    """What a model that was trained to restore makes of measurements (G of Eq. 23).

    Examples:
        >>> restorer = eq.models.deq_restorer(in_channels=1, channels=8)
        >>> seen = eq.inputs.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 8, 8))
        >>> eq.inputs.answer(restorer, seen).shape
        torch.Size([1, 1, 8, 8])
    """
    if getattr(model, "takes_measurement", False):
        restored: Tensor = model(seen.measured, seen.measurement)
    else:
        restored = model(pictured(model, seen).measured)
    return restored


def pictured(model: nn.Module, seen: Corrupted) -> Corrupted:
    """The picture of a measurement as one itself, for a model that takes nothing else."""
    picture = picture_of(seen.measurement, seen.measured, seen.measured.shape[2:])
    if picture is None:
        raise ValueError(
            f"{type(model).__name__} restores pictures, but the measurement makes none: give it "
            "a measurement with a `picture` method, or use a generator"
        )
    return Corrupted(picture, Identity(), seen.noise)


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
