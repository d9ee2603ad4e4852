"""The training loop on a small model and few images."""

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
def few_digits() -> Split:
    train = load_digits().train
    return train.subset(torch.arange(120))


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return eq.create_model("opteq-small", in_channels=1, channels=8, width=8, pool=4)


def settings(**changes: float) -> TrainingSettings:
    options = {"epochs": 4, "batch_size": 40, "learning_rate": 1e-2, "warmup_epochs": 0.5}
    return TrainingSettings(**{**options, **changes})


def test_loss_falls(few_digits: Split) -> None:
    history = fit(small_model(), Classification(), few_digits, settings(epochs=6))
    assert history[-1].loss < 0.7 * history[0].loss
    assert history[-1].accuracy > history[0].accuracy
    assert all(metrics.share_converged == 1 for metrics in history)


def test_same_seed_gives_the_same_run(few_digits: Split) -> None:
    def run(seed: int) -> tuple[list[EpochMetrics], Tensor]:
        model = small_model()
        history = fit(
            model,
            Classification(),
            few_digits,
            settings(epochs=2, seed=seed),
            augmentation=RandomShift(1),
        )
        return history, next(model.parameters()).detach()

    first, second, other = run(0), run(0), run(1)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert first[0] != other[0]


def test_callbacks_hear_of_every_step_and_epoch(few_digits: Split) -> None:
    epochs: list[EpochMetrics] = []
    steps: list[StepProgress] = []
    history = fit(
        small_model(),
        Classification(),
        few_digits,
        settings(epochs=2, batch_size=50),
        on_epoch=epochs.append,
        on_step=steps.append,
    )
    assert epochs == history
    assert [(s.epoch, s.step, s.steps) for s in steps] == [
        (1, 1, 6), (1, 2, 6), (1, 3, 6), (2, 4, 6), (2, 5, 6), (2, 6, 6),
    ]  # fmt: skip
    assert [metrics.epoch for metrics in epochs] == [1, 2]


def test_a_run_can_end_with_a_step_of_its_last_epoch(few_digits: Split) -> None:
    steps: list[StepProgress] = []
    chosen = settings(epochs=3, steps=7, batch_size=40)  # three steps an epoch
    history = fit(small_model(), Classification(), few_digits, chosen, on_step=steps.append)
    assert [(s.epoch, s.step, s.steps) for s in steps][-2:] == [(2, 6, 7), (3, 7, 7)]
    assert len(history) == 3
    # The cosine is that of seven steps.
    assert history[-1].learning_rate < history[1].learning_rate < history[0].learning_rate
    with pytest.raises(ValueError, match="7 steps of 3 an epoch end in epoch 3: set epochs to"):
        fit(small_model(), Classification(), few_digits, settings(epochs=4, steps=7))
    with pytest.raises(ValueError, match="leave out steps"):
        settings(epochs=4, steps=7, continued_at=(2,))


def test_non_finite_loss_says_what_to_do(few_digits: Split) -> None:
    model = small_model()
    with torch.no_grad():
        model.head.classifier.bias[0] = torch.nan
    with (
        pytest.warns(NonFiniteWeightsWarning, match=r"head\.classifier\.bias"),
        pytest.raises(NonFiniteError, match=r"the loss is nan in epoch 1.*lower the learning rate"),
    ):
        fit(model, Classification(), few_digits, settings())


def test_weights_that_the_last_step_has_ruined_are_an_error(few_digits: Split) -> None:
    """No loss sees them any more: the run ended well, with weights of NaN."""
    one_step = few_digits.subset(torch.arange(40))
    ruinous = settings(epochs=1, learning_rate=1e3, weight_decay=1e38, warmup_epochs=0)
    with pytest.raises(NonFiniteError, match="the largest weight is"):
        fit(small_model(), Classification(), one_step, ruinous)


def test_images_with_nan_are_an_error(few_digits: Split) -> None:
    images = few_digits.images.clone()
    images[17] = torch.nan
    model = small_model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(NonFiniteInputError, match=r"samples 17 hold NaN.*non_finite=drop"):
        fit(model, Classification(), Split(images, few_digits.labels), settings(batch_size=120))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class RootAtZero(Task):
    """A finite loss with an infinite gradient."""

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        weight = next(model.parameters())
        loss = (weight - weight.detach()).abs().sqrt().sum()
        return Outcome({"loss": loss.expand(len(targets))})


def test_non_finite_gradient_is_an_error_and_leaves_the_weights(few_digits: Split) -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    with pytest.raises(NonFiniteError, match="the gradient is"):
        fit(model, RootAtZero(), few_digits, settings())
    assert torch.equal(model.weight, before)


def test_clipping_bounds_the_step(few_digits: Split) -> None:
    bounded = fit(small_model(), Classification(), few_digits, settings(epochs=2, clip_norm=1e-9))
    free = fit(small_model(), Classification(), few_digits, settings(epochs=2))
    # AdamW's steps do not depend on the scale of the gradients unless they sink below its epsilon.
    assert bounded[-1].loss > free[-1].loss


def test_empty_split_is_refused(few_digits: Split) -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        fit(small_model(), Classification(), few_digits.subset(torch.arange(0)), settings())


def test_warm_starts_save_iterations(few_digits: Split) -> None:
    """Without augmentation and with small steps an equilibrium is where it was an epoch ago."""
    options = {"epochs": 3, "learning_rate": 1e-5, "tolerance": 1e-3}
    cold = fit(small_model(), Classification(), few_digits, settings(**options))
    warm = fit(small_model(), Classification(), few_digits, settings(**options, warm_start=True))
    assert warm[0] == cold[0]
    assert warm[2].mean_iterations < 0.5 * cold[2].mean_iterations
    assert warm[2].loss == pytest.approx(cold[2].loss, rel=1e-3)


def test_warm_starts_need_one_equilibrium_a_sample(few_digits: Split) -> None:
    class Twice(Classification):
        def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
            return super().training_step(model, inputs.repeat(2, 1, 1, 1), targets.repeat(2))

    with pytest.raises(ValueError, match="warm_start keeps one equilibrium a sample"):
        fit(small_model(), Twice(), few_digits, settings(epochs=1, warm_start=True))


def test_the_jacobian_term_makes_the_map_contract(few_digits: Split) -> None:
    def contraction(weight: float) -> float:
        model = small_model()
        fit(model, Classification(), few_digits, settings(epochs=8, jacobian_weight=weight))
        with torch.no_grad():
            inputs = model.stem(few_digits.images[:20])
        found = model.layer.solve(inputs)
        radius = eq.equilibrium.spectral_radius(model.layer.cell, found.state, found.context)
        return float(radius.mean())

    assert contraction(100.0) < 0.9 * contraction(0.0)


def test_training_leaves_how_a_model_solves_as_it_was(few_digits: Split) -> None:
    model = small_model()
    before = model.layer.solving
    fit(
        model,
        Classification(),
        few_digits,
        settings(
            epochs=1, warm_start=True, jacobian_weight=1.0, tolerance=0.1, gradient="one_step"
        ),
    )
    assert model.layer.solving is before
    assert model.layer.solver == before.solver


def test_training_leaves_the_random_generator_alone(few_digits: Split) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = small_model()
    torch.manual_seed(5)
    fit(model, Classification(), few_digits, settings(epochs=1))
    assert torch.equal(torch.rand(3), expected)


def counts_denormals() -> bool:
    return bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2 > 0)


@pytest.mark.parametrize("before", [True, False])
def test_denormal_numbers_count_as_zero_in_training_alone(few_digits: Split, before: bool) -> None:
    """Backwards too, where they come from: a cotangent of 1e-20 through a weight of 1e-25."""
    seen: list[bool] = []

    class Watched(Classification):
        def training_step(self, model: nn.Module, images: Tensor, labels: Tensor) -> Outcome:
            outcome = super().training_step(model, images, labels)
            leaf = torch.full((1,), 1e-20, requires_grad=True)
            (leaf * 1e-25).backward(torch.full((1,), 1e-15))
            assert leaf.grad is not None
            seen.extend([counts_denormals(), bool(leaf.grad != 0)])
            return outcome

    torch.set_flush_denormal(not before)
    try:
        fit(small_model(), Watched(), few_digits, settings(epochs=1))
        assert counts_denormals() is before
    finally:
        torch.set_flush_denormal(False)
    assert seen
    assert not any(seen)


def test_threads_that_are_started_meanwhile_take_it_over() -> None:
    with denormals_as_zero(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(counts_denormals).result()
    assert counts_denormals()


def test_images_that_are_not_finite_are_left_out_if_the_settings_say_so(
    few_digits: Split,
) -> None:
    images = few_digits.images.clone()
    images[[2, 5]] = torch.nan
    sound = torch.tensor([i for i in range(len(images)) if i not in (2, 5)])
    chosen = settings(non_finite="drop", batch_size=len(images))
    model = small_model()
    with pytest.warns(UserWarning, match=r"left out 2 training samples .*: 2, 5"):
        (metrics, *_) = fit(model, Classification(), Split(images, few_digits.labels), chosen)
    assert torch.isfinite(torch.tensor(metrics.loss))
    assert not non_finite_tensors(model)
    other = small_model()
    (expected, *_) = fit(
        other,
        Classification(),
        Split(images[sound], few_digits.labels[sound]),
        settings(batch_size=len(sound)),
    )
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-4)
