"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.report.explanation import Explanation, explain
from equilibria.report.html import report_page
from equilibria.report.page import RunReport, run_report
from equilibria.report.stored import write_report

__all__ = [
    "Explanation",
    "RunReport",
    "explain",
    "report_page",
    "run_report",
    "write_report",
]
