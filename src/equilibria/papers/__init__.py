"""The papers' tables, run again: rows and recipes, runs that are shared and resumed, reports."""

from equilibria.papers import tables as _tables  # noqa: F401 - makes the tables known
from equilibria.papers.index import write_index
from equilibria.papers.job import Job, make_job, run_job
from equilibria.papers.provenance import provenance
from equilibria.papers.report import cells, markdown, write_report
from equilibria.papers.runner import (
    Findings,
    Plan,
    carry_out,
    check_data,
    findings,
    model_sizes,
    plan,
)
from equilibria.papers.table import (
    Column,
    PaperTable,
    Row,
    Setting,
    find_table,
    list_tables,
    register_table,
)
from equilibria.papers.workers import Outcome

__all__ = [
    "Column",
    "Findings",
    "Job",
    "Outcome",
    "PaperTable",
    "Plan",
    "Row",
    "Setting",
    "carry_out",
    "cells",
    "check_data",
    "find_table",
    "findings",
    "list_tables",
    "make_job",
    "markdown",
    "model_sizes",
    "plan",
    "provenance",
    "register_table",
    "run_job",
    "write_index",
    "write_report",
]
