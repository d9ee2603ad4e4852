"""OptEq's Table 1 by row: fixed points against numerical minimizers, and proximal operators."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import equilibria as eq
from equilibria.activations import LeakyReLU
from equilibria.models import DeepOptEqCell, UnitLayer
from equilibria.papers.theory import is_proximal
from equilibria.papers.theory.opteq import AffineOptEqCell, MultivariateOptEqCell, psd_factor

SIZE = 4
SLOPE = 0.3
SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=5000)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def orthogonal() -> Tensor:
    return torch.linalg.qr(random(SIZE, SIZE, seed=5)).Q


def unit(mu: float = 1.0, alpha: float = 1.0) -> UnitLayer:
    """Return a layer with an invertible W, for which φ has a closed form on the whole space."""
    W = random(SIZE, SIZE, seed=1) + 2 * torch.eye(SIZE)
    W *= 0.9 / torch.linalg.matrix_norm(W, 2)
    return UnitLayer(
        W, random(SIZE, 3, seed=2), bias=random(SIZE, seed=3), activation=LeakyReLU(SLOPE),
        mu=mu, alpha=alpha,
    )  # fmt: skip


def phi(layer: UnitLayer, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return φ = ψ* − ½‖·‖² of Theorem 1, ψ*(z) = 1ᵀS*(W⁻ᵀμz)/μ − ⟨Ux + b, W⁻ᵀz⟩."""
    W, c = layer.W.weights((SIZE,))[0].detach(), layer.inject(x)["c"].detach()[0]

    def value(z: Tensor) -> Tensor:
        y = torch.linalg.solve(W.T, layer.mu * z)
        conjugate = layer.activation.conjugate(y) - c * y
        return conjugate.sum() / layer.mu - 0.5 * z.square().sum()

    return value


def minimizer(function: Callable[[Tensor], Tensor], size: int = SIZE) -> Tensor:
    def with_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        z = torch.from_numpy(flat).requires_grad_()
        value = function(z)
        return value.item(), torch.autograd.grad(value, z)[0].numpy()

    start = np.full(size, 0.1)
    result = minimize(with_gradient, start, jac=True, method="BFGS", options={"gtol": 1e-10})
    return torch.from_numpy(result.x)


def equilibrium(cell: eq.Cell, x: Tensor) -> Tensor:
    layer = eq.EquilibriumLayer(cell=cell, solver=SOLVER, strict=True)
    with torch.no_grad():
        result: Tensor = layer(x)
    return result


CHANGES = {
    "rotation": (orthogonal(), None),
    "translation": (torch.eye(SIZE, dtype=torch.float64), random(SIZE, seed=6)),
    "isometry": (orthogonal(), random(SIZE, seed=6)),
    "scaling": (torch.diag(torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)), None),
    "affine": (random(SIZE, SIZE, seed=7), random(SIZE, seed=6)),
}
ISOMETRIES = {"rotation", "translation", "isometry"}


@pytest.mark.parametrize("mu", [1.0, 1.5])
@pytest.mark.parametrize("name", list(CHANGES))
def test_row_3_the_fixed_point_minimizes_phi_after_an_affine_change(name: str, mu: float) -> None:
    R, t = CHANGES[name]
    layer, x = unit(mu), random(1, 3, seed=4)
    cell = AffineOptEqCell(layer, R, t)
    z = equilibrium(cell, x)
    shift = torch.zeros(SIZE, dtype=torch.float64) if t is None else t
    value = phi(layer, x)
    best = minimizer(lambda u: value(R @ u + shift))
    torch.testing.assert_close(z[0], best, rtol=0, atol=1e-7)
    objective = cell.objective(cell.inject(x))
    assert objective.value(z).item() == pytest.approx(value(R @ z[0] + shift).item(), abs=1e-10)
    assert objective.residual(z).item() < 1e-10
    # Away from the fixed point, value and gradient are those of φ∘A at the image.
    v = random(1, SIZE, seed=8)
    image = cell.step(v, cell.inject(x)).detach().requires_grad_()  # type: ignore[union-attr]
    at_image = value(R @ image[0] + shift)
    torch.testing.assert_close(objective.value(v)[0], at_image)
    (expected,) = torch.autograd.grad(at_image, image)
    torch.testing.assert_close(objective.gradient(v), expected)


@pytest.mark.parametrize("name", list(CHANGES))
def test_row_3_is_a_prox_exactly_for_isometries(name: str) -> None:
    R, t = CHANGES[name]
    layer, x = unit(), random(1, 3, seed=4)
    cell = AffineOptEqCell(layer, R, t)
    report = is_proximal(cell, x)
    assert bool(report) == (name in ISOMETRIES)
    assert report.is_gradient == (name in ISOMETRIES)
    # In the metric of RᵀR it always is a proximal operator.
    shift = torch.zeros(SIZE, dtype=torch.float64) if t is None else t
    value, v = phi(layer, x), random(1, SIZE, seed=8)
    image = cell.step(v, cell.inject(x))
    near = minimizer(lambda u: value(R @ u + shift) + 0.5 * (R @ (u - v[0])).square().sum())
    torch.testing.assert_close(image[0], near, rtol=0, atol=1e-7)  # type: ignore[index]


def test_row_3_bound_holds_and_the_rate_is_that_of_the_layer() -> None:
    R, t = CHANGES["affine"]
    layer, x = unit(), random(1, 3, seed=4)
    cell = AffineOptEqCell(layer, R, t)
    context = cell.inject(x)
    bound = cell.bounds(context, ((SIZE,),)).contraction
    assert bound is not None
    assert is_proximal(cell, x).lipschitz <= bound
    assert bound == pytest.approx(0.81 * torch.linalg.cond(R).item())
    a, b = random(1, SIZE, seed=8), random(1, SIZE, seed=9)
    moved = cell.step(a, context) - cell.step(b, context)  # type: ignore[operator]
    assert (moved @ R.T).norm() <= 0.81 * ((a - b) @ R.T).norm()


def multivariate(rank: int = SIZE, norm: float = 0.95) -> tuple[MultivariateOptEqCell, Tensor]:
    F = random(SIZE, rank, seed=10)
    W = random(SIZE, SIZE, seed=1) + 2 * torch.eye(SIZE)
    W *= norm**0.5 / torch.linalg.matrix_norm(F.T @ W, 2)
    U, bias = random(SIZE, 3, seed=2), random(SIZE, seed=3)
    return MultivariateOptEqCell(W, U, nn.Parameter(F), bias=bias), W


def test_row_4_is_the_prox_of_a_quadratic_and_finds_its_minimizer() -> None:
    cell, W = multivariate()
    x = random(1, 3, seed=4)
    context = cell.inject(x)
    S, c = (cell.factor @ cell.factor.T).detach(), context["c"].detach()[0]

    def value(z: Tensor) -> Tensor:
        y = torch.linalg.solve(W.T, z)
        return 0.5 * y @ torch.linalg.solve(S, y) - c @ y - 0.5 * z @ z

    z = equilibrium(cell, x)
    torch.testing.assert_close(z[0], minimizer(value), rtol=1e-7, atol=1e-7)
    # Its prox in closed form: (W⁻¹S⁻¹W⁻ᵀ) z = v + W⁻¹c.
    v = random(1, SIZE, seed=8)
    inverse = torch.linalg.inv(W)
    near = torch.linalg.solve(inverse @ torch.linalg.inv(S) @ inverse.T, v[0] + inverse @ c)
    image = cell.step(v, context)
    assert isinstance(image, Tensor)
    torch.testing.assert_close(image[0].detach(), near, rtol=1e-10, atol=1e-10)
    objective = cell.objective(context)
    assert objective.value(v).item() == pytest.approx(value(image[0].detach()).item(), abs=1e-10)
    assert objective.residual(z).item() < 1e-10
    point = image.detach().requires_grad_()
    (expected,) = torch.autograd.grad(value(point[0]), point)
    torch.testing.assert_close(objective.gradient(v).detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [SIZE, 2])
def test_row_4_is_a_prox_if_the_norm_is_at_most_one(rank: int) -> None:
    x = random(2, 3, seed=4)
    cell, _ = multivariate(rank, norm=1.0)
    assert is_proximal(cell, x, tolerance=1e-10)
    large, _ = multivariate(rank, norm=1.3)
    report = is_proximal(large, x, samples=200)
    assert report.is_gradient
    assert report.is_monotone
    assert not report.is_nonexpansive
    bound = large.bounds(large.inject(x), ((SIZE,),)).contraction
    assert bound >= 1.3 - 1e-12


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_row_2_skip_connection_is_the_prox_of_a_moreau_envelope(alpha: float) -> None:
    """f_α(v) = argmin_u α M_φ^{1−α}(u) + ½‖u − v‖², with the fixed points of f."""
    layer, x = unit(alpha=alpha), random(1, 3, seed=4)
    cell = DeepOptEqCell([layer])
    torch.testing.assert_close(equilibrium(cell, x), equilibrium(DeepOptEqCell([unit()]), x))
    assert is_proximal(cell, x)
    value, v = phi(layer, x), random(1, SIZE, seed=8)

    def envelope_and_distance(both: Tensor) -> Tensor:
        u, p = both[:SIZE], both[SIZE:]
        envelope = value(p) + (u - p).square().sum() / (2 * (1 - alpha))
        return alpha * envelope + 0.5 * (u - v[0]).square().sum()

    near = minimizer(envelope_and_distance, 2 * SIZE)[:SIZE]
    image = cell.step(v, cell.inject(x))
    torch.testing.assert_close(image[0].detach(), near, rtol=0, atol=1e-7)  # type: ignore[index]


def test_skip_connection_in_other_coordinates_keeps_the_fixed_point() -> None:
    R, t = CHANGES["affine"]
    x = random(2, 3, seed=4)
    plain, skipping = (AffineOptEqCell(unit(alpha=a), R, t) for a in (1.0, 0.4))
    torch.testing.assert_close(equilibrium(plain, x), equilibrium(skipping, x))


def affine_cell() -> eq.Cell:
    R, t = CHANGES["affine"]
    return AffineOptEqCell(unit(), nn.Parameter(R.clone()), nn.Parameter(t.clone()))


def multivariate_cell() -> eq.Cell:
    return multivariate()[0]


@pytest.mark.parametrize("make", [affine_cell, multivariate_cell])
def test_gradients_reach_the_input_and_every_parameter(make: Callable[[], eq.Cell]) -> None:
    cell = make().requires_grad_()
    layer = eq.EquilibriumLayer(cell=cell, solver=SOLVER, gradient=eq.Implicit(tolerance=1e-12))
    x = random(2, 3, seed=4).requires_grad_()
    variables = [x, *cell.parameters()]
    assert len(variables) >= 4
    gradients = torch.autograd.grad(layer(x).square().sum(), variables)
    for variable, gradient in zip(variables, gradients, strict=True):
        direction = torch.randn_like(variable)
        with torch.no_grad():
            shifted = []
            for sign in (1, -1):
                variable += sign * 1e-6 * direction
                shifted.append(layer(x).square().sum())
                variable -= sign * 1e-6 * direction
        difference = (shifted[0] - shifted[1]) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [affine_cell, multivariate_cell])
def test_cells_support_copy_pickle_and_empty_batches(make: Callable[[], eq.Cell]) -> None:
    cell = make()
    x = random(2, 3, seed=4)
    expected = equilibrium(cell, x)
    for same in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        torch.testing.assert_close(equilibrium(same, x), expected, rtol=0, atol=0)
    assert equilibrium(cell, x[:0]).shape == (0, SIZE)
    rough = eq.EquilibriumLayer(cell=cell.float(), solver=eq.Anderson(tolerance=1e-5)).solve(
        x.float()
    )
    torch.testing.assert_close(rough.state, expected.float(), rtol=1e-3, atol=1e-3)


def test_both_cells_act_on_the_channels_of_images() -> None:
    torch.manual_seed(0)
    W = eq.Conv2d(3, 4, 3, norm="bound", zeta=0.9).double()
    U = eq.Conv2d(2, 4, 3).double()
    x = random(2, 2, 5, 5)
    R = torch.linalg.qr(random(3, 3)).Q
    plain = UnitLayer(W, U, bias=False)
    affine = AffineOptEqCell(plain, R, random(3, seed=1))
    assert is_proximal(affine, x)
    z = equilibrium(affine, x)
    moved = torch.einsum("ij,bjhw->bihw", R, z) + random(3, seed=1)[:, None, None]
    torch.testing.assert_close(moved, equilibrium(DeepOptEqCell([plain]), x), rtol=1e-9, atol=1e-9)
    mixing = MultivariateOptEqCell(W, U, 0.9 * torch.linalg.qr(random(4, 4)).Q, bias=False)
    assert is_proximal(mixing, x)
    z = equilibrium(mixing, x)
    assert (mixing.objective(mixing.inject(x)).residual(z) < 1e-9).all()


def test_psd_factor_reproduces_the_matrix() -> None:
    F = random(4, 2)
    factor = psd_factor(F @ F.T)
    torch.testing.assert_close(factor @ factor.T, F @ F.T)
    with pytest.raises(ValueError, match="symmetric"):
        psd_factor(random(3, 3))
    with pytest.raises(ValueError, match="positive semidefinite"):
        psd_factor(-torch.eye(3))
    with pytest.raises(ValueError, match="square"):
        psd_factor(F)


def test_wrong_shapes_raise() -> None:
    with pytest.raises(ValueError, match="square"):
        AffineOptEqCell(unit(), random(4, 3))
    with pytest.raises(ValueError, match="invertible"):
        AffineOptEqCell(unit(), torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="t must have shape"):
        AffineOptEqCell(unit(), orthogonal(), random(3))
    with pytest.raises(ValueError, match="W gives 4 channels, but S acts on 3"):
        MultivariateOptEqCell(random(4, 4), random(4, 3), torch.eye(3), bias=False)
    with pytest.raises(ValueError, match="a matrix"):
        MultivariateOptEqCell(random(4, 4), random(4, 3), torch.ones(4), bias=False)
