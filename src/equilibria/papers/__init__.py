"""The evidence: the papers' tables as data, studies, and what runs and records both."""

from equilibria.papers.jobs import Job, Outcome, make_job, run_job, run_jobs
from equilibria.papers.report import cells, provenance, redraw, write_index, write_report
from equilibria.papers.runner import (
    Plan,
    carry_out,
    check_data,
    findings,
    model_sizes,
    plan,
)
from equilibria.papers.settings import compared_settings
from equilibria.papers.studies import Study, StudyResult, Work, list_studies
from equilibria.papers.table import (
    Column,
    Elsewhere,
    Panel,
    PaperTable,
    Row,
    Setting,
    find_table,
    list_elsewhere,
    list_tables,
    register_table,
)

__all__ = [
    "Column",
    "Elsewhere",
    "Job",
    "Outcome",
    "Panel",
    "PaperTable",
    "Plan",
    "Row",
    "Setting",
    "Study",
    "StudyResult",
    "Work",
    "carry_out",
    "cells",
    "check_data",
    "compared_settings",
    "find_table",
    "findings",
    "list_elsewhere",
    "list_studies",
    "list_tables",
    "make_job",
    "model_sizes",
    "plan",
    "provenance",
    "redraw",
    "register_table",
    "run_job",
    "run_jobs",
    "write_index",
    "write_report",
]
