"""Registry of data sets by name, with those of `sets/catalog.yaml`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from equilibria.data.common_corruptions import CorruptedImages
from equilibria.data.readers import MissingDataError
from equilibria.data.sets import arrays, folders, mazes, omniglot, own, sudoku
from equilibria.data.source import DataSet, choose_samples, select
from equilibria.images import Kind
from equilibria.registry import Registry

ROOT_VARIABLE = "EQUILIBRIA_DATA"


@dataclass(frozen=True)
class Download:
    """A file that can be downloaded without registration.

    Attributes:
        url: Address of the file.
        checksum: Algorithm and digest, such as "md5:0cc1…".
        target: Path of the file, or of the folder that the archive contains, below the folder of
            all data sets.
        unpack_into: Folder to unpack an archive in, below the folder of all data sets.

    Examples:
        >>> eq.data.dataset_card("mnist").downloads[0].target
        'MNIST/raw/train-images-idx3-ubyte.gz'
    """

    url: str
    checksum: str
    target: str
    unpack_into: str | None = None


@dataclass(frozen=True)
class DataSetCard:
    """Description of a data set: what it holds, and where its files are.

    Attributes:
        name: Name of the data set.
        summary: Content in a few words.
        kind: Kind of labels, such as "classification" or "segmentation".
        classes: Number of classes; 0 if there are none.
        size: Number of training and test images as published, and their size in pixels.
        license: License of the images.
        folders: Candidate folders below the folder of all data sets; the first complete one is
            used. Empty if the data set needs no files.
        contents: Glob patterns, each of which matches a file in a complete folder.
        obtain: How to get the data set, in a sentence.
        address: Web page of the publisher.
        downloads: Files to download; empty if registration is required.
        is_own: Whether the user names the folder of the images.

    Examples:
        >>> card = eq.data.dataset_card("digits")
        >>> card.kind, card.classes, card.folders
        ('classification', 10, ())
    """

    name: str
    summary: str = ""
    kind: Kind = "classification"
    classes: int = 0
    size: str = ""
    license: str = ""
    folders: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    obtain: str = ""
    address: str = ""
    downloads: tuple[Download, ...] = ()
    is_own: bool = False

    def find(self, root: Path) -> Path | None:
        """Return the folder with all files of the data set, or None.

        Args:
            root: Folder of all data sets.
        """
        folders = (root / name for name in self.folders)
        return next((f for f in folders if f.is_dir() and not self.missing(f)), None)

    def missing(self, folder: Path) -> list[str]:
        """Return the patterns of `contents` that match nothing.

        Args:
            folder: Folder of the data set.
        """
        return [pattern for pattern in self.contents if not any(folder.glob(pattern))]


Loader = Callable[..., DataSet]

_loaders: Registry[DataSet] = Registry("data set")
_cards: dict[str, DataSetCard] = {}


def register_dataset(
    card: DataSetCard, loader: Loader | None = None, *, replace: bool = False
) -> Any:
    """Make a data set available by name; without `loader`, return a decorator for it.

    Args:
        card: Description of the data set.
        loader: Function that returns the data set. Its arguments are the `folder` with the files,
            if the card names folders, and the user's options.
        replace: Whether a data set of the same name may be replaced.

    Raises:
        ValueError: If the name is taken and `replace` is false.

    Examples:
        >>> @eq.data.register_dataset(eq.data.DataSetCard("my-noise", "Noise", classes=2))
        ... def my_noise(count=4):
        ...     part = eq.data.Split(torch.rand(count, 1, 8, 8), torch.arange(count) % 2)
        ...     return eq.data.DataSet("my-noise", train=part, test=part, class_names=("a", "b"))
        >>> len(eq.data.load_dataset("my-noise", count=6).train)
        6
    """
    if loader is None:
        return partial(register_dataset, card, replace=replace)
    _loaders.register(card.name, loader, replace=replace)
    _cards[card.name] = card
    return loader


def list_datasets() -> list[str]:
    """Return the names of all data sets.

    Examples:
        >>> "cifar10" in eq.data.list_datasets()
        True
    """
    return _loaders.names()


def dataset_card(name: str) -> DataSetCard:
    """Return the description of a data set, without reading its files.

    Args:
        name: Name of the data set.

    Examples:
        >>> eq.data.dataset_card("mnist").classes
        10
    """
    _loaders.factory(name)
    return _cards[name]


def data_root(root: Path | str | None = None) -> Path:
    """Return the folder of all data sets.

    Args:
        root: The folder; by default the environment variable EQUILIBRIA_DATA.

    Raises:
        MissingDataError: If neither is given.

    Examples:
        >>> eq.data.data_root("my/data").name
        'data'
    """
    chosen = root if root is not None else os.environ.get(ROOT_VARIABLE)
    if not chosen:
        raise MissingDataError(
            "the folder of data sets is not set: pass root=FOLDER (--root FOLDER), or set the "
            f"environment variable {ROOT_VARIABLE}"
        )
    return Path(chosen).expanduser()


def load_dataset(
    name: str,
    root: Path | str | None = None,
    *,
    train_samples: int | None = None,
    test_samples: int | None = None,
    subset_seed: int = 0,
    corrupted: str | None = None,
    **options: Any,
) -> DataSet:
    """Load a data set by name.

    Args:
        name: Name of the data set.
        root: Folder of all data sets; by default the environment variable EQUILIBRIA_DATA.
        train_samples: Number of training samples, chosen at random and balanced over the classes;
            None uses all.
        test_samples: Number of test samples, chosen likewise.
        subset_seed: Seed of the choice of samples.
        corrupted: Common corruption of the test images: "fog:3" for severity 3, "fog" for all five.
        options: Options of the data set.

    Returns:
        The data set; image files are read when they are needed.

    Raises:
        MissingDataError: If files are missing; the message says how to get them.

    Examples:
        >>> digits = eq.data.load_dataset("digits", train_samples=50)
        >>> len(digits.train)
        50
    """
    card = dataset_card(name)
    if card.is_own:
        options["folder"] = _named_folder(name, root)
    elif card.folders:
        options["folder"] = _find_folder(card, root)
    data = _loaders.create(name, **options)
    train, test = (
        part if samples is None else select(part, choose_samples(part, samples, subset_seed))
        for part, samples in ((data.train, train_samples), (data.test, test_samples))
    )
    data = replace(data, license=data.license or card.license, train=train, test=test)
    return data if corrupted is None else _with_corruption(data, corrupted)


def _with_corruption(data: DataSet, corruption: str) -> DataSet:
    if data.kind == "episodes":
        raise ValueError(
            f"corrupted={corruption!r} is not supported for {data.name}, whose samples are "
            "episodes: remove the option"
        )
    test = CorruptedImages.of(data.test, str(corruption))
    return replace(data, name=f"{data.name} (corrupted here: {corruption})", test=test)


def _named_folder(name: str, root: Path | str | None) -> Path:
    if root is None:
        raise MissingDataError(f"{name!r} needs the folder of your images: set data.root")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise MissingDataError(
            f"there is no folder {folder}: set data.root to the folder of your images"
        )
    return folder


def _find_folder(card: DataSetCard, root: Path | str | None) -> Path:
    try:
        base = data_root(root)
        complete = card.find(base)
        if complete is not None:
            return complete
        reason = f"it is not below {base}" if base.is_dir() else f"{base} is not a folder"
        for folder in (base / name for name in card.folders):
            if folder.is_dir():
                reason = f"it is incomplete: {folder} lacks {', '.join(card.missing(folder))}"
                break
    except MissingDataError as error:
        reason = str(error)
    raise MissingDataError(
        f"cannot read {card.name!r}: {reason}. Expected a folder "
        f"{' or '.join(f'{folder}/' for folder in card.folders)} with "
        f"{', '.join(card.contents)}. {card.obtain}"
    )


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader that reads lists as tuples, because cards are immutable."""


_Loader.add_constructor(
    "tag:yaml.org,2002:seq", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
)


def _register_catalog() -> None:
    catalog = resources.files("equilibria.data.sets").joinpath("catalog.yaml")
    modules = (arrays, folders, omniglot, own, mazes, sudoku)
    readers = {name: value for module in modules for name, value in vars(module).items()}
    for name, entry in yaml.load(catalog.read_text(encoding="utf-8"), Loader=_Loader).items():
        read, constants = readers[entry.pop("reader")], entry.pop("constants", {})
        if "folders" in entry:
            kind = entry.get("kind", "classification")
            constants["about"] = {"name": name, "kind": kind, **entry.pop("about", {})}
        entry["downloads"] = tuple(Download(**item) for item in entry.get("downloads", ()))
        entry.setdefault("obtain", f"Get it with `equilibria datasets get {name}`.")
        register_dataset(DataSetCard(name, **entry), partial(read, **constants))


_register_catalog()
