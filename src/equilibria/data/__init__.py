"""Data sets, batches, and augmentation."""

from equilibria.data.augment import (
    Augmentation,
    Chain,
    Cutout,
    GaussianNoise,
    Normalize,
    RandomCrop,
    RandomFlip,
    RandomShift,
)
from equilibria.data.augmentation_names import (
    build_augmentation,
    build_paired_augmentation,
    list_augmentations,
    list_paired_augmentations,
)
from equilibria.data.batches import Batches
from equilibria.data.catalog import CORRUPTIONS
from equilibria.data.dataset import DataSet
from equilibria.data.digits import load_digits
from equilibria.data.download import download
from equilibria.data.episodes import Episodes
from equilibria.data.errors import DataFileError, DownloadError, MissingDataError
from equilibria.data.image_files import Framing, ImageFiles, SegmentedFiles
from equilibria.data.normalized import Normalized
from equilibria.data.paired import (
    ImagesOnly,
    PairedAugmentation,
    PairedChain,
    RandomPairFlip,
    RandomScaleCrop,
)
from equilibria.data.randaugment import RandAugment
from equilibria.data.registry import (
    DataSetCard,
    Download,
    data_root,
    dataset_card,
    list_datasets,
    load_dataset,
    register_dataset,
)
from equilibria.data.source import Selection, Source, evenly_spread
from equilibria.data.split import Split, read_into_memory, stratified_split

__all__ = [
    "CORRUPTIONS",
    "Augmentation",
    "Batches",
    "Chain",
    "Cutout",
    "DataFileError",
    "DataSet",
    "DataSetCard",
    "Download",
    "DownloadError",
    "Episodes",
    "Framing",
    "GaussianNoise",
    "ImageFiles",
    "ImagesOnly",
    "MissingDataError",
    "Normalize",
    "Normalized",
    "PairedAugmentation",
    "PairedChain",
    "RandAugment",
    "RandomCrop",
    "RandomFlip",
    "RandomPairFlip",
    "RandomScaleCrop",
    "RandomShift",
    "SegmentedFiles",
    "Selection",
    "Source",
    "Split",
    "build_augmentation",
    "build_paired_augmentation",
    "data_root",
    "dataset_card",
    "download",
    "evenly_spread",
    "list_augmentations",
    "list_datasets",
    "list_paired_augmentations",
    "load_dataset",
    "load_digits",
    "read_into_memory",
    "register_dataset",
    "stratified_split",
]
