"""The evidence: the papers' tables as data, studies, and what runs and records both."""

from equilibria.papers.report import write_report
from equilibria.papers.runner import carry_out, plan
from equilibria.papers.studies import list_studies
from equilibria.papers.studies.study import Study, StudyResult
from equilibria.papers.table import (
    Column,
    Panel,
    PaperTable,
    Row,
    find_table,
    list_tables,
    register_table,
)

__all__ = [
    "Column",
    "Panel",
    "PaperTable",
    "Row",
    "Study",
    "StudyResult",
    "carry_out",
    "find_table",
    "list_studies",
    "list_tables",
    "plan",
    "register_table",
    "write_report",
]
