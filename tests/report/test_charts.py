"""Charts: positions of points, for any range of values."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.report.charts import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series
from equilibria.report.style import DARK, LIGHT


def chart(points: list[tuple[float, float]], **options: object) -> Chart:
    return Chart(
        title="a < b & c",
        x="along",
        y="up",
        series=[Series(points, "one")],
        description="description",
        **options,  # type: ignore[arg-type]
    )


def curve(drawn: str, color: str = LIGHT.first) -> list[tuple[float, float]]:
    """Return the points of the longest path of a color above the legend."""
    matches = re.findall(rf'<path d="M([^"]+)" style="fill: none; stroke: {color}', drawn)
    paths = [[tuple(map(float, pair.split())) for pair in path.split("L")] for path in matches]
    return max((path for path in paths if path[0][1] <= TOP + HEIGHT), key=len)


def test_points_are_at_their_coordinates() -> None:
    drawn = chart([(0, 0), (1, 0.5), (2, 1)], limits=(0.0, 1.0)).svg()
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    expected = [(LEFT, TOP + HEIGHT), (middle, TOP + HEIGHT / 2), (WIDTH - RIGHT, TOP)]
    assert curve(drawn) == [pytest.approx(point) for point in expected]


def test_logarithmic_axis_maps_factors_to_distances() -> None:
    drawn = chart([(0, 1e-6), (1, 1e-3), (2, 1.0)], log=True).svg()
    heights = [y for _, y in curve(drawn)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    for power in ("10⁻⁶", "10⁰"):
        assert power in drawn or "10⁻⁵" in drawn


def test_points_that_cannot_be_drawn_are_omitted() -> None:
    points = [(0, 1.0), (1, math.nan), (2, 0.0), (3, -1.0), (4, math.inf), (5, 0.1)]
    assert len(curve(chart(points, log=True).svg())) == 2
    assert len(curve(chart(points).svg())) == 4


def test_all_kinds_of_series_are_drawn_and_text_is_escaped() -> None:
    kinds = ("line", "dashed", "thin", "dots", "area")
    series = [Series([(0, 1), (1, 2)], f"kind {k}", "second", k) for k in kinds]  # type: ignore[arg-type]
    drawn = Chart("<b>", "x", "y", series, "described").svg(DARK)
    root = ElementTree.fromstring(drawn)
    words = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
    assert "<b>" in words
    assert {f"kind {kind}" for kind in kinds} <= {*words}
    assert root.attrib["aria-label"] == "described"
    assert "stroke-dasharray" in drawn
    assert len(re.findall(rf'style="fill: {DARK.second}; fill-opacity: 0.7', drawn)) == 3
    assert LIGHT.second not in drawn


def test_area_is_a_step_function() -> None:
    points = [(0.0, 1.0), (1.0, 0.5), (2.0, 0.0)]
    series = [Series(points, color="fourth", kind="area")]
    drawn = Chart("t", "x", "y", series, "described", limits=(0.0, 1.0)).svg()
    middle, end = LEFT + (WIDTH - LEFT - RIGHT) / 2, WIDTH - RIGHT
    top, half, floor = TOP, TOP + HEIGHT / 2, TOP + HEIGHT
    expected = [(LEFT, top), (LEFT, half), (middle, half), (middle, floor), (end, floor)]
    assert curve(drawn, LIGHT.fourth) == [pytest.approx(point) for point in expected]


@settings(max_examples=40)  # a chart takes a tenth of a second
@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6, allow_subnormal=False), st.floats(-1e9, 1e9, allow_subnormal=False)
        ),
        max_size=6,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_numbers_give_a_valid_svg(
    points: list[tuple[float, float]], log: bool, integer_x: bool
) -> None:
    drawn = chart(points, log=log, integer_x=integer_x).svg()
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("info", "")
