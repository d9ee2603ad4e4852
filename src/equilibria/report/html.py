"""Pages of one file each, which need nothing beside themselves: no script, no network."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equilibria.data import image_from_tensor
from equilibria.report.charts import Chart
from equilibria.report.figures import (
    calibration_chart,
    convergence_charts,
    radius_chart,
    relation_chart,
    robustness_charts,
    training_charts,
)
from equilibria.report.labels import certificate_reasons
from equilibria.report.saliency import overlaid, signed
from equilibria.report.sheets import image_png
from equilibria.report.style import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from equilibria.report.explanation import Explanation
    from equilibria.report.page import RunReport

PAGE = Theme(*(f"var(--{name})" for name in vars(LIGHT)))
"""The colors of whatever page a chart stands on."""
ROUNDING = 1e-8
"""Shares of the largest number below this are not shown."""
HEAT_SIDE = 240
"""Pixels of a heat map's longer side, at least."""


def report_page(reports: Sequence[RunReport], footer: str = "") -> str:
    """One page for a run, or for several side by side."""
    if not reports:
        raise ValueError("a report needs at least one run")
    return _rendered("report.html.jinja", reports=reports, footer=footer, several=len(reports) > 1)


def explanation_page(explanation: Explanation, title: str, footer: str = "") -> str:
    """Why a model says what it says of some images."""
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
        return Markup(chart.svg(PAGE))  # It escapes its texts itself.

    environment.filters |= {"chart": drawn, "picture": _picture, "heat": _heat, "times": _times}
    environment.globals |= {
        "light": vars(LIGHT),
        "dark": vars(DARK),
        "calibration_chart": calibration_chart,
        "convergence_charts": convergence_charts,
        "radius_chart": radius_chart,
        "relation_chart": relation_chart,
        "robustness_charts": robustness_charts,
        "training_charts": training_charts,
        "certificate_reasons": certificate_reasons,
        "saliency_picture": _saliency,
        "gradient_picture": _gradient,
        "attention_pictures": _attention,
        "bars": _bars,
    }
    return environment.get_template(template).render(**facts)


def _picture(image: Tensor) -> str:
    """An image (channels, height, width) in [0, 1] as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(image_png(image)).decode('ascii')}"


def _saliency(explanation: Explanation, place: int) -> str | None:
    """The image under its Grad-CAM."""
    if explanation.saliency is None:
        return None
    some = slice(place, place + 1)
    return _picture(overlaid(explanation.images[some].float(), explanation.saliency[some])[0])


def _gradient(explanation: Explanation, place: int) -> str:
    """Where more light speaks for the class (red), and where against it (blue)."""
    return _picture(signed(explanation.gradient[place].float().mean(dim=0)))


def _attention(explanation: Explanation, place: int) -> list[str]:
    """β of each branch, averaged over the groups of channels."""
    maps = [beta[place].float().mean(dim=0) for beta in explanation.attention]
    return [_heat(one) for one in maps if min(one.shape) > 1]


def _heat(values: Tensor) -> str:
    """A matrix as a picture, from its least (light) to its most (dark)."""
    from PIL import Image

    low, high = float(values.min()), float(values.max())
    even = (values.float().cpu() - low) / ((high - low) or 1.0)
    ends = torch.tensor([[0.97, 0.98, 1.0], [0.03, 0.19, 0.42]])
    colors = ends[0] + even[..., None] * (ends[1] - ends[0])
    picture = image_from_tensor(colors.permute(2, 0, 1))
    factor = max(1, math.ceil(HEAT_SIDE / max(picture.size)))
    picture = picture.resize(
        (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
    )
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _bars(explanation: Explanation, place: int) -> list[dict[str, Any]]:
    """The terms of an image with the widths of their bars, in per cent of half a line."""
    rows = explanation.pulls(place)
    most = max((max(abs(pull), abs(source)) for _, pull, source in rows), default=0.0) or 1.0

    def rounded(value: float) -> float:
        return 0.0 if abs(value) < ROUNDING * most else value

    return [
        {
            "name": name,
            "pull": rounded(pull),
            "source": rounded(source),
            "pull_width": 50 * abs(pull) / most,
            "source_width": 50 * abs(source) / most,
        }
        for name, pull, source in rows
    ]


def _times(value: float | None, digits: int = 3) -> str:
    """A number with a real minus; empty where there is none."""
    return "" if value is None else f"{value:.{digits}g}".replace("-", "−")
