"""Data sets, batches, and augmentation."""

from equilibria.data.augment import Augmentation, Chain, GaussianNoise, RandomShift
from equilibria.data.batches import Batches
from equilibria.data.digits import DataSet, load_digits
from equilibria.data.split import Split, stratified_split

__all__ = [
    "Augmentation",
    "Batches",
    "Chain",
    "DataSet",
    "GaussianNoise",
    "RandomShift",
    "Split",
    "load_digits",
    "stratified_split",
]
