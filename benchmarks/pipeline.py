"""Measure the cost of the input pipeline and the growth of memory over epochs.

    python -m benchmarks.pipeline [RECIPE...] [--root DATA] [--epochs 6] [--samples 2000]
    python -m benchmarks.pipeline --decode

For each recipe, prints the CPU time of reading and augmenting a batch as a share of the whole step,
and the resident memory after every epoch. Workers read from disk while the step runs, so the share
of the wall-clock time is smaller.

With `--decode`, prints the images per second of wall-clock time and of CPU time for several numbers
of workers, compared with a loop of Pillow's decoding and scaling on one core, in the same process
and on the same files.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from equilibria.data import Batches, Framing, ImageFiles, Selection
from equilibria.training import RunFolder, load_recipe
from equilibria.training.experiment import Experiment

AIM = 0.05
RECIPES = ("digits-opteq", "cifar10-mopteq-quick", "camvid-deep-opteq")


def pipeline_seconds(experiment: Experiment, batches: int) -> float:
    """Return the CPU seconds per batch until it is ready for the model."""
    chance = torch.Generator().manual_seed(0)
    source = Batches(experiment.training, experiment.recipe.training.batch_size, shuffle=chance)
    started, done = time.process_time(), 0
    for images, labels in islice(source, batches):
        experiment.augmentation(images, labels, chance)
        done += 1
    return (time.process_time() - started) / done


def resident_mebibytes() -> float:
    """Return the resident memory of this process in MiB (Linux only)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    name: str, root: str | None, epochs: int, samples: int
) -> tuple[float, float, list[float]]:
    """Return the seconds of pipeline and step per batch, and the MiB after each epoch."""
    overrides = [f"training.epochs={epochs}", "threads=1", "data.validation=0"]
    if root is not None:
        overrides.append(f"data.root={root}")
    experiment = Experiment.of(load_recipe(name, overrides))
    samples = min(samples, len(experiment.training))
    reduced = dataclasses.replace(
        experiment, training=Selection(experiment.training, torch.arange(samples))
    )
    batches = -(-samples // experiment.recipe.training.batch_size)
    pipeline_seconds(reduced, 2)
    reading = pipeline_seconds(reduced, batches)
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.opened(Path(folder), reduced.recipe.as_data())
        history = reduced.train(
            run, torch.device("cpu"), on_epoch=lambda _: memory.append(resident_mebibytes())
        )
    # The first epoch includes one-time allocations and compilation.
    steps = sum(metrics.cpu_seconds for metrics in history[1:]) / (batches * (epochs - 1))
    return reading, steps, memory


def write_photos(folder: Path, count: int) -> tuple[Path, ...]:
    """Write JPEG files of 500×375 pixels with a smooth pattern and some grain."""
    chance = np.random.default_rng(0)
    paths = tuple(folder / f"{number:04}.jpg" for number in range(count))
    for path in paths:
        coarse = Image.fromarray(chance.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        grainy = smooth + chance.integers(-12, 13, smooth.shape, dtype=np.int16)
        Image.fromarray(grainy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return paths


@dataclasses.dataclass(frozen=True)
class Rate:
    """Images per second of wall-clock time and of CPU time of all reading processes."""

    clock: float
    cpu: float


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its workers (Linux only)."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def timed(read: Callable[[], int]) -> Rate:
    """Return the rate of `read`, which returns the number of images that it read."""
    started, cpu_started = time.perf_counter(), cpu_seconds()
    images = read()
    return Rate(images / (time.perf_counter() - started), images / (cpu_seconds() - cpu_started))


def bare_rate(paths: Sequence[Path], framing: Framing) -> Rate:
    """Return the rate of Pillow alone: open, decode, scale, crop, convert to an array."""

    def read() -> int:
        for path in paths:
            with Image.open(path) as image:
                np.asarray(framing.apply(image.convert("RGB")))
        return len(paths)

    return timed(read)


def rate(paths: tuple[Path, ...], framing: Framing, workers: int) -> Rate:
    """Return the rate of `Batches`. A first pass starts the workers."""
    source = ImageFiles(paths, torch.zeros(len(paths)), framing, threads=1)
    batches = Batches(source, 32, shuffle=torch.Generator().manual_seed(0), workers=workers)

    def read() -> int:
        return sum(len(images) for images, _ in batches)

    read()
    return timed(read)


def decode_table(count: int, rounds: int = 3) -> Table:
    """Return a table of median rates for zero workers up to one per core, measured in turns."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    framing = Framing.make(112, 128)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_photos(Path(folder), count)
        rows: dict[str, list[Rate]] = {}
        for _ in range(rounds):
            rows.setdefault("Pillow alone", []).append(bare_rate(paths, framing))
            for workers in range(cores + 1):
                rows.setdefault(f"{workers} workers", []).append(rate(paths, framing, workers))
    table = Table(
        title=f"JPEG 500×375 to 112×112, {cores} cores, batches of 32", title_justify="left"
    )
    columns = ("images per second", "÷ Pillow alone", "images per CPU second", "÷ Pillow alone")
    for column in ("", *columns):
        table.add_column(column)
    bare = _median(rows["Pillow alone"])
    for name, rates in rows.items():
        median = _median(rates)
        table.add_row(
            name,
            f"{median.clock:.0f}",
            f"{median.clock / bare.clock:.2f}",
            f"{median.cpu:.0f}",
            f"{median.cpu / bare.cpu:.2f}",
        )
    return table


def _median(rates: Sequence[Rate]) -> Rate:
    return Rate(statistics.median(r.clock for r in rates), statistics.median(r.cpu for r in rates))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--root", default=os.environ.get("EQUILIBRIA_DATA"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument(
        "--decode", action="store_true", help="compare workers with a loop of Pillow"
    )
    options = parser.parse_args(arguments)
    if options.decode:
        Console(width=120).print(decode_table(min(options.samples, 640)))
        return
    table = Table(title="Input pipeline: CPU time per batch, one thread", title_justify="left")
    for column in ("recipe", "pipeline", "whole step", "share", f"≤ {AIM:.0%}?", "resident MiB"):
        table.add_column(column)
    for name in options.recipes:
        root = None if name.startswith("digits") else options.root
        reading, step, memory = measure(name, root, options.epochs, options.samples)
        table.add_row(
            name,
            f"{reading * 1e3:.2f} ms",
            f"{step * 1e3:.1f} ms",
            f"{reading / step:.1%}",
            "yes" if reading / step <= AIM else "no",
            " ".join(f"{value:.0f}" for value in memory),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
