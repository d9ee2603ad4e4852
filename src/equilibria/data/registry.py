"""Data sets by name; those of `sets/catalog.yaml` are known from the start."""

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
from equilibria.data.sets import arrays, folders, omniglot, own
from equilibria.data.source import DataSet, choose_samples, select
from equilibria.images import Kind
from equilibria.registry import Registry

ROOT_VARIABLE = "EQUILIBRIA_DATA"


@dataclass(frozen=True)
class Download:
    """A file that its publisher offers to everyone.

    Examples:
        >>> eq.data.dataset_card("mnist").downloads[0].target
        'MNIST/raw/train-images-idx3-ubyte.gz'
    """

    url: str
    checksum: str
    """The algorithm and the digest, as in "md5:0cc1…"."""
    target: str
    """Below the root: the file, or the folder that the archive brings along."""
    unpack_into: str | None = None
    """Below the root: the folder to unpack an archive in."""


@dataclass(frozen=True)
class DataSetCard:
    """What is known of a data set before it is read.

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
    """Images to train on and to test on, as published, and their pixels."""
    license: str = ""
    folders: tuple[str, ...] = ()
    """Where it is looked for below the root, first found first taken; none: it needs no files."""
    contents: tuple[str, ...] = ()
    """Patterns, each of which matches a file in that folder."""
    obtain: str = ""
    """How to get it, in a sentence."""
    address: str = ""
    """Where its publisher describes it."""
    downloads: tuple[Download, ...] = ()
    is_own: bool = False
    """Whether the root itself is its folder, which therefore has to be named."""

    def find(self, root: Path) -> Path | None:
        """The folder below `root` that holds everything, if there is one."""
        folders = (root / name for name in self.folders)
        return next((f for f in folders if f.is_dir() and not self.missing(f)), None)

    def missing(self, folder: Path) -> list[str]:
        """The patterns that nothing in `folder` matches."""
        return [pattern for pattern in self.contents if not any(folder.glob(pattern))]


Loader = Callable[..., DataSet]

_loaders: Registry[DataSet] = Registry("data set")
_cards: dict[str, DataSetCard] = {}


def register_dataset(
    card: DataSetCard, loader: Loader | None = None, *, replace: bool = False
) -> Any:
    """Make a data set available by name; without a loader this is a decorator of one.

    `loader` is called with the folder that the card's `find` gives (without it, if the card names
    no folders) and the user's options.

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
    """The names that `load_dataset` knows.

    Examples:
        >>> "cifar10" in eq.data.list_datasets()
        True
    """
    return _loaders.names()


def dataset_card(name: str) -> DataSetCard:
    """What is known of a data set before it is read.

    Examples:
        >>> eq.data.dataset_card("mnist").classes
        10
    """
    _loaders.factory(name)
    return _cards[name]


def data_root(root: Path | str | None = None) -> Path:
    """The folder of all data sets: `root`, or else what EQUILIBRIA_DATA names.

    Examples:
        >>> eq.data.data_root("my/data").name
        'data'
    """
    chosen = root if root is not None else os.environ.get(ROOT_VARIABLE)
    if not chosen:
        raise MissingDataError(
            "no folder of data sets is known: pass root=FOLDER (--root FOLDER), or set the "
            f"environment variable {ROOT_VARIABLE} to it"
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
    """A data set by name, from the files below `root` (or below what EQUILIBRIA_DATA names).

    `train_samples` and `test_samples` choose so many samples of each part, the same ones for the
    same `subset_seed`, and as many of each class as there are to be had. `corrupted` damages the
    test images by one of nineteen common corruptions: "fog:3" in severity 3, "fog" in all five.

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


def _with_corruption(data: DataSet, words: str) -> DataSet:
    if data.kind == "episodes":
        raise ValueError(f"{data.name} holds episodes, which are not corrupted")
    damaged = CorruptedImages.of(data.test, str(words))
    return replace(data, name=f"{data.name} (corrupted here: {words})", test=damaged)


def _named_folder(name: str, root: Path | str | None) -> Path:
    if root is None:
        raise MissingDataError(f"{name!r} needs the folder of your images: name it in data.root")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise MissingDataError(f"there is no folder {folder}: data.root names that of your images")
    return folder


def _find_folder(card: DataSetCard, root: Path | str | None) -> Path:
    try:
        base = data_root(root)
        found = card.find(base)
        if found is not None:
            return found
        why = f"it is not below {base}" if base.is_dir() else f"{base} is not a folder"
        for folder in (base / name for name in card.folders):
            if folder.is_dir():
                why = f"it is not complete: {folder} lacks {', '.join(card.missing(folder))}"
                break
    except MissingDataError as error:
        why = str(error)
    raise MissingDataError(
        f"cannot read {card.name!r}: {why}. It is looked for in "
        f"{' or '.join(f'{folder}/' for folder in card.folders)} with "
        f"{', '.join(card.contents)}. {card.obtain}"
    )


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads lists as tuples, which nobody can change."""


_Loader.add_constructor(
    "tag:yaml.org,2002:seq", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
)


def _register_catalog() -> None:
    catalog = resources.files("equilibria.data.sets").joinpath("catalog.yaml")
    readers = {**vars(arrays), **vars(folders), **vars(omniglot), **vars(own)}
    for name, entry in yaml.load(catalog.read_text(encoding="utf-8"), Loader=_Loader).items():
        read, constants = readers[entry.pop("reader")], entry.pop("constants", {})
        if "folders" in entry:
            kind = entry.get("kind", "classification")
            constants["about"] = {"name": name, "kind": kind, **entry.pop("about", {})}
        entry["downloads"] = tuple(Download(**item) for item in entry.get("downloads", ()))
        entry.setdefault("obtain", f"Get it with `equilibria datasets get {name}`.")
        register_dataset(DataSetCard(name, **entry), partial(read, **constants))


_register_catalog()
