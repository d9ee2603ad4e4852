"""Style of figures: fonts, ticks, units, and long names."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image

from equilibria.report.style import (
    COLORS,
    count_along,
    drawing,
    figure_png,
    figure_svg,
    plain_axis,
    plain_log_axis,
    series,
    shortened,
    time_unit,
    wrapped,
)

SCRIPTS = "数字 हिन्दी العربية ไทย 🙂 ꙮ"


def ticks(along: str, axis: Figure) -> list[str]:
    figure = axis.figure
    with drawing():
        figure.draw_without_rendering()
    low, high = sorted(getattr(axis, f"get_{along}lim")())
    chosen = getattr(axis, f"{along}axis")
    labels = zip(chosen.get_majorticklocs(), chosen.get_majorticklabels(), strict=True)
    return [label.get_text() for value, label in labels if low <= value <= high]


def test_all_scripts_are_drawn_without_warnings() -> None:
    with drawing():
        figure = Figure(layout="constrained")
        figure.subplots().set_title(SCRIPTS)
    with Image.open(io.BytesIO(figure_png(figure))) as image:
        assert image.mode == "RGB"
    texts = [e for e in ElementTree.fromstring(figure_svg(figure)).iter() if e.text == SCRIPTS]
    assert len(texts) == 1, "text must remain text"


@pytest.mark.parametrize("last", [0, 1, 2, 3, 7, 60, 4321])
def test_ticks_of_counts_are_integers(last: int) -> None:
    axis = Figure().subplots()
    axis.plot(range(last + 1), [1.0] * (last + 1), marker="o")
    count_along(axis, "epoch")
    shown = ticks("x", axis)
    assert 1 <= len(shown) <= 8
    assert all(float(label.replace("−", "-")).is_integer() for label in shown)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.1, 30), ["2", "5", "10", "20"]),
        ((1900, 5100), ["2000", "3000", "5000"]),
        ((1e3, 4e6), ["1000", "10 k", "100 k", "1 M"]),
        ((1e-7, 1), ["$\\mathdefault{10^{-6}}$", "$\\mathdefault{10^{0}}$"]),
    ],
)
def test_logarithmic_ticks_are_plain_numbers(
    values: tuple[float, float], expected: list[str]
) -> None:
    axis = Figure().subplots()
    axis.plot(values)
    plain_log_axis(axis)
    shown = ticks("y", axis)
    assert set(expected) <= set(shown)
    assert len(shown) <= 8


def test_large_ticks_have_unit_prefixes() -> None:
    axis = Figure().subplots()
    axis.plot([1, 2], [0, 2_000_000])
    plain_axis(axis)
    assert "1.5 M" in ticks("y", axis)


@pytest.mark.parametrize(("seconds", "name"), [(0.5, "ms"), (90, "s"), (500, "min"), (8000, "h")])
def test_time_unit_fits_the_duration(seconds: float, name: str) -> None:
    unit, chosen = time_unit(seconds)
    assert chosen == name
    assert 1 < seconds / unit < 600


def test_many_series_look_different() -> None:
    looks = {tuple(sorted(series(index).items())) for index in range(4 * len(COLORS))}
    assert len(looks) == 4 * len(COLORS)


def test_long_names_are_wrapped_and_shortened() -> None:
    assert wrapped("one two three", 8) == "one two\nthree"
    assert wrapped("JIIO-MDEQ-100 and others", 14) == "JIIO-MDEQ-100\nand others"
    cut = wrapped("word " * 50, 20, lines=2)
    assert cut.count("\n") == 1
    assert cut.endswith("…")
    assert all(len(line) <= 20 for line in wrapped("x" * 70, 20).splitlines())
    assert wrapped("", 10) == ""
    assert shortened("short", 10) == "short"
    assert shortened("a-very-long-name-17", 10) == "a-ver…me-17"
