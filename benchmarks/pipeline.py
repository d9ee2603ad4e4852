"""What the input pipeline costs beside the training step, and whether memory grows over epochs.

    python -m benchmarks.pipeline [RECIPE...] [--root DATA] [--epochs 6] [--samples 2000]

For each recipe: the CPU time of reading and augmenting a batch as a share of that of the whole
step, and the resident memory after every epoch. Reading from a disk happens in workers beside the
step, so its share of the clock is smaller still.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from equilibria.data import Batches, Selection
from equilibria.training import Experiment, RunFolder, load_recipe

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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--root", default=os.environ.get("EQUILIBRIA_DATA"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=2000)
    options = parser.parse_args(arguments)
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
