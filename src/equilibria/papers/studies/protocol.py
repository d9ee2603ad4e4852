"""Protocol by which studies train models: data, learning rate, end of training, and records.

- A seed determines the training and validation images, which are drawn from the training set, the
  initial weights and the order of the batches. All models of a seed train on the same images in the
  same order. The whole test set is evaluated once, at the end of a run.
- The learning rate of each model is chosen on the validation images of a separate seed. The search
  moves along a ladder of rates until both neighbors of the best rate are worse. These runs end at
  their first plateau.
- Training ends when the validation accuracy stops improving. After `patience` epochs without a
  better one, the learning rate falls to a fifth; after the last such plateau, the weights of the
  best epoch are tested. Runs that reach the limit of epochs first are counted.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.data import Batches, DataSet, Split
from equilibria.papers.studies.family import Contestant
from equilibria.papers.studies.fitting import (
    EVALUATION_BATCH,
    TASK,
    TRAINING_TOLERANCE,
    study_settings,
)
from equilibria.tasks import Classification
from equilibria.training import TrainingSettings, load_weights, save_weights
from equilibria.training.files import write_atomically
from equilibria.training.processes import denormals_as_zero
from equilibria.training.settings import build_optimizer

MAX_SIZE_DIFFERENCE = 0.10
"""Largest relative difference in parameters between models that are compared."""
LADDER_SEED = 1000
"""Seed of the images on which learning rates are chosen."""
EVALUATION_TOLERANCE = 1e-3
SEEDS_PER_RUN = 1000
"""Number of batch seeds reserved per run, more than its epochs, so that none repeats."""


@dataclass(frozen=True)
class Protocol:
    """Settings on which results depend, besides model and seed.

    Attributes:
        data: Name of the data set.
        side: Height and width of the images.
        training_images: Number of training images.
        validation_images: Number of validation images.
        batch_size: Number of images per batch.
        weight_decay: Weight decay.
        rates: Ladder of learning rates.
        first_rate: Index of the rate that is tried first, with its neighbors.
        patience: Number of epochs without improvement that make a plateau.
        decays: Number of plateaus after which the training ends.
        decay: Factor of the learning rate at a plateau.
        most_epochs: Largest number of epochs.
    """

    data: str = "fashion-mnist"
    side: int = 8
    training_images: int = 1000
    validation_images: int = 1000
    batch_size: int = 100
    weight_decay: float = 1e-2
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    first_rate: int = 2
    patience: int = 5
    decays: int = 2
    decay: float = 0.2
    most_epochs: int = 60


QUICK = Protocol()
FULL = Protocol(side=16, training_images=20_000, validation_images=5_000, decays=3)


@dataclass(frozen=True)
class Draw:
    """Training and validation images of one seed."""

    training: Split
    validation: Split


@dataclass(frozen=True)
class ContestantRun:
    """Record of one training.

    Attributes:
        name: Name of the model.
        seed: Seed of images, weights and batches.
        rate: Learning rate.
        parameters: Number of parameters.
        validation_accuracy: Best accuracy on the validation images.
        epochs: Number of epochs.
        flat: Whether the training ended at a plateau rather than at the limit of epochs.
        seconds: CPU seconds of training and testing.
        accuracy: Accuracy on the test images; None if the run only served to choose a rate.
        measures: Other measurements by name.
    """

    name: str
    seed: int
    rate: float
    parameters: int
    validation_accuracy: float
    epochs: int
    flat: bool
    seconds: float
    accuracy: float | None = None
    measures: dict[str, float] = field(default_factory=dict)


def small_images(images: Tensor, side: int) -> Tensor:
    """Pad images with black to a multiple of `side`, and average them down to it."""
    missing = -images.shape[-1] % side
    padded = F.pad(images, (missing // 2, missing - missing // 2) * 2)
    return F.avg_pool2d(padded, padded.shape[-1] // side)


def small_split(source: Any, indices: Tensor, side: int) -> Split:
    """Fetch images by index and reduce them to a side length."""
    images, labels = source.fetch(indices)
    return Split(small_images(images, side), labels)


def draw(data: DataSet, seed: int, protocol: Protocol) -> Draw:
    """Draw disjoint training and validation images."""
    generator = torch.Generator().manual_seed(seed)
    count = protocol.training_images
    order = torch.randperm(len(data.train), generator=generator)[
        : count + protocol.validation_images
    ]
    return Draw(
        small_split(data.train, order[:count], protocol.side),
        small_split(data.train, order[count:], protocol.side),
    )


def check_matched(sizes: Mapping[str, int]) -> None:
    """Check that the numbers of parameters differ by at most 10 %.

    Raises:
        ValueError: If they differ by more.
    """
    small, large = min(sizes.values()), max(sizes.values())
    if large > (1 + MAX_SIZE_DIFFERENCE) * small:
        listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise ValueError(
            f"compared models must have equal sizes within 10 %, got {listed} parameters"
        )


class Plateau:
    """Detector of plateaus in a validation curve.

    The curve is flat after `decays` plateaus, each of `patience` epochs without a better value.
    """

    def __init__(self, patience: int, decays: int) -> None:
        self.patience, self.decays = patience, decays
        self.best = -1.0
        self.waited = 0
        self.passed = 0

    @property
    def flat(self) -> bool:
        return self.passed >= self.decays

    def better(self, value: float) -> bool:
        """Add the value of an epoch; return whether it is the best so far."""
        if value > self.best:
            self.best, self.waited = value, 0
            return True
        self.waited += 1
        if self.waited == self.patience:
            self.waited = 0
            self.passed += 1
        return False


@dataclass(frozen=True)
class Trained:
    """Outcome of a training; the model has the weights of its best epoch."""

    validation_accuracy: float
    epochs: int
    flat: bool


@denormals_as_zero()
def train_until_flat(
    model: nn.Module,
    images: Draw,
    rate: float,
    seed: int,
    protocol: Protocol,
    on_epoch: Callable[[int, float], None],
) -> Trained:
    """Train a model in place; `on_epoch` receives each epoch and its validation accuracy."""
    settings = TrainingSettings(epochs=1, learning_rate=rate, weight_decay=protocol.weight_decay)
    optimizer = build_optimizer(model, settings)
    plateau = Plateau(protocol.patience, protocol.decays)
    best_weights: dict[str, Any] = {}
    epoch = 0
    while epoch < protocol.most_epochs and not plateau.flat:
        epoch += 1
        generator = torch.Generator().manual_seed(seed * SEEDS_PER_RUN + epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate * protocol.decay**plateau.passed
        _train_epoch(model, optimizer, images.training, protocol.batch_size, generator)
        accuracy = accuracy_on(images.validation, model, TRAINING_TOLERANCE)
        if plateau.better(accuracy):
            best_weights = copy.deepcopy(model.state_dict())
        on_epoch(epoch, accuracy)
    model.load_state_dict(best_weights)
    return Trained(plateau.best, epoch, plateau.flat)


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Split,
    batch_size: int,
    generator: torch.Generator,
) -> None:
    model.train()
    with study_settings(model, TRAINING_TOLERANCE):
        for batch, labels in Batches(images, batch_size, shuffle=generator):
            optimizer.zero_grad(set_to_none=True)
            TASK.training_step(model, batch, labels).loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def accuracy_on(images: Split, model: nn.Module, tolerance: float) -> float:
    """Return the accuracy on images."""
    with study_settings(model, tolerance):
        evaluation = Classification().evaluate(model, Batches(images, EVALUATION_BATCH))
    assert evaluation.accuracy is not None
    return evaluation.accuracy


Measure = Callable[[nn.Module, Split, int], Mapping[str, float]]
"""Function of a trained model, test images and the seed that returns numbers by name."""


class Runs:
    """Folder of training runs of a study; existing runs are not repeated."""

    def __init__(self, folder: Path, data: DataSet, protocol: Protocol) -> None:
        self.folder, self.data, self.protocol = folder, data, protocol
        folder.mkdir(parents=True, exist_ok=True)
        setting = folder / "protocol.json"
        text = json.dumps(asdict(protocol), indent=1) + "\n"
        if setting.exists() and setting.read_text(encoding="utf-8") != text:
            raise ValueError(f"{folder} contains runs of another protocol: choose another --output")
        write_atomically(setting, text.encode())
        self._test: Split | None = None

    @property
    def test(self) -> Split:
        if self._test is None:
            indices = torch.arange(len(self.data.test))
            self._test = small_split(self.data.test, indices, self.protocol.side)
        return self._test

    def rate(self, contestant: Contestant, follow: Callable[[str], Follow]) -> float:
        """Return the learning rate with the best validation accuracy on the ladder."""
        accuracies: dict[int, float] = {}
        best = self.protocol.first_rate
        while True:
            for rung in (best, best - 1, best + 1):
                if rung not in accuracies and 0 <= rung < len(self.protocol.rates):
                    rate = self.protocol.rates[rung]
                    run = self.run(contestant, LADDER_SEED, rate, follow, test=False)
                    accuracies[rung] = run.validation_accuracy
            top = max(accuracies, key=lambda rung: accuracies[rung])
            if top == best:
                return self.protocol.rates[best]
            best = top

    def run(
        self,
        contestant: Contestant,
        seed: int,
        rate: float,
        follow: Callable[[str], Follow],
        *,
        test: bool = True,
    ) -> ContestantRun:
        """Return the run of a model, a seed and a rate; train it if the folder does not have it."""
        path = self._path(contestant, seed, rate)
        if path.exists():
            return ContestantRun(**json.loads(path.read_text(encoding="utf-8")))
        started = time.process_time()
        model = self._build(contestant, seed)
        images = draw(self.data, seed, self.protocol)
        on_epoch = follow(f"{contestant.title}, rate {rate:g}, seed {seed}")
        protocol = self.protocol if test else replace(self.protocol, decays=1)
        trained = train_until_flat(model, images, rate, seed, protocol, on_epoch)
        accuracy = accuracy_on(self.test, model, EVALUATION_TOLERANCE) if test else None
        run = ContestantRun(
            name=contestant.name,
            seed=seed,
            rate=rate,
            parameters=eq.models.registry.parameter_count(model),
            **asdict(trained),
            accuracy=accuracy,
            seconds=time.process_time() - started,
        )
        if test:
            save_weights(model, path.with_suffix(".safetensors"))
        _save(path, run)
        return run

    def measured(
        self, contestant: Contestant, run: ContestantRun, name: str, measure: Measure
    ) -> ContestantRun:
        """Return a run with the numbers of a measure; compute them if they are missing."""
        if any(key.startswith(f"{name}.") for key in run.measures):
            return run
        path = self._path(contestant, run.seed, run.rate)
        model = self._build(contestant, run.seed)
        load_weights(model, path.with_suffix(".safetensors"))
        started = time.process_time()
        numbers = measure(model.eval(), self.test, run.seed)
        named = {f"{name}.{key}": value for key, value in numbers.items()}
        spent = {f"{name}.seconds": time.process_time() - started}
        run = ContestantRun(**{**asdict(run), "measures": {**run.measures, **named, **spent}})
        _save(path, run)
        return run

    def _path(self, contestant: Contestant, seed: int, rate: float) -> Path:
        return self.folder / f"{contestant.name}-rate{rate:g}-seed{seed}.json"

    def _build(self, contestant: Contestant, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        shape = self.test.images.shape
        return contestant.build(in_channels=shape[1], num_classes=self.data.num_classes)


Follow = Callable[[int, float], None]
"""Callback with an epoch and its validation accuracy."""


def _save(path: Path, run: ContestantRun) -> None:
    write_atomically(path, (json.dumps(asdict(run), indent=1) + "\n").encode())
