"""Loaders of all data sets, tested on small files in the same layout."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria.data import (
    Batches,
    DataFileError,
    DataSet,
    MissingDataError,
    Source,
    Split,
    load_dataset,
)
from equilibria.data.sets.arrays import CORRUPTIONS
from equilibria.data.sets.folders import load_photographs
from tests.data.formats import (
    cifar_batch,
    idx_bytes,
    random_bytes,
    write_cifar10,
    write_cifar100,
    write_class_folders,
    write_image,
    write_mnist,
)


def everything(source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_idx_files_are_loaded(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    written = write_mnist(tmp_path / folder / "raw", zipped=zipped)
    data = load_dataset(name, tmp_path)
    for source, part in ((data.train, "train"), (data.test, "t10k")):
        images, labels = everything(source)
        assert torch.equal((images * 255).round().byte()[:, 0], torch.from_numpy(written[part]))
        assert labels.tolist() == [number % 10 for number in range(len(written[part]))]
    assert data.image_shape == (1, 28, 28)
    assert data.num_classes == 10


def idx_file(root: Path, name: str) -> Path:
    return root / "MNIST" / "raw" / name


DAMAGED_IDX: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "empty": ("train-images-idx3-ubyte", lambda content: b"", "truncated"),
    "cut": ("train-images-idx3-ubyte", lambda content: content[:-100], "bytes follow|follow"),
    "longer": ("t10k-images-idx3-ubyte", lambda content: content + b"x", "follow"),
    "foreign": ("train-labels-idx1-ubyte", lambda content: b"<html>" + content, "not an idx file"),
    "labels": (
        "t10k-labels-idx1-ubyte",
        lambda content: idx_bytes(np.full(10, 11, dtype=np.uint8)),
        "label 11, but the largest is 9",
    ),
    "count": (
        "t10k-labels-idx1-ubyte",
        lambda content: idx_bytes(np.zeros(9, dtype=np.uint8)),
        "9 labels for the 10 images",
    ),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("fault", DAMAGED_IDX)
def test_the_error_names_a_damaged_idx_file(tmp_path: Path, fault: str, zipped: bool) -> None:
    name, damage, message = DAMAGED_IDX[fault]
    write_mnist(tmp_path / "MNIST" / "raw", zipped=zipped)
    path = idx_file(tmp_path, name + (".gz" if zipped else ""))
    content = path.read_bytes()
    damaged = damage(gzip.decompress(content) if zipped else content)
    path.write_bytes(gzip.compress(damaged) if zipped else damaged)
    with pytest.raises(DataFileError, match=f"{name}.*({message})"):
        load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("damage", [lambda content: content[:-50], lambda content: b"no gzip"])
def test_the_error_names_a_damaged_gzip_file(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", zipped=True)
    path = idx_file(tmp_path, "train-images-idx3-ubyte.gz")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataFileError, match=r"train-images-idx3-ubyte\.gz: cannot be unzipped"):
        load_dataset("mnist", tmp_path)


def test_pickled_cifar10_is_loaded(tmp_path: Path) -> None:
    pixels = write_cifar10(tmp_path / "cifar-10-batches-py")
    data = load_dataset("cifar10", tmp_path)
    assert isinstance(data.train, Split)
    assert data.train.images.dtype == torch.uint8
    assert torch.equal(data.train.images, torch.from_numpy(np.concatenate(pixels[:5])))
    assert torch.equal((everything(data.test)[0] * 255).byte(), torch.from_numpy(pixels[5]))
    assert data.class_names[0] == "airplane"
    assert data.license


def test_binary_cifar10_equals_pickled_cifar10(tmp_path: Path) -> None:
    pickled, binary = (
        tmp_path / "a" / "cifar-10-batches-py",
        tmp_path / "b" / "cifar-10-batches-bin",
    )
    write_cifar10(pickled)
    binary.mkdir(parents=True)
    for path in pickled.iterdir():
        batch = pickle.loads(path.read_bytes(), encoding="bytes")
        labels = np.array(batch[b"labels"], dtype=np.uint8)[:, None]
        rows = np.concatenate([labels, batch[b"data"]], axis=1)
        (binary / f"{path.name}.bin").write_bytes(rows.tobytes())
    first, second = load_dataset("cifar10", tmp_path / "a"), load_dataset("cifar10", tmp_path / "b")
    for part in ("train", "test"):
        expected, result = (everything(getattr(data, part)) for data in (first, second))
        assert all(map(torch.equal, expected, result))
    path = binary / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataFileError, match=r"data_batch_3\.bin: its size of .* is not a multiple"):
        load_dataset("cifar10", tmp_path / "b")


@pytest.mark.parametrize(
    "batch",
    [
        cifar_batch(3, 0, labels=[0, 1]),
        cifar_batch(3, 0, labels=[0, 1, 10]),
        cifar_batch(3, 0),
        {"data": random_bytes(3, 100), "labels": [0, 1, 2]},
        {"labels": [0, 1, 2]},
    ],
)
def test_the_error_names_an_invalid_batch_of_cifar(
    tmp_path: Path, batch: dict[str, object]
) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    (folder / "data_batch_4").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataFileError, match=r"data_batch_4: has no (list|array)"):
        load_dataset("cifar10", tmp_path)


def test_cifar100_has_two_kinds_of_labels(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "cifar-100-python")
    fine, coarse = (
        load_dataset("cifar100", tmp_path, labels=labels) for labels in ("fine", "coarse")
    )
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert everything(fine.train)[1].tolist() == [number * 7 % 100 for number in range(10)]
    assert everything(coarse.train)[1].tolist() == [number * 3 % 20 for number in range(10)]
    assert fine.class_names[3] == "fine3"
    with pytest.raises(ValueError, match=r"'fine'.*'coarse'"):
        load_dataset("cifar100", tmp_path, labels="both")


def test_binary_cifar100_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name in ("train", "test"):
        rows = random_bytes(4, 3074)
        rows[:, 0], rows[:, 1] = np.arange(4), np.arange(4) + 90
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"f{n}\n" for n in range(100)))
    (folder / "coarse_label_names.txt").write_text("".join(f"c{n}\n" for n in range(20)))
    assert everything(load_dataset("cifar100", tmp_path).test)[1].tolist() == [90, 91, 92, 93]
    coarse = load_dataset("cifar100", tmp_path, labels="coarse")
    assert everything(coarse.test)[1].tolist() == [0, 1, 2, 3]
    (folder / "fine_label_names.txt").write_text("only\n")
    with pytest.raises(DataFileError, match=r"fine_label_names\.txt: does not name the 100"):
        load_dataset("cifar100", tmp_path)


def test_cifar100_with_known_or_unseen_subclasses(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    # Group g has the classes g, g + 20, …, g + 80: the last is unseen.
    for name, copies in (("train", 2), ("test", 1)):
        rows = random_bytes(100 * copies, 3074)
        fine = np.tile(np.arange(100), copies)
        rows[:, 0], rows[:, 1] = fine % 20, fine
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    for kind, count in (("fine", 100), ("coarse", 20)):
        (folder / f"{kind}_label_names.txt").write_text("".join(f"c{n}\n" for n in range(count)))
    whole, known, unseen = (
        load_dataset("cifar100", tmp_path, labels="coarse", subclasses=which)
        for which in ("all", "known", "unseen")
    )
    assert (len(known.train), len(known.test)) == (160, 80)
    assert (len(unseen.train), len(unseen.test)) == (0, 60)
    assert known.class_names == unseen.class_names == whole.class_names
    assert everything(unseen.test)[1].bincount().tolist() == 20 * [3]
    assert torch.equal(everything(known.test)[0], everything(whole.test)[0][:80])
    first, second = everything(whole.train)[0], everything(whole.test)[0]
    expected = torch.cat([first[80:100], first[180:], second[80:]])
    assert torch.equal(everything(unseen.test)[0], expected)
    with pytest.raises(ValueError, match="set labels='coarse'"):
        load_dataset("cifar100", tmp_path, subclasses="known")
    with pytest.raises(ValueError, match="'all', 'known' or 'unseen'"):
        load_dataset("cifar100", tmp_path, labels="coarse", subclasses="some")


def write_cifar10_c(folder: Path) -> np.ndarray:
    folder.mkdir()
    images = random_bytes(20, 32, 32, 3)
    np.save(folder / "fog.npy", images)
    np.save(folder / "gaussian_noise.npy", images)
    np.save(folder / "labels.npy", np.tile(np.arange(4, dtype=np.uint8), 5))
    return images


def test_cifar10_c_is_loaded(tmp_path: Path) -> None:
    written = write_cifar10_c(tmp_path / "CIFAR-10-C")
    data = load_dataset("cifar10-c", tmp_path, corruption="fog", severity=3)
    images, labels = everything(data.test)
    expected = torch.from_numpy(written[8:12]).permute(0, 3, 1, 2)
    assert torch.equal((images * 255).round().byte(), expected)
    assert labels.tolist() == [0, 1, 2, 3]
    assert len(data.train) == 0
    assert data.image_shape == (3, 32, 32)
    assert len(load_dataset("cifar10-c", tmp_path, corruption="fog").test) == 20
    assert len(CORRUPTIONS) == 15


def test_invalid_corruptions_raise(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    write_cifar10_c(folder)
    with pytest.raises(ValueError, match=r"needs the option corruption.*Available: gaussian_noise"):
        load_dataset("cifar10-c", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'fog'"):
        load_dataset("cifar10-c", tmp_path, corruption="fogg")
    with pytest.raises(ValueError, match="from 1 to 5"):
        load_dataset("cifar10-c", tmp_path, corruption="fog", severity=0)
    with pytest.raises(MissingDataError, match=r"snow\.npy is missing"):
        load_dataset("cifar10-c", tmp_path, corruption="snow")


def test_npy_files_are_read_without_pickles(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    write_cifar10_c(folder)
    np.save(folder / "fog.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataFileError, match=r"fog\.npy: not a plain \.npy file"):
        load_dataset("cifar10-c", tmp_path, corruption="fog")
    np.save(folder / "fog.npy", np.zeros((20, 32, 32)))
    with pytest.raises(DataFileError, match=r"fog\.npy.*not images"):
        load_dataset("cifar10-c", tmp_path, corruption="fog")
    np.save(folder / "fog.npy", random_bytes(20, 32, 32, 3))
    cut = (folder / "fog.npy").read_bytes()[:-1]
    for content in (b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", cut):
        (folder / "fog.npy").write_bytes(content)
        with pytest.raises(DataFileError, match=r"fog\.npy"):
            load_dataset("cifar10-c", tmp_path, corruption="fog")


WNIDS = [
    "n01440764",
    "n02102040",
    "n02979186",
    "n03000684",
    "n03028079",
    "n03394916",
    "n03417042",
    "n03425413",
    "n03445777",
    "n03888257",
]


def test_class_folders_are_loaded(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "imagenette2-320", WNIDS)
    data = load_dataset("imagenette", tmp_path, size=8)
    images, labels = everything(data.train)
    assert labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)
    assert data.image_shape == (3, 8, 8)
    assert data.class_names[0] == "tench"
    assert data.class_names[9] == "parachute"


@pytest.mark.parametrize(("name", "classes"), [("imagenet100", 100), ("imagenet", 1000)])
def test_imagenet_is_loaded(tmp_path: Path, name: str, classes: int) -> None:
    names = [f"n{number:08}" for number in range(classes)]
    write_class_folders(tmp_path / name, names[:1], images=1)
    for part in ("train", "val"):
        first = tmp_path / name / part / names[0] / "0.png"
        for other in names[1:]:
            (tmp_path / name / part / other).mkdir()
            os.link(first, tmp_path / name / part / other / "0.png")
    data = load_dataset(name, tmp_path, size=4, resize=6)
    assert data.num_classes == len(data.train) == len(data.test) == classes
    assert data.test.fetch(torch.tensor([classes - 1]))[1].tolist() == [classes - 1]
    assert data.mean == (0.485, 0.456, 0.406)


def test_the_error_names_an_incomplete_class_folder(tmp_path: Path) -> None:
    folder = tmp_path / "imagenette2"
    write_class_folders(folder, WNIDS[:9])
    with pytest.raises(DataFileError, match="9 folders of classes, expected 10"):
        load_dataset("imagenette", tmp_path)
    (folder / "train" / WNIDS[9]).mkdir()
    with pytest.raises(DataFileError, match=f"{WNIDS[9]}: there are no images of this class"):
        load_dataset("imagenette", tmp_path)
    write_class_folders(folder, WNIDS)
    (folder / "val" / "n99999999").mkdir()
    with pytest.raises(
        DataFileError, match="n99999999: there is no such class in the training part"
    ):
        load_dataset("imagenette", tmp_path)


def write_camvid(folder: Path) -> None:
    for part, count in (("train", 4), ("val", 2), ("test", 3)):
        for number in range(count):
            write_image(folder / part / f"{number}.png", random_bytes(6, 8, 3, seed=number))
            values = random_bytes(6, 8, seed=number) % 12
            write_image(folder / f"{part}annot" / f"{number}.png", values)


def test_camvid_is_loaded(tmp_path: Path) -> None:
    write_camvid(tmp_path / "camvid")
    data = load_dataset("camvid", tmp_path)
    assert data.kind == "segmentation"
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 2, 3)
    images, maps = everything(data.train)
    values = torch.from_numpy(np.stack([random_bytes(6, 8, seed=n) % 12 for n in range(4)])).long()
    assert images.shape == (4, 3, 6, 8)
    assert torch.equal(maps, torch.where(values == 11, data.ignore_index, values))
    assert data.num_classes == 11
    loss = torch.nn.functional.cross_entropy(
        torch.zeros(4, 11, 6, 8), maps, ignore_index=data.ignore_index
    )
    assert torch.isclose(loss, torch.tensor(11.0).log())
    assert load_dataset("camvid", tmp_path, size=(4, 5)).image_shape == (3, 4, 5)
    assert len(load_dataset("camvid", tmp_path, train_samples=2).train) == 2


def write_photographs(folder: Path, count: int) -> list[np.ndarray]:
    """Write photographs, every second one in portrait format; return their landscape versions."""
    pictures = [random_bytes(5, 7, 3, seed=number) for number in range(count)]
    for number, picture in enumerate(pictures):
        turned = picture.transpose(1, 0, 2) if number % 2 else picture
        write_image(folder / f"{number:02}.png", np.ascontiguousarray(turned))
    return pictures


def test_photographs_of_both_orientations_are_loaded(tmp_path: Path) -> None:
    pictures = write_photographs(tmp_path / "train", 10)
    about = {"name": "few", "class_names": (), "kind": "unlabelled"}
    data = load_photographs(tmp_path, part="train", count=10, held_out=3, about=about)
    kept = [*everything(data.train)[0], *everything(data.test)[0]]
    assert (len(data.train), len(data.test)) == (7, 3)
    assert data.validation is data.test
    expected = [torch.from_numpy(p).permute(2, 0, 1) for p in pictures]
    places = [next(i for i, e in enumerate(expected) if e.equal((x * 255).byte())) for x in kept]
    assert sorted(places) == list(range(10))
    assert places[7:] == [3, 6, 9]  # evenly spread
    gray = load_photographs(tmp_path, gray=True, part="train", count=10, about=about)
    assert (len(gray.train), len(gray.test), gray.image_shape) == (0, 10, (1, 5, 7))


def test_the_error_names_what_is_wrong_with_photographs(tmp_path: Path) -> None:
    write_photographs(tmp_path / "bsd68", 3)
    with pytest.raises(DataFileError, match="has 3 photographs, expected 68"):
        load_dataset("bsd68", tmp_path)
    write_image(tmp_path / "bsd68" / "x.png", random_bytes(9, 9, 3))
    about = {"name": "few", "class_names": (), "kind": "unlabelled"}
    with pytest.raises(DataFileError, match=r"x\.png: has shape \(3, 9, 9\)"):
        load_photographs(tmp_path, part="bsd68", count=4, about=about)


def test_the_error_names_a_missing_label_map(tmp_path: Path) -> None:
    write_camvid(tmp_path / "CamVid")
    (tmp_path / "CamVid" / "valannot" / "1.png").unlink()
    with pytest.raises(MissingDataError, match=r"valannot.1\.png is missing"):
        load_dataset("camvid", tmp_path)


def test_cityscapes_is_loaded(tmp_path: Path) -> None:
    values = np.array([[7, 8, 0, 33], [26, 255, 4, 11]], dtype=np.uint8)
    for part, city in (("train", "bonn"), ("val", "ulm")):
        stem = f"{city}_000000_000019"
        root = tmp_path / "cityscapes"
        write_image(
            root / "leftImg8bit" / part / city / f"{stem}_leftImg8bit.png", random_bytes(2, 4, 3)
        )
        write_image(root / "gtFine" / part / city / f"{stem}_gtFine_labelIds.png", values)
    data = load_dataset("cityscapes", tmp_path)
    assert everything(data.test)[1].tolist() == [[[0, 1, 255, 18], [13, 255, 255, 2]]]
    assert data.num_classes == 19
    assert data.class_names[13] == "car"
    assert data.image_shape == (3, 2, 4)


def test_celeba_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "celeba"
    parts = [0, 0, 0, 1, 2, 2]
    lines = []
    for number, part in enumerate(parts, start=1):
        pixels = np.full((22, 18, 3), number, dtype=np.uint8)
        write_image(folder / "img_align_celeba" / f"{number:06}.png", pixels)
        lines.append(f"{number:06}.png {part}\n")
    listing = folder / "list_eval_partition.txt"
    listing.write_text("".join(lines))
    data = load_dataset("celeba", tmp_path, size=16)
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 2)
    images, labels = everything(data.test)
    assert (images[:, 0, 0, 0] * 255).round().tolist() == [5, 6]
    assert labels.tolist() == [0, 0]
    assert (data.kind, data.num_classes, data.image_shape) == ("unlabelled", 0, (3, 16, 16))
    for line in ("000001.png 3", "../secret.png 0", "000001.png"):
        listing.write_text(line + "\n")
        with pytest.raises(DataFileError, match=r"list_eval_partition\.txt: line 1"):
            load_dataset("celeba", tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_ffhq_is_loaded(tmp_path: Path, nested: bool) -> None:
    folder = tmp_path / "ffhq" / "thumbnails128x128"
    for number in (0, 1, 59_999, 60_000, 69_999):
        place = folder / f"{number // 1000 * 1000:05}" if nested else folder
        write_image(place / f"{number:05}.png", random_bytes(4, 4, 3, seed=number))
    data = load_dataset("ffhq", tmp_path, size=4)
    assert (len(data.train), len(data.test), data.kind) == (3, 2, "unlabelled")
    pixels = torch.from_numpy(random_bytes(4, 4, 3, seed=69_999)).permute(2, 0, 1)
    assert torch.equal((everything(data.test)[0][1] * 255).round().byte(), pixels)
    write_image(folder / "me.png", random_bytes(4, 4, 3))
    with pytest.raises(DataFileError, match=r"me\.png: its name is not a number"):
        load_dataset("ffhq", tmp_path)


def write_omniglot(folder: Path, parts: dict[str, list[str]], drawings: int = 20) -> None:
    for part, alphabets in parts.items():
        for alphabet in alphabets:
            for character in ("character01", "character02"):
                for number in range(1, drawings + 1):
                    pixels = random_bytes(10, 10, seed=number)
                    write_image(folder / part / alphabet / character / f"x_{number:02}.png", pixels)


def classes_of(source: Source) -> set[int]:
    return set(everything(source)[1].tolist())


def test_omniglot_is_loaded(tmp_path: Path) -> None:
    parts = {"images_background": ["Greek", "Latin"], "images_evaluation": ["Tengwar"]}
    write_omniglot(tmp_path / "omniglot-py", parts)
    data = load_dataset("omniglot", tmp_path, size=10)
    assert data.image_shape == (1, 10, 10)
    assert (len(data.train), len(data.test), data.num_classes) == (80, 40, 6)
    assert (classes_of(data.train), classes_of(data.test)) == ({0, 1, 2, 3}, {4, 5})
    assert data.class_names[4] == "Tengwar/character01"
    drawings = load_dataset("omniglot", tmp_path, parting="drawings", size=10)
    assert (len(drawings.train), len(drawings.test)) == (90, 30)
    assert classes_of(drawings.train) == classes_of(drawings.test) == set(range(6))
    with pytest.raises(ValueError, match="'characters' or 'drawings'"):
        load_dataset("omniglot", tmp_path, parting="alphabets")


def test_omniglot_with_known_or_unseen_characters(tmp_path: Path) -> None:
    for part, alphabet, characters in (("small1", "Greek", 11), ("small2", "Sanskrit", 5)):
        for character in range(1, characters + 1):
            for number in range(20):
                place = f"images_background_{part}/{alphabet}/character{character:02}"
                pixels = random_bytes(10, 10, seed=number)
                write_image(tmp_path / "omniglot-py" / place / f"x_{number:02}.png", pixels)
    options = {"parting": "drawings", "labels": "alphabets", "size": 10}
    known, unseen = (
        load_dataset("omniglot", tmp_path, **options, subclasses=which)
        for which in ("known", "unseen")
    )
    assert known.class_names == unseen.class_names == ("Greek", "Sanskrit")
    assert known.train.labels.bincount().tolist() == [9 * 15, 4 * 15]
    assert known.test.labels.bincount().tolist() == [9 * 5, 4 * 5]
    assert len(unseen.train) == 0
    unseen_characters = {Path(path).parent.name for path in unseen.test.paths}
    assert unseen_characters == {"character05", "character10"}
    assert unseen.test.labels.bincount().tolist() == [2 * 20, 20]
    with pytest.raises(ValueError, match="set labels='alphabets'"):
        load_dataset("omniglot", tmp_path, subclasses="known")


def test_omniglot_with_alphabets_as_labels(tmp_path: Path) -> None:
    parts = {"images_background": ["Greek", "Latin"], "images_evaluation": ["Tengwar"]}
    write_omniglot(tmp_path / "omniglot-py", parts)
    data = load_dataset(
        "omniglot",
        tmp_path,
        parting="drawings",
        labels="alphabets",
        alphabets=["Tengwar", "Greek"],
        size=10,
    )
    assert data.class_names == ("Tengwar", "Greek")
    assert (len(data.train), len(data.test)) == (60, 20)
    assert everything(data.train)[1].tolist() == [0] * 30 + [1] * 30
    with pytest.raises(
        ValueError, match=r"no alphabet 'Elvish' in .* Available: Greek, Latin, Tengwar"
    ):
        load_dataset("omniglot", tmp_path, alphabets=["Elvish"])
    with pytest.raises(ValueError, match="'characters' or 'alphabets'"):
        load_dataset("omniglot", tmp_path, labels="drawings")


def test_alphabets_in_both_small_parts_are_for_training(tmp_path: Path) -> None:
    parts = {
        "images_background_small1": ["Greek", "Latin"],
        "images_background_small2": ["Latin", "Tagalog"],
    }
    write_omniglot(tmp_path / "omniglot-py", parts, drawings=3)
    data = load_dataset("omniglot", tmp_path)
    assert len(set(data.class_names)) == data.num_classes == 6
    tested = {data.class_names[label] for label in classes_of(data.test)}
    assert tested == {"Tagalog/character01", "Tagalog/character02"}


def test_batches_work_for_files_and_data_in_memory(tmp_path: Path) -> None:
    """Batches of both kinds of sources have the same shapes and dtypes."""
    write_cifar10(tmp_path / "cifar-10-batches-py")
    write_class_folders(tmp_path / "imagenette", WNIDS)
    sets: list[DataSet] = [
        load_dataset("cifar10", tmp_path),
        load_dataset("imagenette", tmp_path, size=32),
    ]
    for data in sets:
        generator = torch.Generator().manual_seed(0)
        for images, labels in Batches(data.train, 7, shuffle=generator, workers=1):
            assert images.shape == (len(labels), *data.image_shape)
            assert images.dtype == torch.float32
            assert labels.dtype == torch.long


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("imagenette", {"size": 8}),
        ("imagenette", {"size": 5, "resize": 7}),
        ("camvid", {}),
        ("camvid", {"size": [4, 7]}),
        ("omniglot", {"size": 9}),
    ],
)
def test_read_pixels_equals_fetch_for_the_same_file(
    tmp_path: Path, name: str, options: dict[str, object], subset: bool
) -> None:
    """Scaling, cropping and colors are the same."""
    if name == "imagenette":
        write_class_folders(tmp_path / name, WNIDS)
        first = tmp_path / name / "val" / WNIDS[0] / "0.png"
        write_image(first, random_bytes(17, 13, 3))
    elif name == "camvid":
        write_camvid(tmp_path / name)
        first = tmp_path / name / "test" / "0.png"
    else:
        parts = {"images_background": ["Greek"], "images_evaluation": ["Tengwar"]}
        write_omniglot(tmp_path / "omniglot-py", parts, drawings=1)
        folder = tmp_path / "omniglot-py" / "images_evaluation" / "Tengwar" / "character01"
        (first,) = folder.iterdir()
    if subset:
        samples = len(load_dataset(name, tmp_path, **options).train)
        options = {**options, "train_samples": samples - 1}
    data = load_dataset(name, tmp_path, **options)
    assert torch.equal(data.read_pixels(first), data.test.fetch(torch.tensor([0]))[0][0])


def test_read_pixels_gives_new_images_the_size_of_data_in_memory(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py")
    data = load_dataset("cifar10", tmp_path)
    assert isinstance(data.test, Split)
    own = data.test.images[3].permute(1, 2, 0).numpy()
    same = write_image(tmp_path / "same.png", own)
    assert torch.equal(data.read_pixels(same), data.test.fetch(torch.tensor([3]))[0][0])
    # A wider image of the same height is cropped, not stretched.
    wide = np.concatenate([random_bytes(32, 10, 3), own, random_bytes(32, 10, 3)], axis=1)
    path = write_image(tmp_path / "wide.png", wide)
    assert torch.equal(data.read_pixels(path), data.read_pixels(same))
