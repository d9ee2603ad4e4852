"""Self-contained HTML pages: a single file, without scripts or network access."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.analysis import ExplainedPredictions, RunFindings
from equilibria.data import image_from_tensor
from equilibria.registry import printable
from equilibria.report.charts import Chart
from equilibria.report.figures import (
    calibration_chart,
    convergence_charts,
    disk_chart,
    radius_chart,
    relation_chart,
    robustness_charts,
    training_charts,
)
from equilibria.report.labels import certificate_reasons
from equilibria.report.saliency import overlaid, signed
from equilibria.report.sheets import image_png
from equilibria.report.style import DARK, LIGHT, Theme
from equilibria.report.tables import certified_details, certified_rows, run_rows
from equilibria.training import RunFolder
from equilibria.training.files import write_atomically

PAGE = Theme(*(f"var(--{name})" for name in vars(LIGHT)))
"""CSS variables, so that charts take the colors of the page."""
ROUNDING = 1e-8
"""Values below this share of the largest are shown as 0."""
HEAT_SIDE = 240
"""Smallest longer side of a heat map, in pixels."""


def report_page(reports: Sequence[RunFindings], footer: str = "") -> str:
    """Render the HTML page of a run, or of several runs side by side.

    Args:
        reports: Measures of the runs.
        footer: Last line of the page.

    Returns:
        The page, which needs no other files.

    Raises:
        ValueError: If there are no reports.
    """
    if not reports:
        raise ValueError("a report page needs at least one run, got none")
    return _rendered("report.html.jinja", reports=reports, footer=footer, several=len(reports) > 1)


def write_report(folder: Path, findings: RunFindings, footer: str) -> Path:
    """Write the report of a run into its folder.

    Args:
        folder: Folder of the run.
        findings: Measures of the run.
        footer: Last line of the page.

    Returns:
        Path of the HTML page.
    """
    page = RunFolder(folder).report
    write_atomically(page, report_page([findings], footer).encode())
    return page


def explanation_page(explanation: ExplainedPredictions, title: str, footer: str = "") -> str:
    """Render the HTML page of an explanation."""
    return _rendered("explanation.html.jinja", explanation=explanation, title=title, footer=footer)


def _rendered(template: str, **facts: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("equilibria", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def drawn(chart: Chart) -> Markup:
        return Markup(chart.svg(PAGE))  # Charts escape their texts.

    environment.filters |= {"chart": drawn, "picture": _picture, "heat": _heat, "times": _times}
    environment.globals |= {
        "light": vars(LIGHT),
        "dark": vars(DARK),
        "calibration_chart": calibration_chart,
        "convergence_charts": convergence_charts,
        "disk_chart": disk_chart,
        "radius_chart": radius_chart,
        "relation_chart": relation_chart,
        "robustness_charts": robustness_charts,
        "training_charts": training_charts,
        "certificate_reasons": certificate_reasons,
        "run_rows": run_rows,
        "certified_rows": certified_rows,
        "certified_details": certified_details,
        "saliency_picture": _saliency,
        "gradient_picture": _gradient,
        "attention_pictures": _attention,
        "bars": _bars,
    }
    return printable(environment.get_template(template).render(**facts))


def _picture(image: Tensor) -> str:
    """Return an image (C, H, W) with values in [0, 1] as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(image_png(image)).decode('ascii')}"


def _saliency(explanation: ExplainedPredictions, index: int) -> str | None:
    """Return the image overlaid with its Grad-CAM map, if there is one."""
    if explanation.saliency is None:
        return None
    batch = slice(index, index + 1)
    return _picture(overlaid(explanation.images[batch].float(), explanation.saliency[batch])[0])


def _gradient(explanation: ExplainedPredictions, index: int) -> str:
    """Draw the gradient: making red pixels brighter increases the margin, blue ones reduce it."""
    return _picture(signed(explanation.gradient[index].float().mean(dim=0)))


def _attention(explanation: ExplainedPredictions, index: int) -> list[str]:
    """Return β of each branch, averaged over the groups of channels."""
    maps = [beta[index].float().mean(dim=0) for beta in explanation.attention]
    return [_heat(beta) for beta in maps if min(beta.shape) > 1]


def _heat(values: Tensor) -> str:
    """Return a matrix as a picture, from its minimum (light) to its maximum (dark)."""
    from PIL import Image

    low, high = float(values.min()), float(values.max())
    scaled = (values.float().cpu() - low) / ((high - low) or 1.0)
    ends = torch.tensor([[0.97, 0.98, 1.0], [0.03, 0.19, 0.42]])
    colors = ends[0] + scaled[..., None] * (ends[1] - ends[0])
    picture = image_from_tensor(colors.permute(2, 0, 1))
    factor = max(1, math.ceil(HEAT_SIDE / max(picture.size)))
    picture = picture.resize(
        (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
    )
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _bars(explanation: ExplainedPredictions, index: int) -> list[dict[str, Any]]:
    """Return the terms of an image with the widths of their bars, in percent of half a line."""
    rows = explanation.pulls(index)
    largest = max((max(abs(pull), abs(source)) for _, pull, source in rows), default=0.0) or 1.0

    def rounded(value: float) -> float:
        return 0.0 if abs(value) < ROUNDING * largest else value

    return [
        {
            "name": name,
            "pull": rounded(pull),
            "source": rounded(source),
            "pull_width": 50 * abs(pull) / largest,
            "source_width": 50 * abs(source) / largest,
        }
        for name, pull, source in rows
    ]


def _times(value: float | None, digits: int = 3) -> str:
    """Format a number with a typographic minus sign; empty for None."""
    return "" if value is None else f"{value:.{digits}g}".replace("-", "−")
