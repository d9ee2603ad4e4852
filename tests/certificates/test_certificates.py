"""Certificates hold, bounds are valid, and missing certificates have a reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.certificates.layer import LayerCertifier
from equilibria.certificates.resolvent import Resolvent
from equilibria.certificates.stem import StemBounds
from equilibria.context.state import Packing
from equilibria.models import EquilibriumClassifier, EquilibriumModel, OptEqCell
from equilibria.operators.rounding import application_rounding, unit_roundoff
from tests.certificates.certified_bank import (
    CLASSES,
    FAMILIES,
    SIDE,
    Hunt,
    exact,
    images,
    narrow_margins,
    random_model,
)

SINGLE = unit_roundoff(torch.float32)


@settings(max_examples=8)
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 2**16),
    zeta=st.sampled_from([0.6, 0.9, 1 - 1e-6]),
    margin=st.sampled_from([None, 1e-7, 1e-4]),
)
def test_no_certificate_is_false(family: str, seed: int, zeta: float, margin: float | None) -> None:
    """Compares classes, early exits and attacks with a float64 solve to 1e-12."""
    model, x = random_model(family, seed, zeta), images(16)
    if margin is not None:
        narrow_margins(model, x, margin)
    hunt = Hunt()
    hunt.check(model, x, attacked=2)
    assert (hunt.false_classes, hunt.false_exits, hunt.false_radii) == (0, 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_most_classes_of_every_family_are_certified(family: str) -> None:
    model, x = random_model(family, 3, 0.6), images(24)
    with eq.solving(model, tolerance=1e-6):
        certificate = eq.certify(model, x, refine=False)
    assert certificate.share_certified > 0.9
    assert bool(certificate.unique.all())
    assert bool((certificate.radius[certificate.certified_class] > 0).all())


def toy(seed: int, zeta: float = 0.7) -> EquilibriumClassifier:
    """Return a dense ReLU OptEq on the plane, in float64."""
    torch.manual_seed(seed)
    W = eq.Dense(4, 6, norm="bound", zeta=zeta)
    with torch.no_grad():
        W.kernel.mul_(3)
    cell = OptEqCell(W, eq.Dense(2, 6), bias=torch.randn(6))
    layer = eq.EquilibriumLayer(cell=cell, tolerance=1e-10, max_iterations=1000)
    return EquilibriumClassifier(nn.Identity(), layer, nn.Linear(4, 3)).double()


def with_nearly_equal_rows(seed: int, spread: float) -> tuple[EquilibriumModel, Tensor]:
    """Return a float64 model and one image, with logits that cancel: rows v + spread, −⟨v, y⟩."""
    torch.manual_seed(seed)
    W = eq.Dense(64, 64, norm="bound")
    cell = eq.EnergyCell(eq.Input(torch.eye(64)) + eq.Quadratic(W))
    solver = eq.Picard(tolerance=1e-15, max_iterations=2000)
    layer, head = eq.EquilibriumLayer(cell, solver=solver), nn.Linear(64, CLASSES)
    model = EquilibriumModel(nn.Flatten(), layer, head).double().eval()
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        v = 10 * torch.randn(64, dtype=torch.float64)
        head.weight.copy_(v + spread * torch.randn(CLASSES, 64, dtype=torch.float64))
        head.bias.fill_(-float(head.weight[0] @ model.features(x)[0]))
    return model, x


@pytest.mark.filterwarnings("ignore:the tolerance")
@pytest.mark.parametrize("spread", [1e-12, 3e-15])
def test_margins_of_nearly_equal_rows_are_within_their_error(spread: float) -> None:
    """The margins are compared with those in rational arithmetic, at the same state."""
    for seed in range(20):
        model, x = with_nearly_equal_rows(seed, spread)
        certifier = LayerCertifier.of(model, (1, 8, 8))
        solved = certifier.solve(x)
        certificate = certifier.judge(x, solved)
        at, reading = certifier._locate(x, solved, slice(0, 1)), certifier.prepared.reading
        assert reading is not None
        y = [Fraction(value) for value in at.variables[0].tolist()]
        rows, offsets = reading.pairs.rows.tolist(), reading.offset.tolist()
        logits = [
            sum(Fraction(a) * b for a, b in zip(row, y, strict=True)) + Fraction(offset)
            for row, offset in zip(rows, offsets, strict=True)
        ]
        best = int(certificate.prediction)
        for j, margin in enumerate(certificate.margin[0].tolist()):
            error = abs(Fraction(margin) - (logits[best] - logits[j]))
            assert error <= certificate.margin_error[0, j].item()
        if max(logits) > logits[best]:
            assert not certificate.certified_class
        leave = eq.certificates.CertifiedExit(model, (1, 8, 8))
        leave(x)
        assert not leave.certified  # the margins are smaller than the rounding of the logits


@pytest.mark.parametrize("seed", range(5))
def test_equilibrium_solves_its_quadratic_program(seed: int) -> None:
    """min ½yᵀ(I − WWᵀ)y − cᵀy over y ≥ 0, solved as least squares ‖Lᵀy − L⁻¹c‖ by active sets."""
    model, x = toy(seed), torch.randn(4, 2, dtype=torch.float64)
    cell = model.layer.cell
    assert isinstance(cell, OptEqCell)
    with torch.no_grad():
        W = cell.W.weights((4,))[0].numpy()
        c = cell.inject(x).parts["input"]["c"].numpy()
        y = model.layer.solve(x).state.numpy()
    L = np.linalg.cholesky(np.eye(len(W)) - W @ W.T)
    for sample in range(len(x)):
        solution, _ = nnls(L.T, np.linalg.solve(L, c[sample]))
        assert np.abs(solution - y[sample]).max() < 1e-6
    error = eq.certify(model, x).error
    assert bool((error < 1e-6).all())


def test_certified_radius_is_below_the_exact_radius() -> None:
    """The exact radius is the smallest distance along rays at which the class changes."""
    ratios = []
    angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)[:-1]
    rays = torch.stack([angles.cos(), angles.sin()], dim=1)
    for seed in range(4):
        model, x = toy(seed), torch.randn(6, 2, dtype=torch.float64)
        certificate = eq.certify(model, x, refine=True)
        for point, radius, label in zip(x, certificate.radius, certificate.prediction, strict=True):
            if not radius > 0:
                continue
            lengths = radius * torch.cat([torch.linspace(0.1, 1, 4), torch.logspace(0, 1.3, 24)])
            grid = point + lengths.double()[:, None, None] * rays
            with torch.no_grad():
                classes = model(grid.view(-1, 2)).argmax(dim=1).view(len(lengths), -1)
            other = (classes != label).any(dim=1)
            assert not bool(other[:4].any())
            if bool(other.any()):
                ratios.append(float(radius / lengths[int(other.int().argmax())]))
        assert set(certificate.radii) == {"global", "weighted", "pattern"}
    # The certified radius is within an order of magnitude of the exact one.
    assert len(ratios) > 10
    assert max(ratios) <= 1
    assert float(np.median(ratios)) > 0.1


def test_sharper_bounds_give_larger_radii() -> None:
    model, x = random_model("opteq-y", 1, 0.9), images(8)
    with eq.solving(model, tolerance=1e-6):
        certificate = eq.certify(model, x, refine=True)
    radii = certificate.radii
    assert bool((radii["weighted"] >= radii["global"]).all())
    assert bool((radii["pattern"] >= radii["weighted"]).all())
    gains = certificate.gains()
    assert gains["pattern"] >= gains["weighted"] > gains["global"] == 1


def test_error_bars_hold_and_are_tight() -> None:
    """Margins at the exact equilibrium are within their error bars, which are at most 100 times."""
    for family in ("opteq-y", "opteq-z", "deep-opteq", "popteq", "mopteq", "geq"):
        model, x = random_model(family, 5, 0.8), images(12)
        with eq.solving(model, tolerance=1e-2):
            certificate = eq.certify(model, x, refine=False)
        true = exact(model, x).logits
        margins = true.gather(1, certificate.prediction[:, None]) - true
        off = (certificate.margin - margins).abs()
        assert bool((off <= certificate.margin_error).all()), family
        assert float(certificate.margin_error.amax()) < 100 * float(off.amax()) + 1e-9, family


def test_error_bounds_hold_for_the_state() -> None:
    for family in ("opteq-y", "deep-opteq", "geq"):
        model, x = random_model(family, 2, 0.8), images(6)
        with eq.solving(model, tolerance=1e-2):
            certificate = eq.certify(model, x, refine=False)
            state = model.solve(x).state
        wide = copy.deepcopy(model).double()
        with torch.no_grad(), eq.solving(wide, tolerance=1e-12, max_iterations=3000):
            solution = wide.solve(x.double())
            context = solution.context
            start = tuple(t.double() for t in state) if isinstance(state, tuple) else state.double()
            image = wide.layer.cell.step(start, context)
        pairs = (
            [(image, solution.state)]
            if isinstance(image, Tensor)
            else zip(image, solution.state, strict=True)
        )
        off = sum((a - b).flatten(1).square().sum(dim=1) for a, b in pairs).sqrt()
        assert bool((off <= certificate.error * (1 + 1e-9) + 1e-14).all())
        assert bool((off <= certificate.contraction_error * (1 + 1e-9) + 1e-14).all())


def test_missing_certificates_have_reasons() -> None:
    x = images(3)
    options = {"channels": 4, "in_channels": 1, "num_classes": 4, "pool": 2}
    signs = eq.create_model("mopteq-small", widths=(2, 3), scales=(1, 2), diversity=0.05, **options)
    certificate = eq.certify(signs.eval(), x)
    assert not certificate.certified_class.any()
    assert not certificate.radius.any()
    assert "signs" in certificate.reasons[0]

    scaled = eq.create_model(
        "geq-small", widths=(4,), scales=(1,), channel_split=2, hidden=5, gamma="per-sample",
        zeta=0.5, tolerance=1e-6, **options
    ).eval()  # fmt: skip
    certificate = eq.certify(scaled, x)
    assert certificate.certified_class.all()
    assert not certificate.radius.any()
    assert "depends on the image" in certificate.reasons[0]

    free = eq.create_model("opteq-small", width=3, norm=None, init_scale=9.0, **options).eval()
    with pytest.warns(eq.ConvergenceWarning):
        certificate = eq.certify(free, x)
    assert not certificate.unique.any()
    assert "unique" in certificate.reasons[0]

    coupled = eq.create_model(
        "deep-opteq-small", widths=(2,), regularizer="decorrelation", gamma=1e-3, **options
    ).eval()
    with pytest.warns(eq.equilibrium.BatchCouplingWarning):
        assert "coupled" in eq.certify(coupled, x).reasons[0]

    grouped = random_model("opteq-y", 0)
    grouped.head = nn.Sequential(nn.GroupNorm(2, 4), grouped.head)
    assert "GroupNorm" in eq.certify(grouped, x).reasons[0]
    stem = random_model("opteq-y", 0, 0.6)
    stem.stem.append(nn.GroupNorm(2, 4))
    certificate = eq.certify(stem, x)
    assert "GroupNorm" in certificate.reasons[0]
    assert not certificate.radius.any()
    with pytest.raises(ValueError, match="no certificate"):
        eq.certificates.CertifiedExit(signs, (1, SIDE, SIDE))
    with pytest.raises(ValueError, match="no equilibrium"):
        eq.certify(nn.Linear(2, 3), torch.zeros(1, 2))


def test_checks_vanish_at_the_equilibrium() -> None:
    for family in ("opteq-y", "opteq-z", "mopteq", "geq"):
        model, x = random_model(family, 4, 0.7).double(), images(4).double()
        with eq.solving(model, tolerance=1e-12, max_iterations=2000):
            checks = eq.certify(model, x, refine=False).checks
        for name in ("stationarity", "fenchel_gap", "firmness"):
            assert float(checks[name].abs().amax()) < 1e-8, (family, name)
        if family == "mopteq":
            assert bool((checks["proposition_2"] >= 1 - 1e-9).all())
    deep = random_model("deep-opteq", 4, 0.7).double()
    with eq.solving(deep, tolerance=1e-12, max_iterations=2000):
        assert float(eq.certify(deep, images(4).double()).checks["inclusion"].amax()) < 1e-9


def test_early_exit_gives_the_class_of_a_full_solve_with_fewer_evaluations() -> None:
    for family in ("opteq-y", "opteq-z", "deep-opteq", "popteq", "geq-fixed"):
        model, x = random_model(family, 7, 0.8), images(40)
        quick = eq.certificates.CertifiedExit(model, tuple(x.shape[1:]))
        with torch.no_grad(), eq.solving(model, tolerance=1e-5, record=True) as record:
            full = model(x).argmax(dim=1)
            early = quick(x).argmax(dim=1)
        costs = [solution.sample_evaluations for solution in record.solutions]
        assert bool((full == early).all()), family
        assert costs[1] < costs[0], family
        assert quick.share_certified > 0.5, family
        # A single sample stops at the same iteration as in a batch.
        alone = quick(x[:1])
        assert int(alone.argmax()) == int(early[0])


def test_rounding_of_operators_is_bounded() -> None:
    torch.manual_seed(0)
    for operator in (
        eq.Dense(50, 30, norm="bound", zeta=0.9),
        eq.Conv2d(8, 16, 3, norm="bound", zeta=0.9),
        eq.Conv2d(8, 16, 3) @ eq.AveragePool(2),
    ):
        shape = (50,) if isinstance(operator, eq.Dense) else (8, 12, 12)
        wide = copy.deepcopy(operator).double()
        bound = application_rounding(operator, wide, shape, SINGLE)
        assert bound is not None
        with torch.no_grad():
            z = torch.randn(16, *shape)
            off = (operator(z).double() - wide(z.double())).flatten(1).norm(dim=1)
            assert bool((off <= bound * z.double().flatten(1).norm(dim=1)).all())
            y = torch.randn(16, *operator.output_shape(shape))
            back = (operator.adjoint(y).double() - wide.adjoint(y.double())).flatten(1).norm(dim=1)
            assert bool((back <= bound * y.double().flatten(1).norm(dim=1)).all())


def test_bounds_of_a_stem_hold() -> None:
    """Compares the Lipschitz constant with the Jacobian, and the rounding with float64."""
    model = random_model("opteq-y", 0)
    wide = copy.deepcopy(model).double()
    stem = StemBounds.of(model.stem, wide.stem, model.normalize, (1, SIDE, SIDE), SINGLE)
    x = images(5)
    with torch.no_grad():
        features = stem.run(x)
        true = wide.stem(x.double())
        assert torch.equal(features.values, model.stem(x))
    assert bool(((features.values.double() - true).flatten(1).norm(dim=1) <= features.error).all())
    assert bool((true.flatten(1).norm(dim=1) <= features.size).all())
    J = torch.autograd.functional.jacobian(lambda image: wide.stem(image), x[:1].double())
    largest = torch.linalg.matrix_norm(J.reshape(true[0].numel(), SIDE**2), 2)
    assert float(largest) <= stem.lipschitz()
    assert not stem.is_affine


def test_resolvents_agree_with_dense_inverses() -> None:
    model = toy(0)
    cell = model.layer.cell
    context = cell.inject(torch.randn(1, 2, dtype=torch.float64))
    H = (lambda W: W @ W.T)(cell.W.weights((4,))[0].detach())
    resolvent = Resolvent(cell.energy, context, ((6,),), 0.49)
    rows = torch.randn(3, 6, dtype=torch.float64)
    mask = (torch.rand(3, 6) > 0.4).double()
    with torch.no_grad():
        resolved = resolvent.solve_masked(rows, mask, torch.zeros_like(rows))
        low, high = resolved.quadratic()
    for i in range(3):
        P = torch.diag(mask[i])
        X = P @ torch.linalg.inv(torch.eye(6).double() - P @ H @ P) @ P
        value = rows[i] @ X @ rows[i]
        assert low[i] - 1e-12 <= value <= high[i] + 1e-12
        assert (resolved.solution[i] - X @ rows[i]).norm() <= resolved.error()[i] + 1e-12


def test_bounds_of_energies_hold_at_random_states() -> None:
    """Compares eigenvalues of −∇²E and the Lipschitz constant in the input with Jacobians."""
    for family in ("opteq-y", "popteq", "mopteq", "geq", "geq-fixed"):
        model = random_model(family, 6, 0.9).double()
        cell = model.layer.cell
        feature = torch.randn(1, 4, SIDE, SIDE, dtype=torch.float64)
        with torch.no_grad():
            context = cell.inject(feature)
            state = cell.initial_state(feature, context)
            form = cell.energy_form(state, context)
        assert form is not None
        energy, packing = form.cell.energy, Packing.of(form.image)
        y = 3 * torch.rand_like(packing.pack(form.image))

        def descent(y: Tensor, x: Tensor, cell=cell, energy=energy, packing=packing) -> Tensor:
            inner = cell.inject(x)
            form = cell.energy_form(cell.initial_state(x, inner), inner)
            return packing.pack(energy.descent(packing.unpack(y), form.context))[0]

        in_y, in_x = torch.autograd.functional.jacobian(descent, (y, feature))
        size = y.shape[1]
        with torch.no_grad():
            h = float(energy.bounds(form.context, packing.layout).concavity)
            steep = float(energy.bounds(form.context, packing.layout).input)
            units = energy.bounds(form.context, packing.layout).units
        assert float(torch.linalg.eigvalsh(in_y.view(size, size)).amax()) <= h * (1 + 1e-9)
        matrix = in_x.reshape(size, -1)
        assert float(torch.linalg.matrix_norm(matrix, 2)) <= steep * (1 + 1e-9)
        assert (units is None) == (family in ("mopteq", "geq", "geq-fixed"))
        if units is not None:
            pairs = zip(units, packing.layout, strict=True)
            rows = torch.cat([unit.input.expand(shape).flatten() for unit, shape in pairs])
            assert bool((matrix.norm(dim=1) <= rows * (1 + 1e-9)).all())


@pytest.mark.parametrize("method", ["fgsm", "pgd", "jiio"])
def test_attacks_within_a_certified_radius_do_not_change_a_class(method: str) -> None:
    for family in ("opteq-y", "deep-opteq", "geq"):
        model, x = random_model(family, 8, 0.7).double(), images(6).double()
        with eq.solving(model, tolerance=1e-9):
            certificate = eq.certify(model, x)
            is_certain = certificate.radius > 0
            assert int(is_certain.sum()) > 3
            eps = float(certificate.radius[is_certain].min())
            labels = certificate.prediction[is_certain]
            attacked = eq.attack(model, x[is_certain], labels, eps=eps, method=method, clip=None)
        assert attacked.robust_accuracy == 1


@pytest.mark.parametrize("family", ["deep-opteq", "deep-opteq-five"])
def test_weighted_radius_of_a_deep_opteq_exceeds_the_global_radius(family: str) -> None:
    certificate = eq.certify(random_model(family, 3), images(40))
    is_certain = certificate.certified_class
    assert is_certain.any()
    assert (
        certificate.radii["weighted"][is_certain] > certificate.radii["global"][is_certain]
    ).all()
    assert torch.equal(certificate.radius[is_certain], certificate.radii["weighted"][is_certain])


def test_radii_by_activation_patterns_need_refine() -> None:
    model, x = random_model("opteq-y", 1, 0.9), images(4)
    assert set(eq.certify(model, x).radii) == {"global", "weighted"}
    assert set(eq.certify(model, x, refine=True).radii) == {"global", "weighted", "pattern"}


class Written(TorchDispatchMode):
    """Counts of float64 numbers that operations return, in the largest tensor and in total."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.largest = max(self.largest, result.numel())
            self.total += result.numel()
        return result


def test_differences_of_classes_are_not_computed_per_image() -> None:
    """No tensor may have images × classes × units numbers."""
    classes, count = 10, 64
    options = {"channels": 4, "width": 16, "space": "y", "in_channels": 1}
    model = eq.create_model("opteq-small", num_classes=classes, **options).eval()
    x = torch.rand(count, 1, 8, 8)
    units = model.solve(x).state[0].numel()
    certify = eq.certificates.certifier(model, (1, 8, 8))
    with Written() as written:
        certify(x, refine=False)
    assert 0 < written.largest < count * classes * units


def half_certain() -> tuple[EquilibriumClassifier, Tensor, Tensor]:
    """Return a model, images, and which of them are certified at a tolerance of 0.3."""
    model, x = random_model("opteq-y", 3, 0.9), images(16)
    with eq.solving(model, tolerance=0.3):
        certified = eq.certify(model, x, refine=False).certified_class
    assert 0 < int(certified.sum()) < len(x)
    return model, x, certified


def test_only_images_with_a_certified_class_are_refined() -> None:
    model, x, certified = half_certain()

    def work(images: Tensor, refine: bool) -> int:
        with Written() as written:
            eq.certify(model, images, refine=refine)
        return written.total

    with eq.solving(model, tolerance=0.3):
        more = work(x[~certified], refine=True) / work(x[~certified], refine=False)
        assert more < 1.01
        assert work(x[certified], refine=True) > 1.5 * work(x[certified], refine=False)
        plain = eq.certify(model, x, refine=False)
        refined = eq.certify(model, x, refine=True)
    assert torch.equal(plain.certified_class, refined.certified_class)
    assert bool((refined.radius >= plain.radius).all())
    assert bool((refined.radius[certified] > plain.radius[certified]).any())


def test_refining_reports_progress_without_printing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, x, _ = half_certain()
    done: list[int] = []

    def watched(pieces: Sequence[Any]) -> Iterator[Any]:
        for piece in pieces:
            yield piece
            done.append(len(pieces))

    with eq.solving(model, tolerance=0.3):
        eq.certify(model, x, progress=watched)
        assert not done
        eq.certify(model, x, refine=True, progress=watched)
    assert done
    assert done == [done[0]] * done[0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", ["opteq-y", "deep-opteq", "geq", "reflection"])
def test_one_solve_gives_prediction_and_certificate(family: str) -> None:
    model, x = random_model(family, 3, 0.6), images(8)
    certify = eq.certificates.certifier(model, tuple(x.shape[1:]))
    direct = certify(x)
    with eq.solving(model, record=True) as record:
        solved = certify.solve(x)
        solves = len(record.solutions)
        certificate = certify.judge(x, solved)
    assert solves == len(solved.solutions) == len(record.solutions)
    assert torch.equal(certificate.radius, direct.radius)
    assert torch.equal(certificate.margin, direct.margin)
    assert torch.equal(certificate.certified_class, direct.certified_class)
    with torch.no_grad():
        assert torch.equal(solved.logits.argmax(dim=1), model(x).argmax(dim=1))
    with pytest.raises(ValueError, match="expected images of shape"):
        certify.judge(x[:, :, 1:], solved)


def test_states_of_other_images_give_no_false_certificate() -> None:
    model, x = random_model("opteq-y", 5, 0.8), images(16)
    certify = eq.certificates.certifier(model, tuple(x.shape[1:]))
    solved = certify.solve(x.flip(0))
    certificate, true = certify.judge(x, solved), exact(model, x)
    is_certain = certificate.certified_class
    assert torch.equal(certificate.prediction[is_certain], true.classes[is_certain])
    margins = true.logits.gather(1, certificate.prediction[:, None]) - true.logits
    assert bool(((certificate.margin - margins).abs() <= certificate.margin_error).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_certificate_does_not_depend_on_the_rest_of_the_batch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks give the same certificates as one block."""
    model, x = random_model(family, 3, 0.7), images(12)
    whole = eq.certify(model, x)
    monkeypatch.setattr("equilibria.solvers._cpu.BLOCK_BYTES", 1024)
    parts = eq.certify(model, x)
    for name in ("contraction", "error", "margin", "margin_error", "radius"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-9)
    assert torch.equal(parts.certified_class, whole.certified_class)


def test_weighted_radii_agree_with_dense_linear_algebra() -> None:
    """½‖UᵀXg‖ + ½√(gᵀXg)·‖U‖/√(1 − h) with X = (I − WWᵀ)⁻¹, for g = W(v_k − v_j)."""
    model, x = toy(2), torch.randn(5, 2, dtype=torch.float64)
    certificate = eq.certify(model, x)
    cell = model.layer.cell
    assert isinstance(cell, OptEqCell)
    W = cell.W.weights((4,))[0].detach()
    U = cell.energy["input"].U.weights((2,))[0].detach()
    X = torch.linalg.inv(torch.eye(len(W), dtype=torch.float64) - W @ W.T)
    rows = model.head.weight.detach() @ W.T
    root = (1 - torch.linalg.matrix_norm(W, 2) ** 2).sqrt()
    for sample in range(len(x)):
        g = rows[certificate.prediction[sample]] - rows
        size = torch.linalg.matrix_norm(U, 2)
        along = (g @ X @ U).norm(dim=1)
        across = ((g @ X) * g).sum(dim=1).clamp_min(0).sqrt() * size / root
        room = certificate.margin[sample] - certificate.margin_error[sample]
        quotients = room / (0.5 * (along + across))
        others = torch.arange(len(rows)) != certificate.prediction[sample]
        exactly = float(quotients[others].min())
        assert exactly * (1 - 1e-3) <= float(certificate.radii["weighted"][sample]) <= exactly
