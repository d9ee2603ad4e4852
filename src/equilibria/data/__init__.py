"""Data sets, batches, and augmentation."""

from equilibria.data.augment import (
    Augmentation,
    Chain,
    GaussianNoise,
    RandomShift,
    build_augmentation,
)
from equilibria.data.batches import (
    Batches,
    UnreadableImageWarning,
    read_into_memory,
    unreadable_images,
)
from equilibria.data.common_corruptions import CorruptedImages
from equilibria.data.download import DownloadError, download
from equilibria.data.file_sources import ImageFiles, SegmentedFiles
from equilibria.data.finding import find_images
from equilibria.data.image_files import (
    BRIGHTEST,
    has_several_frames,
    image_from_tensor,
    image_to_tensor,
    open_image,
    read_pixels,
    readable,
)
from equilibria.data.items import Items, from_dataset
from equilibria.data.readers import DataFileError, MissingDataError
from equilibria.data.reframing import reframed
from equilibria.data.registry import (
    DataSetCard,
    Download,
    data_root,
    dataset_card,
    list_datasets,
    load_dataset,
    register_dataset,
)
from equilibria.data.sets.arrays import CORRUPTIONS, load_digits
from equilibria.data.sets.omniglot import Episodes
from equilibria.data.sets.own import list_own_images
from equilibria.data.source import (
    DataSet,
    Selection,
    Source,
    Split,
    evenly_spread,
    fingerprint,
    known_labels,
    stratified_split,
)
from equilibria.data.survey import Survey, mean_and_deviation, survey
from equilibria.data.workers import usual_workers
from equilibria.images import AS_ON_DISK, Framing, Kind

__all__ = [
    "AS_ON_DISK",
    "BRIGHTEST",
    "CORRUPTIONS",
    "Augmentation",
    "Batches",
    "Chain",
    "CorruptedImages",
    "DataFileError",
    "DataSet",
    "DataSetCard",
    "Download",
    "DownloadError",
    "Episodes",
    "Framing",
    "GaussianNoise",
    "ImageFiles",
    "Items",
    "Kind",
    "MissingDataError",
    "RandomShift",
    "SegmentedFiles",
    "Selection",
    "Source",
    "Split",
    "Survey",
    "UnreadableImageWarning",
    "build_augmentation",
    "data_root",
    "dataset_card",
    "download",
    "evenly_spread",
    "find_images",
    "fingerprint",
    "from_dataset",
    "has_several_frames",
    "image_from_tensor",
    "image_to_tensor",
    "known_labels",
    "list_datasets",
    "list_own_images",
    "load_dataset",
    "load_digits",
    "mean_and_deviation",
    "open_image",
    "read_into_memory",
    "read_pixels",
    "readable",
    "reframed",
    "register_dataset",
    "stratified_split",
    "survey",
    "unreadable_images",
    "usual_workers",
]
