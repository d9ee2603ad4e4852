"""Statements of the papers as runnable code: bounds, constructions, and tests of properties.

No model, certificate, task or command uses this package. It evaluates what the papers state and
compares it with measurements. Where a printed statement is wrong, a corrected one is given as well.
"""

from equilibria.papers.theory.geq_bounds import (
    BranchFacts,
    LipschitzBounds,
    branch_facts,
    layer_facts,
    lipschitz_bounds,
    measured_lipschitz,
    opteq_lipschitz,
    printed_lipschitz,
    remark_2,
)
from equilibria.papers.theory.geq_generalization import (
    GeneralizationBounds,
    PacBayes,
    generalization_bounds,
    margin_loss,
)
from equilibria.papers.theory.geq_similarity import (
    SimilarityBounds,
    arc_cosine,
    expected_opteq_similarity,
    remark_3,
    similarity_bounds,
)
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
    "BranchFacts",
    "GeneralizationBounds",
    "LipschitzBounds",
    "MultivariateOptEqCell",
    "PacBayes",
    "ProximalReport",
    "SimilarityBounds",
    "arc_cosine",
    "branch_facts",
    "deep_opteq_of_network",
    "expected_opteq_similarity",
    "generalization_bounds",
    "is_proximal",
    "layer_facts",
    "lipschitz_bounds",
    "margin_loss",
    "measured_lipschitz",
    "opteq_lipschitz",
    "printed_lipschitz",
    "psd_factor",
    "remark_2",
    "remark_3",
    "similarity_bounds",
    "universal_hidden_units",
]
