"""Sources of image files and label maps, and their scaling and cropping."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from equilibria.data import Batches, DataFileError, Framing, ImageFiles, SegmentedFiles
from equilibria.data.finding import list_images
from equilibria.data.image_files import read_image
from tests.data.formats import random_bytes, write_image


def files(
    folder: Path, sizes: list[tuple[int, int]], framing: Framing, **options: int
) -> ImageFiles:
    paths = tuple(
        write_image(folder / f"{number}.png", random_bytes(*size, 3, seed=number))
        for number, size in enumerate(sizes)
    )
    return ImageFiles(paths, torch.arange(len(paths)), framing, **options)


def test_pixels_match_the_file(tmp_path: Path) -> None:
    source = files(tmp_path, [(6, 7)] * 5, Framing())
    images, labels = source.fetch(torch.tensor([3, 1]))
    assert images.dtype == torch.float32
    assert labels.tolist() == [3, 1]
    for image, number in zip(images, (3, 1), strict=True):
        expected = torch.from_numpy(random_bytes(6, 7, 3, seed=number)).permute(2, 0, 1)
        assert torch.equal((image * 255).round().byte(), expected)


def test_results_do_not_depend_on_the_threads(tmp_path: Path) -> None:
    sizes = [(20 + number, 31) for number in range(9)]
    alone = files(tmp_path, sizes, Framing.make(16), threads=1)
    several = files(tmp_path, sizes, Framing.make(16), threads=4)
    everything = torch.arange(9)
    assert torch.equal(alone.fetch(everything)[0], several.fetch(everything)[0])


@pytest.mark.parametrize("size", [(40, 60), (60, 40), (33, 33), (8, 90), (7, 5)])
@pytest.mark.parametrize("requested", [(16, 16), (10, 20), (33, 33)])
def test_images_of_any_size_get_the_requested_size(
    tmp_path: Path, size: tuple[int, int], requested: tuple[int, int]
) -> None:
    path = write_image(tmp_path / "image.png", random_bytes(*size, 3))
    assert read_image(path, Framing.make(requested)).shape == (3, *requested)


def test_the_center_is_cropped(tmp_path: Path) -> None:
    """An image whose shorter side has the right length is not resampled."""
    pixels = random_bytes(10, 16, 3)
    path = write_image(tmp_path / "image.png", pixels)
    middle = torch.from_numpy(pixels).permute(2, 0, 1)
    assert torch.equal(read_image(path, Framing.make(10)), middle[:, :, 3:13])
    assert torch.equal(read_image(path, Framing.make(6, resize=10)), middle[:, 2:8, 5:11])


def test_scaling_of_the_shorter_side_matches_pillow(tmp_path: Path) -> None:
    pixels = random_bytes(20, 30, 3)
    path = write_image(tmp_path / "image.png", pixels)
    scaled = Image.fromarray(pixels).resize((15, 10), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(scaled)).permute(2, 0, 1)[:, 1:9, 3:11]
    assert torch.equal(read_image(path, Framing.make(8, resize=10)), expected)


def test_images_of_any_mode_become_rgb_or_gray(tmp_path: Path) -> None:
    for mode in ("1", "L", "P", "RGBA", "CMYK"):
        path = tmp_path / f"{mode}.tif"
        Image.new(mode, (5, 4)).save(path)
        assert read_image(path, Framing()).shape == (3, 4, 5)
        assert read_image(path, Framing(), is_gray=True).shape == (1, 4, 5)


def test_invalid_framings_raise() -> None:
    with pytest.raises(ValueError, match="at least one pixel"):
        Framing.make(0)
    with pytest.raises(ValueError, match="at least 224"):
        Framing.make(224, resize=200)
    with pytest.raises(ValueError, match="give both"):
        Framing.make(None, resize=200)


def test_images_of_different_sizes_need_the_option_size(tmp_path: Path) -> None:
    source = files(tmp_path, [(4, 4), (5, 4)], Framing())
    with pytest.raises(DataFileError, match=r"1\.png.*set `size`"):
        source.fetch(torch.arange(2))


@pytest.mark.parametrize("content", [b"", b"text", b"\x89PNG\r\n\x1a\n", "cut"])
def test_the_error_names_a_damaged_image(tmp_path: Path, content: bytes | str) -> None:
    source = files(tmp_path, [(40, 40)] * 3, Framing())
    damaged = Path(source.paths[1])
    damaged.write_bytes(damaged.read_bytes()[:900] if isinstance(content, str) else content)
    with pytest.raises(DataFileError, match=r"1\.png: cannot be read as an image"):
        list(Batches(source, 3, workers=1))


def test_the_error_names_a_missing_image(tmp_path: Path) -> None:
    source = files(tmp_path, [(4, 4)], Framing())
    Path(source.paths[0]).unlink()
    with pytest.raises(DataFileError, match=r"0\.png"):
        source.fetch(torch.tensor([0]))


def test_empty_batches_and_pickled_sources(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(files(tmp_path, [(4, 4)], Framing.make(3))))
    assert source.fetch(torch.zeros(0, dtype=torch.long))[0].shape == (0, 3, 3, 3)
    assert source.fetch(torch.tensor([0]))[0].shape == (1, 3, 3, 3)


def test_list_images_returns_only_images_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPEG", "notes.txt", ".hidden"):
        (tmp_path / name).touch()
    assert [path.name for path in list_images(tmp_path)] == ["a.JPEG", "b.png"]


def segmented(
    folder: Path, framing: Framing, map_size: tuple[int, int] = (8, 12)
) -> SegmentedFiles:
    """Return one image whose label map has the value 7 on the left and 99 on the right."""
    image = write_image(folder / "image.png", random_bytes(8, 12, 3))
    values = np.full(map_size, 7, dtype=np.uint8)
    values[:, map_size[1] // 2 :] = 99
    table = torch.full((256,), 255)
    table[7], table[99] = 0, 1
    return SegmentedFiles((image,), (write_image(folder / "map.png", values),), framing, table)


def test_label_maps_are_converted_to_classes(tmp_path: Path) -> None:
    images, maps = segmented(tmp_path, Framing()).fetch(torch.tensor([0, 0]))
    assert images.shape == (2, 3, 8, 12)
    assert maps.dtype == torch.long
    assert (maps[:, :, :6] == 0).all()
    assert (maps[:, :, 6:] == 1).all()


def test_segmented_images_can_be_gray(tmp_path: Path) -> None:
    """Gray is 0.299 red + 0.587 green + 0.114 blue within 1/255; label maps do not change."""
    colored = segmented(tmp_path, Framing())
    images, maps = replace(colored, is_gray=True).fetch(torch.tensor([0]))
    colors, same = colored.fetch(torch.tensor([0]))
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    expected = (colors * weights).sum(dim=1, keepdim=True)
    assert (images - expected).abs().max() <= 1 / 255
    assert maps.equal(same)


def test_label_maps_are_scaled_to_the_nearest_label(tmp_path: Path) -> None:
    images, maps = segmented(tmp_path, Framing.make((5, 6))).fetch(torch.tensor([0]))
    assert images.shape[2:] == maps.shape[1:] == (5, 6)
    assert set(maps.flatten().tolist()) == {0, 1}


def test_a_label_map_must_have_the_size_of_its_image(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"map\.png.*\(8, 10\), but the image has \(8, 12\)"):
        segmented(tmp_path, Framing(), map_size=(8, 10)).fetch(torch.tensor([0]))


def test_a_label_map_must_have_one_byte_per_pixel(tmp_path: Path) -> None:
    source = segmented(tmp_path, Framing())
    write_image(source.maps[0], random_bytes(8, 12, 3))
    with pytest.raises(DataFileError, match=r"map\.png: a label map has one byte per pixel"):
        source.fetch(torch.tensor([0]))


def test_an_empty_batch_of_segmented_images(tmp_path: Path) -> None:
    source = segmented(tmp_path, Framing.make(4))
    images, maps = source.fetch(torch.zeros(0, dtype=torch.long))
    assert (images.shape, maps.shape) == ((0, 3, 4, 4), (0, 4, 4))


@pytest.mark.parametrize("size", [(40, 60), (60, 40), (33, 33), (8, 90)])
@pytest.mark.parametrize("framing", [Framing.make((16, 20)), Framing.make(12, resize=16)])
def test_the_region_is_the_part_of_the_image_in_the_frame(
    size: tuple[int, int], framing: Framing
) -> None:
    """In ramps from 0 to 255, the value of a pixel shows its position in the image."""
    down, right = (np.linspace(0, 255, side) for side in size)
    for ramp in (np.tile(down[:, None], (1, size[1])), np.tile(right, (size[0], 1))):
        image = Image.fromarray(ramp.astype(np.uint8))
        region = np.asarray(framing.region(image), dtype=float)
        framed = np.asarray(framing.apply(image), dtype=float)
        # The edges can differ by one pixel of the coarser image.
        step = 255 / min(size)
        assert abs(region.mean() - framed.mean()) <= step
        assert abs(region.min() - framed.min()) <= 1.5 * step
        assert abs(region.max() - framed.max()) <= 1.5 * step


def test_without_a_size_the_region_is_the_whole_image() -> None:
    image = Image.fromarray(random_bytes(5, 7))
    assert Framing().region(image).size == (7, 5)
