"""Contracts of the package: registered certifiers, constants and joined certificates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.certificates import Certificate, CertifiedExit, certifier
from equilibria.certificates.certificate import Exit, MarginConstants
from equilibria.certificates.constants import certificate_constants
from equilibria.certificates.layer import LayerCertifier
from equilibria.certificates.margins import MarginBound
from equilibria.models import EquilibriumClassifier
from tests.certificates.certified_bank import FAMILIES, images, random_model

ROOM = Path(eq.certificates.__file__).parent
BOUNDS = {
    *("contraction_bound", "input_bound", "curvature_bound", "concavity_bound", "unit_bounds"),
    *("slopes_along", "energy_form"),
}


class Cautious(EquilibriumClassifier):
    """A model whose certifier certifies nothing."""


class CautiousCertifier(LayerCertifier):
    def judge(self, images: Tensor, *args: object, **options: object) -> Certificate:
        certificate = super().judge(images, *args, **options)  # type: ignore[arg-type]
        nothing = torch.zeros_like(certificate.certified_class)
        return eq.certificates.Certificate(**{**vars(certificate), "certified_class": nothing})

    def exit(self) -> Exit:
        def solve(images: Tensor) -> tuple[Tensor, Tensor]:
            return self.solve(images).logits, torch.zeros(len(images), dtype=torch.bool)

        return solve

    def constants(self) -> MarginConstants:
        return MarginConstants(torch.full((4, 4), torch.inf), why_no_slope="caution")


certifier.register(Cautious, CautiousCertifier.of)


def test_registered_certifier_is_used_by_certify_early_exit_and_constants() -> None:
    model, x = random_model("opteq-y", 3, 0.6), images(4)
    assert eq.certify(model, x).certified_class.all()
    cautious = Cautious(model.stem, model.layer, model.head).eval()
    shape = tuple(x.shape[1:])
    assert not eq.certify(cautious, x).certified_class.any()
    quick = CertifiedExit(cautious, shape)
    quick(x)
    assert not quick.certified.any()
    assert certificate_constants(cautious, shape)["why_not"] == "caution"


def test_model_without_a_certifier_raises() -> None:
    with pytest.raises(eq.certificates.NoCertificateError, match="Linear cannot be certified"):
        certifier(nn.Linear(2, 3), (2,))


def test_constants_bound_the_errors_of_certify() -> None:
    """Both come from one `MarginBound`; `certify` may only be sharper."""
    for family in FAMILIES:
        model, x = random_model(family, 3, 0.6).double(), images(6).double()
        constants = certificate_constants(model, tuple(x.shape[1:]))
        with eq.solving(model, tolerance=1e-3):
            certificate = eq.certify(model, x)
        slope = torch.tensor(constants["margin_error"], dtype=torch.float64)
        limits = slope[certificate.prediction] * certificate.residual[:, None]
        if family != "reflection":  # its constants are per residual of the map, not of ∇G
            assert bool((certificate.margin_error <= 1.01 * limits + 1e-9).all()), family


def test_joined_certificates_match_the_whole_batch() -> None:
    model, x = random_model("opteq-y", 3, 0.6), images(6)
    certify = certifier(model, tuple(x.shape[1:]))
    solved = certify.solve(x)
    whole = certify.judge(x, solved)
    joined = Certificate.join([certify(part) for part in x.split(2)])
    assert len(joined) == len(whole) == len(joined.reasons)
    torch.testing.assert_close(joined.margin, whole.margin, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="at least one certificate"):
        Certificate.join([])


def test_margin_bound_is_infinite_without_a_contraction() -> None:
    direction, q = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0]])
    bound = MarginBound.by_contraction(direction, q)
    assert not bound.is_known
    assert float(bound.error(torch.zeros(1), torch.zeros(1))[0, 1]) == torch.inf


def test_only_facts_calls_the_bounds_of_cells() -> None:
    for path in ROOM.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if path.name not in ("facts.py", "constants.py"):
            assert not called & BOUNDS, path.name
    # Constants for exports use the layer, whose inputs the model computes.
    constants = ast.parse((ROOM / "constants.py").read_text(encoding="utf-8"))
    called = {node.attr for node in ast.walk(constants) if isinstance(node, ast.Attribute)}
    assert called & BOUNDS == {"contraction_bound"}
