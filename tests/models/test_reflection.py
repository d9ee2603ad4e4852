"""Reflection networks: nonexpansive for all weights, certificates, early exit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.autograd import gradcheck

import equilibria as eq
from equilibria.models import ReflectionCell
from equilibria.models.reflection.dual import DualReflectionCell
from equilibria.models.reflection.model import Isometry, ReflectionNetwork, reflection_network
from equilibria.models.reflection.orthonormal import orthonormal_network
from tests.certificates.certified_bank import Hunt, narrow_margins

SOLVED = eq.Solving(tolerance=1e-11, max_iterations=1000, gradient=eq.Implicit(tolerance=1e-12))


def reflection(matrix: Tensor, bias: Tensor) -> eq.EquilibriumLayer:
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    cell = ReflectionCell(
        eq.Dense.from_tensor(nn.Parameter(matrix)), bias=nn.Parameter(bias), zeta=norm
    )
    return eq.EquilibriumLayer(cell, solving=SOLVED)


def network(seed: int = 0, **options: object) -> ReflectionNetwork:
    torch.manual_seed(seed)
    sizes = {"image_size": 4, "units": (7, 5), "in_channels": 1, "num_classes": 4}
    if "weight" in options:
        model = orthonormal_network(**{**sizes, **options})  # type: ignore[arg-type]
    else:
        model = reflection_network(**{**sizes, "zeta": 3.0, **options})  # type: ignore[arg-type]
    with torch.no_grad():
        for layer in model.reflections():
            for name, parameter in layer.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
    return model.eval()


@settings(max_examples=15, deadline=None)
@given(size=st.floats(0.01, 5), seed=st.integers(0, 2**31))
def test_reflections_are_nonexpansive_for_all_weights(size: float, seed: int) -> None:
    torch.manual_seed(seed)
    W, b = size * torch.randn(6, 4).double(), torch.randn(6).double()
    layer = reflection(W, b)
    u, v = torch.randn(2, 8, 4).double()
    with torch.no_grad():
        moved = (layer(u) - layer(v)).norm(dim=1)
    assert (moved <= (u - v).norm(dim=1) * (1 + 1e-9) + 1e-8).all()


def test_equilibrium_is_the_proximal_operator() -> None:
    torch.manual_seed(0)
    W, b, u = torch.randn(6, 4).double(), torch.randn(6).double(), torch.randn(1, 4).double()

    def objective(values: list[float]) -> float:
        z = torch.tensor(values, dtype=torch.float64)
        return float(0.5 * (z - u[0]).square().sum() + 0.5 * (W @ z + b).relu().square().sum())

    layer = reflection(W, b)
    minimizer = minimize(objective, u[0].numpy(), method="L-BFGS-B", options={"ftol": 1e-15}).x
    solution = layer.solve(u)
    torch.testing.assert_close(solution.state[0], torch.tensor(minimizer), rtol=0, atol=1e-6)
    value = layer.objective(u).value(solution.state)
    expected = objective(solution.state[0].tolist()) - 0.5 * float(u.square().sum())
    torch.testing.assert_close(value, value.new_tensor([expected]))


def test_dual_gives_the_same_reflection_and_gradients() -> None:
    torch.manual_seed(0)
    W = eq.Dense.from_tensor(nn.Parameter(2 * torch.randn(4, 6).double()))
    b, u = torch.randn(4).double(), torch.randn(5, 6).double().requires_grad_()
    zeta = float(W.norm_bound((6,)).detach())
    primal = eq.EquilibriumLayer(ReflectionCell(W, bias=b, zeta=zeta), solving=SOLVED)
    dual = eq.EquilibriumLayer(DualReflectionCell(W, zeta=zeta), solving=SOLVED)
    with torch.no_grad():
        dual.cell.energy.bias.copy_(b)
    expected, output = primal(u), dual(u)
    torch.testing.assert_close(output, expected)
    slopes = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(expected, (u, W.kernel), slopes),
        torch.autograd.grad(output, (u, W.kernel), slopes),
        strict=True,
    )
    for gradient, from_dual in pairs:
        torch.testing.assert_close(from_dual, gradient)
    state = dual.solve(u).state
    assert float(dual.objective(u).residual(state).detach().max()) < 1e-9


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 10.0])
def test_single_unit_mirrors_a_half_space(size: float) -> None:
    layer = reflection(torch.tensor([[size, 0.0]]).double(), torch.zeros(1).double())
    with torch.no_grad():
        mirrored = layer(torch.tensor([[2.0, 1.0], [-2.0, 1.0]]).double())
    factor = (1 - size**2) / (1 + size**2)
    expected = torch.tensor([[2 * factor, 1.0], [-2.0, 1.0]]).double()
    torch.testing.assert_close(mirrored, expected)


def test_gradients_against_finite_differences() -> None:
    torch.manual_seed(0)
    W, b = 2 * torch.randn(5, 3).double(), torch.randn(5).double()
    u = torch.randn(2, 3).double().requires_grad_()

    layer = reflection(W, b)
    assert gradcheck(layer, (u,), atol=1e-6)
    potential = layer.cell.energy["convex_potential"]
    layer(u.detach()).square().sum().backward()
    for parameter in potential.parameters():
        slope = torch.randn_like(parameter)
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.add_(step * slope)
                values.append(layer(u.detach()).square().sum())
                parameter.sub_(step * slope)
        difference = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close((parameter.grad * slope).sum(), difference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("channels", "downsample"), [(None, 1), (5, 1), (None, 2), (12, 2)])
def test_embedding_is_isometric(channels: int | None, downsample: int) -> None:
    first, second = torch.rand(2, 3, 2, 6, 4)
    embed = Isometry(2, channels, downsample, flatten=False)
    gap = embed(first) - embed(second)
    expected = (first - second).flatten(1).norm(dim=1)
    torch.testing.assert_close(gap.flatten(1).norm(dim=1), expected)


NETWORKS = {
    "dense": {},
    "steep": {"zeta": 8.0},
    "dual": {"dual": True},
    "conv": {"filters": (3,), "units": (), "channels": 4},
    "pooled": {"units": (5,), "pool": 2, "center": 0.4},
    "both": {"filters": (6,), "units": (5,), "channels": 4, "downsample": 2, "norm": "bound"},
    "orthonormal": {"weight": 100.0, "center": 0.4},
    "patches": {"weight": 3.0, "stages": [(2, 5, 3)], "units": ()},
    "patches and units": {"weight": 100.0, "stages": [(1, 3, 1), (1, 9, 2)], "units": (8,)},
}
ITERATED = [kind for kind, options in NETWORKS.items() if "weight" not in options]


@pytest.mark.parametrize("kind", NETWORKS)
def test_margin_slopes_are_lipschitz_constants(kind: str) -> None:
    model = network(**NETWORKS[kind]).double()  # type: ignore[arg-type]
    x, y = torch.rand(2, 16, 1, 4, 4).double()
    with torch.no_grad(), eq.solving(model, tolerance=1e-11, max_iterations=1000):
        first, second = model(x), model(y)
    margins = [logits[:, :, None] - logits[:, None] for logits in (first, second)]
    change = (margins[0] - margins[1]).abs()
    bound = model.margin_slopes()[None] * (x - y).flatten(1).norm(dim=1)[:, None, None]
    assert (change <= bound * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
def test_margin_errors_are_below_their_bounds(kind: str, tolerance: float) -> None:
    model, x = network(**NETWORKS[kind]), torch.rand(32, 1, 4, 4)  # type: ignore[arg-type]
    with eq.solving(model, tolerance=tolerance):
        certificate = eq.certify(model, x)
    exact = network(**NETWORKS[kind]).double()  # type: ignore[arg-type]
    with torch.no_grad(), eq.solving(exact, tolerance=1e-11, max_iterations=1000):
        logits = exact(x.double())
    best = certificate.prediction
    margin = logits.gather(1, best[:, None]) - logits
    assert ((margin - certificate.margin).abs() <= certificate.margin_error + 1e-9).all()
    assert (certificate.error > 0).all()
    assert certificate.unique.all()


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("margin", [None, 1e-7])
def test_no_certificate_is_false(kind: str, margin: float | None) -> None:
    model, x = network(1, **NETWORKS[kind]), torch.rand(48, 1, 4, 4)  # type: ignore[arg-type]
    if margin is not None:
        narrow_margins(model, x, margin)
    hunt = Hunt()
    hunt.check(model, x, attacked=8)
    assert hunt.certified > 0
    assert hunt.attacked > 0
    assert hunt.exits > 0
    assert hunt.false_classes == hunt.false_radii == hunt.false_exits == 0


@pytest.mark.parametrize("kind", ITERATED)
def test_early_exit_predicts_the_same_classes_with_fewer_iterations(kind: str) -> None:
    model, x = network(1, **NETWORKS[kind]), torch.rand(48, 1, 4, 4)  # type: ignore[arg-type]
    with torch.no_grad():
        model.head.bias[0] += 3  # type: ignore[index, operator]
    early = eq.certificates.CertifiedExit(model, (1, 4, 4))
    with torch.no_grad(), eq.solving(model, tolerance=1e-5):
        with eq.solving(model, record=True) as full_record:
            expected = model(x).argmax(dim=1)
        with eq.solving(model, record=True) as early_record:
            classes = early(x).argmax(dim=1)
    assert early.certified.all()
    assert torch.equal(classes, expected)
    iterations, full_iterations = (
        sum(int(solution.iterations.sum()) for solution in record.solutions)
        for record in (early_record, full_record)
    )
    assert iterations < full_iterations


def test_early_exit_without_a_certificate_returns_the_logits_of_the_model() -> None:
    """With a margin of zero there is never a certificate."""
    model, x = network(), torch.rand(6, 1, 4, 4)
    with torch.no_grad():
        model.head.direction[1:] = model.head.direction[0]  # type: ignore[index, operator]
        model.head.bias.zero_()  # type: ignore[union-attr, operator]
        early = eq.certificates.CertifiedExit(model, (1, 4, 4))
        with eq.solving(model, tolerance=1e-4, record=True) as record:
            logits = early(x)
            expected = model(x)
    assert not early.certified.any()
    assert early.share_certified == 0
    assert all(bool((s.residual <= 1e-4).all()) for s in record.solutions[-2:])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_center_does_not_change_distances() -> None:
    first, second = torch.rand(2, 3, 1, 4, 4)
    embed = Isometry(1, None, 1, flatten=True, center=0.3)
    torch.testing.assert_close(embed(first) - embed(second), (first - second).flatten(1))
    torch.testing.assert_close(embed(first), first.flatten(1) - 0.3)


def test_pooling_is_nonexpansive_and_isometric_on_constant_squares() -> None:
    first, second = torch.rand(2, 8, 2, 6, 4).double()
    pooled = Isometry(2, None, 1, flatten=True, pool=2)
    gap, before = (
        (pooled(first) - pooled(second)).norm(dim=1),
        (first - second).flatten(1).norm(dim=1),
    )
    assert (gap < before).all()
    constant = first[:, :, ::2, ::2].repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(pooled(constant).norm(dim=1), constant.flatten(1).norm(dim=1))


def test_radii_for_two_pixels_are_below_the_exact_ones() -> None:
    """Compare with the nearest point of another class on a fine grid."""
    torch.manual_seed(3)
    model = reflection_network(
        image_size=1, units=(6, 6), in_channels=2, num_classes=3, zeta=3.0
    ).eval()
    x = torch.rand(6, 2, 1, 1)
    certificate = eq.certify(model, x)
    angles = torch.linspace(0, 2 * math.pi, 49)[:-1]
    directions = torch.stack([angles.cos(), angles.sin()], dim=1)
    lengths = torch.linspace(0, 2, 33)[1:]
    ratios = []
    for image, predicted, radius in zip(x, certificate.prediction, certificate.radius, strict=True):
        grid = image.flatten() + lengths[:, None, None] * directions
        with torch.no_grad(), eq.solving(model, tolerance=1e-4):
            classes = model(grid.reshape(-1, 2, 1, 1)).argmax(dim=1).reshape(len(lengths), -1)
        changed = (classes != predicted).any(dim=1)
        nearest = float(lengths[changed.int().argmax()]) if bool(changed.any()) else math.inf
        assert float(radius) <= nearest
        ratios.append(float(radius) / nearest)
    assert max(ratios) > 0.3


def test_radii_account_for_the_normalization() -> None:
    options = {"image_size": 4, "units": (7,), "in_channels": 1, "num_classes": 4}
    torch.manual_seed(0)
    plain = reflection_network(**options).eval()  # type: ignore[arg-type]
    normalized = eq.create_model("reflection-digits", **options, normalize=((0.0,), (0.5,))).eval()
    normalized.load_state_dict(plain.state_dict(), strict=False)
    x = torch.rand(8, 1, 4, 4)
    expected, actual = eq.certify(plain, x), eq.certify(normalized, x / 2)
    torch.testing.assert_close(expected.radius, 2 * actual.radius, rtol=1e-4, atol=1e-6)


def test_invalid_options_and_images_raise() -> None:
    with pytest.raises(ValueError, match="channels must be at least"):
        reflection_network(channels=2, downsample=2)
    with pytest.raises(ValueError, match="filters and units are both empty"):
        reflection_network(units=())
    with pytest.raises(ValueError, match="must be divisible by"):
        reflection_network(image_size=28, downsample=3)
    model = network()
    with pytest.raises(ValueError, match="image_size"):
        model.head(torch.rand(2, 9))
    with pytest.raises(ValueError, match="expected images of shape"):
        eq.certificates.certifier(model, (1, 4, 4))(torch.rand(2, 1, 5, 5))
