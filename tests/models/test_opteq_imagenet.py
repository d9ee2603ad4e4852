"""Deep OptEq for ImageNet: parameter counts, separable unit layers, options of the paper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.energies import Decorrelation
from equilibria.models import DeepOptEqCell, EquilibriumClassifier
from equilibria.models.baselines.resnet import ConvolutionalHead, resnet
from equilibria.models.opteq.models import opteq_imagenet, separable
from equilibria.operators import SeparableConv2d
from tests.models.small import with_solving

MIDDLE: dict[str, Any] = {
    "extractor_widening": 2,
    "widths": (1024, 512) * 3,
    "kernel_sizes": (5, 3) * 3,
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def tiny(**options: Any) -> EquilibriumClassifier:
    """Build a small model with layers narrower and wider than z, and both kernel sizes."""
    defaults: dict[str, Any] = {
        "num_classes": 3,
        "extractor_channels": 1,
        "channels": 6,
        "widths": (5, 7, 6),
        "kernel_sizes": (3, 5, 3),
        "head_widths": (4, 5),
        "init_scale": 1.5,  # large enough for norm control to be active
        "tolerance": 1e-11,
        "max_iterations": 2000,
        "gradient": eq.Implicit(tolerance=1e-11),
    }
    return opteq_imagenet(**with_solving({**defaults, **options})).double()


def images(batch: int = 3, size: int = 32) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64)


def settled(model: EquilibriumClassifier) -> EquilibriumClassifier:
    """Set the running statistics from some images; return the model in evaluation mode."""
    with torch.no_grad():
        for _ in range(20):
            model.stem(images(8))
    return model.eval()


@pytest.mark.parametrize(
    ("options", "extractor", "equilibrium", "total"),
    [
        ({}, 1_444_928, 10 * (9 * 512 + 512 * 512), 8_788_525),
        (MIDDLE, 4_126_528, 6 * (25 * 1024 + 1024 * 512 + 9 * 512 + 512 * 512), 13_704_494),
    ],
)
def test_parameter_counts(
    options: dict[str, Any], extractor: int, equilibrium: int, total: int
) -> None:
    with torch.device("meta"):
        model = opteq_imagenet(num_classes=1000, **options)
        features = model.stem(torch.empty(2, 3, 224, 224))
    assert features.shape == (2, 512, 28, 28)
    assert count(model.stem) == extractor
    cell = model.layer.cell
    assert isinstance(cell, DeepOptEqCell)
    biases_and_alphas = sum(layer.input.bias.numel() + 1 for layer in cell.units())
    assert count(model.layer) == equilibrium + biases_and_alphas
    assert count(model.head) == 512 * 1024 + 1024 + 1024 * 2048 + 2048 + 2049 * 1000
    assert count(model) == total
    with torch.device("meta"):
        wide = "wide-" if "extractor_widening" in options else ""
        extractor_only = eq.create_model(f"{wide}resnet-50-extractor-imagenet")
    assert count(extractor_only) == count(model) - count(model.layer)


def test_separable_operator_has_its_filters_on_the_wider_side() -> None:
    narrow, wide = separable(6, 4, 3), separable(4, 6, 5)
    assert isinstance(narrow, SeparableConv2d)
    assert count(narrow) == 9 * 6 + 6 * 4
    assert count(wide) == 25 * 6 + 6 * 4
    z = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    y = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    wide = wide.double()
    weights = wide.weights((4, 8, 8))
    assert wide(z, weights).shape == y.shape
    torch.testing.assert_close(
        (wide(z, weights) * y).sum(), (z * wide.adjoint(y, weights)).sum(), rtol=1e-10, atol=1e-10
    )


def test_equilibrium_satisfies_eqs_5_and_6() -> None:
    """z* = f_L∘…∘f_1(z*), f(z) = αWᵀσ(Wz + Ux + b) + (1 − α)z."""
    model = settled(tiny())
    batch = images()
    with torch.no_grad():
        x = model.stem(batch)
        z = model.features(batch)
        image = z
        cell = model.layer.cell
        assert isinstance(cell, DeepOptEqCell)
        for layer in cell.units():
            shape = tuple(z.shape[1:])
            weights = layer.W.weights(shape)
            y = (layer.W(image, weights) + layer.input.U(x) + layer.input.bias).relu()
            assert layer.alpha.item() == pytest.approx(0.8)  # type: ignore[union-attr]
            image = 0.8 * layer.W.adjoint(y, weights) + 0.2 * image
    torch.testing.assert_close(image, z, rtol=1e-8, atol=1e-8)
    assert z.abs().sum() > 0


@pytest.mark.parametrize("size", [8, 16, 32, 45])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_all_channels_and_sizes(size: int, channels: int, device: torch.device) -> None:
    model = tiny(in_channels=channels, tolerance=1e-4).float().to(device).eval()
    batch = torch.randn(2, channels, size, size, device=device)
    assert model(batch).shape == (2, 3)
    assert model(batch[:0]).shape == (0, 3)
    assert model.solve(batch).converged.all()


@pytest.mark.parametrize("gradient", ["auto", eq.Unrolled(steps=5)])
def test_gradients_reach_every_parameter(gradient: str | eq.gradients.GradientRule) -> None:
    model = tiny(gradient=gradient)
    F.cross_entropy(model(images()), torch.tensor([0, 1, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if "raw_alpha" in name or "W." in name or "U." in name:
            assert parameter.grad.abs().sum() > 0, name


def test_implicit_agrees_with_unrolling() -> None:
    model = settled(tiny())
    unrolled = settled(tiny(gradient=eq.Unrolled(steps=400)))
    unrolled.load_state_dict(model.state_dict())
    batch = images()
    results = []
    for network in (model, unrolled):
        network.zero_grad()
        F.cross_entropy(network(batch), torch.tensor([0, 1, 2])).backward()
        results.append({n: p.grad for n, p in network.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-6, atol=1e-9)


def test_evaluation_does_not_depend_on_the_batch() -> None:
    model = settled(tiny())
    batch = images(4)
    batch[2] *= 40
    together = model(batch)
    for i in range(4):
        torch.testing.assert_close(model(batch[i : i + 1])[0], together[i], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("placement", ["exact", "paper"])
def test_decorrelation_decreases_its_value_and_couples_the_batch(placement: str) -> None:
    plain = settled(tiny())
    model = settled(tiny(regularizer=Decorrelation(), gamma=0.02, placement=placement))
    model.load_state_dict(plain.state_dict())
    assert model.layer.cell.couples_batch
    batch = images(8)
    with torch.no_grad():
        before = Decorrelation().value(plain.features(batch))
        with pytest.warns(eq.equilibrium.BatchCouplingWarning, match="depends on the others"):
            features = model.features(batch)
        after = Decorrelation().value(features)
    assert model.last_solution is not None
    assert model.last_solution.converged.all()
    assert after < before


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_the_norm_of_every_layer_is_controlled(norm: str) -> None:
    """Compare with the dense matrix of W on a 4×4 map; the estimate is off by at most 5 %."""
    model = tiny(norm=norm, zeta=0.7, init_scale=20.0)
    model(images(1))
    cell = model.layer.cell
    assert isinstance(cell, DeepOptEqCell)
    basis = torch.eye(6 * 4 * 4, dtype=torch.float64).view(-1, 6, 4, 4)
    for layer in cell.units():
        with torch.no_grad():
            matrix = layer.W(basis, layer.W.weights((6, 4, 4))).flatten(1)
        size = torch.linalg.matrix_norm(matrix, 2).item()
        assert 0.4 < size <= 0.7 * (1 + 1e-9 if norm == "bound" else 1.05)


def test_contraction_limit_needs_a_fixed_alpha_and_a_norm_bound() -> None:
    model = tiny(norm="bound", learnable_alpha=False, init_scale=20.0).eval()
    limit = (0.2 + 0.8 * 0.95**2) ** 3
    assert model.layer.cell.limits.contraction == pytest.approx(limit)
    assert model.contraction_bound(images(1)) == pytest.approx(limit)
    assert tiny().layer.cell.limits.contraction is None


def test_head_has_the_layers_of_table_6() -> None:
    head = ConvolutionalHead(4, (6, 8), 3)
    names = [type(layer).__name__ for layer in head.layers]
    assert names == ["Conv2d", "ReLU", "MaxPool2d"] * 2
    assert head.layers(torch.randn(2, 4, 28, 28)).shape == (2, 8, 7, 7)
    assert head(torch.randn(2, 4, 1, 1)).shape == (2, 3)


def test_every_parameter_of_extractor_and_head_has_a_gradient() -> None:
    model = resnet(num_classes=3, depth=50, stages=2, channels=1, head_widths=(4, 5))
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 3)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_are_equal() -> None:
    model = settled(tiny())
    batch = images(2)
    assert torch.equal(copy.deepcopy(model)(batch), model(batch))


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="must have the same length, got 5 and 3"):
        opteq_imagenet(kernel_sizes=(3, 3, 3))
    with pytest.raises(ValueError, match="add a batch dimension"):
        tiny()(torch.randn(3, 32, 32))
