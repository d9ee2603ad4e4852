"""Making networks understood: charts, figures, and HTML pages of given values."""

from equilibria.report.explanation import Explanation, explain
from equilibria.report.html import report_page, write_report

__all__ = ["Explanation", "explain", "report_page", "write_report"]
