"""Conversion between image files and tensors, with limits on the memory that decoding takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from equilibria.data.readers import DataFileError, check_plain_file
from equilibria.images import AS_ON_DISK, Framing

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Content = TypeVar("Content")

BRIGHTEST = 255.0
"""Largest byte, which corresponds to 1 in floating-point images."""
MULTI_FRAME_SUFFIXES = frozenset({".gif", ".tif", ".tiff", ".webp"})
SENT_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats accepted over a network."""
FORMATS = (*SENT_FORMATS, "TIFF", "PPM", "DIB", "TGA", "AVIF", "JPEG2000")
"""Formats of image files. Their headers state the decoded size, and Pillow decodes them in C. EPS
is excluded because its reader runs another program."""
MAX_SENT_PIXELS = 25_000_000
"""Largest number of pixels of an image accepted over a network."""
DECODED_BYTES, SMALL_FILE = 200_000_000, 1_000_000
"""Memory that decoding may take for a file of up to `SMALL_FILE` bytes; a larger file may take
proportionally more."""
MAX_SCANNED_PIXELS = 500_000_000
"""Largest product of pixels and scans of a JPEG; every scan visits all pixels."""
PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes per pixel in Pillow's memory; 4 in other modes."""
WORKING_BYTES = {"WEBP": 12, "AVIF": 6, "JPEG2000": 12}
"""Bytes per pixel of a decoder's working memory, if it is more than a few rows."""
FREE_PIXELS, PIXELS_PER_BYTE = 2_000_000, 8
"""Limits for work at full resolution: an image may always have `FREE_PIXELS` pixels, and larger
files may have `PIXELS_PER_BYTE`. A JPEG of a noisy photograph has more than one bit per pixel."""
START_OF_SCAN = b"\xff\xda"
TILE = 2**20
"""Number of pixels that are converted at once, to bound the memory of intermediate results."""
GRAY_MODES = frozenset({"1", "L", "LA", "La"})
HIGH_DEPTH_MODES = frozenset({"I", "F", "I;16", "I;16L", "I;16B", "I;16N"})
"""Pillow modes of more than 8 bits per channel."""
TILE_WIDTH, TILE_LENGTH = 322, 323
"""TIFF tags of the size of a tile."""
ORIENTATION, SIDEWAYS = 0x0112, range(5, 9)
"""EXIF tag of the orientation, and its values that swap width and height."""


def read_pixels(
    source: Path | bytes, framing: Framing = AS_ON_DISK, *, is_gray: bool | None = False
) -> Tensor:
    """Read an image as a float32 tensor of shape (C, H, W) with values in [0, 1].

    `open_image` describes the treatment of colors, transparency, rotation and high bit depths.
    `image_from_tensor` is the inverse.

    Args:
        source: An image file, or its content as bytes. Since bytes may come over a network, only
            the formats `SENT_FORMATS` with at most `MAX_SENT_PIXELS` pixels are accepted.
        framing: Size that the image is scaled and cropped to.
        is_gray: Whether to return one channel instead of three. None keeps gray images gray.

    Raises:
        DataFileError: If the image cannot be read, or decoding it would take too much memory.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(torch.ones(1, 1, 2)).save("white.png")
        >>> eq.data.read_pixels(Path("white.png"), is_gray=True)
        tensor([[[1., 1.]]])
    """
    if isinstance(source, bytes):
        image = framing.apply(decode_image(source, is_gray=is_gray, framing=framing))
        return as_pixels(image_to_tensor(image))
    return as_pixels(read_image(source, framing, is_gray=is_gray))


def as_pixels(levels: Tensor) -> Tensor:
    """Convert bytes from 0 to 255 to float32 in [0, 1]; leave floating-point pixels unchanged."""
    return levels.float().div_(BRIGHTEST) if levels.dtype == torch.uint8 else levels


def read_image(
    path: Path, framing: Framing = AS_ON_DISK, *, is_gray: bool | None = False
) -> Tensor:
    """Read an image file like `read_pixels`, but as bytes, which take a quarter of the memory."""
    return image_to_tensor(framing.apply(open_image(path, is_gray=is_gray, framing=framing)))


def read_label_map(path: Path, framing: Framing) -> Tensor:
    """Read a label map with one byte per pixel, shape (1, H, W)."""
    with _opened(path) as image:
        if image.mode not in ("L", "P"):
            raise DataFileError(
                path, f"a label map has one byte per pixel, but the mode is {image.mode}"
            )
        return image_to_tensor(framing.apply(image, is_map=True))


def open_image(path: Path, *, is_gray: bool | None = False, framing: Framing = AS_ON_DISK) -> Image:
    """Open an image file as a viewer would show it, with 8 bits per channel, gray or RGB.

    The image is rotated according to its EXIF data, transparent pixels are blended with white, and
    only the first frame or page is read. The range is 0 to 65535 for pixels of 16 bits, and 0 to 1
    for floating-point pixels.

    Args:
        path: Image file.
        is_gray: Whether to convert to gray instead of RGB. None keeps gray images gray.
        framing: Size that the image will be scaled to. A much larger JPEG may be decoded at a half,
            a quarter or an eighth of its size, which is faster.

    Raises:
        DataFileError: If the image cannot be read, or decoding it would take too much memory.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(torch.rand(1, 4, 6)).save("gray.png")
        >>> from equilibria.data.image_files import open_image
        >>> open_image(Path("gray.png"), is_gray=None).mode
        'L'
    """
    with _opened(path, framing) as opened:
        return _as_viewed(path, opened, is_gray=is_gray)


def decode_image(
    content: bytes, *, is_gray: bool | None = False, framing: Framing = AS_ON_DISK
) -> Image:
    """Decode an image that was received over a network; the result is that of `open_image`.

    Args:
        content: Content of an image file in one of the formats `SENT_FORMATS`, with at most
            `MAX_SENT_PIXELS` pixels.
        is_gray: Whether to convert to gray instead of RGB. None keeps gray images gray.
        framing: Size that the image will be scaled to.

    Raises:
        DataFileError: If the content is not such an image, or decoding it would take more memory
            than is allowed for its size.
    """
    import PIL.Image

    path = Path("the picture")
    try:
        with PIL.Image.open(BytesIO(content), formats=SENT_FORMATS) as opened:
            if opened.width * opened.height > MAX_SENT_PIXELS:
                raise DataFileError(
                    path,
                    f"has more than {MAX_SENT_PIXELS:,} pixels ({opened.width}×{opened.height})",
                    "send a smaller one",
                )
            _load(path, opened, len(content), framing)
            return _as_viewed(path, opened, is_gray=is_gray)
    except DataFileError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        problem = f"has more than {MAX_SENT_PIXELS:,} pixels"
        raise DataFileError(path, problem, "send a smaller one") from error
    except Exception as error:
        # Decoders of damaged images raise almost any exception.
        problem = "cannot be read as an image"
        raise DataFileError(path, problem, f"send a {' or '.join(SENT_FORMATS)}") from error


def _as_viewed(path: Path, opened: Image, *, is_gray: bool | None) -> Image:
    """Convert a decoded image as a viewer would show it; `opened` may change."""
    import PIL.Image
    import PIL.ImageOps

    PIL.ImageOps.exif_transpose(opened, in_place=True)
    _check_range(path, opened)
    if is_gray is None:
        is_gray = opened.mode in (*GRAY_MODES, *HIGH_DEPTH_MODES)
    mode = "L" if is_gray else "RGB"
    boxes = _tiles(opened.size)
    if len(boxes) == 1:
        return _converted(opened, mode)
    result = PIL.Image.new(mode, opened.size)
    for box in boxes:
        result.paste(_converted(opened.crop(box), mode), box)
    return result


def _converted(image: Image, mode: str) -> Image:
    """Convert to a mode; blend transparent pixels with white."""
    import PIL.Image

    image = _to_8_bits(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(mode)


def _tiles(size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Cover an image of this width and height by boxes of at most `TILE` pixels."""
    width, height = size
    across = min(width, TILE)
    down = TILE // max(1, across)
    return [
        (left, top, min(left + across, width), min(top + down, height))
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]


def has_several_frames(path: Path) -> bool:
    """Whether an image file has several frames or pages; `open_image` reads only the first.

    Args:
        path: Image file.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(torch.rand(3, 4, 4)).save("still.png")
        >>> from equilibria.data.image_files import has_several_frames
        >>> has_several_frames(Path("still.png"))
        False
    """
    import PIL.Image

    if path.suffix.lower() not in MULTI_FRAME_SUFFIXES:
        return False
    try:
        with PIL.Image.open(path) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # Reading the file will report what is wrong with it.
        return False


def image_to_tensor(image: Image) -> Tensor:
    """Convert a Pillow image to a tensor of bytes.

    Args:
        image: Image with 8 bits per channel.

    Returns:
        Bytes (uint8), shape (C, H, W).

    Examples:
        >>> pixels = torch.tensor([[[0.0, 1.0]]])
        >>> eq.data.image_to_tensor(eq.data.image_from_tensor(pixels))
        tensor([[[  0, 255]]], dtype=torch.uint8)
    """
    return torch.from_numpy(np.atleast_3d(np.array(image, dtype=np.uint8))).permute(2, 0, 1)


def image_from_tensor(pixels: Tensor) -> Image:
    """Convert a tensor to a Pillow image; the inverse of `read_pixels`.

    Args:
        pixels: Pixels, shape (C, H, W) with one or three channels. Values are clamped to [0, 1]
            and rounded to multiples of 1/255.

    Examples:
        >>> image = eq.data.image_from_tensor(torch.rand(3, 4, 6))
        >>> image.size, image.mode
        ((6, 4), 'RGB')
    """
    import PIL.Image

    levels = (pixels.clamp(0, 1) * BRIGHTEST).round().byte()
    return PIL.Image.fromarray((levels[0] if len(levels) == 1 else levels.permute(1, 2, 0)).numpy())


def readable(
    items: Iterable[Item],
    read: Callable[[Item], Content],
    on_unreadable: Callable[[Exception], None] | None = None,
) -> Iterator[tuple[Item, Content]]:
    """Yield each item with the result of `read`, except items that cannot be read.

    Args:
        items: The items.
        read: Function that reads an item, and raises `OSError` or `ValueError` if it cannot.
        on_unreadable: Callback for the error of an item that cannot be read. Without it, the error
            is raised.

    Examples:
        >>> errors = []
        >>> from equilibria.data.image_files import readable
        >>> [number for _, number in readable(["1", "two"], int, errors.append)], len(errors)
        ([1], 1)
    """
    for item in items:
        try:
            content = read(item)
        except (OSError, ValueError) as error:
            if on_unreadable is None:
                raise
            on_unreadable(error)
        else:
            yield item, content


@dataclass(frozen=True)
class Header:
    """Header of an image file.

    Attributes:
        size: Width and height, after rotation according to the EXIF data.
        mode: Pillow's mode of the pixels.
    """

    size: tuple[int, int]
    mode: str


def header_of(path: Path) -> Header:
    """Read the header of an image file without decoding the image."""
    with _opened(path, None) as image:
        # For the EXIF data of other formats, Pillow would decode the image.
        rotated = image.format in ("JPEG", "MPO") and image.getexif().get(ORIENTATION) in SIDEWAYS
        return Header(image.size[::-1] if rotated else image.size, image.mode)


def check_detail(path: Path) -> None:
    """Reject an image with far more pixels than a detailed image in a file of its size.

    Use this before work at full resolution, such as restoration.

    Raises:
        DataFileError: If the file has more than `FREE_PIXELS` pixels and more than
            `PIXELS_PER_BYTE` of them per byte.
    """
    width, height = header_of(path).size
    size = check_plain_file(path)
    allowed = max(FREE_PIXELS, PIXELS_PER_BYTE * size)
    if width * height > allowed:
        raise DataFileError(
            path,
            f"{width}×{height} pixels in a file of {size:,} bytes, more than the limit of "
            f"{allowed:,} pixels for a file of this size",
            "scale the picture down or crop it",
        )


@contextmanager
def _opened(path: Path, framing: Framing | None = AS_ON_DISK) -> Iterator[Image]:
    """Open an image file; errors in the block become errors of the file.

    A JPEG is decoded only at the resolution that `framing` needs; None decodes nothing.
    """
    import PIL.Image

    size = check_plain_file(path)
    PIL.Image.init()
    # Some formats are optional when Pillow is built.
    formats = [name for name in FORMATS if name in PIL.Image.OPEN]
    try:
        with PIL.Image.open(path, formats=formats) as image:
            if framing is not None:
                _load(path, image, size, framing)
            yield image
    except DataFileError:
        raise
    except Exception as error:
        # Decoders of damaged images raise almost any exception.
        raise DataFileError(path, f"cannot be read as an image ({error})") from error


def _load(path: Path, image: Image, size: int, framing: Framing) -> None:
    """Decode an image, unless the cost is out of proportion to the file's `size` in bytes."""
    width, height = image.size
    pixels, share = width * height, max(1.0, size / SMALL_FILE)
    image.draft(None, framing.needed(image))
    needed = 0
    if image.format in ("JPEG", "MPO"):
        file = image.fp  # type: ignore[attr-defined]
        position = file.tell()
        file.seek(0)
        scans = file.read().count(START_OF_SCAN)
        file.seek(position)
        if scans * pixels > MAX_SCANNED_PIXELS * share:
            problem = f"{scans:,} scans of {width}×{height} pixels take too long to decode"
            raise DataFileError(path, problem, "save it as a JPEG that is not progressive")
        if scans > 1:  # The decoder keeps all coefficients, 16 bits each.
            needed = 2 * len(image.getbands()) * pixels
    elif image.format == "TIFF":
        tile: Any = image.tag_v2  # type: ignore[attr-defined]
        # A strip can be the whole image, and a tile can be larger than the image.
        strip = max(pixels, int(tile.get(TILE_WIDTH, 1)) * int(tile.get(TILE_LENGTH, 1)))
        needed = strip * (PIXEL_BYTES.get(image.mode) or 8)
    elif image.format == "PNG" and _has_16_bits(image):
        needed = 6 * pixels
    # A decoder keeps two rows of up to 8 bytes per pixel; Pillow keeps pointers to the rows.
    needed += 16 * width + 32 * height + WORKING_BYTES.get(image.format or "", 0) * pixels
    # The result is a second image.
    needed += image.width * image.height * (PIXEL_BYTES.get(image.mode, 4) + 4)
    allowed = DECODED_BYTES * share
    if needed > allowed:
        raise DataFileError(
            path,
            f"{width}×{height} pixels in a file of {size:,} bytes: decoding takes about "
            f"{needed / 1e6:,.0f} MB, more than the limit of {allowed / 1e6:,.0f} MB for a file of "
            "this size",
            "use a picture with fewer pixels",
        )
    image.load()


def _has_16_bits(image: Image) -> bool:
    """Whether a file has 16 bits per channel; Pillow's mode may show only 8."""
    tiles: Any = image.tile  # type: ignore[attr-defined]
    return any("16" in str(tile[-1]) for tile in tiles)


def _check_range(path: Path, image: Image) -> None:
    """Reject pixels of more than 8 bits with an unknown range, which Pillow would clip."""
    if image.mode not in ("I", "F"):
        return
    # Pillow reads PNG and PPM files of 16 bits as 32 bits.
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        problem = "has integers of 32 bits, whose range is not known"
        raise DataFileError(path, problem, "save it with 8 or 16 bits per channel")
    tiles = (np.asarray(image.crop(box)) for box in _tiles(image.size))
    extremes = np.array([(tile.min(), tile.max()) for tile in tiles], dtype=np.float64)
    low, high = extremes[:, 0].min(), extremes[:, 1].max()
    if not (low >= 0 and high <= _brightest(image)):
        raise DataFileError(
            path,
            f"has values from {low:g} to {high:g}",
            "scale them to [0, 1], or save it with 8 or 16 bits per channel",
        )


def _brightest(image: Image) -> float:
    return 1.0 if image.mode == "F" else 65535.0


def _to_8_bits(image: Image) -> Image:
    """Round the values of an image with more than 8 bits per channel to 8 bits."""
    import PIL.Image

    if image.mode not in HIGH_DEPTH_MODES:
        return image
    numbers = np.asarray(image).astype(np.float64)
    shades = numbers / _brightest(image)
    if isinstance(image.info.get("transparency"), int):
        shades[numbers == image.info["transparency"]] = 1
    return PIL.Image.fromarray((BRIGHTEST * shades).round().astype(np.uint8))
