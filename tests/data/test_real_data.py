"""The real data sets in the folder EQUILIBRIA_DATA."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from equilibria.data import Batches, DataSet, Source, dataset_card, load_dataset
from equilibria.data.source import known_labels


def load(root: Path, name: str, **options: object) -> DataSet:
    if dataset_card(name).find(root) is None:
        pytest.skip(f"NO REAL DATA: {name} is not below {root}")
    return load_dataset(name, root, **options)


def fingerprint(source: Source) -> str:
    """Return a digest of the first and the last fifty images and their labels."""
    samples = len(source)
    images, labels = source.fetch(
        torch.cat([torch.arange(50), torch.arange(samples - 50, samples)])
    )
    content = (images * 255).round().byte().contiguous().numpy().tobytes()
    return hashlib.sha256(content + labels.contiguous().numpy().tobytes()).hexdigest()[:16]


def per_class(source: Source) -> list[int]:
    labels = known_labels(source)
    assert labels is not None
    return torch.bincount(labels).tolist()


CLASSIFICATION = {
    "cifar10": ((50_000, 10_000), (3, 32, 32), [5000] * 10, [1000] * 10),
    "fashion-mnist": ((60_000, 10_000), (1, 28, 28), [6000] * 10, [1000] * 10),
    "mnist": (
        (60_000, 10_000),
        (1, 28, 28),
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
}
FINGERPRINTS = {
    "cifar10": ("ab71b92dbd19d6fa", "ed1d95a4264617d8"),
    "fashion-mnist": ("194e7073047ee6d8", "64eb14601e246ad2"),
    "mnist": ("b474ee5d076d849d", "725b5e7182f082a9"),
    "camvid": ("cf0e68eceb1c398a", "4e8e172be084f13a"),
    "omniglot": ("9fb5bccee6b5b874", "fd849e62f511ff49"),
}


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_sizes_and_classes_match_the_publication(real_data: Path, name: str) -> None:
    data = load(real_data, name)
    sizes, shape, train, test = CLASSIFICATION[name]
    assert (len(data.train), len(data.test)) == sizes
    assert data.image_shape == shape
    assert per_class(data.train) == train
    assert per_class(data.test) == test


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_published_mean_and_standard_deviation_match_the_pixels(real_data: Path, name: str) -> None:
    data = load(real_data, name)
    total = squares = torch.zeros(data.channels, dtype=torch.double)
    for images, _ in Batches(data.train, 2000):
        values = images.double().transpose(0, 1).flatten(1)
        total, squares = total + values.sum(1), squares + values.square().sum(1)
    count = len(data.train) * data.image_shape[1] * data.image_shape[2]
    mean = total / count
    deviation = (squares / count - mean**2).sqrt()
    assert torch.allclose(mean, torch.tensor(data.mean).double(), atol=1e-4)
    assert torch.allclose(deviation, torch.tensor(data.std).double(), atol=1e-4)


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_pixels_and_labels_match_the_recorded_digests(real_data: Path, name: str) -> None:
    # Without scaling, which depends on the version of Pillow.
    data = load(real_data, name, **({"size": 105} if name == "omniglot" else {}))
    if name == "camvid" and data.image_shape != (3, 90, 120):
        pytest.skip("NO REAL DATA: the images of this CamVid have another size")
    if name == "omniglot" and data.num_classes != 242:
        pytest.skip("NO REAL DATA: this Omniglot is not the two small parts")
    assert (fingerprint(data.train), fingerprint(data.test)) == FINGERPRINTS[name]


def test_subsets_are_balanced(real_data: Path) -> None:
    data = load(real_data, "cifar10", train_samples=2000, test_samples=500)
    assert per_class(data.train) == [200] * 10
    assert per_class(data.test) == [50] * 10


def test_camvid(real_data: Path) -> None:
    data = load(real_data, "camvid")
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (367, 101, 233)
    counts = torch.zeros(256, dtype=torch.long)
    for _, maps in Batches(data.train, 64, workers=1):
        counts += torch.bincount(maps.flatten(), minlength=256)
    assert counts.nonzero().squeeze(1).tolist() == [*range(11), data.ignore_index]
    shares = counts[:11] / counts[:11].sum()
    # Roads, buildings and the sky cover most of a street scene; poles and cyclists little.
    assert float(shares[[0, 1, 3]].sum()) > 0.6
    assert float(shares[[2, 10]].sum()) < 0.05


def test_omniglot(real_data: Path) -> None:
    data = load(real_data, "omniglot")
    train, test = known_labels(data.train), known_labels(data.test)
    assert train is not None
    assert test is not None
    assert set(torch.bincount(torch.cat([train, test])).tolist()) == {20}
    assert not set(train.tolist()) & set(test.tolist())
    images, _ = data.train.fetch(torch.arange(100))
    assert 0.8 < float(images.mean()) < 1


def test_berkeley_photographs(real_data: Path) -> None:
    data, published = load(real_data, "bsd400"), load(real_data, "bsd68", gray=True)
    assert (len(data.train), len(data.test), data.image_shape) == (368, 32, (3, 321, 481))
    assert (len(published.train), len(published.test)) == (0, 68)
    assert published.image_shape == (1, 321, 481)
    # No test photograph is among the training photographs: corners of 9×9 pixels all differ.
    training = load(real_data, "bsd400", gray=True)
    corners = {
        bytes(images[0, :9, :9].mul(255).byte().flatten().tolist())
        for source in (training.train, training.test, published.test)
        for images, _ in (source.fetch(torch.tensor([i])) for i in range(len(source)))
    }
    assert len(corners) == 468
