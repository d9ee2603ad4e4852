"""Tables of report pages: measures of a run and of its certificates, as (label, value)."""

from __future__ import annotations

from typing import Any

from equilibria.analysis import RunFindings
from equilibria.analysis.certified import Certified
from equilibria.report.labels import certificate_rows, figure_rows

UNKNOWN = "not known"
MAIN_ROWS = ("Class certified", "Certified and right", "Radius")
"""Prefixes of the labels of certificate rows that are always visible."""


def run_rows(findings: RunFindings) -> list[tuple[str, str]]:
    """Return the table of a run's measures, such as the accuracy, as (label, value)."""
    evaluation, solves = findings.evaluation, findings.evaluation.solves
    right = f"{evaluation.correct} of {evaluation.samples}"
    rows = [
        ("Test accuracy", f"{value} ({right})") if label == "Accuracy" else (label, value)
        for label, value in figure_rows(evaluation.figures)
        if value
    ]
    facts: list[tuple[str, Any, str]] = [
        ("Loss", evaluation.loss, ".4f"),
        ("Parameters", findings.parameters, ","),
    ]
    if solves.mean_iterations is not None:
        facts += [
            ("Iterations, mean", solves.mean_iterations, ".1f"),
            ("Share converged", solves.share_converged, ".1%"),
            ("Relative residual, max", solves.max_residual, ".1e"),
        ]
    if findings.convergence is not None:
        facts.append(("Contraction bound q", findings.convergence.contraction, ".3f"))
        if findings.convergence.objective is not None:
            for label, iteration in (("first step", 0), ("equilibrium", -1)):
                mean = float(findings.convergence.objective[iteration].mean())
                facts.append((f"Hidden objective, {label}", mean, ",.2f"))
    if findings.calibration is not None:
        facts.append(("Expected calibration error", findings.calibration.error, ".3f"))
    if findings.certified is not None:
        count, of = findings.certified.count, len(findings.certified)
        facts.append(("Class certified", f"{count / of:.1%} ({count} of {of})", ""))
        radius = float(findings.certified.certificate.radius.median())
        facts.append(("Certified radius (L2), median", radius or None, ".3g"))
    if findings.history:
        seconds = sum(metrics.seconds for metrics in findings.history)
        facts.append(("Training time", f"{seconds:,.1f} s", ""))
    return rows + [(label, UNKNOWN if v is None else format(v, form)) for label, v, form in facts]


def certified_rows(certified: Certified) -> list[tuple[str, str]]:
    """Return certified classes and radii, as (label, value)."""
    return [row for row in _all_rows(certified) if row[0].startswith(MAIN_ROWS)]


def certified_details(certified: Certified) -> list[tuple[str, str]]:
    """Return all other measures of the certificates, as (label, value)."""
    return [row for row in _all_rows(certified) if not row[0].startswith(MAIN_ROWS)]


def _all_rows(certified: Certified) -> list[tuple[str, str]]:
    return certificate_rows(certified.certificate, certified.labels.tolist())
