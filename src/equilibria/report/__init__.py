"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.report.convergence import Convergence, follow_solve
from equilibria.report.explanation import Explanation, explain
from equilibria.report.generation import generate
from equilibria.report.html import report_page
from equilibria.report.page import RunReport, run_report
from equilibria.report.saliency import grad_cam
from equilibria.report.stored import write_report

__all__ = [
    "Convergence",
    "Explanation",
    "RunReport",
    "explain",
    "follow_solve",
    "generate",
    "grad_cam",
    "report_page",
    "run_report",
    "write_report",
]
