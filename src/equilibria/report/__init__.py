"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.report.convergence import (
    Convergence,
    ObjectiveChange,
    follow_solve,
    objective_change,
)
from equilibria.report.page import (
    ClassifierReport,
    Example,
    Formula,
    Summary,
    choose_examples,
    classifier_report,
    model_formula,
)
from equilibria.report.segmentation import segmentation_png

__all__ = [
    "ClassifierReport",
    "Convergence",
    "Example",
    "Formula",
    "ObjectiveChange",
    "Summary",
    "choose_examples",
    "classifier_report",
    "follow_solve",
    "model_formula",
    "objective_change",
    "segmentation_png",
]
