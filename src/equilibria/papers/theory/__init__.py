"""Statements of the papers as runnable code: bounds, constructions, and tests of properties.

No model, certificate, task or command uses this package. It evaluates what the papers state and
compares it with measurements. Where a printed statement is wrong, a corrected one is given as well.
"""

from equilibria.papers.theory.opteq import (
    AffineOptEqCell,
    MultivariateOptEqCell,
    ProximalReport,
    deep_opteq_of_network,
    is_proximal,
    psd_factor,
    universal_hidden_units,
)

__all__ = [
    "AffineOptEqCell",
    "MultivariateOptEqCell",
    "ProximalReport",
    "deep_opteq_of_network",
    "is_proximal",
    "psd_factor",
    "universal_hidden_units",
]
