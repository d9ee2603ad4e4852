"""Loss trajectories of one recipe per family, in double precision with a fixed seed.

Unchanged mathematics gives unchanged losses: a refactoring must not change these numbers.
`python -m tests.golden.trajectories [CASE ...]` prints the difference between the code and the
records. `--record` records new numbers after a definition has changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equilibria.data import Batches, Source
from equilibria.training import fit, load_recipe
from equilibria.training.experiment import Experiment

RECORDED = Path(__file__).with_name("trajectories.json")
BATCHES = 3
"""Number of training batches in each of two epochs; two test batches are evaluated."""

SMALL = ("data.options.train_samples=48", "data.options.test_samples=32")
SMALLER = ("data.options.train_samples=32", "data.options.test_samples=32")
FOUR = ("training.batch_size=4",)
TWO = ("training.batch_size=2",)
OTHER_MODELS = (
    "popteq-small",
    "mondeq-small",
    "mondeq-multi-small",
    "node-small",
    "anode-small",
    "dnn-small",
    "resnet-small",
    "mdeq-small",
)
WARM = ("training.warm_start=true", "training.jacobian_weight=0.1", "training.final_tolerance=1e-4")
ONE_CONVOLUTION = ("model.options={pool: 4}",)
"""Stem of the recipe at the time of the recording."""
LATENTS_OF_32 = (
    "model.options={latent_dim: 32, channels: 32, width: 32, kernel_size: 3, downsample: 4}",
    "training.tolerance=null",
    "training.learning_rate=0.003",
)
"""Generator of the recipe at the time of the recording."""

DIGITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "opteq": ("digits-opteq", ONE_CONVOLUTION),
    "opteq-implicit": ("digits-opteq", (*ONE_CONVOLUTION, "training.gradient=implicit")),
    "opteq-warm-jacobian": ("digits-opteq", (*ONE_CONVOLUTION, *WARM)),
    "deep-opteq": ("digits-deep-opteq", ()),
    "geq": ("digits-geq", ()),
    "mopteq": ("digits-mopteq", ()),
    **{
        name: (
            "digits-opteq",
            (
                f"model={{name: {name}}}",
                "training.gradient=null",
                "training.learning_rate=0.003",
            ),
        )
        for name in OTHER_MODELS
    },
}
REAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "cifar-mopteq": ("cifar10-mopteq-quick", SMALL),
    "cifar-resnet": ("cifar10-resnet-quick", SMALL),
    "cifar-geq": ("cifar10-geq-quick", SMALL),
    "cifar-deep-opteq": ("cifar10-deep-opteq-quick", SMALL),
    "mnist-mdeq-clean": ("mnist-mdeq-clean", SMALL),
    "mnist-opteq-pgd": ("mnist-opteq-pgd", SMALL),
    "mnist-opteq-jiio": ("mnist-opteq-jiio", (*SMALL, "task.options.steps=20")),
    "camvid-deep-opteq": ("camvid-deep-opteq", FOUR),
    "camvid-fcn": ("camvid-fcn", FOUR),
    "generator": ("mnist-generator", (*SMALL, *LATENTS_OF_32)),
    "vae": ("mnist-vae", SMALL),
    "ae": ("mnist-ae", SMALL),
    "rae": ("mnist-rae", SMALL),
    "mdeq-vae": ("mnist-mdeq-vae", SMALL),
    "restore-jiio": ("mnist-restore-jiio-denoise", SMALLER),
    "restore-jiio-inpaint": ("mnist-restore-jiio-inpaint", SMALLER),
    "restore-deq": ("mnist-restore-deq-denoise", SMALL),
    "restore-ae": ("mnist-restore-ae-inpaint", SMALL),
    "restore-dncnn": ("cifar10-restore-dncnn-denoise", SMALL),
    "few-shot-jiio": ("omniglot-jiio", (*TWO, "model.options.shared=false")),
    "few-shot-shared": ("omniglot-jiio", TWO),
    "few-shot-maml": ("omniglot-maml", TWO),
    "few-shot-imaml": ("omniglot-imaml", TWO),
    "few-shot-reptile": ("omniglot-reptile", TWO),
}
CASES = {**DIGITS, **REAL}


@dataclass(frozen=True)
class FirstInDouble:
    """First samples of a source, in double precision."""

    source: Source
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, targets = self.source.fetch(indices)
        return images.double(), targets.double() if targets.is_floating_point() else targets

    @property
    def labels(self) -> Tensor | None:
        labels = getattr(self.source, "labels", None)
        return None if labels is None else labels[: len(self)]


def trajectory(case: str) -> dict[str, list[float]]:
    """Return the loss of every step, and loss and score on test images."""
    name, overrides = CASES[case]
    recipe = load_recipe(
        name, ["training.epochs=2", "training.batch_size=16", "threads=1", *overrides]
    )
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    # Initial weights need double precision, because those in single precision depend on the CPU.
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _trained(Experiment.of(recipe))
    finally:
        torch.set_default_dtype(default)
        torch.set_num_threads(threads)


def _trained(experiment: Experiment) -> dict[str, list[float]]:
    model, settings = experiment.model.double(), experiment.recipe.training
    losses: list[float] = []
    fit(
        model,
        experiment.task,
        FirstInDouble(experiment.training, BATCHES * settings.batch_size),
        settings,
        augmentation=experiment.augmentation,
        on_step=lambda progress: losses.append(float(progress.loss)),
    )
    model.eval()
    test = Batches(FirstInDouble(experiment.test, 2 * settings.batch_size), 16)
    with experiment.solving():
        result = experiment.task.evaluate(model, test)
    return {"losses": losses, "evaluation": [result.loss, result.score]}


def difference(measured: dict[str, list[float]], recorded: dict[str, list[float]]) -> float:
    """Return the largest relative difference of the numbers."""
    pairs = [(a, b) for key in recorded for a, b in zip(measured[key], recorded[key], strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences, and return 1 if one exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"cases to check: {', '.join(CASES)}; default: all"
    )
    parser.add_argument("--record", action="store_true", help="record new trajectories")
    options = parser.parse_args(arguments)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    worst = 0.0
    for case in options.cases or CASES:
        measured = trajectory(case)
        if options.record:
            recorded[case] = measured
            RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
        change = difference(measured, recorded[case])
        worst = max(worst, change)
        print(f"{case:24} {change:.1e}{'   DIFFERS' if change > 1e-6 else ''}", flush=True)
    return int(worst > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
