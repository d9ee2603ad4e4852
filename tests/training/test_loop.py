"""The training loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import RandomShift, Split, load_digits
from equilibria.models import NonFiniteInputError, NonFiniteWeightsWarning
from equilibria.models.non_finite import non_finite_tensors
from equilibria.tasks import Classification, Outcome, Task
from equilibria.training import EpochMetrics, NonFiniteError, TrainingSettings, fit
from equilibria.training.metrics import StepProgress
from equilibria.training.processes import denormals_as_zero


@pytest.fixture(scope="module")
def digits() -> Split:
    train = load_digits().train
    return train.subset(torch.arange(120))


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return eq.create_model("opteq-small", in_channels=1, channels=8, width=8, pool=4)


def settings(**changes: float) -> TrainingSettings:
    options = {"epochs": 4, "batch_size": 40, "learning_rate": 1e-2, "warmup_epochs": 0.5}
    return TrainingSettings(**{**options, **changes})


def test_the_loss_decreases(digits: Split) -> None:
    history = fit(small_model(), Classification(), digits, settings(epochs=6))
    assert history[-1].loss < 0.7 * history[0].loss
    assert history[-1].accuracy > history[0].accuracy
    assert all(metrics.share_converged == 1 for metrics in history)


def test_results_depend_on_the_seed(digits: Split) -> None:
    def run(seed: int) -> tuple[list[EpochMetrics], Tensor]:
        model = small_model()
        history = fit(
            model,
            Classification(),
            digits,
            settings(epochs=2, seed=seed),
            augmentation=RandomShift(1),
        )
        return history, next(model.parameters()).detach()

    first, second, other = run(0), run(0), run(1)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert first[0] != other[0]


def test_callbacks_are_called_for_every_step_and_epoch(digits: Split) -> None:
    epochs: list[EpochMetrics] = []
    steps: list[StepProgress] = []
    history = fit(
        small_model(),
        Classification(),
        digits,
        settings(epochs=2, batch_size=50),
        on_epoch=epochs.append,
        on_step=steps.append,
    )
    assert epochs == history
    assert [(s.epoch, s.step, s.steps) for s in steps] == [
        (1, 1, 6), (1, 2, 6), (1, 3, 6), (2, 4, 6), (2, 5, 6), (2, 6, 6),
    ]  # fmt: skip
    assert [metrics.epoch for metrics in epochs] == [1, 2]


def test_a_run_can_end_within_its_last_epoch(digits: Split) -> None:
    steps: list[StepProgress] = []
    chosen = settings(epochs=3, steps=7, batch_size=40)  # Three steps per epoch.
    history = fit(small_model(), Classification(), digits, chosen, on_step=steps.append)
    assert [(s.epoch, s.step, s.steps) for s in steps][-2:] == [(2, 6, 7), (3, 7, 7)]
    assert len(history) == 3
    # The cosine ends at step seven.
    assert history[-1].learning_rate < history[1].learning_rate < history[0].learning_rate
    with pytest.raises(
        ValueError, match="7 steps of 3 per epoch end in epoch 3 of 4: set epochs to 3"
    ):
        fit(small_model(), Classification(), digits, settings(epochs=4, steps=7))
    with pytest.raises(ValueError, match="remove steps"):
        settings(epochs=4, steps=7, continued_at=(2,))


def test_a_non_finite_loss_raises_with_a_remedy(digits: Split) -> None:
    model = small_model()
    with torch.no_grad():
        model.head.classifier.bias[0] = torch.nan
    with (
        pytest.warns(NonFiniteWeightsWarning, match=r"head\.classifier\.bias"),
        pytest.raises(NonFiniteError, match=r"the loss is nan in epoch 1.*lower the learning rate"),
    ):
        fit(model, Classification(), digits, settings())


def test_non_finite_weights_after_the_last_step_raise(digits: Split) -> None:
    """No loss is computed with these weights, so that they need a separate check."""
    one_step = digits.subset(torch.arange(40))
    diverging = settings(epochs=1, learning_rate=1e3, weight_decay=1e38, warmup_epochs=0)
    with pytest.raises(NonFiniteError, match="the largest weight is"):
        fit(small_model(), Classification(), one_step, diverging)


def test_images_with_nan_raise(digits: Split) -> None:
    images = digits.images.clone()
    images[17] = torch.nan
    model = small_model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(NonFiniteInputError, match=r"samples 17 have NaN.*non_finite=drop"):
        fit(model, Classification(), Split(images, digits.labels), settings(batch_size=120))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class RootAtZero(Task):
    """Task with a finite loss and an infinite gradient."""

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        weight = next(model.parameters())
        loss = (weight - weight.detach()).abs().sqrt().sum()
        return Outcome({"loss": loss.expand(len(targets))})


def test_a_non_finite_gradient_raises_before_the_weights_change(digits: Split) -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    with pytest.raises(NonFiniteError, match="the gradient is"):
        fit(model, RootAtZero(), digits, settings())
    assert torch.equal(model.weight, before)


def test_clipping_bounds_the_step(digits: Split) -> None:
    bounded = fit(small_model(), Classification(), digits, settings(epochs=2, clip_norm=1e-9))
    unbounded = fit(small_model(), Classification(), digits, settings(epochs=2))
    # AdamW is invariant to the scale of gradients unless they are below its epsilon.
    assert bounded[-1].loss > unbounded[-1].loss


def test_empty_training_data_raise(digits: Split) -> None:
    with pytest.raises(ValueError, match="there are no training samples"):
        fit(small_model(), Classification(), digits.subset(torch.arange(0)), settings())


def test_warm_starts_save_iterations(digits: Split) -> None:
    """Without augmentation and with small steps, equilibria change little between epochs."""
    options = {"epochs": 3, "learning_rate": 1e-5, "tolerance": 1e-3}
    cold = fit(small_model(), Classification(), digits, settings(**options))
    warm = fit(small_model(), Classification(), digits, settings(**options, warm_start=True))
    assert warm[0] == cold[0]
    assert warm[2].mean_iterations < 0.5 * cold[2].mean_iterations
    assert warm[2].loss == pytest.approx(cold[2].loss, rel=1e-3)


def test_warm_starts_need_one_equilibrium_per_sample(digits: Split) -> None:
    class Twice(Classification):
        def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
            return super().training_step(model, inputs.repeat(2, 1, 1, 1), targets.repeat(2))

    with pytest.raises(ValueError, match="warm_start needs one equilibrium per sample"):
        fit(small_model(), Twice(), digits, settings(epochs=1, warm_start=True))


def test_the_jacobian_penalty_reduces_the_spectral_radius(digits: Split) -> None:
    def contraction(weight: float) -> float:
        model = small_model()
        fit(model, Classification(), digits, settings(epochs=8, jacobian_weight=weight))
        with torch.no_grad():
            inputs = model.stem(digits.images[:20])
        solution = model.layer.solve(inputs)
        radius = eq.equilibrium.spectral_radius(model.layer.cell, solution.state, solution.context)
        return float(radius.mean())

    assert contraction(100.0) < 0.9 * contraction(0.0)


def test_training_restores_the_settings_of_the_layers(digits: Split) -> None:
    model = small_model()
    before = model.layer.solving
    fit(
        model,
        Classification(),
        digits,
        settings(
            epochs=1, warm_start=True, jacobian_weight=1.0, tolerance=0.1, gradient="one_step"
        ),
    )
    assert model.layer.solving is before
    assert model.layer.solver == before.solver


def test_training_does_not_advance_the_random_generator(digits: Split) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = small_model()
    torch.manual_seed(5)
    fit(model, Classification(), digits, settings(epochs=1))
    assert torch.equal(torch.rand(3), expected)


def keeps_denormals() -> bool:
    return bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2 > 0)


@pytest.mark.parametrize("before", [True, False])
def test_denormals_are_flushed_only_during_training(digits: Split, before: bool) -> None:
    """This includes the backward pass: a cotangent of 1e-15 times a weight of 1e-25."""
    observed: list[bool] = []

    class Observing(Classification):
        def training_step(self, model: nn.Module, images: Tensor, labels: Tensor) -> Outcome:
            outcome = super().training_step(model, images, labels)
            leaf = torch.full((1,), 1e-20, requires_grad=True)
            (leaf * 1e-25).backward(torch.full((1,), 1e-15))
            assert leaf.grad is not None
            observed.extend([keeps_denormals(), bool(leaf.grad != 0)])
            return outcome

    torch.set_flush_denormal(not before)
    try:
        fit(small_model(), Observing(), digits, settings(epochs=1))
        assert keeps_denormals() is before
    finally:
        torch.set_flush_denormal(False)
    assert observed
    assert not any(observed)


def test_new_threads_flush_denormals() -> None:
    with denormals_as_zero(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(keeps_denormals).result()
    assert keeps_denormals()


def test_non_finite_images_can_be_dropped(
    digits: Split,
) -> None:
    images = digits.images.clone()
    images[[2, 5]] = torch.nan
    finite = torch.tensor([i for i in range(len(images)) if i not in (2, 5)])
    chosen = settings(non_finite="drop", batch_size=len(images))
    model = small_model()
    with pytest.warns(UserWarning, match=r"skipped 2 training samples .*: 2, 5"):
        (metrics, *_) = fit(model, Classification(), Split(images, digits.labels), chosen)
    assert torch.isfinite(torch.tensor(metrics.loss))
    assert not non_finite_tensors(model)
    other = small_model()
    (expected, *_) = fit(
        other,
        Classification(),
        Split(images[finite], digits.labels[finite]),
        settings(batch_size=len(finite)),
    )
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-4)
