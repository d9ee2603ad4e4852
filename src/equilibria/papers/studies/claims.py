"""The claims of the papers that are decided, each by a comparison of trained models."""

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
"""Half a point of accuracy: less is of no account."""


@dataclass(frozen=True)
class Value:
    """A number of a model: its test accuracy, or one that `_measures` takes."""

    contestant: Contestant
    measure: str = "accuracy"


@dataclass(frozen=True)
class Comparison:
    """A claim: one number is above another, seed by seed.

    scale: from the number to the one that is shown; 100 for points of accuracy.
    """

    claim: str
    above: Value
    below: Value
    margin: float = MARGIN
    scale: float = 100.0


@dataclass(frozen=True)
class ClaimStudy:
    """Claims that the same trained models decide."""

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


def _accuracy(claim: str, above: Contestant, below: Contestant) -> Comparison:
    return Comparison(claim, Value(above), Value(below))


def _of_features(claim: str, up: Contestant, down: Contestant, measure: str) -> Comparison:
    name = f"heritage_diversity.{measure}"
    return Comparison(claim, Value(up, name), Value(down, name), margin=0.01, scale=1.0)


def _perturbed(claim: str, other: str) -> Comparison:
    random = Value(MOPTEQ, f"perturbations.{other}")
    return Comparison(claim, random, Value(MOPTEQ, "perturbations.reconstructed"))


CLAIM_STUDIES = {
    study.name: study
    for study in (
        ClaimStudy(
            "hhd",
            "HH&D over POptEqs",
            "MOptEqs, Table 1 (a)",
            (_accuracy("MOptEqs is more accurate than POptEqs", MOPTEQ, POPTEQ),),
        ),
        ClaimStudy(
            "heritage-diversity",
            "H up and D down under HH&D",
            "MOptEqs, Figure 2",
            (
                _of_features("H is larger in MOptEqs than in POptEqs", MOPTEQ, POPTEQ, "H"),
                _of_features("D is smaller in MOptEqs than in POptEqs", POPTEQ, MOPTEQ, "D"),
                _of_features("H/D is larger in MOptEqs than in POptEqs", MOPTEQ, POPTEQ, "ratio"),
            ),
        ),
        ClaimStudy(
            "pe",
            "PE",
            "MOptEqs, Tables 1 and 5, Figure 3 (b)",
            (
                _accuracy("PE makes MOptEqs more accurate", MOPTEQ_PE, MOPTEQ),
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
                _perturbed("The reconstructed δ harms more than a random one of ±ε", "binomial"),
                _perturbed("The reconstructed δ harms more than a uniform one", "uniform"),
            ),
        ),
        ClaimStudy(
            "opteq",
            "OptEq over a plain network of its size",
            "OptEq, Table 3",
            (_accuracy("Deep OptEq is more accurate than a plain network", DEEP_OPTEQ, PLAIN),),
        ),
        ClaimStudy(
            "mondeq",
            "OptEq over monDEQ of its size",
            "OptEq, Table 4",
            (_accuracy("Deep OptEq is more accurate than monDEQ", DEEP_OPTEQ, MONDEQ),),
        ),
        ClaimStudy(
            "geq",
            "GEQ over MOptEqs",
            "GEQ, Tables 1 and 2",
            (_accuracy("GEQ is more accurate than MOptEqs, both without PE", GEQ, MOPTEQ),),
        ),
        ClaimStudy(
            "kernels",
            "The Gaussian kernel over others",
            "GEQ, Table 5",
            (
                _accuracy("The Gaussian kernel is ahead of the polynomial one", GEQ, POLYNOMIAL),
                _accuracy("The Gaussian kernel is ahead of the sigmoid one", GEQ, SIGMOID),
            ),
        ),
        ClaimStudy(
            "regularizers",
            "Regularizers",
            "OptEq, Tables 3 and 5",
            (
                _accuracy("Decorrelation makes Deep OptEq more accurate", DECORRELATED, DEEP_OPTEQ),
                _accuracy("HSIC makes Deep OptEq more accurate", INDEPENDENT, DEEP_OPTEQ),
            ),
        ),
    )
}
