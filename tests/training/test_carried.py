"""Samples that stay for several steps, and averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import Split
from equilibria.equilibrium.solving import Equilibrium
from equilibria.tasks import Outcome
from equilibria.training import EpochMetrics, TrainingSettings, fit
from equilibria.training.averaging import WeightAverage
from equilibria.training.carried import CarriedBatches
from equilibria.training.checkpoints import Checkpoints


def stream(size: int, count: int) -> Any:
    for index in range(count):
        indices = torch.arange(index * size, (index + 1) * size)
        yield indices, indices[:, None].float(), indices % 2


@pytest.mark.parametrize("start", ["cell", "random"])
def test_samples_stay_until_they_are_right_and_keep_their_state(start: str) -> None:
    layer = eq.EquilibriumLayer(lambda z, x: z / 2 + x, solving=eq.Solving(start=start))
    carried = CarriedBatches(3, [layer])
    right = {1: [1], 3: [0, 2]}  # places of right answers, by step
    ages = {0: 0, 1: 0, 2: 0}
    states: dict[int, Tensor] = {}
    waiting = 3
    present = [0, 1, 2]
    for step, (indices, images, targets) in enumerate(carried.batches(stream(3, 6), 6)):
        assert indices.tolist() == present
        assert images[:, 0].tolist() == present
        assert targets.tolist() == [index % 2 for index in present]
        given = carried.states[layer]
        if step == 0:
            assert given is None
        else:
            assert isinstance(given, Tensor)
            for row, index in enumerate(present):
                if index in states:
                    assert torch.equal(given[row], states[index])
                else:
                    assert bool(given[row].any()) == (start == "random")
        state = torch.randn(3, 5)
        correct = torch.zeros(3, dtype=torch.bool)
        correct[right.get(step, [])] = True
        equilibrium = Equilibrium(layer, (images,), state, eq.Context())
        carried.keep([equilibrium], Outcome({"loss": torch.zeros(3), "correct": correct}))
        states = dict(zip(present, state, strict=True))
        for row, index in enumerate(present):
            ages[index] += 1
            if correct[row] or ages[index] == 3:
                states.pop(index)
                ages[waiting] = 0
                present[row], waiting = waiting, waiting + 1


def puzzles() -> Split:
    torch.manual_seed(1)
    images = torch.rand(24, 3, 5, 5)
    return Split(images, (images[:, 0] > 0.5).long())


def run(
    folder: Path | None = None, stop_after: int | None = None, **changes: Any
) -> tuple[list[EpochMetrics], nn.Module]:
    torch.manual_seed(0)
    model = eq.create_model("conv-reasoner", channels=4, max_iterations=10)
    options = {"epochs": 4, "batch_size": 6, "max_iterations": 1, "segments": 3, "averaging": 0.9}

    def on_epoch(metrics: EpochMetrics) -> None:
        if metrics.epoch == stop_after:
            raise KeyboardInterrupt

    history = fit(
        model,
        eq.tasks.create_task("puzzle"),
        puzzles(),
        TrainingSettings(**{**options, **changes}),
        validation=puzzles(),
        checkpoints=None if folder is None else Checkpoints(folder),
        on_epoch=on_epoch,
    )
    return history, model


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
def test_a_resumed_run_with_segments_and_averaged_weights_gives_the_same_results(
    tmp_path: Path,
) -> None:
    whole, model = run()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_after=2)
    torch.manual_seed(99)
    resumed, again = run(tmp_path)
    assert whole == resumed
    for (name, first), second in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(first, second), name


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize(
    "changes", [{"segments": 1}, {"averaging": 0.0}, {"max_iterations": 3}], ids=str
)
def test_every_option_changes_the_training(changes: dict[str, Any]) -> None:
    first, second = run(epochs=2)[1], run(epochs=2, **changes)[1]
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_an_average_of_weights() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, 0.5)
    expected = model.weight.item()
    for step in range(1, 9):
        model.weight.data.fill_(step)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    with average.applied() as trained:
        assert abs(model.weight.item() - expected) < 1e-5
        assert trained[0] == 8
    assert model.weight == 8


def test_settings_that_contradict_each_other_raise() -> None:
    with pytest.raises(ValueError, match="segments=2 needs warm_start=False and accumulate=1"):
        TrainingSettings(epochs=1, segments=2, accumulate=2)
    with pytest.raises(ValueError, match=r"averaging must be in \[0, 1\)"):
        TrainingSettings(epochs=1, averaging=1.0)
