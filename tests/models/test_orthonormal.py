"""Orthonormal reflections: the closed form, its bounds, and patches."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.certificates.reflection_bounds import ClosedFormBound
from equilibria.models.reflection.model import ReflectionNetwork
from equilibria.models.reflection.orthonormal import (
    Maps,
    OrthonormalReflectionCell,
    Patches,
    orthonormal_network,
)
from equilibria.operators.orthonormal import orthonormal_rows


def cell(features: int = 5, rows: int = 3, weight: float = 100.0) -> OrthonormalReflectionCell:
    torch.manual_seed(0)
    made = OrthonormalReflectionCell(features, rows, weight=weight).double()
    with torch.no_grad():
        made.ridge.bias.normal_()  # type: ignore[union-attr]
        made.ridge.W.kernel.normal_()
    return made


def with_rows(rows: Tensor, weight: float) -> OrthonormalReflectionCell:
    """Return a cell with given rows Q instead of orthonormal ones."""
    made = cell(rows.shape[1], len(rows), weight)
    made.ridge.W.norm = None
    made.ridge.W.kernel = nn.Parameter(rows.clone())
    return made


def network() -> ReflectionNetwork:
    torch.manual_seed(0)
    return orthonormal_network(image_size=8, stages=[(2, 6, 2)], units=(12,), in_channels=1).eval()


@pytest.mark.parametrize("weight", [0.3, 1.0, 100.0])
def test_closed_form_minimizes_the_objective(weight: float) -> None:
    """½‖z − u‖² + ½ω‖σ(Qz + b)‖² with QQᵀ = I."""
    rows = torch.linalg.qr(torch.randn(6, 6).double())[0][:4]
    layer = eq.EquilibriumLayer(cell=with_rows(rows, weight))
    bias, u = layer.cell.ridge.bias.detach(), torch.randn(1, 6).double()

    def objective(values: list[float]) -> float:
        z = torch.tensor(values, dtype=torch.float64)
        ridge = 0.5 * weight * (rows @ z + bias).relu().square().sum()
        return float(0.5 * (z - u[0]).square().sum() + ridge)

    expected = minimize(objective, u[0].numpy(), method="L-BFGS-B", options={"ftol": 1e-15}).x
    solution = layer.solve(u)
    torch.testing.assert_close(solution.state[0], torch.tensor(expected), rtol=0, atol=1e-5)
    assert float(layer.objective(u).residual(solution.state).detach()) < 1e-12
    assert solution.solver == "closed form"
    assert solution.converged.all()
    assert solution.iterations.tolist() == [1]


@pytest.mark.parametrize("weight", [1.0, 100.0])
def test_error_by_jitter_is_bounded(weight: float) -> None:
    """‖z − z*‖ ≤ ‖∇G(z)‖ ≤ ωt‖Q‖‖I − QQᵀ‖‖y‖ with t = ω/(1 + ω), y = σ(Qu + b)."""
    layer = eq.EquilibriumLayer(cell=cell(weight=weight)).requires_grad_(False)
    u, ridge = torch.randn(8, 5).double(), layer.cell.ridge
    tight = {"tolerance": 1e-13, "max_iterations": 10_000}
    exact = layer.solve(u, solver=eq.Picard(**tight)).state
    rows = ridge.W.weight
    gap = torch.linalg.matrix_norm(torch.eye(3).double() - rows @ rows.T, 2)
    active = (u @ rows.T + ridge.bias).relu().norm(dim=1)
    share = weight / (1 + weight)
    bound = weight * share * gap * torch.linalg.matrix_norm(rows, 2) * active
    error = (layer.solve(u).state - exact).norm(dim=1)
    assert (error <= bound + 1e-10).all()
    assert error.max() > 0


def test_steepness_of_any_rows_is_bounded() -> None:
    for size in (0.5, 1.0, 1.004, 1.3):
        made = with_rows(size * torch.linalg.qr(torch.randn(6, 6).double())[0][:4], 100.0)
        bound = ClosedFormBound.of(made)
        u = torch.randn(64, 6).double()
        v = u + 1e-3 * torch.randn(64, 6).double()
        with torch.no_grad():
            layer = eq.EquilibriumLayer(cell=made)
            quotient = (layer(u) - layer(v)).norm(dim=1) / (u - v).norm(dim=1)
        assert float(quotient.max()) <= bound.steepness * (1 + 1e-9)
        exact = max(1.0, 2 / 1.01 * size**2 - 1)
        assert exact <= bound.steepness <= exact * (1 + 1e-6)


def test_rounding_in_float64_is_below_its_bound() -> None:
    """Compare with exact arithmetic on the same numbers, by fractions."""
    from fractions import Fraction

    made = with_rows(torch.linalg.qr(torch.randn(4, 4).double())[0][:2], 100.0)
    u = torch.randn(1, 4).double()
    with torch.no_grad():
        computed = eq.EquilibriumLayer(cell=made)(u)[0]
    rows, bias = made.ridge.W.weight.tolist(), made.ridge.bias.tolist()  # type: ignore[union-attr]
    values = [Fraction(x) for x in u[0].tolist()]
    active = []
    for row, offset in zip(rows, bias, strict=True):
        lifted = sum(Fraction(q) * x for q, x in zip(row, values, strict=True)) + Fraction(offset)
        active.append(max(lifted, Fraction(0)))
    tau = Fraction(200, 101)
    squares = Fraction(0)
    for i, x in enumerate(values):
        exact = x - tau * sum(Fraction(row[i]) * y for row, y in zip(rows, active, strict=True))
        squares += (exact - Fraction(float(computed[i]))) ** 2
    error = math.sqrt(squares)
    assert error <= float(ClosedFormBound.of(made).rounding(u)) <= 1e-13


def test_rounding_in_float32_is_below_its_bound() -> None:
    """The margins of the model in its own type, compared with those in float64."""
    for seed in range(5):
        torch.manual_seed(seed)
        model, images = network(), torch.rand(32, 1, 8, 8)
        certifier = eq.certificates.certifier(model, (1, 8, 8))
        at = certifier._reflected(images.double(), [])  # type: ignore[attr-defined]
        logits, margins = certifier._margins(at)  # type: ignore[attr-defined]
        own = model(images).detach().double()
        own_margins = own.gather(1, margins.best[:, None]) - own
        bound = certifier._own_error(at, logits)  # type: ignore[attr-defined]
        assert ((own_margins - margins.margin).abs() <= bound + margins.error).all()
        assert (bound < 1e-2).all()


def test_certificates_do_not_depend_on_what_the_model_computes() -> None:
    model, images = network(), torch.rand(16, 1, 8, 8)
    with torch.no_grad():
        model.head.bias[1] = model.head.bias[0]  # type: ignore[index]
        model.head.direction[1] = model.head.direction[0] + 1e-6  # type: ignore[index]
    certifier = eq.certificates.certifier(model, (1, 8, 8))
    first, second = certifier(images), certifier.judge(images, certifier.solve(images))
    for name in ("prediction", "certified_class", "radius", "margin", "margin_error"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.reasons == second.reasons


def test_nothing_but_a_formula_is_evaluated() -> None:
    layer, u = eq.EquilibriumLayer(cell=cell()), torch.randn(2, 5).double()
    with eq.solving(layer, solver="picard", record=True) as record:
        output = layer(u)
    assert record.solutions[0].evaluations == 1
    expected = 2 * layer.solve(u).state - u
    torch.testing.assert_close(output, expected)
    iterated = layer.solve(u, solver="picard")
    assert iterated.solver == "Picard"
    assert iterated.evaluations > 1


def test_inputs_that_are_not_finite_diverge() -> None:
    layer = eq.EquilibriumLayer(cell=cell())
    u = torch.tensor([[1.0] * 5, [math.nan] * 5]).double()
    with pytest.warns(eq.ConvergenceWarning):
        solution = layer.solve(u)
    assert [eq.Status(int(status)).name for status in solution.status] == ["CONVERGED", "DIVERGED"]


def test_gradients_against_finite_differences() -> None:
    layer = eq.EquilibriumLayer(cell=cell())
    u = torch.randn(3, 5).double().requires_grad_()
    kernel, bias = layer.cell.ridge.W.kernel, layer.cell.ridge.bias

    def output(u: Tensor, *parameters: Tensor) -> Tensor:
        names = ("kernel", "bias")
        prefixes = (
            "cell.energy.terms.convex_potential.term.W.",
            "cell.energy.terms.convex_potential.term.",
        )
        values = {p + n: t for p, n, t in zip(prefixes, names, parameters, strict=True)}
        return torch.func.functional_call(layer, values, (u,))

    leaves = [t.detach().clone().requires_grad_() for t in (kernel, bias)]
    assert gradcheck(output, (u, *leaves))
    assert gradgradcheck(output, (u, *leaves))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_orthonormal_rows() -> None:
    """QQᵀ = I − εL⁻¹L⁻ᵀ with ε = 1e-5·mean eigenvalue of KKᵀ; Q spans the rows of K."""
    torch.manual_seed(0)
    K = torch.randn(4, 7).double().requires_grad_()
    rows, gram = orthonormal_rows(K), K @ K.T
    eps = 1e-5 * gram.trace() / 4
    eye = torch.eye(4).double()
    inverse = torch.linalg.inv(torch.linalg.cholesky(gram + eps * eye))
    torch.testing.assert_close(rows @ rows.T, eye - eps * inverse @ inverse.T)
    torch.testing.assert_close(orthonormal_rows(1e6 * K), rows)
    assert torch.linalg.matrix_rank(torch.cat([K, rows])) == 4
    assert gradcheck(orthonormal_rows, (K,))
    assert gradgradcheck(orthonormal_rows, (K,))
    forward = torch.func.jvp(orthonormal_rows, (K.detach(),), (torch.ones_like(K),))[1]
    step = 1e-6 * torch.ones_like(K)
    difference = (orthonormal_rows(K + step) - orthonormal_rows(K - step)) / 2e-6
    torch.testing.assert_close(forward, difference, rtol=1e-5, atol=1e-7)
    assert orthonormal_rows(torch.zeros(2, 3)).isnan().all()


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows of length 3 cannot be orthonormal"):
        eq.Dense(3, 4, norm="orthonormal")
    with pytest.raises(ValueError, match="must be divisible by 8 for stage 2"):
        orthonormal_network(image_size=12, stages=[(2, 4, 1), (2, 4, 1)])
    with pytest.raises(ValueError, match="stages and units are both empty"):
        orthonormal_network(units=())


def test_patches_are_an_isometry_with_an_inverse() -> None:
    maps = torch.randn(2, 3, 4, 6)
    patches = Patches(2)(maps)
    assert patches.shape == (2, 6, 12)
    assert torch.equal(Maps(2, 4, 6)(patches), maps)
    square = maps[0, :, 2:4, 4:6]
    torch.testing.assert_close(patches[0, 5].sort().values, square.flatten().sort().values)
    shifted = Patches(2, shift=1)(maps)
    assert torch.equal(Maps(2, 4, 6)(shifted), torch.roll(maps, (-1, -1), (2, 3)))


def test_weights_are_cached_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = network(), []
    monkeypatch.setattr(
        "equilibria.operators.dense.orthonormal_rows",
        lambda kernel: calls.append(kernel.dtype) or orthonormal_rows(kernel),
    )
    with torch.no_grad():
        first = model(torch.rand(2, 1, 8, 8))
        model(torch.rand(3, 1, 8, 8))
    assert calls == [torch.float64] * 3
    assert first.dtype == torch.float32


def test_contributions_sum_to_the_margin() -> None:
    model, images = network(), torch.rand(2, 1, 8, 8)
    order = model(images).argsort(dim=1)
    result = eq.models.contributions(model, images, order[:, -1], order[:, 0])
    assert result.terms == ("input", "convex potential", "input past the equilibrium")
    torch.testing.assert_close(result.source.sum(dim=1) + result.head, result.margin)


def test_compiled_model_and_early_exit_agree() -> None:
    model, images = network(), torch.rand(3, 1, 8, 8)
    early = eq.certificates.CertifiedExit(model, (1, 8, 8))
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(early(images), expected)
        assert early.certified.all()
        torch.testing.assert_close(eq.compile(model)(images), expected)
    assert model.last_solution is not None
    assert model.last_solution.solver == "closed form"
