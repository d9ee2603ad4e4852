"""Curves of the accuracy under attack: monotone, above the certified curve, equal to attacks."""

from __future__ import annotations

import pytest
import torch

from equilibria.certificates import certify
from equilibria.inputs import AttackSettings, RobustnessCurves, attack, measure_robustness
from equilibria.inputs.robustness import SHARES, STEP_COUNTS, certified_curve, curve_methods
from tests.inputs.digit_models import digit_classifier, digits

COUNT = 20
SETTINGS = AttackSettings(eps=0.8, steps=5)


@pytest.fixture(scope="module")
def curves() -> RobustnessCurves:
    images, labels = digits(COUNT)
    methods = ("pgd", "fgsm")
    return measure_robustness(digit_classifier("opteq"), images, labels, SETTINGS, methods=methods)


def test_accuracy_falls_with_the_distance(curves: RobustnessCurves) -> None:
    assert {*curves.over_eps} == {"pgd", "fgsm"}
    for points in curves.over_eps.values():
        shares = [curves.accuracy, *(point.accuracy for point in points)]
        assert shares == sorted(shares, reverse=True)
        assert [p.eps for p in points] == [pytest.approx(0.8 * share) for share in SHARES]
        assert all(p.low <= p.accuracy <= p.high for p in points)
    assert curves.over_eps["pgd"][-1].accuracy < curves.accuracy


def test_points_agree_with_single_attacks(curves: RobustnessCurves) -> None:
    """Images that a smaller distance changed are not attacked again."""
    images, labels = digits(COUNT)
    model = digit_classifier("opteq")
    first = attack(model, images, labels, norm="l2", eps=0.08, steps=5)
    assert curves.over_eps["pgd"][0].accuracy == first.robust_accuracy
    assert curves.accuracy == first.accuracy
    steps = [point.steps for point in curves.over_steps["pgd"]]
    assert steps == list(STEP_COUNTS)
    single = attack(model, images, labels, norm="l2", eps=curves.step_eps, steps=1)
    assert curves.over_steps["pgd"][0].accuracy == single.robust_accuracy
    assert "fgsm" not in curves.over_steps


def test_certified_curve_lies_below_every_attack(curves: RobustnessCurves) -> None:
    images, labels = digits(COUNT)
    certificate = certify(digit_classifier("opteq"), images, refine=False)
    right = certificate.prediction == labels
    curve = certified_curve(certificate.radius, right)
    assert curve[0][1] > 0
    for points in curves.over_eps.values():
        for point in points:
            certified = max((share for eps, share in curve if eps > point.eps), default=0.0)
            assert certified <= point.accuracy


def test_certified_curve_counts_radii_of_right_predictions() -> None:
    radii = torch.tensor([0.5, 0.2, 0.0, 0.9])
    right = torch.tensor([True, True, True, False])
    curve = certified_curve(radii, right)
    assert curve == (
        (0.0, 0.5),
        (pytest.approx(0.2), 0.5),
        (pytest.approx(0.5), 0.25),
        (pytest.approx(0.5), 0.0),
    )
    assert certified_curve(torch.zeros(3), torch.ones(3, dtype=torch.bool)) == ((0.0, 0.0),)
    many = certified_curve(torch.rand(500), torch.ones(500, dtype=torch.bool))
    assert len(many) <= 62
    assert [share for _, share in many] == sorted((s for _, s in many), reverse=True)


def test_unsupported_methods_are_skipped() -> None:
    images, labels = digits(4)
    model = digit_classifier("resnet")
    result = measure_robustness(
        model, images, labels, AttackSettings(eps=0.2, steps=1), methods=("jiio", "fgsm")
    )
    assert {*result.over_eps} == {"fgsm"}
    assert result.passed_over[0].startswith("jiio: ")
    with pytest.raises((TypeError, ValueError)):
        measure_robustness(model, images, labels, SETTINGS, methods=("jiio",))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_foolbox_attacks_have_curves(norm: str) -> None:
    pytest.importorskip("foolbox", reason="NO FOOLBOX: pip install foolbox", exc_type=ImportError)
    images, labels = digits(6)
    measured = []
    settings = AttackSettings(eps=0.5 if norm == "l2" else 0.05, norm=norm, steps=2)  # type: ignore[arg-type]
    methods = curve_methods(norm)[3:]
    assert methods == ("foolbox pgd", "foolbox deepfool")
    result = measure_robustness(
        digit_classifier("opteq"),
        images,
        labels,
        settings,
        methods=methods,
        on_measured=measured.append,
    )
    assert {*result.over_eps} == {*methods}
    assert {*result.over_steps} == {"foolbox pgd"}
    assert len(measured) == 2 * len(SHARES) + len(STEP_COUNTS)
    for points in result.over_eps.values():
        shares = [point.accuracy for point in points]
        assert shares == sorted(shares, reverse=True)
