"""What a trained model costs: seconds of a batch forwards and backwards, and memory of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from equilibria.data import Batches
from equilibria.papers.clocks import clock_of
from equilibria.papers.memory import peak_bytes
from equilibria.training import Experiment
from equilibria.training.solves import TrainingSolves

REPEATS = 7
WARM_UP = 2


def efficiency(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """Of one training batch, the median of several repeats; processor time on a CPU.

    The tolerance is that of the evaluation for the forward pass without gradients, and that of the
    last epoch for the training step.
    """
    model, settings = experiment.model, experiment.recipe.training
    images, targets = next(iter(Batches(experiment.training, settings.batch_size)))
    images, targets = experiment.prepare(images).to(device), targets.to(device)
    solves = TrainingSolves(model, settings, samples=len(images))
    clock = clock_of(device)

    def forward() -> torch.Tensor:
        return experiment.task.training_step(model, images, targets).loss

    def inference() -> float:
        begin = clock()
        with torch.no_grad():
            model(images)
        return clock() - begin

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        begin = clock()
        loss = forward()
        middle = clock()
        loss.backward()  # type: ignore[no-untyped-call]
        return middle - begin, clock() - middle

    was_training = model.training
    try:
        solves.prepare_evaluation()
        model.eval()
        inference_seconds = _median(inference)
        solves.prepare_training(settings.epochs)
        model.train()
        steps = [step() for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        model.zero_grad(set_to_none=True)
        peak = peak_bytes(lambda: forward().backward(), device)  # type: ignore[no-untyped-call]
    finally:
        solves.prepare_evaluation()
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    total = statistics.median(there + back for there, back in steps)
    return {
        "inference_seconds": inference_seconds,
        "backward_seconds": statistics.median(back for _, back in steps),
        "images_per_second": len(images) / total,
        "peak_bytes": float(peak),
    }


def _median(run: Callable[[], float]) -> float:
    for _ in range(WARM_UP):
        run()
    return statistics.median(run() for _ in range(REPEATS))
