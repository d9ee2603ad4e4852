"""An interrupted run resumes with the results of an uninterrupted one."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import equilibria as eq
from equilibria.data import Batches, RandomShift, Split, load_digits
from equilibria.tasks import Classification
from equilibria.training import CheckpointWarning, EpochMetrics, TrainingSettings, fit, load_weights
from equilibria.training.checkpoints import Checkpoints
from equilibria.training.files import sealed_json, unsealed

MODELS: dict[str, dict[str, Any]] = {
    "opteq-small": {"channels": 8, "width": 8},
    "mopteq-small": {"channels": 6, "widths": (6, 8), "scales": (1, 2)},
    "geq-small": {"channels": 8},
    "deep-opteq-small": {"channels": 8, "widths": (8, 12)},
}


def few_digits() -> tuple[Split, Split]:
    everything = load_digits().train
    return everything.subset(torch.arange(60)), everything.subset(torch.arange(60, 90))


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    return eq.create_model(name, in_channels=1, pool=4, **MODELS[name])


def run(
    name: str, folder: Path | None, stop_after: int | None = None, **changes: object
) -> tuple[list[EpochMetrics], nn.Module]:
    settings = TrainingSettings(
        **{"epochs": 4, "batch_size": 20, "learning_rate": 1e-2, "tolerance": 1e-2, **changes}
    )
    training, validation = few_digits()
    model = fresh(name)

    def on_epoch(metrics: EpochMetrics) -> None:
        if metrics.epoch == stop_after:
            raise KeyboardInterrupt

    history = fit(
        model,
        Classification(),
        training,
        settings,
        augmentation=RandomShift(1),
        validation=validation,
        checkpoints=None if folder is None else Checkpoints(folder),
        on_epoch=on_epoch,
    )
    return history, model


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_gives_the_same_results(name: str, optimizer: str, tmp_path: Path) -> None:
    options = {"optimizer": optimizer, "accumulate": 2}
    whole, model = run(name, None, **options)
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path, stop_after=2, **options)
    torch.manual_seed(99)  # The global generator does not matter.
    resumed, again = run(name, tmp_path, **options)
    assert resumed == whole
    assert_same_weights(model, again)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    whole, model = run("opteq-small", tmp_path)
    resumed, again = run("opteq-small", tmp_path)
    assert resumed == whole
    assert_same_weights(model, again)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run("opteq-small", tmp_path)
    kept = [path.name for path in sorted(tmp_path.iterdir())]
    assert kept == ["best.safetensors", "epoch-00003", "epoch-00004"]


def test_the_weights_of_the_best_epoch_are_kept(tmp_path: Path) -> None:
    history, model = run("opteq-small", tmp_path, learning_rate=0.3)
    scores = [metrics.validation_score for metrics in history]
    assert scores == [metrics.validation_accuracy for metrics in history]
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    with safe_open(Checkpoints(tmp_path).best, "pt") as file:
        stored = file.metadata()
    assert (stored["epoch"], stored["score"]) == (str(best + 1), repr(scores[best]))
    load_weights(model, Checkpoints(tmp_path).best)
    _, validation = few_digits()
    assert Classification().evaluate(model, Batches(validation, 30)).accuracy == scores[best]


@pytest.mark.parametrize(
    "changes",
    [
        {"warm_start": True},
        {"jacobian_weight": 0.5},
        {"jacobian_weight": 0.5, "jacobian_at": "iterate", "jacobian_vectors": 2},
    ],
)
@pytest.mark.parametrize("name", ["opteq-small", "mopteq-small"])
def test_warm_starts_and_jacobian_penalties_resume(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    whole, model = run(name, None, **changes)
    plain, _ = run(name, None)
    assert whole != plain
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path, stop_after=2, **changes)
    resumed, again = run(name, tmp_path, **changes)
    assert resumed == whole
    assert_same_weights(model, again)


@pytest.mark.parametrize("file", ["state.pt", "model.safetensors"])
def test_a_truncated_checkpoint_is_skipped(file: str, tmp_path: Path) -> None:
    whole, model = run("opteq-small", None)
    with pytest.raises(KeyboardInterrupt):
        run("opteq-small", tmp_path, stop_after=3)
    damaged = tmp_path / "epoch-00003" / file
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.warns(CheckpointWarning, match="epoch-00003.*trying the one before"):
        resumed, again = run("opteq-small", tmp_path)
    assert resumed == whole
    assert_same_weights(model, again)


def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".epoch-00001.123.tmp").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpoints(tmp_path).load(accept) is None


def accept(*_: object) -> None:
    """Accept any checkpoint."""


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def update_manifest(folder: Path) -> None:
    """Rewrite the manifest of a checkpoint for its present files."""
    manifest = unsealed((folder / "manifest.json").read_text(), "manifest.json")
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(sealed_json(manifest))


def test_a_checkpoint_without_a_manifest_is_skipped(tmp_path: Path) -> None:
    whole, model = run("opteq-small", None)
    with pytest.raises(KeyboardInterrupt):
        run("opteq-small", tmp_path, stop_after=3)
    (tmp_path / "epoch-00003" / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning, match="epoch-00003.*trying the one before"):
        resumed, again = run("opteq-small", tmp_path)
    assert resumed == whole
    assert_same_weights(model, again)


@pytest.mark.parametrize("file", ["state.pt", "model.safetensors", "manifest.json"])
def test_a_checkpoint_with_a_flipped_bit_is_skipped(file: str, tmp_path: Path) -> None:
    whole, model = run("opteq-small", None)
    with pytest.raises(KeyboardInterrupt):
        run("opteq-small", tmp_path, stop_after=3)
    flip_a_bit(tmp_path / "epoch-00003" / file)
    with pytest.warns(CheckpointWarning, match="epoch-00003.*trying the one before"):
        resumed, again = run("opteq-small", tmp_path)
    assert resumed == whole
    assert_same_weights(model, again)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """A checkpoint is restored completely or not at all."""
    whole, model = run("opteq-small", None)
    run("opteq-small", tmp_path)
    for folder in Checkpoints(tmp_path).present():
        state = torch.load(folder / "state.pt", weights_only=True)
        state["optimizer"]["param_groups"].pop()  # The weights fit, the optimizer does not.
        torch.save(state, folder / "state.pt")
        update_manifest(folder)
    with pytest.warns(CheckpointWarning, match="parameter groups"):
        again, fresh_start = run("opteq-small", tmp_path)
    assert again == whole
    assert_same_weights(model, fresh_start)


def test_new_checkpoints_are_kept_next_to_unreadable_ones_of_later_epochs(tmp_path: Path) -> None:
    """The newest checkpoints are kept, not those of the highest epochs."""
    run("opteq-small", tmp_path, epochs=4)
    for folder in Checkpoints(tmp_path).present():
        flip_a_bit(folder / "state.pt")
    with (
        pytest.warns(CheckpointWarning, match="cannot be read"),
        pytest.raises(KeyboardInterrupt),
    ):
        run("opteq-small", tmp_path, stop_after=1)
    assert Checkpoints(tmp_path).load(accept).step == 3
    with pytest.raises(KeyboardInterrupt):
        run("opteq-small", tmp_path, stop_after=2)
    kept = [path.name for path in Checkpoints(tmp_path).present()]
    assert kept[:2] == ["epoch-00002", "epoch-00001"]
    whole, _ = run("opteq-small", None)
    assert run("opteq-small", tmp_path)[0] == whole


def test_loading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """Pickles that would call functions are rejected."""

    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (eval, ("1/0",))

    run("opteq-small", tmp_path)
    for folder in tmp_path.glob("epoch-*"):
        torch.save({"optimizer": Malicious()}, folder / "state.pt")
        update_manifest(folder)
    with pytest.warns(CheckpointWarning, match="cannot be read"):
        assert Checkpoints(tmp_path).load(accept) is None


def test_accumulated_gradients_equal_those_of_a_large_batch() -> None:
    """Without batch statistics, four batches of 5 give the same step as one batch of 20."""
    training, _ = few_digits()
    training = replace(training, images=training.images.double())

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = fresh("opteq-small").double()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.model.stem.eval()
            return self.model(images)  # type: ignore[no-any-return]

    results = []
    for size, accumulate in ((20, 1), (5, 4)):
        settings = TrainingSettings(
            epochs=1, batch_size=size, accumulate=accumulate, optimizer="sgd", learning_rate=0.1
        )
        model = Frozen()
        fit(model, Classification(), training, settings)
        results.append(model)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_tolerances_and_the_gradient_rule_apply_during_training() -> None:
    training, _ = few_digits()
    model = fresh("opteq-small")
    default = model.layer.solver.tolerance
    tolerances, rules = [], set()

    def record(_: object) -> None:
        tolerances.append(model.layer.solver.tolerance)
        rules.add(type(model.layer.gradient))

    settings = TrainingSettings(
        epochs=2,
        tolerance=0.1,
        final_tolerance=0.01,
        evaluation_tolerance=1e-5,
        gradient="one_step",
    )
    fit(
        model,
        Classification(),
        training,
        settings,
        on_step=record,
    )
    assert tolerances == pytest.approx([0.1, 0.01])
    assert rules == {eq.OneStep}
    assert model.layer.solver.tolerance == default
    assert isinstance(model.layer.gradient, eq.Implicit)


def test_training_works_with_autocast() -> None:
    training, validation = few_digits()
    model = fresh("opteq-small")
    settings = TrainingSettings(epochs=2, autocast=True, tolerance=0.05, learning_rate=1e-2)
    history = fit(model, Classification(), training, settings, validation=validation)
    assert history[1].loss < history[0].loss
    assert all(p.dtype == torch.float32 for p in model.parameters())
