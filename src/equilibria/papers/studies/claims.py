"""Claims of the papers, as comparisons of trained models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equilibria.papers.studies.contestants import (
    DECORRELATED,
    DEEP_OPTEQ,
    GEQ,
    INDEPENDENT,
    MONDEQ,
    MOPTEQ,
    MOPTEQ_PE,
    PLAIN,
    POLYNOMIAL,
    POPTEQ,
    SIGMOID,
)
from equilibria.papers.studies.family import Contestant

MARGIN = 0.005
"""Smallest relevant difference in accuracy: half a percentage point."""


@dataclass(frozen=True)
class Value:
    """A measure of a model: its test accuracy, or one of `measures.MEASURES`."""

    contestant: Contestant
    measure: str = "accuracy"


@dataclass(frozen=True)
class Comparison:
    """A claim that one measure is larger than another, with paired seeds.

    Attributes:
        claim: The claim, as text.
        above: The measure that is claimed to be larger.
        below: The measure that is claimed to be smaller.
        margin: Smallest relevant difference.
        scale: Factor from a measure to the number in tables; 100 for percentage points.
    """

    claim: str
    above: Value
    below: Value
    margin: float = MARGIN
    scale: float = 100.0


@dataclass(frozen=True)
class ClaimStudy:
    """A study that tests claims of one paper by comparing trained models.

    The models are trained once, with the same seeds, for all claims of the study.

    Attributes:
        name: Name of the study on the command line.
        title: Title of the study.
        paper: Paper, with the table or figure that makes the claims.
        comparisons: The claims.
    """

    name: str
    title: str
    paper: str
    comparisons: tuple[Comparison, ...]

    @property
    def values(self) -> Sequence[Value]:
        both = [(comparison.above, comparison.below) for comparison in self.comparisons]
        return [value for pair in both for value in pair]

    @property
    def contestants(self) -> list[Contestant]:
        return list({value.contestant.name: value.contestant for value in self.values}.values())


def _accuracy_claim(claim: str, above: Contestant, below: Contestant) -> Comparison:
    return Comparison(claim, Value(above), Value(below))


def _feature_claim(claim: str, up: Contestant, down: Contestant, measure: str) -> Comparison:
    name = f"heritage_diversity.{measure}"
    return Comparison(claim, Value(up, name), Value(down, name), margin=0.01, scale=1.0)


def _perturbation_claim(claim: str, other: str) -> Comparison:
    random = Value(MOPTEQ, f"perturbations.{other}")
    return Comparison(claim, random, Value(MOPTEQ, "perturbations.reconstructed"))


CLAIM_STUDIES = {
    study.name: study
    for study in (
        ClaimStudy(
            "hhd",
            "HH&D over POptEqs",
            "MOptEqs, Table 1 (a)",
            (_accuracy_claim("MOptEqs is more accurate than POptEqs", MOPTEQ, POPTEQ),),
        ),
        ClaimStudy(
            "heritage-diversity",
            "H up and D down under HH&D",
            "MOptEqs, Figure 2",
            (
                _feature_claim("H is larger in MOptEqs than in POptEqs", MOPTEQ, POPTEQ, "H"),
                _feature_claim("D is smaller in MOptEqs than in POptEqs", POPTEQ, MOPTEQ, "D"),
                _feature_claim("H/D is larger in MOptEqs than in POptEqs", MOPTEQ, POPTEQ, "ratio"),
            ),
        ),
        ClaimStudy(
            "pe",
            "PE",
            "MOptEqs, Tables 1 and 5, Figure 3 (b)",
            (
                _accuracy_claim("PE makes MOptEqs more accurate", MOPTEQ_PE, MOPTEQ),
                Comparison(
                    "PE makes MOptEqs more accurate under PGD",
                    Value(MOPTEQ_PE, "robustness.pgd"),
                    Value(MOPTEQ, "robustness.pgd"),
                ),
            ),
        ),
        ClaimStudy(
            "perturbations",
            "Reconstructed δ worse than random",
            "MOptEqs, Figure 3 (a)",
            (
                _perturbation_claim(
                    "The reconstructed δ harms more than a random one of ±ε", "binomial"
                ),
                _perturbation_claim("The reconstructed δ harms more than a uniform one", "uniform"),
            ),
        ),
        ClaimStudy(
            "opteq",
            "OptEq over a plain network of its size",
            "OptEq, Table 3",
            (
                _accuracy_claim(
                    "Deep OptEq is more accurate than a plain network", DEEP_OPTEQ, PLAIN
                ),
            ),
        ),
        ClaimStudy(
            "mondeq",
            "OptEq over monDEQ of its size",
            "OptEq, Table 4",
            (_accuracy_claim("Deep OptEq is more accurate than monDEQ", DEEP_OPTEQ, MONDEQ),),
        ),
        ClaimStudy(
            "geq",
            "GEQ over MOptEqs",
            "GEQ, Tables 1 and 2",
            (_accuracy_claim("GEQ is more accurate than MOptEqs, both without PE", GEQ, MOPTEQ),),
        ),
        ClaimStudy(
            "kernels",
            "The Gaussian kernel over others",
            "GEQ, Table 5",
            (
                _accuracy_claim(
                    "The Gaussian kernel is ahead of the polynomial one", GEQ, POLYNOMIAL
                ),
                _accuracy_claim("The Gaussian kernel is ahead of the sigmoid one", GEQ, SIGMOID),
            ),
        ),
        ClaimStudy(
            "regularizers",
            "Regularizers",
            "OptEq, Tables 3 and 5",
            (
                _accuracy_claim(
                    "Decorrelation makes Deep OptEq more accurate", DECORRELATED, DEEP_OPTEQ
                ),
                _accuracy_claim("HSIC makes Deep OptEq more accurate", INDEPENDENT, DEEP_OPTEQ),
            ),
        ),
    )
}
