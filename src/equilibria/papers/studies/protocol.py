"""How a claim is decided: the images of a seed, training until nothing improves, what is kept.

Every model of a study is trained by one protocol.

- A seed draws images to train on and to validate on from the training images, the initial weights
  and the order of the batches: all models of a seed see the same images in the same order. The
  test is all test images, and is looked at once, at the end of a run.
- The learning rate is chosen for each model on the validation images of a seed that is not one of
  the study's: up and down a ladder, until both neighbors of the best rate are worse. These runs end
  at their first plateau.
- A training ends when its validation curve is flat. Whenever `patience` epochs bring no better
  validation accuracy, the learning rate falls to a fifth; the second time the training is over, and
  the weights of the best epoch are tested. A run that meets the limit of epochs before that is not
  flat, and is counted.
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
from equilibria.papers.studies.fitting import EVALUATION_BATCH, TASK, TRAINING_TOLERANCE, studied
from equilibria.tasks import Classification
from equilibria.training import TrainingSettings, load_weights, save_weights
from equilibria.training.files import write_atomically
from equilibria.training.processes import denormals_as_zero
from equilibria.training.settings import build_optimizer

MATCHED = 0.10
"""How far the sizes of models that are compared may be apart."""
LADDER_SEED = 1000
"""Of the images on which learning rates are chosen."""
EVALUATION_TOLERANCE = 1e-3
DRAWN_EPOCHS = 1000
"""More than any run has: seeds of epochs do not meet."""


@dataclass(frozen=True)
class Protocol:
    """All that a figure depends on, besides model and seed."""

    data: str = "fashion-mnist"
    side: int = 8
    training_images: int = 1000
    validation_images: int = 1000
    batch_size: int = 100
    weight_decay: float = 1e-2
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    first_rate: int = 2
    """The rung of the ladder that is tried first, with its neighbors."""
    patience: int = 5
    decays: int = 2
    decay: float = 0.2
    most_epochs: int = 60


QUICK = Protocol()
FULL = Protocol(side=16, training_images=20_000, validation_images=5_000, decays=3)


@dataclass(frozen=True)
class Draw:
    """The images of a seed."""

    training: Split
    validation: Split


@dataclass(frozen=True)
class ContestantRun:
    """One model, trained once."""

    name: str
    seed: int
    rate: float
    parameters: int
    validation_accuracy: float
    epochs: int
    flat: bool
    """Whether it ended because nothing improved, not because its epochs were over."""
    seconds: float
    """CPU time of training and testing."""
    accuracy: float | None = None
    """On the test images; None where a rate was tried."""
    measures: dict[str, float] = field(default_factory=dict)


def small_images(images: Tensor, side: int) -> Tensor:
    """Framed by black to a multiple of `side`, and averaged down to it."""
    short = -images.shape[-1] % side
    framed = F.pad(images, (short // 2, short - short // 2) * 2)
    return F.avg_pool2d(framed, framed.shape[-1] // side)


def taken(source: Any, indices: Tensor, side: int) -> Split:
    """Fetch images by index, reduced to a side length."""
    images, labels = source.fetch(indices)
    return Split(small_images(images, side), labels)


def draw(data: DataSet, seed: int, protocol: Protocol) -> Draw:
    """The images of a seed, no image in both parts."""
    chance = torch.Generator().manual_seed(seed)
    count = protocol.training_images
    order = torch.randperm(len(data.train), generator=chance)[: count + protocol.validation_images]
    return Draw(
        taken(data.train, order[:count], protocol.side),
        taken(data.train, order[count:], protocol.side),
    )


def check_matched(sizes: Mapping[str, int]) -> None:
    """An error unless all models have the same number of parameters within 10 %."""
    small, large = min(sizes.values()), max(sizes.values())
    if large > (1 + MATCHED) * small:
        listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise ValueError(f"the models are compared at unlike sizes, more than 10 % apart: {listed}")


class Plateau:
    """When a validation curve is flat: `decays` times `patience` epochs without a better value."""

    def __init__(self, patience: int, decays: int) -> None:
        self.patience, self.decays = patience, decays
        self.best = -1.0
        self.waited = 0
        self.passed = 0

    @property
    def flat(self) -> bool:
        return self.passed >= self.decays

    def better(self, value: float) -> bool:
        """Take in the value of an epoch: whether it is the best so far."""
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
    """How a training went; the model holds the weights of its best epoch."""

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
    """Train `model` in place; `on_epoch` is told the epoch and its validation accuracy."""
    settings = TrainingSettings(epochs=1, learning_rate=rate, weight_decay=protocol.weight_decay)
    optimizer = build_optimizer(model, settings)
    plateau = Plateau(protocol.patience, protocol.decays)
    kept: dict[str, Any] = {}
    epoch = 0
    while epoch < protocol.most_epochs and not plateau.flat:
        epoch += 1
        chance = torch.Generator().manual_seed(seed * DRAWN_EPOCHS + epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate * protocol.decay**plateau.passed
        _train_epoch(model, optimizer, images.training, protocol.batch_size, chance)
        accuracy = accuracy_on(images.validation, model, TRAINING_TOLERANCE)
        if plateau.better(accuracy):
            kept = copy.deepcopy(model.state_dict())
        on_epoch(epoch, accuracy)
    model.load_state_dict(kept)
    return Trained(plateau.best, epoch, plateau.flat)


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Split,
    batch_size: int,
    chance: torch.Generator,
) -> None:
    model.train()
    with studied(model, TRAINING_TOLERANCE):
        for batch, labels in Batches(images, batch_size, shuffle=chance):
            optimizer.zero_grad(set_to_none=True)
            TASK.training_step(model, batch, labels).loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def accuracy_on(images: Split, model: nn.Module, tolerance: float) -> float:
    """The accuracy on these images."""
    with studied(model, tolerance):
        found = Classification().evaluate(model, Batches(images, EVALUATION_BATCH))
    assert found.accuracy is not None
    return found.accuracy


Measure = Callable[[nn.Module, Split, int], Mapping[str, float]]
"""From a trained model, test images and the seed to numbers by name."""


class Runs:
    """A folder of runs: what it holds is not done again."""

    def __init__(self, folder: Path, data: DataSet, protocol: Protocol) -> None:
        self.folder, self.data, self.protocol = folder, data, protocol
        folder.mkdir(parents=True, exist_ok=True)
        setting = folder / "protocol.json"
        text = json.dumps(asdict(protocol), indent=1) + "\n"
        if setting.exists() and setting.read_text(encoding="utf-8") != text:
            raise ValueError(f"{folder} holds runs of another protocol: choose another --output")
        write_atomically(setting, text.encode())
        self._test: Split | None = None

    @property
    def test(self) -> Split:
        if self._test is None:
            everything = torch.arange(len(self.data.test))
            self._test = taken(self.data.test, everything, self.protocol.side)
        return self._test

    def rate(self, contestant: Contestant, follow: Callable[[str], Follow]) -> float:
        """The learning rate that validates best, tried with both neighbors."""
        found: dict[int, float] = {}
        best = self.protocol.first_rate
        while True:
            for rung in (best, best - 1, best + 1):
                if rung not in found and 0 <= rung < len(self.protocol.rates):
                    rate = self.protocol.rates[rung]
                    run = self.run(contestant, LADDER_SEED, rate, follow, test=False)
                    found[rung] = run.validation_accuracy
            top = max(found, key=lambda rung: found[rung])
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
        """The run of a model, a seed and a rate, from the folder or made now."""
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
        _keep(path, run)
        return run

    def measured(
        self, contestant: Contestant, run: ContestantRun, name: str, measure: Measure
    ) -> ContestantRun:
        """The run with the numbers that a measure gives, taken of its kept weights if not there."""
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
        _keep(path, run)
        return run

    def _path(self, contestant: Contestant, seed: int, rate: float) -> Path:
        return self.folder / f"{contestant.name}-rate{rate:g}-seed{seed}.json"

    def _build(self, contestant: Contestant, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        shape = self.test.images.shape
        return contestant.build(in_channels=shape[1], num_classes=self.data.num_classes)


Follow = Callable[[int, float], None]


def _keep(path: Path, run: ContestantRun) -> None:
    write_atomically(path, (json.dumps(asdict(run), indent=1) + "\n").encode())
