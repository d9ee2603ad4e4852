"""Description of the images that a model expects, and the framing of image files to their size."""

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
MAX_SCALED_FRAMES = 16
"""Largest scaled image, in units of the frame, that is computed as a whole before cropping."""

Kind: TypeAlias = Literal["classification", "segmentation", "episodes", "unlabelled"]


@dataclass(frozen=True)
class Framing:
    """Transformation of images of any size to a fixed size.

    Scales an image to cover `cover`, keeping its proportions, and crops the center to `size`.

    Attributes:
        size: Height and width of the result. None leaves images unchanged.
        cover: Height and width to cover before cropping; by default `size`.

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
                    f"size must be at most {LARGEST_FRAME:,} pixels, got "
                    f"{sides[0]:,}×{sides[1]:,}; choose a smaller size"
                )

    @classmethod
    def make(cls, size: int | Sequence[int] | None, resize: int | None = None) -> Framing:
        """Create a framing from a size and a length of the shorter side.

        `Framing.make(224, resize=256)` is the standard test transformation for ImageNet.

        Args:
            size: Side of a square, or height and width, in pixels. None leaves images unchanged.
            resize: Length in pixels to which the shorter side is scaled before cropping.

        Raises:
            ValueError: If the size is not positive or too large, or does not fit into `resize`.
        """
        if size is None:
            if resize is not None:
                raise ValueError(f"resize={resize} needs a size to crop to: give both or neither")
            return cls()
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        if min(height, width) < 1:
            raise ValueError(f"size must be at least one pixel, got {height}×{width}")
        if resize is not None and resize < max(height, width):
            raise ValueError(
                f"resize must be at least {max(height, width)} to crop {height}×{width} pixels, "
                f"got {resize}"
            )
        return cls((height, width), None if resize is None else (resize, resize))

    def apply(self, image: Image, *, is_map: bool = False) -> Image:
        """Scale and crop an image.

        Args:
            image: The image.
            is_map: Whether the image is a label map, which is scaled without interpolation.
        """
        from PIL.Image import Resampling

        if self.size is None:
            return image
        height, width = self.size
        scaled = self._scaled(image)
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        box = (left, top, left + width, top + height)
        how = Resampling.NEAREST if is_map else Resampling.BILINEAR
        if math.prod(scaled) > MAX_SCALED_FRAMES * math.prod(self.cover or self.size):
            return _resized_part(image, scaled, box, how)
        if scaled != image.size:
            image = image.resize(scaled, how)
        return image.crop(box)

    def region(self, image: Image) -> Image:
        """Return the part of an image that `apply` keeps, at the original resolution."""
        if self.size is None:
            return image
        scaled_width, scaled_height = self._scaled(image)
        height = max(1, round(self.size[0] * image.height / scaled_height))
        width = max(1, round(self.size[1] * image.width / scaled_width))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def needed(self, image: Image) -> tuple[int, int]:
        """Return the width and height at which to decode an image: twice the final resolution.

        At most the size of the image. It is large enough for both orientations, because the image
        is decoded before its EXIF orientation is applied.
        """
        if self.size is None:
            return image.size
        sides = self.cover or self.size
        scale = min(1.0, 2 * max(sides) / min(image.size))
        return round(image.width * scale), round(image.height * scale)

    def _scaled(self, image: Image) -> tuple[int, int]:
        """Return the width and height of the image scaled to cover the frame."""
        assert self.size is not None
        height, width = self.cover or self.size
        scale = max(width / image.width, height / image.height)
        # Rounding must not make the image one pixel smaller than the crop.
        return max(width, round(image.width * scale)), max(height, round(image.height * scale))


def _resized_part(
    image: Image, scaled: tuple[int, int], box: tuple[int, int, int, int], how: Resampling
) -> Image:
    """Return the part `box` of the image resized to `scaled`, without computing the rest.

    The result may differ by one gray level from resizing the whole image, because of rounding.
    """
    inner: list[float] = [0.0] * 4
    outer = [0] * 4
    for axis in (0, 1):
        length, pixel = image.size[axis], image.size[axis] / scaled[axis]
        start, end = box[axis] * pixel, box[axis + 2] * pixel
        # Bilinear interpolation reads up to one pixel of the coarser grid outside of the part.
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
    """Description of the images that a model expects, for use without its training data.

    A model has its specification as `model.images`. Run folders and packed files store it under
    the key "images".

    Attributes:
        class_names: Names of the classes.
        image_shape: Channels, height and width.
        frame: Transformation of image files to that height and width.
        normalization: Mean and standard deviation per channel, applied by the first layer, or None.
        names_classes: Whether the model predicts one of the classes, per image or per pixel.
        kind: Kind of data set that the model was trained on.
        ignore_index: Label of pixels without a class.

    Examples:
        >>> images = eq.load("digits-opteq").images
        >>> images.image_shape, images.class_names[:3], images.is_gray
        ((1, 8, 8), ('0', '1', '2'), True)
    """

    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    frame: Framing
    normalization: tuple[Any, Any] | None
    names_classes: bool
    kind: Kind
    ignore_index: int | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def is_gray(self) -> bool:
        """Whether the images have one channel."""
        return self.image_shape[0] == 1

    def as_data(self) -> dict[str, Any]:
        """Return the specification as plain data, the format of run folders."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ImageSpec:
        """Create a specification from the data of a run folder.

        Args:
            data: Result of `as_data`, possibly read from JSON.

        Raises:
            pydantic.ValidationError: If a value is missing or has another type.
        """
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(data)


def images_of(model: nn.Module) -> ImageSpec | None:
    """Return the image specification of a model, or None if it has none.

    Args:
        model: Any module. An attribute `images` that is not an `ImageSpec` is ignored.

    Examples:
        >>> eq.models.images_of(torch.nn.Linear(2, 2)) is None
        True
    """
    images = getattr(model, "images", None)
    return images if isinstance(images, ImageSpec) else None
