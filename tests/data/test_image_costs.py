"""Limits for the time and memory of decoding an image file."""

from __future__ import annotations

import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.Image import Resampling

from equilibria.data import DataFileError, Framing
from equilibria.data.image_files import decode_image, image_to_tensor, read_image
from tests.data.formats import random_bytes
from tests.program import invoke

PNG_GRAY, PNG_RGB = 0, 2


def write_png(path: Path, size: tuple[int, int], color: int = PNG_GRAY, depth: int = 8) -> Path:
    """Write a PNG of one color and any size without its pixels in memory."""
    width, height = size
    packer = zlib.compressobj(9)
    row = b"\0" + b"\x55" * (width * depth * (3 if color == PNG_RGB else 1) // 8)
    content = packer.compress(row * height) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", content), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    return path


def framed_by_pillow(path: Path, framing: Framing, *, is_gray: bool = False) -> torch.Tensor:
    """Scale the whole image with Pillow until it covers the frame, then crop it."""
    with Image.open(path) as opened:
        image = opened.convert("L" if is_gray else "RGB")
    assert framing.size is not None
    (height, width), (down, across) = framing.size, framing.cover or framing.size
    scale = max(across / image.width, down / image.height)
    scaled = max(across, round(image.width * scale)), max(down, round(image.height * scale))
    if scaled != image.size:
        image = image.resize(scaled, Resampling.BILINEAR)
    left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
    return image_to_tensor(image.crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("framing", [Framing.make(8), Framing.make((16, 24)), Framing.make(20, 32)])
@pytest.mark.parametrize(
    "size", [(28, 28), (32, 48), (481, 321), (7, 90), (90, 7), (5, 5), (1, 8), (300, 24)]
)
def test_framing_matches_pillow(tmp_path: Path, size: tuple[int, int], framing: Framing) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(random_bytes(*size, 3)).save(path)
    for is_gray in (True, False):
        result = read_image(path, framing, is_gray=is_gray)
        assert torch.equal(result, framed_by_pillow(path, framing, is_gray=is_gray))


@pytest.mark.parametrize("size", [(3, 700), (2, 4001), (900, 3), (500, 1), (1, 3000)])
@pytest.mark.parametrize("framing", [Framing.make(8), Framing.make((12, 9)), Framing.make(6, 10)])
def test_framing_of_very_long_images_matches_pillow_within_one_level(
    tmp_path: Path, size: tuple[int, int], framing: Framing
) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(random_bytes(*size, 3)).save(path)
    difference = read_image(path, framing).int() - framed_by_pillow(path, framing).int()
    assert int(difference.abs().max()) <= 1


def test_maps_of_very_long_images_keep_their_labels() -> None:
    labels = np.repeat(np.array([[3, 200, 90]], dtype=np.uint8), 400, axis=1)
    framed = Framing.make(8).apply(Image.fromarray(labels), is_map=True)
    assert np.asarray(framed).tolist() == [[200] * 8] * 8


def test_framing_a_long_image_makes_no_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were scaled completely, this image would have 8 × 1,600,000 pixels."""
    sizes: list[int] = []
    resize = Image.Image.resize

    def recording_resize(
        image: Image.Image, size: tuple[int, int], *args: object, **options: object
    ) -> object:
        sizes.append(size[0] * size[1])
        return resize(image, size, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", recording_resize)
    for size in ((200_000, 1), (1, 200_000)):
        assert Framing.make(8).apply(Image.new("RGB", size)).size == (8, 8)
    assert max(sizes) <= 16 * 8 * 8


def image_of_mode(mode: str, size: tuple[int, int]) -> Image.Image:
    colors = Image.fromarray(random_bytes(size[1], size[0], 4), "RGBA")
    if mode == "I;16":
        return Image.fromarray(random_bytes(size[1], size[0], 2).view(np.uint16)[..., 0])
    if mode == "P":
        palette = colors.convert("RGB").quantize(16)
        palette.info["transparency"] = 3
        return palette
    return colors.convert(mode)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_conversion_in_tiles_matches_conversion_at_once(
    tmp_path: Path, mode: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "image.png"
    image_of_mode(mode, (37, 23)).save(path, exif=exif)
    whole = [read_image(path, is_gray=is_gray) for is_gray in (True, False)]
    assert whole[0].shape == ((1, 23, 37) if orientation == 1 else (1, 37, 23))
    for pixels in (10, 64):
        monkeypatch.setattr("equilibria.data.image_files.TILE", pixels)
        pieces = [read_image(path, is_gray=is_gray) for is_gray in (True, False)]
        assert all(map(torch.equal, whole, pieces))


TOO_LARGE = {
    "wide.png": (25_000_000, 1),
    "tall.png": (1, 7_000_000),
    "square.png": (7000, 7000),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_small_files_with_many_pixels_are_rejected_before_decoding(
    tmp_path: Path, name: str
) -> None:
    path = write_png(tmp_path / name, TOO_LARGE[name])
    assert path.stat().st_size < 1_000_000
    width, height = TOO_LARGE[name]
    message = f"{width}×{height} pixels.*: decoding takes about .* MB, more than .*fewer pixels"
    tracemalloc.start()
    try:
        with pytest.raises(DataFileError, match=message):
            read_image(path, Framing.make(8))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(DataFileError, match=r"fewer pixels|smaller"):
        decode_image(path.read_bytes(), framing=Framing.make(8))


def test_larger_files_may_have_more_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equilibria.data.image_files.DECODED_BYTES", 1000)
    monkeypatch.setattr("equilibria.data.image_files.SMALL_FILE", 100)
    flat, noise = tmp_path / "flat.png", tmp_path / "noise.png"
    Image.new("RGB", (60, 60)).save(flat)
    Image.fromarray(random_bytes(60, 60, 3)).save(noise)
    assert read_image(noise).shape == (3, 60, 60)
    with pytest.raises(DataFileError, match="60×60 pixels in a file of"):
        read_image(flat)


def test_a_jpeg_with_many_scans_is_rejected(tmp_path: Path) -> None:
    """Each scan visits all coefficients; decoding 3,000 scans in 0.4 MB would take 27 seconds."""
    path = tmp_path / "scans.jpg"
    Image.new("RGB", (1200, 1200), (9, 99, 200)).save(path, progressive=True)
    content = path.read_bytes()
    last = content[content.rfind(b"\xff\xda") : -2]
    assert read_image(path, Framing.make(8)).shape == (3, 8, 8)
    path.write_bytes(content[:-2] + 500 * last + content[-2:])
    with pytest.raises(DataFileError, match=r"scans of 1200×1200 pixels.*not progressive"):
        read_image(path, Framing.make(8))


def test_a_tiff_with_a_huge_tile_is_rejected(tmp_path: Path) -> None:
    tags = [(256, 16), (257, 16), (258, 8), (259, 1), (262, 1), (277, 1)]
    tags += [(322, 20_000), (323, 20_000), (324, 0), (325, 1000)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    path = tmp_path / "tile.tif"
    path.write_bytes(head + entries + bytes(1000))
    with pytest.raises(DataFileError, match=r"16×16 pixels in a file of .*: decoding takes about"):
        read_image(path)


def test_formats_with_nested_images_are_rejected(tmp_path: Path) -> None:
    """Reading an icon would decode an embedded file of any size."""
    path = tmp_path / "image.png"
    Image.new("RGB", (16, 16)).save(path, format="ICO")
    with pytest.raises(DataFileError, match="cannot be read as an image"):
        read_image(path)


def test_restoration_rejects_small_files_with_many_pixels(tmp_path: Path) -> None:
    path = write_png(tmp_path / "flat.png", (2000, 1500))
    result = invoke("restore", path, "--noise", 0.1, "--output", tmp_path / "restored")
    assert result.exit_code == 1
    assert re.search(
        "2000×1500 pixels in a file of .*, more than the limit", " ".join(result.output.split())
    )
    assert read_image(path, Framing.make(8)).shape == (3, 8, 8)
