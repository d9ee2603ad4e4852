"""Pixels from image files and bytes, with limits on what is decoded, and images from pixels."""

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
"""The largest byte, which is 1 in an image of floats."""
SEVERAL_FRAMES = frozenset({".gif", ".tif", ".tiff", ".webp"})
SENT_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats accepted over a network."""
FORMATS = (*SENT_FORMATS, "TIFF", "PPM", "DIB", "TGA", "AVIF", "JPEG2000")
"""Formats of image files. Their headers state the size of what is decoded, and Pillow decodes them
in C. EPS is not among them: its reader runs another program."""
MOST_PIXELS = 25_000_000
DECODED_BYTES, SMALL_FILE = 200_000_000, 1_000_000
"""Memory that decoding may take for a file of up to `SMALL_FILE` bytes; a larger file may take
proportionally more."""
MOST_SCANNED = 500_000_000
"""Pixels times scans of a JPEG: every scan passes over all pixels."""
PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes per pixel in Pillow's memory; 4 in other modes."""
WORKING_BYTES = {"WEBP": 12, "AVIF": 6, "JPEG2000": 12}
"""Bytes per pixel of a decoder's own working memory, where it is more than some rows."""
DETAILED, PIXELS_PER_BYTE = 2_000_000, 8
"""Pixels that any image may have where its pixels are worked on as they are, and how many it may
have per byte of its file. A noisy photograph takes more than a bit per pixel in a JPEG."""
START_OF_SCAN = b"\xff\xda"
TILE = 2**20
"""Pixels that are converted at once, so that intermediate results take little memory."""
GRAY_MODES = frozenset({"1", "L", "LA", "La"})
NUMBERS = frozenset({"I", "F", "I;16", "I;16L", "I;16B", "I;16N"})
"""Modes of more than 8 bits per channel."""
TILE_WIDTH, TILE_LENGTH = 322, 323
"""Tags of TIFF."""
ORIENTATION, SIDEWAYS = 0x0112, range(5, 9)
"""Of EXIF: the tag, and those of its values that turn an image by a quarter."""


def read_pixels(
    source: Path | bytes, framing: Framing = AS_ON_DISK, *, is_gray: bool | None = False
) -> Tensor:
    """Read an image as a model takes it: float32 in [0, 1], shape `(channels, height, width)`.

    `open_image` describes how colors, transparency, rotation and large numbers are treated.
    `image_from_tensor` is the inverse.

    Args:
        source: An image file, or its content. Content may have come over a network: only
            `SENT_FORMATS` with at most `MOST_PIXELS` pixels are accepted.
        framing: The size that the image is brought to.
        is_gray: Whether to return one channel or three. None keeps a gray image gray.

    Raises:
        DataFileError: If the image cannot be read, or takes too much memory to decode.

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
    """Read an image like `read_pixels`, but as bytes, which take a quarter of the memory."""
    return image_to_tensor(framing.apply(open_image(path, is_gray=is_gray, framing=framing)))


def read_label_map(path: Path, framing: Framing) -> Tensor:
    """Read a map with one label per pixel, each one byte, shape `(1, height, width)`."""
    with _opened(path) as image:
        if image.mode not in ("L", "P"):
            raise DataFileError(
                path, f"not a map of labels: its pixels are {image.mode}, not one byte each"
            )
        return image_to_tensor(framing.apply(image, is_map=True))


def open_image(path: Path, *, is_gray: bool | None = False, framing: Framing = AS_ON_DISK) -> Image:
    """The image in a file of any kind, as a viewer shows it: 8 bits, gray or in three colors.

    is_gray: None leaves a gray file gray, and any other in color.

    It is turned as its EXIF data say; what is transparent lies on white; of several frames or pages
    the first counts. Pixels of 16 bits go from 0 to 65535, those of floating-point numbers from 0
    to 1. A JPEG that is much larger than `framing` needs may come in a half, a quarter or an eighth
    of its size, which takes a fraction of the time.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(torch.rand(1, 4, 6)).save("gray.png")
        >>> from equilibria.data.image_files import open_image
        >>> open_image(Path("gray.png"), is_gray=None).mode
        'L'
    """
    with _opened(path, framing) as opened:
        return _shown(path, opened, is_gray=is_gray)


def decode_image(
    content: bytes, *, is_gray: bool | None = False, framing: Framing = AS_ON_DISK
) -> Image:
    """The image in bytes that came from somewhere, as `open_image` gives it.

    Accepts `SENT_FORMATS` of at most `MOST_PIXELS` pixels.

    Raises:
        DataFileError: If the bytes are no such image, or decoding takes more memory than a file of
            this size is allowed.
    """
    import PIL.Image

    place = Path("the picture")
    try:
        with PIL.Image.open(BytesIO(content), formats=SENT_FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise DataFileError(
                    place,
                    f"more than {MOST_PIXELS:,} pixels, {opened.width}×{opened.height}",
                    "send a smaller one",
                )
            _load(place, opened, len(content), framing)
            return _shown(place, opened, is_gray=is_gray)
    except DataFileError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        what = f"more than {MOST_PIXELS:,} pixels"
        raise DataFileError(place, what, "send a smaller one") from error
    except Exception as error:
        # Damaged images raise nearly anything.
        what = "cannot be read as an image"
        raise DataFileError(place, what, f"send a {' or '.join(SENT_FORMATS)}") from error


def _shown(path: Path, opened: Image, *, is_gray: bool | None) -> Image:
    """Convert a decoded image, which may be changed, to what a viewer shows."""
    import PIL.Image
    import PIL.ImageOps

    PIL.ImageOps.exif_transpose(opened, in_place=True)
    _check_numbers(path, opened)
    if is_gray is None:
        is_gray = opened.mode in (*GRAY_MODES, *NUMBERS)
    mode = "L" if is_gray else "RGB"
    boxes = _tiles(opened.size)
    if len(boxes) == 1:
        return _converted(opened, mode)
    shown = PIL.Image.new(mode, opened.size)
    for box in boxes:
        shown.paste(_converted(opened.crop(box), mode), box)
    return shown


def _converted(image: Image, mode: str) -> Image:
    """The image in this mode, what is transparent on white."""
    import PIL.Image

    image = _in_bytes(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(mode)


def _tiles(size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Boxes of at most `TILE` pixels that cover an image of this width and height."""
    width, height = size
    across = min(width, TILE)
    down = TILE // max(1, across)
    return [
        (left, top, min(left + across, width), min(top + down, height))
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]


def has_several_frames(path: Path) -> bool:
    """Whether a file is an animation, or has pages, of which `open_image` takes the first.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(torch.rand(3, 4, 4)).save("still.png")
        >>> from equilibria.data.image_files import has_several_frames
        >>> has_several_frames(Path("still.png"))
        False
    """
    import PIL.Image

    if path.suffix.lower() not in SEVERAL_FRAMES:
        return False
    try:
        with PIL.Image.open(path) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # Whoever reads it says what is wrong with it.
        return False


def image_to_tensor(image: Image) -> Tensor:
    """The bytes of an image, shape `(channels, height, width)`.

    Examples:
        >>> pixels = torch.tensor([[[0.0, 1.0]]])
        >>> eq.data.image_to_tensor(eq.data.image_from_tensor(pixels))
        tensor([[[  0, 255]]], dtype=torch.uint8)
    """
    return torch.from_numpy(np.atleast_3d(np.array(image, dtype=np.uint8))).permute(2, 0, 1)


def image_from_tensor(pixels: Tensor) -> Image:
    """The image of numbers in [0, 1], shape `(channels, height, width)`, gray or in color.

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
    """Each item with what `read` makes of it; of those it cannot read, `on_unreadable` is told.

    Without `on_unreadable` the first one that cannot be read is an error.

    Examples:
        >>> told = []
        >>> from equilibria.data.image_files import readable
        >>> [number for _, number in readable(["1", "two"], int, told.append)], len(told)
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
    """What the first bytes of an image file say."""

    size: tuple[int, int]
    """Width and height, as the image is shown."""
    mode: str


def header_of(path: Path) -> Header:
    """Width, height and kind of pixels of an image, which is not decoded."""
    with _opened(path, None) as image:
        # Pillow would decode other kinds of files to find their EXIF data.
        turned = image.format in ("JPEG", "MPO") and image.getexif().get(ORIENTATION) in SIDEWAYS
        return Header(image.size[::-1] if turned else image.size, image.mode)


def check_detail(path: Path) -> None:
    """Refuse an image of far more pixels than a file of its size can show in detail.

    For work whose time and memory grow with the pixels of the image as it is, such as restoration.

    Raises:
        DataFileError: If the file has more than `DETAILED` pixels and more than
            `PIXELS_PER_BYTE` of them per byte.
    """
    width, height = header_of(path).size
    size = check_plain_file(path)
    allowed = max(DETAILED, PIXELS_PER_BYTE * size)
    if width * height > allowed:
        raise DataFileError(
            path,
            f"{width}×{height} pixels in a file of {size:,} bytes, which are mostly flat: a file "
            f"of this size may have {allowed:,} pixels",
            "scale the picture down, or cut out the part that matters",
        )


@contextmanager
def _opened(path: Path, framing: Framing | None = AS_ON_DISK) -> Iterator[Image]:
    """The image in a file; what goes wrong with it in this block is an error of the file.

    Of a JPEG not more is decoded than `framing` needs; None decodes nothing.
    """
    import PIL.Image

    size = check_plain_file(path)
    PIL.Image.init()
    # Which of them Pillow can open depends on how it was built.
    formats = [name for name in FORMATS if name in PIL.Image.OPEN]
    try:
        with PIL.Image.open(path, formats=formats) as image:
            if framing is not None:
                _load(path, image, size, framing)
            yield image
    except DataFileError:
        raise
    except Exception as error:
        # Damaged images raise nearly anything.
        raise DataFileError(path, f"cannot be read as an image ({error})") from error


def _load(path: Path, image: Image, size: int, framing: Framing) -> None:
    """Decode an image from a file of `size` bytes, unless that takes out of proportion to it."""
    width, height = image.size
    pixels, share = width * height, max(1.0, size / SMALL_FILE)
    image.draft(None, framing.needed(image))
    needed = 0
    if image.format in ("JPEG", "MPO"):
        file = image.fp  # type: ignore[attr-defined]
        place = file.tell()
        file.seek(0)
        scans = file.read().count(START_OF_SCAN)
        file.seek(place)
        if scans * pixels > MOST_SCANNED * share:
            what = f"{scans:,} scans of {width}×{height} pixels, which take too long to decode"
            raise DataFileError(path, what, "save it as a JPEG that is not progressive")
        if scans > 1:  # All coefficients are kept, 16 bits each.
            needed = 2 * len(image.getbands()) * pixels
    elif image.format == "TIFF":
        tile: Any = image.tag_v2  # type: ignore[attr-defined]
        # A strip may be the whole image, and a tile larger than it.
        strip = max(pixels, int(tile.get(TILE_WIDTH, 1)) * int(tile.get(TILE_LENGTH, 1)))
        needed = strip * (PIXEL_BYTES.get(image.mode) or 8)
    elif image.format == "PNG" and _has_16_bits(image):
        needed = 6 * pixels
    # A decoder keeps two rows, of up to 8 bytes per pixel, and Pillow a pointer to each row.
    needed += 16 * width + 32 * height + WORKING_BYTES.get(image.format or "", 0) * pixels
    # The result is a second image.
    needed += image.width * image.height * (PIXEL_BYTES.get(image.mode, 4) + 4)
    allowed = DECODED_BYTES * share
    if needed > allowed:
        raise DataFileError(
            path,
            f"{width}×{height} pixels in a file of {size:,} bytes: decoding takes about "
            f"{needed / 1e6:,.0f} MB, more than the {allowed / 1e6:,.0f} MB that a file of this "
            "size may take",
            "use a picture of fewer pixels",
        )
    image.load()


def _has_16_bits(image: Image) -> bool:
    """Whether a file holds 16 bits per channel, of which Pillow may keep 8."""
    tiles: Any = image.tile  # type: ignore[attr-defined]
    return any("16" in str(tile[-1]) for tile in tiles)


def _check_numbers(path: Path, image: Image) -> None:
    """Refuse pixels of more than a byte whose range is not known, which Pillow would clip."""
    if image.mode not in ("I", "F"):
        return
    # Pillow reads 16 bits of some kinds of files as 32.
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        what = "integers of 32 bits, of which nobody knows the brightest"
        raise DataFileError(path, what, "save it with 8 or 16 bits a pixel")
    tiles = (np.asarray(image.crop(box)) for box in _tiles(image.size))
    extremes = np.array([(tile.min(), tile.max()) for tile in tiles], dtype=np.float64)
    low, high = extremes[:, 0].min(), extremes[:, 1].max()
    if not (low >= 0 and high <= _brightest(image)):
        what = f"numbers from {low:g} to {high:g}"
        raise DataFileError(
            path, what, "scale them to [0, 1], or save it with 8 or 16 bits a pixel"
        )


def _brightest(image: Image) -> float:
    return 1.0 if image.mode == "F" else 65535.0


def _in_bytes(image: Image) -> Image:
    """The image with its numbers of more than 8 bits, if it has any, rounded to 8 bits."""
    import PIL.Image

    if image.mode not in NUMBERS:
        return image
    numbers = np.asarray(image).astype(np.float64)
    shades = numbers / _brightest(image)
    if isinstance(image.info.get("transparency"), int):
        shades[numbers == image.info["transparency"]] = 1
    return PIL.Image.fromarray((BRIGHTEST * shades).round().astype(np.uint8))
