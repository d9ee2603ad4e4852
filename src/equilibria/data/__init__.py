"""Data sets, batches, and augmentation."""

from equilibria.data.augment import Augmentation, GaussianNoise, RandomShift
from equilibria.data.batches import Batches, UnreadableImageWarning
from equilibria.data.download import DownloadError
from equilibria.data.file_sources import ImageFiles, SegmentedFiles
from equilibria.data.finding import find_images
from equilibria.data.image_files import image_from_tensor, image_to_tensor, read_pixels
from equilibria.data.items import from_dataset
from equilibria.data.readers import DataFileError, MissingDataError
from equilibria.data.registry import (
    DataSetCard,
    Download,
    data_root,
    dataset_card,
    list_datasets,
    load_dataset,
    register_dataset,
)
from equilibria.data.sets.arrays import load_digits
from equilibria.data.sets.omniglot import Episodes
from equilibria.data.source import DataSet, Selection, Source, Split, fingerprint, stratified_split
from equilibria.images import Framing

__all__ = [
    "Augmentation",
    "Batches",
    "DataFileError",
    "DataSet",
    "DataSetCard",
    "Download",
    "DownloadError",
    "Episodes",
    "Framing",
    "GaussianNoise",
    "ImageFiles",
    "MissingDataError",
    "RandomShift",
    "SegmentedFiles",
    "Selection",
    "Source",
    "Split",
    "UnreadableImageWarning",
    "data_root",
    "dataset_card",
    "find_images",
    "fingerprint",
    "from_dataset",
    "image_from_tensor",
    "image_to_tensor",
    "list_datasets",
    "load_dataset",
    "load_digits",
    "read_pixels",
    "register_dataset",
    "stratified_split",
]
