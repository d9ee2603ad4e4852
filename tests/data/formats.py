"""Writers of small data sets in the formats of the real ones."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_mnist(
    folder: Path, *, zipped: bool, samples: int = 20
) -> dict[str, np.ndarray[Any, Any]]:
    """Write four idx files; return the images by part."""
    folder.mkdir(parents=True)
    written = {}
    for part, count in (("train", samples), ("t10k", samples // 2)):
        images = random_bytes(count, 28, 28, seed=count)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for content_name, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            name = f"{part}-{content_name}-ubyte" + (".gz" if zipped else "")
            (folder / name).write_bytes(gzip.compress(content) if zipped else content)
        written[part] = images
    return written


def cifar_batch(samples: int, seed: int, **labels: list[int]) -> dict[str, Any]:
    return {
        "batch_label": "a batch",
        "data": random_bytes(samples, 3072, seed=seed),
        "filenames": [f"{number}.png" for number in range(samples)],
        **labels,
    }


def write_cifar10(folder: Path, samples: int = 10) -> list[np.ndarray[Any, Any]]:
    """Write the six batches as Python 2 pickles; return the pixels of each."""
    folder.mkdir(parents=True)
    pixels = []
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names):
        batch = cifar_batch(samples, seed, labels=[number % 10 for number in range(samples)])
        (folder / name).write_bytes(python2_pickle(batch))
        pixels.append(batch["data"].reshape(samples, 3, 32, 32))
    return pixels


def write_cifar100(folder: Path, samples: int = 10) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate(("train", "test")):
        batch = cifar_batch(
            samples,
            seed,
            fine_labels=[number * 7 % 100 for number in range(samples)],
            coarse_labels=[number * 3 % 20 for number in range(samples)],
        )
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {
        "fine_label_names": [f"fine{number}" for number in range(100)],
        "coarse_label_names": [f"coarse{number}" for number in range(20)],
    }
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))


def python2_pickle(batch: dict[str, Any]) -> bytes:
    """Return a batch as Python 2 pickled it, where text and pixels are `str`."""

    def text(value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else value
        return b"T" + struct.pack("<i", len(content)) + content

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def array(value: np.ndarray[Any, Any]) -> bytes:
        kind = b"cnumpy\ndtype\n" + text("u1") + number(0) + number(1) + b"\x87R("
        kind += number(3) + text("|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        empty += number(0) + b"\x85" + text("b") + b"\x87R"
        shape = b"(" + b"".join(map(number, value.shape)) + b"t"
        return empty + b"(" + number(1) + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    def encoded(value: Any) -> bytes:
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"](" + b"".join(map(encoded, value)) + b"e"
        return number(value) if isinstance(value, int) else text(value)

    items = b"".join(text(key) + encoded(value) for key, value in batch.items())
    return b"\x80\x02}(" + items + b"u."


def write_image(path: Path, pixels: np.ndarray[Any, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_class_folders(folder: Path, classes: list[str], images: int = 2) -> None:
    for part in ("train", "val"):
        for label, name in enumerate(classes):
            for number in range(images):
                flat = np.full((9, 12, 3), label % 256, dtype=np.uint8)
                write_image(folder / part / name / f"{number}.png", flat)
