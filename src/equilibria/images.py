"""The images that a model expects (`ImageSpec`), and how a file gets their size (`Framing`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling
    from torch import nn

LARGEST_FRAME = 2**26
"""Largest number of pixels of an image for a model."""
MOST_SCALED = 16
"""Largest size of a scaled image, in frames, that is computed before the frame is cut out."""

Kind: TypeAlias = Literal["classification", "segmentation", "episodes", "unlabelled"]


@dataclass(frozen=True)
class Framing:
    """A transformation of images of any size to one size.

    An image is scaled, keeping its proportions, until it covers `cover`; then the center is cut
    out.

    Attributes:
        size: Height and width of the result. None leaves images as they are on disk.
        cover: Height and width to cover before the center is cut out; `size` if None.

    Examples:
        >>> eq.data.Framing(size=(32, 32))
        Framing(size=(32, 32), cover=None)
    """

    size: tuple[int, int] | None = None
    cover: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for sides in (self.size, self.cover):
            if sides is not None and math.prod(sides) > LARGEST_FRAME:
                raise ValueError(
                    f"a frame of {sides[0]:,}×{sides[1]:,} pixels is larger than the "
                    f"{LARGEST_FRAME:,} that are allowed: give a smaller size"
                )

    @classmethod
    def make(cls, size: int | Sequence[int] | None, resize: int | None = None) -> Framing:
        """Make a framing from a size and a length of the shorter side.

        `Framing.make(224, resize=256)` is the usual way to test on ImageNet.

        Args:
            size: A side, or height and width. None leaves images as they are on disk.
            resize: Length that the shorter side is scaled to before the center is cut out.
        """
        if size is None:
            if resize is not None:
                raise ValueError("resize needs a size to cut out: give both, or neither")
            return cls()
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        if min(height, width) < 1:
            raise ValueError(f"an image has at least one pixel, not {height}×{width}")
        if resize is not None and resize < max(height, width):
            raise ValueError(
                f"the shorter side, scaled to {resize}, does not hold {height}×{width}: "
                f"set resize to at least {max(height, width)}"
            )
        return cls((height, width), None if resize is None else (resize, resize))

    def apply(self, image: Image, *, is_map: bool = False) -> Image:
        """Frame an image. A map of labels (`is_map`) is scaled without interpolation."""
        from PIL.Image import Resampling

        if self.size is None:
            return image
        height, width = self.size
        scaled = self._scaled(image)
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        box = (left, top, left + width, top + height)
        how = Resampling.NEAREST if is_map else Resampling.BILINEAR
        if math.prod(scaled) > MOST_SCALED * math.prod(self.cover or self.size):
            return _resized_part(image, scaled, box, how)
        if scaled != image.size:
            image = image.resize(scaled, how)
        return image.crop(box)

    def region(self, image: Image) -> Image:
        """Cut out the part that `apply` keeps, in the resolution of the image."""
        if self.size is None:
            return image
        scaled_width, scaled_height = self._scaled(image)
        height = max(1, round(self.size[0] * image.height / scaled_height))
        width = max(1, round(self.size[1] * image.width / scaled_width))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def needed(self, image: Image) -> tuple[int, int]:
        """Return a width and height to decode: twice the detail that remains after framing.

        They are at most those of the image, and hold for every EXIF orientation.
        """
        if self.size is None:
            return image.size
        sides = self.cover or self.size
        scale = min(1.0, 2 * max(sides) / min(image.size))
        return round(image.width * scale), round(image.height * scale)

    def _scaled(self, image: Image) -> tuple[int, int]:
        """Return the width and height at which the image covers the frame."""
        assert self.size is not None
        height, width = self.cover or self.size
        scale = max(width / image.width, height / image.height)
        # Rounding must not leave the image a pixel short of what is cut out.
        return max(width, round(image.width * scale)), max(height, round(image.height * scale))


def _resized_part(
    image: Image, scaled: tuple[int, int], box: tuple[int, int, int, int], how: Resampling
) -> Image:
    """Return the part `box` of the image resized to `scaled`, without computing the rest.

    The result may differ from resizing first by a gray level, because positions are rounded.
    """
    inner: list[float] = [0.0] * 4
    outer = [0] * 4
    for axis in (0, 1):
        length, pixel = image.size[axis], image.size[axis] / scaled[axis]
        start, end = box[axis] * pixel, box[axis + 2] * pixel
        # Bilinear interpolation reads up to one pixel of the coarser grid beyond the part.
        margin = max(1.0, pixel) + 1
        low = max(0, math.floor(start - margin))
        outer[axis], outer[axis + 2] = low, min(length, math.ceil(end + margin))
        inner[axis], inner[axis + 2] = start - low, end - low
    part = image.crop((outer[0], outer[1], outer[2], outer[3]))
    size = (box[2] - box[0], box[3] - box[1])
    return part.resize(size, how, box=(inner[0], inner[1], inner[2], inner[3]))


AS_ON_DISK = Framing()


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """Description of the images that a model expects, to use it without its training data.

    A model keeps its specification as `model.images`. A run folder and a packed file store it
    under the key "images".

    Examples:
        >>> images = eq.load("digits-opteq").images
        >>> images.image_shape, images.class_names[:3], images.is_gray
        ((1, 8, 8), ('0', '1', '2'), True)
    """

    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    """Channels, height and width."""
    frame: Framing
    """How image files are brought to that height and width."""
    normalization: tuple[Any, Any] | None
    """Mean and standard deviation of each channel, which the first layer applies, or None."""
    names_classes: bool
    """Whether the model predicts one of the classes, for an image or for each pixel."""
    kind: Kind
    """The kind of data set that the model was trained on."""
    ignore_index: int | None = None
    """The label of pixels without a class."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def is_gray(self) -> bool:
        """Whether the images have one channel."""
        return self.image_shape[0] == 1

    def as_data(self) -> dict[str, Any]:
        """Return what a run folder stores."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ImageSpec:
        """Read what a run folder stores.

        Raises:
            pydantic.ValidationError: If a value is missing or has another type.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(data)


def images_of(model: nn.Module) -> ImageSpec | None:
    """Return what a model expects of images, or None if the model does not say.

    Any module may have the attribute `images`; only an `ImageSpec` counts.

    Examples:
        >>> eq.models.images_of(torch.nn.Linear(2, 2)) is None
        True
    """
    images = getattr(model, "images", None)
    return images if isinstance(images, ImageSpec) else None
