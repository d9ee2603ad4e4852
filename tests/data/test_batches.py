"""Batches: every sample once, in an order that follows the seed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from equilibria.data import (
    Batches,
    DataFileError,
    Framing,
    ImageFiles,
    Selection,
    Source,
    Split,
    UnreadableImageWarning,
)
from equilibria.data.batches import read_into_memory, unreadable_images
from equilibria.data.workers import usual_workers
from tests.data.formats import random_bytes


@pytest.fixture
def split() -> Split:
    return Split(torch.arange(10.0).reshape(10, 1, 1, 1), torch.arange(10))


def order(batches: Batches) -> list[int]:
    return torch.cat([labels for _, labels in batches]).tolist()


def shuffled(split: Split, seed: int) -> Batches:
    return Batches(split, 4, shuffle=torch.Generator().manual_seed(seed))


def test_every_sample_once(split: Split) -> None:
    batches = shuffled(split, 0)
    assert sorted(order(batches)) == list(range(10))
    assert len(batches) == len(list(batches)) == 3


def test_images_stay_with_their_labels(split: Split) -> None:
    for images, labels in shuffled(split, 0):
        assert torch.equal(images.flatten(), labels.float())


def test_order_is_new_each_time_and_follows_the_seed(split: Split) -> None:
    first, second = shuffled(split, 0), shuffled(split, 0)
    once, again = order(first), order(first)
    assert once != again
    assert [once, again] == [order(second), order(second)]
    assert once != order(shuffled(split, 1))


def test_without_shuffling_the_order_is_kept(split: Split) -> None:
    assert order(Batches(split, 3)) == list(range(10))


def test_size_must_be_positive(split: Split) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Batches(split, 0)


def test_the_last_batch_may_be_short(split: Split) -> None:
    batches = Batches(split, 4)
    assert len(batches) == 3
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert len(Batches(split, 5)) == 2


def run(source: Source, workers: int, epochs: int = 2) -> list[float]:
    """What two passes give, with noise drawn between the batches."""
    chance = torch.Generator().manual_seed(5)
    seen: list[float] = []
    batches = Batches(source, 3, shuffle=chance, workers=workers)
    for _ in range(epochs):
        for images, labels in batches:
            noise = torch.randn(images.shape, generator=chance)
            seen += [*(images + noise).flatten().tolist(), *labels.tolist()]
    return seen


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(split: Split, tmp_path: Path, workers: int) -> None:
    """Nor do they draw from a generator, this one or torch's own."""
    before = torch.get_rng_state()
    assert run(split, workers) == run(split, 0)
    source = image_files(tmp_path, 8)
    assert run(source, workers) == run(source, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_images_are_read_by_forked_workers_beside_the_threads_of_a_model(tmp_path: Path) -> None:
    """OpenMP's threads do not survive a fork: what a worker does must need none of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        large = torch.rand(600, 600)
        large @ large
        source = image_files(tmp_path, 8)
        assert run(source, 2) == run(source, 0)
    finally:
        torch.set_num_threads(threads)


class Watched:
    """A source that says which process read a sample, and fails at one of them."""

    def __init__(self, samples: int, error: Exception | None = None) -> None:
        self.samples = samples
        self.error = error

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self.error is not None and 3 in indices.tolist():
            raise self.error
        return torch.full((len(indices), 1, 1, 1), float(os.getpid())), indices


def test_workers_stay_for_all_passes_and_end_with_their_batches() -> None:
    batches = Batches(Watched(6), 2, workers=1)
    readers = {int(images[0]) for _ in range(2) for images, _ in batches}
    assert len(readers) == 1
    assert os.getpid() not in readers
    del batches
    assert not multiprocessing.active_children()


class Unusual(Exception):  # noqa: N818
    """One that cannot be sent to another process."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("sample 3 cannot be read"), OSError, "^sample 3 cannot be read$"),
        (DataFileError("a.png", "is damaged"), DataFileError, "^a.png: is damaged; replace it"),
        (Unusual(1, 2), RuntimeError, "^Unusual: 1 and 2$"),
    ],
)
def test_what_fails_ahead_fails_at_its_batch(
    error: Exception, kind: type[Exception], message: str
) -> None:
    batches = iter(Batches(Watched(6, error), 2, workers=1))
    assert next(batches)[1].tolist() == [0, 1]
    with pytest.raises(kind, match=message) as told:
        next(batches)
    # Not even while the error is at hand, which keeps all that its traceback names.
    assert told.value
    assert not multiprocessing.active_children()


def test_a_pass_that_is_left_early_does_not_disturb_the_next(split: Split) -> None:
    batches = Batches(split, 2, workers=2)
    for images, _ in batches:
        assert len(images) == 2
        break
    assert order(batches) == list(range(10))


def test_nothing_gives_no_batch() -> None:
    empty = Split(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long))
    assert list(Batches(empty, 4)) == []
    assert list(Batches(empty, 4, workers=1)) == []


def test_workers_must_not_be_negative(split: Split) -> None:
    with pytest.raises(ValueError, match="workers must not be negative"):
        Batches(split, 2, workers=-1)


def image_files(folder: Path, count: int, *, skips: bool = True) -> ImageFiles:
    paths = [folder / f"{i}.png" for i in range(count)]
    for path in paths:
        Image.fromarray(random_bytes(6, 7, 3)).save(path)
    labels = torch.arange(count)
    return ImageFiles(tuple(paths), labels, Framing.make(5), skips_unreadable=skips)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_is_left_out_and_told_once(tmp_path: Path, workers: int) -> None:
    source = image_files(tmp_path, 9)
    for bad in (1, 3, 4, 5):
        (tmp_path / f"{bad}.png").write_text("no image")
    part = Selection(source, torch.arange(1, 9))
    batches = Batches(part, 3, workers=workers)
    with pytest.warns(UnreadableImageWarning) as told:
        assert order(batches) == [2, 6, 7, 8]
    assert len(told) == 4
    assert "1.png: cannot be read as an image" in str(told[0].message)
    # Told once; and of a batch without a single image the indices are empty.
    found = [(indices.tolist(), len(images)) for indices, images, _ in batches.indexed()]
    assert found == [([1], 1), ([5], 1), ([6, 7], 2)]
    kept = read_into_memory(part, batch=3, workers=workers)
    assert kept.labels.tolist() == [2, 6, 7, 8]
    assert torch.equal(kept.fetch(torch.arange(4))[0], source.fetch(torch.tensor([2, 6, 7, 8]))[0])
    assert sorted(Path(path).stem for path in unreadable_images(part)) == ["1", "3", "4", "5"]


def test_many_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    source = image_files(tmp_path, 9)
    for bad in range(8):
        (tmp_path / f"{bad}.png").write_text("no image")
    with pytest.warns(UnreadableImageWarning) as told:
        assert [labels.tolist() for _, labels in Batches(source, 4)] == [[8]]
    assert len(told) == 5
    assert str(told[-1].message).endswith("others will be counted")
    assert len(unreadable_images(source)) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_published_set_an_unreadable_image_is_an_error(tmp_path: Path, workers: int) -> None:
    source = image_files(tmp_path, 3, skips=False)
    (tmp_path / "1.png").write_text("no image")
    with pytest.raises(DataFileError, match=r"1\.png"):
        list(Batches(source, 2, workers=workers))


def test_how_many_workers(split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert usual_workers(split, 1) == 0
    source = image_files(tmp_path, 20)
    found = [usual_workers(source, size, processes) for size, processes in ((1, 1), (1, 2), (1, 9))]
    assert found == [5, 2, 1]
    assert [usual_workers(source, size) for size in (5, 10, 11)] == [2, 1, 0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usual_workers(source, 1) == 8
    # A process of a pool, as `equilibria reproduce --workers` has them, may not start others.
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert usual_workers(source, 1) == 0


KILLED = """
import sys, time, torch
from pathlib import Path
from equilibria.data import Batches, Framing, ImageFiles
files = tuple(sorted(Path(sys.argv[1]).glob("*.png")))
batches = Batches(ImageFiles(files, torch.zeros(8), Framing.make(4)), 1, workers=2)
for _ in batches:
    import multiprocessing
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    image_files(tmp_path, 8)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workers = process.stdout.readline().split()
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their process"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
