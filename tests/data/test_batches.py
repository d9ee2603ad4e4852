"""Batches: order, workers, and images that cannot be read."""

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


def test_every_sample_is_visited_once(split: Split) -> None:
    batches = shuffled(split, 0)
    assert sorted(order(batches)) == list(range(10))
    assert len(batches) == len(list(batches)) == 3


def test_images_stay_with_their_labels(split: Split) -> None:
    for images, labels in shuffled(split, 0):
        assert torch.equal(images.flatten(), labels.float())


def test_every_iteration_has_a_new_order_that_depends_on_the_seed(split: Split) -> None:
    first, second = shuffled(split, 0), shuffled(split, 0)
    once, again = order(first), order(first)
    assert once != again
    assert [once, again] == [order(second), order(second)]
    assert once != order(shuffled(split, 1))


def test_without_shuffle_the_order_is_kept(split: Split) -> None:
    assert order(Batches(split, 3)) == list(range(10))


def test_size_must_be_positive(split: Split) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Batches(split, 0)


def test_the_last_batch_may_be_smaller(split: Split) -> None:
    batches = Batches(split, 4)
    assert len(batches) == 3
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert len(Batches(split, 5)) == 2


def run(source: Source, workers: int, epochs: int = 2) -> list[float]:
    """Return the values of several iterations, with noise drawn between the batches."""
    generator = torch.Generator().manual_seed(5)
    values: list[float] = []
    batches = Batches(source, 3, shuffle=generator, workers=workers)
    for _ in range(epochs):
        for images, labels in batches:
            noise = torch.randn(images.shape, generator=generator)
            values += [*(images + noise).flatten().tolist(), *labels.tolist()]
    return values


@pytest.mark.parametrize("workers", [1, 2])
def test_results_do_not_depend_on_the_workers(split: Split, tmp_path: Path, workers: int) -> None:
    """Workers do not advance the given generator or the global one."""
    before = torch.get_rng_state()
    assert run(split, workers) == run(split, 0)
    source = image_files(tmp_path, 8)
    assert run(source, workers) == run(source, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_forked_workers_read_images_while_a_model_uses_threads(tmp_path: Path) -> None:
    """A fork does not copy OpenMP's threads, so that workers must not need them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        large = torch.rand(600, 600)
        large @ large
        source = image_files(tmp_path, 8)
        assert run(source, 2) == run(source, 0)
    finally:
        torch.set_num_threads(threads)


class ProcessIds:
    """Source whose images are the id of the reading process; sample 3 may raise an error."""

    def __init__(self, samples: int, error: Exception | None = None) -> None:
        self.samples = samples
        self.error = error

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if self.error is not None and 3 in indices.tolist():
            raise self.error
        return torch.full((len(indices), 1, 1, 1), float(os.getpid())), indices


def test_workers_live_as_long_as_their_batches() -> None:
    batches = Batches(ProcessIds(6), 2, workers=1)
    readers = {int(images[0]) for _ in range(2) for images, _ in batches}
    assert len(readers) == 1
    assert os.getpid() not in readers
    del batches
    assert not multiprocessing.active_children()


class Unpicklable(Exception):  # noqa: N818
    """Exception that cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("sample 3 cannot be read"), OSError, "^sample 3 cannot be read$"),
        (DataFileError("a.png", "is damaged"), DataFileError, "^a.png: is damaged; replace it"),
        (Unpicklable(1, 2), RuntimeError, "^Unpicklable: 1 and 2$"),
    ],
)
def test_errors_of_workers_are_raised_at_their_batch(
    error: Exception, kind: type[Exception], message: str
) -> None:
    batches = iter(Batches(ProcessIds(6, error), 2, workers=1))
    assert next(batches)[1].tolist() == [0, 1]
    with pytest.raises(kind, match=message) as caught:
        next(batches)
    # Workers end although the traceback of the error keeps the frames of the iteration.
    assert caught.value
    assert not multiprocessing.active_children()


def test_an_iteration_can_be_abandoned(split: Split) -> None:
    batches = Batches(split, 2, workers=2)
    for images, _ in batches:
        assert len(images) == 2
        break
    assert order(batches) == list(range(10))


def test_an_empty_source_has_no_batches() -> None:
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
def test_unreadable_images_are_skipped_with_one_warning_each(tmp_path: Path, workers: int) -> None:
    source = image_files(tmp_path, 9)
    for bad in (1, 3, 4, 5):
        (tmp_path / f"{bad}.png").write_text("no image")
    part = Selection(source, torch.arange(1, 9))
    batches = Batches(part, 3, workers=workers)
    with pytest.warns(UnreadableImageWarning) as warned:
        assert order(batches) == [2, 6, 7, 8]
    assert len(warned) == 4
    assert "1.png: cannot be read as an image" in str(warned[0].message)
    # The second iteration does not warn again. Batches without images are dropped.
    result = [(indices.tolist(), len(images)) for indices, images, _ in batches.indexed()]
    assert result == [([1], 1), ([5], 1), ([6, 7], 2)]
    kept = read_into_memory(part, batch=3, workers=workers)
    assert kept.labels.tolist() == [2, 6, 7, 8]
    assert torch.equal(kept.fetch(torch.arange(4))[0], source.fetch(torch.tensor([2, 6, 7, 8]))[0])
    assert sorted(Path(path).stem for path in unreadable_images(part)) == ["1", "3", "4", "5"]


def test_further_unreadable_images_are_only_counted(tmp_path: Path) -> None:
    source = image_files(tmp_path, 9)
    for bad in range(8):
        (tmp_path / f"{bad}.png").write_text("no image")
    with pytest.warns(UnreadableImageWarning) as warned:
        assert [labels.tolist() for _, labels in Batches(source, 4)] == [[8]]
    assert len(warned) == 5
    assert str(warned[-1].message).endswith("further ones are only counted")
    assert len(unreadable_images(source)) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_raise_unless_the_source_skips_them(tmp_path: Path, workers: int) -> None:
    source = image_files(tmp_path, 3, skips=False)
    (tmp_path / "1.png").write_text("no image")
    with pytest.raises(DataFileError, match=r"1\.png"):
        list(Batches(source, 2, workers=workers))


def test_default_number_of_workers(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert usual_workers(split, 1) == 0
    source = image_files(tmp_path, 20)
    result = [
        usual_workers(source, size, processes) for size, processes in ((1, 1), (1, 2), (1, 9))
    ]
    assert result == [5, 2, 1]
    assert [usual_workers(source, size) for size in (5, 10, 11)] == [2, 1, 0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usual_workers(source, 1) == 8
    # Daemonic processes, as in `equilibria reproduce --workers`, may not start others.
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
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc")
def test_workers_end_if_their_parent_is_killed(tmp_path: Path) -> None:
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
