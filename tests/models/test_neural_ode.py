"""Neural ODEs: closed-form flows, both gradients, parameter counts."""

from __future__ import annotations

import copy
import math
import pickle
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.baselines.neural_ode import NeuralODE


def tiny(
    augment: int = 0, adjoint: bool = True, tolerance: float = 1e-8, activation: str = "softplus"
) -> NeuralODE:
    model = NeuralODE(
        num_classes=3,
        in_channels=2,
        filters=4,
        augment=augment,
        pool=2,
        activation=activation,
        adjoint=adjoint,
        rtol=tolerance,
        atol=tolerance,
    )
    return model.double()


def images(batch: int = 3, size: int = 4) -> Tensor:
    return torch.randn(batch, 2, size, size, dtype=torch.float64)


@torch.no_grad()
def linear_field(model: NeuralODE, rate: float, drift: float) -> NeuralODE:
    """Set f(t, z) = rate · z + drift · t for z ≥ 0."""
    for parameter in model.field.parameters():
        parameter.zero_()
    for channel in range(2):
        model.field.expand.weight[channel, channel] = 1
        model.field.mix.weight[channel, channel, 1, 1] = 1
        model.field.reduce.weight[channel, channel] = rate
        model.field.reduce.weight[channel, -1] = drift  # t is the last channel
    return model


@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize(("rate", "drift"), [(0.7, 0.0), (0.0, 1.0), (0.5, 2.0)])
def test_flow_of_a_linear_field_is_exact(adjoint: bool, rate: float, drift: float) -> None:
    """The solution of dz/dt = az + bt is z(1) = eᵃz(0) + b(eᵃ − 1 − a)/a²."""
    model = linear_field(tiny(adjoint=adjoint, activation="relu"), rate, drift)
    start = images().abs()
    forced = drift * ((math.exp(rate) - 1 - rate) / rate**2 if rate else 0.5)
    torch.testing.assert_close(
        model.features(start), math.exp(rate) * start + forced, rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("augment", [0, 2])
def test_both_gradients_agree(augment: int) -> None:
    batch = images()
    gradients = []
    for adjoint in (True, False):
        torch.manual_seed(0)
        model = tiny(augment, adjoint=adjoint)
        point = batch.clone().requires_grad_()
        F.cross_entropy(model(point), torch.tensor([0, 1, 2])).backward()
        assert point.grad is not None
        gradients.append([point.grad, *(p.grad for p in model.parameters())])
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients[0])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_augmentation_adds_zero_channels() -> None:
    model = tiny(augment=3)
    with torch.no_grad():
        for parameter in model.field.parameters():
            parameter.zero_()
    batch = images()
    features = model.features(batch)
    assert features.shape == (3, 5, 4, 4)
    torch.testing.assert_close(features[:, :2], batch)
    assert not features[:, 2:].any()


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"filters": 125, "time_dependent": False, "pool": 32}, 172_358),
        ({"filters": 64, "augment": 10, "time_dependent": False, "pool": 32}, 171_799),
        ({"filters": 125, "pool": 32}, 173_611),
        ({"filters": 64, "augment": 10, "pool": 32}, 172_452),
    ],
)
def test_parameter_counts(options: dict[str, int], parameters: int) -> None:
    """Both papers state 172 k, plain and augmented."""
    with torch.device("meta"):
        model = NeuralODE(**options)  # type: ignore[arg-type]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_head_with_the_size_of_the_map_is_linear_in_all_pixels() -> None:
    model = NeuralODE(filters=2, pool=8)
    assert isinstance(model.head, nn.Module)
    features = torch.randn(2, 3, 8, 8)
    expected = model.head.classifier(features.flatten(1))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(model.head(features), expected)


def test_evaluations_are_counted() -> None:
    loose, tight = tiny(tolerance=1e-2), tiny(tolerance=1e-8)
    tight.load_state_dict(loose.state_dict())
    assert loose.last_evaluations is None
    batch = 3 * images()
    counts = []
    for model in (loose, tight):
        calls: list[int] = []
        handle = model.field.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(batch).sum()
        handle.remove()
        assert model.last_evaluations == len(calls)
        counts.append(len(calls))
    assert counts[0] < counts[1]
    before = tight.last_evaluations
    tight(batch).sum().backward()
    assert tight.last_evaluations == before, "the backward solve was counted"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("augment", [0, 2])
def test_images_of_all_channels_and_sizes(
    channels: int, size: int, augment: int, device: torch.device
) -> None:
    model = NeuralODE(in_channels=channels, filters=4, augment=augment).to(device)
    batch = torch.randn(2, channels, size, size, device=device)
    logits = model(batch)
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model(batch[:0]).shape == (0, 10)


def test_samples_do_not_depend_on_the_batch_for_small_tolerances() -> None:
    model = tiny()
    batch = images()
    batch[1] *= 5
    together = model(batch)
    for i in range(3):
        torch.testing.assert_close(model(batch[i : i + 1])[0], together[i], rtol=1e-6, atol=1e-6)


def test_half_precision_has_nearly_the_same_outputs() -> None:
    model = tiny(tolerance=1e-3).float()
    batch = images().float()
    exact = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(batch)
    torch.testing.assert_close(mixed.float(), exact, rtol=0.05, atol=0.05)
    half = copy.deepcopy(model).bfloat16()(batch.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.1)


def test_copies_are_equal() -> None:
    model = tiny(augment=1)
    batch = images()
    expected = model(batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(batch), expected)


def test_failed_solve_raises_with_advice() -> None:
    model = NeuralODE(in_channels=2, filters=4, max_steps=1, rtol=1e-9, atol=1e-9).double()
    with pytest.raises(RuntimeError, match="raise rtol and atol, or max_steps"):
        model(images())


def test_non_finite_image_does_not_affect_other_samples() -> None:
    batch, model = images(), tiny()
    clean = model(batch[1:])
    batch[0, 0, 0, 0] = float("nan")
    outputs = model(batch)
    assert outputs[0].isnan().all()
    torch.testing.assert_close(outputs[1:], clean)


def test_missing_torchdiffeq_raises_with_the_command_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"pip install 'equilibria\[ode\]'"):
        model(images())


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="augment must not be negative"):
        NeuralODE(augment=-1)
    with pytest.raises(ValueError, match="unknown activation"):
        NeuralODE(activation="nothing")
    with pytest.raises(ValueError, match="rtol must be positive"):
        NeuralODE(rtol=0.0)
    with pytest.raises(ValueError, match="add a batch dimension"):
        tiny()(torch.randn(2, 8, 8))
