"""The data sets that are known from the start: importing this registers them."""

from __future__ import annotations

from equilibria.data.digits import LICENCE, load_digits
from equilibria.data.registry import DataSetCard, register_dataset
from equilibria.data.sets import cifar, class_folders, episodes, faces, mnist, omniglot, streets
from equilibria.data.sets.cifar_c import CORRUPTIONS

__all__ = [
    "CORRUPTIONS",
    "cifar",
    "class_folders",
    "episodes",
    "faces",
    "mnist",
    "omniglot",
    "streets",
]

register_dataset(
    DataSetCard(
        "digits",
        summary="small handwritten digits",
        classes=10,
        size="1,347 + 450, 8×8 gray",
        license=LICENCE,
        address="https://archive.ics.uci.edu/dataset/80",
        obtain="It comes with scikit-learn.",
    ),
    load_digits,
)
