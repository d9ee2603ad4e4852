"""What the input pipeline costs beside the training step, and whether memory grows over epochs.

    python -m benchmarks.pipeline [RECIPE...] [--root DATA] [--epochs 6] [--samples 2000]
    python -m benchmarks.pipeline --decode

For each recipe: the CPU time of reading and augmenting a batch as a share of that of the whole
step, and the resident memory after every epoch. Reading from a disk happens in workers beside the
step, so its share of the clock is smaller still.

With `--decode`: images that come out of the pipeline with so many workers, a second of the clock
and of the processor, beside a bare loop of Pillow's decoding and scaling on one core, in the same
process and on the same files.
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
    """CPU time of a batch as the loop gets it, before the model sees it."""
    chance = torch.Generator().manual_seed(0)
    source = Batches(experiment.training, experiment.recipe.training.batch_size, shuffle=chance)
    started, done = time.process_time(), 0
    for images, labels in islice(source, batches):
        experiment.augmentation(images, labels, chance)
        done += 1
    return (time.process_time() - started) / done


def resident_mebibytes() -> float:
    """Of this process; Linux only."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    name: str, root: str | None, epochs: int, samples: int
) -> tuple[float, float, list[float]]:
    """Seconds of the pipeline and of the step, a batch, and the memory after each epoch."""
    overrides = [f"training.epochs={epochs}", "threads=1", "data.validation=0"]
    if root is not None:
        overrides.append(f"data.root={root}")
    experiment = Experiment.of(load_recipe(name, overrides))
    samples = min(samples, len(experiment.training))
    few = dataclasses.replace(
        experiment, training=Selection(experiment.training, torch.arange(samples))
    )
    batches = -(-samples // experiment.recipe.training.batch_size)
    pipeline_seconds(few, 2)
    reading = pipeline_seconds(few, batches)
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.opened(Path(folder), few.recipe.as_data())
        history = few.train(
            run, torch.device("cpu"), on_epoch=lambda _: memory.append(resident_mebibytes())
        )
    # The first epoch pays for what is allocated and compiled once.
    steps = sum(metrics.cpu_seconds for metrics in history[1:]) / (batches * (epochs - 1))
    return reading, steps, memory


def write_photos(folder: Path, count: int) -> tuple[Path, ...]:
    """JPEG files of 500×375, smooth with some grain."""
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
    """Of images: by the clock, and by the processor time of all processes that read them."""

    clock: float
    cpu: float


def cpu_seconds() -> float:
    """Of this process and of the workers it has now; Linux only."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def timed(read: Callable[[], int]) -> Rate:
    """Of `read`, which says how many images it has read."""
    started, cpu_started = time.perf_counter(), cpu_seconds()
    images = read()
    return Rate(images / (time.perf_counter() - started), images / (cpu_seconds() - cpu_started))


def bare_rate(paths: Sequence[Path], framing: Framing) -> Rate:
    """Of Pillow alone: opened, decoded, scaled, cut, an array."""

    def read() -> int:
        for path in paths:
            with Image.open(path) as image:
                np.asarray(framing.apply(image.convert("RGB")))
        return len(paths)

    return timed(read)


def rate(paths: tuple[Path, ...], framing: Framing, workers: int) -> Rate:
    """Of batches; a first pass starts the workers."""
    source = ImageFiles(paths, torch.zeros(len(paths)), framing, threads=1)
    batches = Batches(source, 32, shuffle=torch.Generator().manual_seed(0), workers=workers)

    def read() -> int:
        return sum(len(images) for images, _ in batches)

    read()
    return timed(read)


def decode_table(count: int, rounds: int = 3) -> Table:
    """Workers from none to one a core; the medians of some rounds, taken in turns."""
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
    columns = ("images a second", "÷ Pillow alone", "images a CPU second", "÷ Pillow alone")
    for column in ("", *columns):
        table.add_column(column)
    bare = _median(rows["Pillow alone"])
    for name, found in rows.items():
        median = _median(found)
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
    parser.add_argument("--decode", action="store_true", help="workers against a bare loop")
    options = parser.parse_args(arguments)
    if options.decode:
        Console(width=120).print(decode_table(min(options.samples, 640)))
        return
    table = Table(title="The input pipeline, a batch, CPU time of one thread", title_justify="left")
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
