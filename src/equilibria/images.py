"""What a model expects of images: their size, their classes, and how files are framed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling
    from torch import nn

LARGEST_FRAME = 2**26
"""Pixels of an image that is given to a model."""
MOST_SCALED = 16
"""An image that is scaled as a whole may become this many times the frame before it is cut."""

Kind: TypeAlias = Literal["classification", "segmentation", "episodes", "unlabelled"]


@dataclass(frozen=True)
class Framing:
    """How an image of any size becomes one of `size` (height, width).

    It is scaled, its proportions kept, until it covers `cover` (`size` if None), and the center is
    cut out. Without `size` images stay as they are on disk.

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
        """Of `size` (a side, or height and width), after the shorter side was scaled to `resize`.

        With 256 and 224 for `resize` and `size`, the usual way to test on ImageNet.
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
        """The image framed; a map of labels is scaled without mixing them."""
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
        """What of the image is inside the frame, in the image's own resolution."""
        if self.size is None:
            return image
        scaled_width, scaled_height = self._scaled(image)
        height = max(1, round(self.size[0] * image.height / scaled_height))
        width = max(1, round(self.size[1] * image.width / scaled_width))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def needed(self, image: Image) -> tuple[int, int]:
        """A width and height, not above the image's, with twice the detail that will remain.

        Whichever way the image is turned.
        """
        if self.size is None:
            return image.size
        sides = self.cover or self.size
        scale = min(1.0, 2 * max(sides) / min(image.size))
        return round(image.width * scale), round(image.height * scale)

    def _scaled(self, image: Image) -> tuple[int, int]:
        """Width and height of the image where it covers the frame."""
        assert self.size is not None
        height, width = self.cover or self.size
        scale = max(width / image.width, height / image.height)
        # Rounding must not leave the image a pixel short of what is cut out.
        return max(width, round(image.width * scale)), max(height, round(image.height * scale))


def _resized_part(
    image: Image, scaled: tuple[int, int], box: tuple[int, int, int, int], how: Resampling
) -> Image:
    """The part `box` of the image resized to `scaled`, without the rest of the resized image.

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


AS_ON_DISK = Framing()


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """What a model expects of images: enough to use it without the data set of its training.

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
