"""Bounds on max pooling and convolutions in stems agree with dense matrices and random searches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.certificates.stem import StemBounds
from equilibria.models import EquilibriumClassifier
from equilibria.models.blocks import Normalize
from equilibria.operators.rounding import unit_roundoff
from tests.certificates.certified_bank import Hunt, images, random_model

SINGLE = unit_roundoff(torch.float32)
CONVOLUTIONS = [
    nn.ConvTranspose2d(3, 2, 3),
    nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0)),
    nn.ConvTranspose2d(3, 2, 2, stride=2, bias=False),
    nn.ConvTranspose2d(3, 5, 4, stride=3, padding=2),
    nn.Conv2d(3, 4, 3, stride=2, padding=1),
    nn.Conv2d(3, 2, 2, stride=3),
]
POOLINGS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, stride=2),
    nn.MaxPool2d(3, stride=1, padding=1),
    nn.MaxPool2d((3, 1), stride=(1, 2)),
    nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    nn.MaxPool2d(2, stride=1, dilation=2),
]


def bounds(
    stem: nn.Module, shape: tuple[int, ...], normalize: Normalize | None = None
) -> StemBounds:
    stem = stem.eval()
    return StemBounds.of(stem, copy.deepcopy(stem).double(), normalize, shape, SINGLE)


def matrix(stem: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix of an affine map in float64."""
    wide = copy.deepcopy(stem).double()
    basis = torch.eye(3 * 5 * 6, dtype=torch.float64).view(-1, *shape)
    with torch.no_grad():
        return (wide(basis) - wide(torch.zeros_like(basis[:1]))).flatten(1).T


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_bounds_of_convolutions_hold(layer: nn.Module, has_norm: bool) -> None:
    """The Lipschitz constant is compared with a dense matrix, the rounding with float64."""
    torch.manual_seed(0)
    shape, normalize, stem = (3, 5, 6), None, nn.Sequential(copy.deepcopy(layer))
    if has_norm:
        normalize = Normalize((0.1, 0.4, 0.2), (0.3, 0.6, 0.2))
        norm = nn.BatchNorm2d(layer.out_channels)
        nn.init.uniform_(norm.weight, 0.2, 2)
        nn.init.uniform_(norm.running_var, 0.2, 2)
        nn.init.normal_(norm.running_mean)
        stem.append(norm)
    stem.eval()
    bound = bounds(stem, shape, normalize)
    whole = stem if normalize is None else nn.Sequential(normalize, stem)
    largest = float(torch.linalg.matrix_norm(matrix(whole, shape), 2))
    assert largest <= bound.lipschitz() <= 1.5 * largest
    assert bound.is_affine
    x = torch.rand(16, *shape)
    with torch.no_grad():
        features, true = bound.run(x), copy.deepcopy(whole).double()(x.double())
    off = (features.values.double() - true).flatten(1).norm(dim=1)
    assert bool((off <= features.error).all())
    assert bool((true.flatten(1).norm(dim=1) <= features.size).all())


@pytest.mark.parametrize("layer", POOLINGS, ids=str)
def test_the_bound_of_max_pooling_is_attained_and_never_exceeded(layer: nn.Module) -> None:
    """A pixel alone is the largest of all its windows. No random pair is further apart."""
    torch.manual_seed(0)
    bound = bounds(layer, (1, 7, 8))
    lipschitz = bound.lipschitz()
    alone = torch.eye(56, dtype=torch.float64).view(-1, 1, 7, 8)
    attained = (layer(alone) - layer(torch.zeros_like(alone))).flatten(1).norm(dim=1).amax()
    assert float(attained) * (1 + 1e-12) <= lipschitz <= float(attained) * (1 + 1e-8)
    assert not bound.is_affine
    x = torch.randn(2000, 1, 7, 8, dtype=torch.float64)
    scale = 10 ** -torch.linspace(0, 4, 2000).double()[:, None, None, None]
    y = x + scale * torch.randn_like(x)
    moved = (layer(x) - layer(y)).flatten(1).norm(dim=1)
    assert bool((moved <= lipschitz * (x - y).flatten(1).norm(dim=1)).all())


def test_a_stem_with_max_pooling_and_transposed_convolutions_has_radii() -> None:
    """Random attacks and projected gradients find no false class, exit or radius."""
    plain = random_model("opteq-y", 4, 0.6)
    torch.manual_seed(1)
    added = nn.Sequential(
        nn.ConvTranspose2d(1, 3, 3, stride=2, padding=1, output_padding=1),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(3, 1, 1),
    )
    stem = nn.Sequential(added, plain.stem)
    model = EquilibriumClassifier(stem, plain.layer, plain.head).eval()
    x = images(8)
    certificate = eq.certify(model, x)
    assert bool((certificate.radius[certificate.certified_class] > 0).all())
    assert bool(certificate.certified_class.any())
    hunt = Hunt()
    hunt.check(model, x, attacked=8)
    assert (hunt.false_classes, hunt.false_exits, hunt.false_radii) == (0, 0, 0)
    assert hunt.attacked > 0


def test_layers_without_a_bound_are_named() -> None:
    model = random_model("opteq-y", 4, 0.6)
    model.stem.append(nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2))
    assert "ConvTranspose2d" in eq.certify(model, images(2)).reasons[0]
    with pytest.raises(ValueError, match="indices"):
        bounds(nn.MaxPool2d(2, return_indices=True), (1, 4, 4))
