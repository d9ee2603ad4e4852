"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.report.convergence import Convergence, follow_solve
from equilibria.report.page import (
    ClassifierReport,
    Example,
    Formula,
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
    "choose_examples",
    "classifier_report",
    "follow_solve",
    "model_formula",
    "segmentation_png",
]
