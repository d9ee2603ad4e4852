"""Style of all figures: colors, fonts, and axes; and their conversion to files.

matplotlib is imported where it is used because importing it is slow.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

PAPER = "#ffffff"
TITLE, TEXT, SMALL = 11, 10, 9
"""Font sizes in points, for titles; for labels, ticks, and legends; and for notes."""
DOTS = 110
"""Resolution of a PNG, in pixels per inch."""
LETTER = 0.085
"""Width of a letter of a legend, in inches."""
LEAST_FACTOR = 5.0
"""Smallest ratio of the largest to the smallest value for which an axis is logarithmic."""
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#24292f", "#8a8f98"),
)
"""Palette of Okabe and Ito, which color-blind readers can distinguish."""
DASHES = ("-", "--", ":", "-.")
"""Line styles of the first eight series, the next eight, and so on."""
MARKERS = "osD^vPX*"
OTHER_SCRIPTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans"),
    *("Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS", "Noto Sans", "Noto Sans Devanagari"),
    *("Noto Sans Arabic", "Nirmala UI", "Noto Sans Thai", "Noto Emoji", "Segoe UI Symbol"),
)
"""Fonts with glyphs that DejaVu Sans lacks, in order of preference."""


@dataclass(frozen=True)
class Theme:
    """The colors of a page."""

    ink: str
    faint: str
    first: str
    second: str
    third: str
    fourth: str
    fifth: str
    sixth: str


LIGHT = Theme(
    *("#24292f", "#d0d7de", "#0072b2", "#d55e00", "#57606a", "#009e73", "#cc79a7", "#b37700")
)
DARK = Theme(
    *("#d6dde6", "#3a424d", "#56b4e9", "#ff9e64", "#9aa5b1", "#3fd0a4", "#e6a3cb", "#f2c14e")
)
SERIES = ("first", "second", "fourth", "fifth", "sixth", "third")
"""Colors of the series of a chart, in this order."""


@contextmanager
def drawing() -> Iterator[None]:
    """Set fonts and colors for figures drawn inside; missing glyphs are drawn as boxes."""
    from matplotlib import rc_context

    style: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", *_installed_fonts()],
        "font.size": TEXT,
        "text.color": LIGHT.ink,
        "mathtext.fontset": "dejavusans",
    }
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        warnings.filterwarnings("ignore", "Matplotlib currently does not support", UserWarning)
        yield


@cache
def _installed_fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in OTHER_SCRIPTS if name in installed]


def series(index: int) -> dict[str, Any]:
    """Return color, line style, and marker of the series with an index."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index // len(COLORS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def figure_png(figure: Any, dots_per_inch: int = DOTS, *, is_drawing: bool = False) -> bytes:
    """Return a figure as PNG; equal figures give equal bytes.

    Args:
        figure: A matplotlib figure.
        dots_per_inch: Resolution.
        is_drawing: Whether the figure has only lines and text; a palette of 256 colors then makes
            the file two thirds smaller.
    """
    from PIL import Image

    drawn, buffer = io.BytesIO(), io.BytesIO()
    with drawing():
        figure.savefig(drawn, format="png", dpi=dots_per_inch, facecolor=PAPER)
    # Without the alpha channel, which is not used, the file is a third smaller.
    image = Image.open(drawn).convert("RGB")
    image = image.quantize(dither=Image.Dither.NONE) if is_drawing else image
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def figure_svg(figure: Any) -> bytes:
    """Return a figure as SVG whose text is text: small, searchable, and in a font of the reader."""
    from matplotlib import rc_context

    # A fixed salt for ids and fonts that do not depend on the system make the file reproducible.
    style: dict[Any, Any] = {
        "svg.hashsalt": "equilibria",
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    }
    buffer = io.BytesIO()
    with drawing(), rc_context(style):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def dress_axes(
    axis: Any, theme: Theme = LIGHT, *, grid: Literal["both", "x", "y"] = "both"
) -> None:
    """Apply the colors of a theme and a light grid to axes."""
    axis.title.set_color(theme.ink)
    axis.title.set_fontsize(TITLE)
    axis.xaxis.label.set_color(theme.ink)
    axis.yaxis.label.set_color(theme.ink)
    axis.tick_params(colors=theme.ink, which="both", length=3)
    axis.tick_params(which="minor", length=0)
    axis.grid(color=theme.faint, linewidth=0.6, axis=grid)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_color(theme.faint)
        spine.set_visible(side in ("left", "bottom"))


def count_along(axis: Any, label: str) -> None:
    """Label the x-axis, and put its ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def plain_log_axis(axis: Any, along: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic with plain numbers as ticks: 1, 2, 5, 10.

    Ticks of very small values, and over many decades, are powers of ten.
    """
    from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter

    getattr(axis, f"set_{along}scale")("log")
    ticks = getattr(axis, f"{along}axis")
    low, high = sorted(getattr(axis, f"get_{along}lim")())
    if low < 1e-3 or high / low > 1e4:
        ticks.set_major_locator(LogLocator(numticks=6))
        ticks.set_major_formatter(LogFormatterMathtext())
    else:
        # The shorter the range, the more ticks per decade.
        kinds = ((300, (1,)), (50, (1, 3)), (6, (1, 2, 5)), (0, (1, 2, 3, 5, 7)))
        subs = next(numbers for factor, numbers in kinds if high / low > factor)
        ticks.set_major_locator(LogLocator(subs=subs))
        ticks.set_major_formatter(_number)
    ticks.set_minor_formatter(NullFormatter())


def plain_axis(axis: Any, along: Literal["x", "y"] = "y") -> None:
    """Put the ticks of an axis at a few round numbers."""
    from matplotlib.ticker import MaxNLocator

    ticks = getattr(axis, f"{along}axis")
    ticks.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if max(map(abs, getattr(axis, f"get_{along}lim")())) >= 1e4:
        ticks.set_major_formatter(_number)


def _number(value: float, _: int | None = None) -> str:
    """Format a tick; 1,500,000 gives 1.5 M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep=" ")(value) if abs(value) >= 1e4 else f"{value:g}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return a readable unit for times up to `seconds`: its length in seconds, and its name."""
    units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next((unit for unit in units if seconds >= 2 * unit[0]), (0.001, "ms"))


def wrapped(text: str, width: int, lines: int = 3) -> str:
    """Wrap a text at a width; what does not fit is replaced by "…"."""
    width = max(2, width)
    cut = textwrap.wrap(text, width, max_lines=lines, placeholder=" …", break_on_hyphens=False)
    return "\n".join(cut)


def shortened(text: str, letters: int) -> str:
    """Replace the middle of a text longer than `letters` by "…"."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]}…{text[-half:]}"


def legend_columns(labels: Sequence[str], width: float, *, mark: float = 0.7) -> int:
    """Return the number of legend columns that fit into a width; all widths are in inches."""
    columns = int(width / (LETTER * max(map(len, labels)) + mark))
    return max(1, min(len(labels), columns))


def legend_below(figure: Any, handles: list[Any], columns: int) -> None:
    """Add a legend below the axes of a figure."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=TEXT,
        labelcolor=LIGHT.ink,
    )
