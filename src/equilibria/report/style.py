"""How every picture looks: colors, type and axes; and how a figure becomes a file.

matplotlib is imported where it is used.
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
"""Sizes of type in points: of titles; of labels, ticks and legends; of notes."""
DOTS = 110
"""An inch of a PNG."""
LETTER = 0.085
"""The width of a letter of a legend, in inches."""
LEAST_FACTOR = 5.0
"""Values further apart than this are drawn on a logarithmic axis, where that makes sense."""
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#24292f", "#8a8f98"),
)
"""Of Okabe and Ito, for series side by side: told apart by color-blind people too."""
DASHES = ("-", "--", ":", "-.")
"""Of the first eight series, the next eight, and so on."""
MARKERS = "osD^vPX*"
OTHER_SCRIPTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans"),
    *("Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS", "Noto Sans", "Noto Sans Devanagari"),
    *("Noto Sans Arabic", "Nirmala UI", "Noto Sans Thai", "Noto Emoji", "Segoe UI Symbol"),
)
"""Fonts that have what DejaVu Sans lacks; those that are installed are asked in this order."""


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
"""Colors of series side by side, in their order."""


@contextmanager
def drawing() -> Iterator[None]:
    """Type and colors for what is drawn inside; a letter that no font has is drawn as a box."""
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


def series(place: int) -> dict[str, Any]:
    """Color, dashes and marker of a series among others."""
    return {
        "color": COLORS[place % len(COLORS)],
        "linestyle": DASHES[place // len(COLORS) % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def figure_png(figure: Any, dots_per_inch: int = DOTS, *, is_drawing: bool = False) -> bytes:
    """As a PNG; without the version of the library in it, equal figures are equal files.

    is_drawing: lines and text alone, for which 256 colors do, in a third of the bytes.
    """
    from PIL import Image

    drawn, buffer = io.BytesIO(), io.BytesIO()
    with drawing():
        figure.savefig(drawn, format="png", dpi=dots_per_inch, facecolor=PAPER)
    # Without transparency, which nothing here has, a file is a third smaller.
    image = Image.open(drawn).convert("RGB")
    image = image.quantize(dither=Image.Dither.NONE) if is_drawing else image
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def figure_svg(figure: Any) -> bytes:
    """As an SVG whose text is text: small, found by a search, in a font of whoever looks at it."""
    from matplotlib import rc_context

    # The salt makes the names inside the SVG, and so the file, the same on every run; so do fonts
    # that do not depend on what is installed.
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
    """Whole numbers along the axis below."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def plain_log_axis(axis: Any, along: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis whose ticks are numbers that one reads at once: 1, 2, 5, 10.

    Of very small values, and over many decades, they are powers of ten.
    """
    from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter

    getattr(axis, f"set_{along}scale")("log")
    ticks = getattr(axis, f"{along}axis")
    low, high = sorted(getattr(axis, f"get_{along}lim")())
    if low < 1e-3 or high / low > 1e4:
        ticks.set_major_locator(LogLocator(numticks=6))
        ticks.set_major_formatter(LogFormatterMathtext())
    else:
        # The closer the ends of the axis, the more numbers in a decade.
        kinds = ((300, (1,)), (50, (1, 3)), (6, (1, 2, 5)), (0, (1, 2, 3, 5, 7)))
        subs = next(numbers for factor, numbers in kinds if high / low > factor)
        ticks.set_major_locator(LogLocator(subs=subs))
        ticks.set_major_formatter(_number)
    ticks.set_minor_formatter(NullFormatter())


def plain_axis(axis: Any, along: Literal["x", "y"] = "y") -> None:
    """A few round numbers."""
    from matplotlib.ticker import MaxNLocator

    ticks = getattr(axis, f"{along}axis")
    ticks.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if max(map(abs, getattr(axis, f"get_{along}lim")())) >= 1e4:
        ticks.set_major_formatter(_number)


def _number(value: float, _: int | None = None) -> str:
    """1,500,000 is 1.5 M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep=" ")(value) if abs(value) >= 1e4 else f"{value:g}"


def time_unit(seconds: float) -> tuple[float, str]:
    """In which unit times up to this one are read at once: seconds of it, and its name."""
    units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next((unit for unit in units if seconds >= 2 * unit[0]), (0.001, "ms"))


def wrapped(text: str, width: int, lines: int = 3) -> str:
    """Wrap a text at a width; what does not fit is replaced by "…"."""
    width = max(2, width)
    cut = textwrap.wrap(text, width, max_lines=lines, placeholder=" …", break_on_hyphens=False)
    return "\n".join(cut)


def shortened(text: str, letters: int) -> str:
    """Its beginning and its end, if it has more letters."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]}…{text[-half:]}"


def legend_columns(labels: Sequence[str], width: float, *, mark: float = 0.7) -> int:
    """How many columns of a legend fit into a width; in inches, as that of the mark at a label."""
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
