"""Statements of the papers as runnable code: bounds, constructions, and tests of properties.

No model, certificate, task or command uses this package. It evaluates what the papers state and
compares it with measurements. Where a printed statement is wrong, a corrected one is given as well.
"""

from equilibria.papers.theory.geq_bounds import branch_facts, lipschitz_bounds
from equilibria.papers.theory.geq_generalization import generalization_bounds
from equilibria.papers.theory.geq_similarity import similarity_bounds
from equilibria.papers.theory.opteq import ProximalReport, deep_opteq_of_network, is_proximal

__all__ = [
    "ProximalReport",
    "branch_facts",
    "deep_opteq_of_network",
    "generalization_bounds",
    "is_proximal",
    "lipschitz_bounds",
    "similarity_bounds",
]
