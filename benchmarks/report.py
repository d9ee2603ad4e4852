"""Tables of results, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.results import PEERS, Duel, Measured, Overhead, Result

TOPICS = {
    "forward": "Forward solves to a relative residual",
    "mixed": "A batch with one hard sample",
    "backward": "Backward passes at a given equilibrium",
    "training": "Training steps at equal error of the gradient",
    "memory": "Peak memory of a training step",
    "overhead": "Cost per evaluation ÷ the bare map",
    "growth": "Growth with batch, channels and resolution",
    "growth-memory": "Growth of the peak memory of a training step",
}


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def sheets(results: Iterable[Result]) -> list[Sheet]:
    """Return one table per topic, in the order of `TOPICS`."""
    by_topic: dict[str, list[Result]] = {topic: [] for topic in TOPICS}
    for result in results:
        by_topic.setdefault(result.topic, []).append(result)
    return [_sheet(topic, group) for topic, group in by_topic.items() if group]


def print_tables(results: Sequence[Result], console: Console) -> None:
    for sheet in sheets(results):
        table = Table(title=sheet.title, title_justify="left")
        for number, column in enumerate(sheet.columns):
            table.add_column(column, overflow="fold", justify="left" if number < 2 else "right")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for line in verdict(results):
        console.print(line, highlight=False)


def verdict(results: Sequence[Result]) -> list[str]:
    """Summarize the rows, and name every row in which the peer is ahead."""
    duels = [result for result in results if isinstance(result, Duel)]
    lines = []
    for against in PEERS:
        fair = [duel for duel in duels if duel.counts(against)]
        won = sum(duel.is_won(against) for duel in fair)
        if fair:
            lines.append(f"Ahead of the {against} peer in {won} of {len(fair)} comparable rows.")
    for against in PEERS:
        behind = [d.row for d in duels if d.counts(against) and not d.is_won(against)]
        if behind:
            lines.append(f"The {against} peer is ahead in: {'; '.join(behind)}.")
    missed = [d.row for d in duels if not d.ours.reached]
    if missed:
        lines.append(f"Equilibria did not reach the target in: {'; '.join(missed)}.")
    return lines


def _sheet(topic: str, results: Sequence[Result]) -> Sheet:
    overheads = [result for result in results if isinstance(result, Overhead)]
    if overheads:
        columns = ["row", "library", "solver", "bare map, ms", "ratio", "aim"]
        return Sheet(TOPICS[topic], columns, [overhead_cells(o) for o in overheads])
    duels = [result for result in results if isinstance(result, Duel)]
    columns = [
        "row",
        "ours",
        "peer, tuned",
        "peer, rewritten",
        "peer, default",
        "÷ tuned",
        "÷ rewritten",
        "÷ default",
        "reached?",
    ]
    return Sheet(TOPICS.get(topic, topic), columns, [duel_cells(duel) for duel in duels])


def duel_cells(duel: Duel) -> list[str]:
    contestants = (duel.ours, duel.tuned, duel.rewritten, duel.default)
    return [
        duel.row,
        *(contestant_cell(contestant, duel.unit) for contestant in contestants),
        ratio_cell(duel, "tuned", duel.aim_tuned),
        ratio_cell(duel, "rewritten", None),
        ratio_cell(duel, "default", duel.aim_default),
        reached_cell(duel),
    ]


def overhead_cells(overhead: Overhead) -> list[str]:
    aim = "" if overhead.aim is None else _aim(overhead.ratio, overhead.aim)
    ratio = f"{overhead.ratio:.2f}"
    return [overhead.row, overhead.library, overhead.solver, f"{overhead.bare:.2f}", ratio, aim]


def contestant_cell(contestant: Measured | None, unit: str) -> str:
    if contestant is None:
        return "–"
    pieces = [contestant.label, f"{_digits(contestant.value)} {unit}"]
    if contestant.evaluations is not None:
        pieces.append(f"{contestant.evaluations} ev.")
    if "backward_tolerance" in contestant.details:
        tolerances = (contestant.details[key] for key in ("tolerance", "backward_tolerance"))
        pieces.append("tol. " + "/".join(f"{tolerance:.0e}" for tolerance in tolerances))
    return "; ".join(pieces)


def ratio_cell(duel: Duel, against: str, aim: float | None) -> str:
    """Ratio, range over seeds, and aim; in parentheses if the peer missed the target."""
    ratio = duel.ratio(against)
    if ratio is None:
        return "–"
    if not duel.counts(against):
        return f"({ratio:.2f}) not counted"
    each = duel.ratios(against)
    span = f" ({min(each):.2f}–{max(each):.2f})" if len(each) > 1 else ""
    return f"{ratio:.2f}{span}" + ("" if aim is None else f", aim {_aim(ratio, aim)}")


def reached_cell(duel: Duel) -> str:
    """`yes`, or the contestants that missed the target, with their errors."""
    names = ("ours", *PEERS)
    missed = [
        f"{name}: no ({contestant.error:.0e})"
        for name, contestant in ((name, getattr(duel, name)) for name in names)
        if contestant is not None and not contestant.reached
    ]
    return ", ".join(missed) or "yes"


def _aim(ratio: float, aim: float) -> str:
    return f"≤ {aim:g} {'✓' if ratio <= aim else '✗'}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
