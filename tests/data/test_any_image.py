"""Images of all formats are read as a viewer shows them, or rejected with a clear error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from equilibria.data import DataFileError, Framing, ImageFiles, image_from_tensor
from equilibria.data.image_files import image_to_tensor, open_image, read_image, read_pixels
from tests.data.formats import random_bytes

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
"""Image with every 8-bit value once."""
WIDE = RAMP.astype(np.uint16) * 257
"""The same image in 16 bits."""


def pgm(pixels: np.ndarray[Any, Any], brightest: int) -> bytes:
    return f"P5 16 16 {brightest}\n".encode() + pixels.astype(">u2").tobytes()


GRAY: dict[str, Callable[[Path], Any]] = {
    "8.png": lambda path: Image.fromarray(RAMP).save(path),
    "16.png": lambda path: Image.fromarray(WIDE).save(path),
    "16.tif": lambda path: Image.fromarray(WIDE).save(path),
    "16 packed.tif": lambda path: Image.fromarray(WIDE).save(path, compression="tiff_lzw"),
    "16 big-endian.tif": lambda path: Image.fromarray(WIDE.astype(">u2")).save(path),
    "16.pgm": lambda path: path.write_bytes(pgm(WIDE, 65535)),
    "float.tif": lambda path: Image.fromarray((RAMP / 255).astype(np.float32)).save(path),
    "palette.gif": lambda path: Image.fromarray(RAMP).convert("P").save(path),
    "palette.png": lambda path: Image.fromarray(RAMP).convert("P").save(path),
    "alpha.png": lambda path: Image.fromarray(RAMP).convert("LA").save(path),
    "color.png": lambda path: Image.fromarray(RAMP).convert("RGB").save(path),
    "color.ppm": lambda path: Image.fromarray(RAMP).convert("RGB").save(path),
    "color.bmp": lambda path: Image.fromarray(RAMP).convert("RGB").save(path),
    "color.tif": lambda path: Image.fromarray(RAMP).convert("RGB").save(path),
    "alpha of colors.png": lambda path: Image.fromarray(RAMP).convert("RGBA").save(path),
}


@pytest.mark.parametrize("kind", GRAY)
@pytest.mark.parametrize("is_gray", [True, False])
def test_a_gray_ramp_is_the_same_in_every_format(tmp_path: Path, kind: str, is_gray: bool) -> None:
    path = tmp_path / kind
    GRAY[kind](path)
    expected = torch.from_numpy(RAMP).expand(1 if is_gray else 3, 16, 16)
    assert torch.equal(read_image(path, is_gray=is_gray), expected)
    source = ImageFiles((path,), torch.zeros(1), Framing(), is_gray=is_gray)
    assert torch.equal(source.read(torch.tensor([0]))[0][0], expected)


@pytest.mark.parametrize("kind", [kind for kind in GRAY if kind.endswith(("png", "jpg", "gif"))])
@pytest.mark.parametrize("is_gray", [True, False, None])
def test_pixels_are_the_bytes_divided_by_255(
    tmp_path: Path, kind: str, is_gray: bool | None
) -> None:
    path = tmp_path / kind
    GRAY[kind](path)
    framing = Framing.make(8)
    expected = read_image(path, framing, is_gray=is_gray).float() / 255
    for source in (path, path.read_bytes()):
        result = read_pixels(source, framing, is_gray=is_gray)
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)


def test_image_from_tensor_is_the_inverse_of_read_pixels(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    pixels = torch.arange(256).reshape(1, 16, 16) / 255
    for expected in (pixels, torch.cat([pixels, pixels.flip(2), pixels.mT])):
        image_from_tensor(expected).save(path)
        assert torch.equal(read_pixels(path, is_gray=None), expected)


def test_16_bit_values_are_rounded_to_8_bits(tmp_path: Path) -> None:
    shades = np.array([[0, 128, 129, 65406, 65407, 65535]], dtype=np.uint16)
    path = tmp_path / "image.png"
    Image.fromarray(shades).save(path)
    assert read_image(path, is_gray=True).flatten().tolist() == [0, 0, 1, 254, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_images_are_rotated_according_to_their_exif_data(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    shape = {1: lambda p: p, 2: np.fliplr, 3: lambda p: np.rot90(p, 2), 4: np.flipud}
    shape |= {5: lambda p: p.T, 6: lambda p: np.rot90(p, -1)}
    shape |= {7: lambda p: np.rot90(p, 2).T, 8: np.rot90}
    # The dark corner shows the orientation; JPEG preserves large flat areas.
    stored = np.full((32, 48), 200, dtype=np.uint8)
    stored[:16, :16] = 20
    path = tmp_path / f"image.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).convert("RGB").save(path, exif=exif)
    result = read_image(path, is_gray=True)[0].numpy()
    expected = shape[orientation](stored)
    assert result.shape == expected.shape
    assert np.abs(result.astype(int) - expected).max() < 60


def test_transparent_pixels_are_blended_with_white(tmp_path: Path) -> None:
    color = np.zeros((2, 3, 4), dtype=np.uint8)
    color[..., 0] = 200
    color[0, :, 3] = (0, 51, 255)
    Image.fromarray(color).save(tmp_path / "a.png")
    top = read_image(tmp_path / "a.png")[:, 0].T.tolist()
    assert top == [[255, 255, 255], [244, 204, 204], [200, 0, 0]]
    gray = Image.fromarray(np.array([[10, 20, 30]], dtype=np.uint8))
    gray.save(tmp_path / "key.png", transparency=20)
    assert read_image(tmp_path / "key.png", is_gray=True).flatten().tolist() == [10, 255, 30]
    paletted = Image.new("P", (2, 1), 0)
    paletted.putpalette([50, 50, 50, 90, 90, 90])
    paletted.putpixel((1, 0), 1)
    for suffix in ("gif", "png"):
        paletted.save(tmp_path / f"palette.{suffix}", transparency=1)
        shades = read_image(tmp_path / f"palette.{suffix}", is_gray=True)
        assert shades.flatten().tolist() == [50, 255]


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_cmyk_images_are_converted_to_rgb(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"image.{suffix}"
    Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK").save(path)
    middle = read_image(path)[:, 8, 8].tolist()
    assert max(abs(a - b) for a, b in zip(middle, (200, 40, 90), strict=True)) <= 4


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tif"])
def test_the_first_of_several_frames_is_read(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("L", (8, 8), shade).convert("RGB") for shade in (40, 120, 220)]
    path = tmp_path / f"image.{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with Image.open(path) as image:
        assert getattr(image, "n_frames", 1) == 3
    assert abs(int(read_image(path)[0, 4, 4]) - 40) <= 2


def test_ordinary_images_match_pillow(tmp_path: Path) -> None:
    pixels = random_bytes(20, 30, 3)
    for suffix in ("png", "jpg", "bmp", "webp"):
        path = tmp_path / f"image.{suffix}"
        Image.fromarray(pixels).save(path)
        with Image.open(path) as image:
            for mode in ("L", "RGB"):
                expected = image_to_tensor(image.convert(mode))
                assert torch.equal(read_image(path, is_gray=mode == "L"), expected)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "float.tif": (
        lambda path: Image.fromarray(np.array([[0, 255]], dtype=np.float32)).save(path),
        r"has values from 0 to 255; scale them to \[0, 1\]",
    ),
    "nan.tif": (
        lambda path: Image.fromarray(np.array([[0, np.nan]], dtype=np.float32)).save(path),
        "has values from nan to nan",
    ),
    "long.tif": (
        lambda path: Image.fromarray(WIDE.astype(np.int32)).save(path),
        "integers of 32 bits.*save it with 8 or 16 bits",
    ),
    "pipe.png": (os.mkfifo, "not a file, but a folder, a pipe or a device; remove it"),
    "folder.png": (os.mkdir, "a folder"),
    "gone.png": (lambda path: None, "cannot be read.*put it there"),
    "link.png": (lambda path: path.symlink_to("nowhere"), "cannot be read.*put it there"),
    "empty.png": (lambda path: path.touch(), "cannot be read as an image"),
    "text.jpg": (lambda path: path.write_text("<html>"), "cannot be read as an image"),
    "head.png": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n"), "cannot be read as an image"),
    "bomb.bmp": (
        lambda path: path.write_bytes(
            b"BM"
            + bytes(8)
            + b"\x36\0\0\0\x28\0\0\0\xff\xff\xff\0\xff\xff\xff\0\1\0\x18"
            + bytes(25)
        ),
        "cannot be read as an image",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unreadable_files_raise_an_error_of_one_sentence(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    path = tmp_path / kind
    make(path)
    with pytest.raises(DataFileError, match=message) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reading_an_image_runs_no_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would pass EPS files to Ghostscript, whatever their suffix."""

    def run(*command: object, **options: object) -> None:
        raise AssertionError(f"run: {command}")

    monkeypatch.setattr("subprocess.check_call", run)
    monkeypatch.setattr("subprocess.Popen", run)
    path = tmp_path / "image.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(DataFileError, match="cannot be read as an image"):
        read_image(path)


def test_damaged_files_give_an_image_or_a_data_file_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = ["16.png", "16.tif", "16 packed.tif", "palette.gif", "alpha.png", "color.bmp", "16.pgm"]
    refused = 0
    for name in files:
        path = tmp_path / name
        GRAY[name](path)
        good = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(good[: rng.integers(1, len(good) + 1)])
            for place in rng.integers(0, len(damaged), 3):
                damaged[place] = rng.integers(256)
            path.write_bytes(damaged)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert open_image(path).mode == "RGB"
            except DataFileError:
                refused += 1
    assert refused > 100
