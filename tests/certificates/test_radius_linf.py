"""The certified radius in L∞ holds against attacks and is at least the L2 radius over √n."""

from __future__ import annotations

import math

import pytest
import torch

import equilibria as eq
from equilibria.certificates.stem import LINF
from tests.certificates.certified_bank import FAMILIES, images, random_model


@pytest.mark.parametrize("family", FAMILIES)
def test_linf_radius_is_at_least_the_l2_radius_over_root_n(family: str) -> None:
    model, x = random_model(family, 3, 0.6), images(6)
    for refine in (False, True):
        certificate = eq.certify(model, x, refine=refine)
        assert bool((certificate.radius_linf >= certificate.radius / math.sqrt(x[0].numel())).all())
        assert torch.equal(certificate.radius_linf > 0, certificate.radius > 0)


@pytest.mark.parametrize("family", ["dense", "opteq-y", "reflection"])
@pytest.mark.parametrize("method", ["fgsm", "pgd"])
def test_linf_attacks_within_the_radius_do_not_change_a_class(family: str, method: str) -> None:
    model, x = random_model(family, 8, 0.7).double(), images(8).double()
    with eq.solving(model, tolerance=1e-9):
        certificate = eq.certify(model, x)
        is_certain = certificate.radius_linf > 0
        assert int(is_certain.sum()) > 3
        for place in is_certain.nonzero().flatten().tolist()[:4]:
            image, label = x[place : place + 1], certificate.prediction[place : place + 1]
            eps = float(certificate.radius_linf[place])
            attacked = eq.attack(
                model, image, label, norm="linf", eps=eps, method=method, clip=None, loss="margin"
            )
            assert attacked.robust_accuracy == 1


def test_linf_radius_of_an_affine_stem_agrees_with_dense_linear_algebra() -> None:
    """½‖UᵀXg‖₁ + ½√(gᵀXg)·√n‖U‖/√(1 − h) with X = (I − WWᵀ)⁻¹, better than the L2 bound."""
    model, x = random_model("dense", 3, 0.6).double(), images(6).double()
    certificate = eq.certify(model, x)
    cell = model.layer.cell
    W = cell.W.weights((5,))[0].detach()
    U = cell.energy["input"].U.weights((16,))[0].detach()
    X = torch.linalg.inv(torch.eye(len(W), dtype=torch.float64) - W @ W.T)
    rows = model.head.weight.detach() @ W.T
    root = (1 - torch.linalg.matrix_norm(W, 2) ** 2).sqrt()
    size = math.sqrt(16) * torch.linalg.matrix_norm(U, 2)
    for sample in certificate.certified_class.nonzero().flatten().tolist():
        g = rows[certificate.prediction[sample]] - rows
        along = (g @ X @ U).abs().sum(dim=1)
        across = ((g @ X) * g).sum(dim=1).clamp_min(0).sqrt() * size / root
        room = certificate.margin[sample] - certificate.margin_error[sample]
        others = torch.arange(len(rows)) != certificate.prediction[sample]
        exactly = float((room / (0.5 * (along + across)))[others].min())
        radius = float(certificate.radius_linf[sample])
        assert exactly * (1 - 1e-3) <= radius <= exactly * (1 + 1e-12)
        assert radius > float(certificate.radius[sample]) / 4 * (1 + 1e-3)


def test_dual_norm_of_linf_is_the_l1_norm() -> None:
    row = torch.tensor([[3.0, -4.0]])
    assert float(LINF.dual(row)) == 7
    assert LINF.l2_size(4) == 2
