"""The handwritten digits that come with scikit-learn: 1797 images, 8×8, ten classes."""

from __future__ import annotations

import torch

from equilibria.data.dataset import DataSet
from equilibria.data.split import Split, stratified_split

TEST_SHARE = 0.25
SPLIT_SEED = 20220613
"""Fixed, so that every run is tested on the same images whatever its own seed."""

BRIGHTEST = 16.0
LICENCE = "CC BY 4.0"


def load_digits() -> DataSet:
    """The digits with pixels in [0, 1]; a quarter of every class is the test set."""
    from sklearn.datasets import load_digits as read_digits

    bunch = read_digits()
    everything = Split(
        images=torch.from_numpy(bunch.images).float().div(BRIGHTEST).unsqueeze(1),
        labels=torch.from_numpy(bunch.target).long(),
    )
    train, test = stratified_split(everything, TEST_SHARE, SPLIT_SEED)
    names = tuple(str(name) for name in bunch.target_names)
    return DataSet("digits", train, test, names, license=LICENCE)
