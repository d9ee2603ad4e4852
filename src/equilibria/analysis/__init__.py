"""Measurements of trained models: the values that reports, figures and tables show."""

from equilibria.analysis.convergence import Convergence, follow_solve
from equilibria.analysis.explanation import ExplainedPredictions
from equilibria.analysis.run import RunFindings, measure_run
from equilibria.analysis.saliency import grad_cam

__all__ = [
    "Convergence",
    "ExplainedPredictions",
    "RunFindings",
    "follow_solve",
    "grad_cam",
    "measure_run",
]
