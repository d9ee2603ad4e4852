"""Results of a benchmark run, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Any

PEERS = ("tuned", "rewritten", "default")


@dataclass(frozen=True)
class Measured:
    """One contestant of a row."""

    label: str
    """Solver and other choices."""
    value: float
    """Median, in CPU milliseconds or MiB."""
    evaluations: int | None = None
    """Calls of the map and products with its Jacobian in one run."""
    error: float | None = None
    """Error from an independent check."""
    reached: bool = True
    """Whether the error is within the target of the row."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Duel:
    """A row that compares Equilibria with the peer.

    `default` is the peer with its defaults, `tuned` the peer with its best options, and `rewritten`
    the tuned peer with the map rewritten by hand, so that flattening the state copies nothing.
    """

    row: str
    topic: str
    ours: Measured
    tuned: Measured | None = None
    default: Measured | None = None
    rewritten: Measured | None = None
    unit: str = "ms"
    wanted: float | None = None
    """Error that each contestant must reach."""
    aim_tuned: float | None = None
    aim_default: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def ratio(self, against: str) -> float | None:
        """Ours ÷ the peer's; None where there is nothing to compare or ours missed the mark."""
        peer: Measured | None = getattr(self, against)
        if peer is None or not self.ours.reached:
            return None
        each = self.ratios(against)
        return fmean(each) if each else self.ours.value / peer.value

    def ratios(self, against: str) -> list[float]:
        """Ratio per seed, if there are several."""
        each = self.details.get("ratios", {}).get(against, [])
        return [ratio for ratio in each if ratio is not None]

    def counts(self, against: str) -> bool:
        """Whether both contestants reached the target, so that the ratio counts."""
        peer: Measured | None = getattr(self, against)
        return peer is not None and self.ours.reached and peer.reached

    def is_won(self, against: str) -> bool:
        ratio = self.ratio(against)
        return ratio is not None and self.counts(against) and ratio < 1


@dataclass(frozen=True)
class Overhead:
    """A row with the cost per evaluation in a solver ÷ that of the bare map."""

    row: str
    topic: str
    library: str
    solver: str
    bare: float
    """Milliseconds per evaluation of the bare map, in its fastest memory format."""
    ratio: float
    aim: float | None = None


Result = Duel | Overhead


def averaged(runs: Sequence[Sequence[Result]]) -> list[Result]:
    """Average rows over seeds, and keep the ratio of each seed."""
    first, *others = runs
    return [_mean([result, *(run[i] for run in others)]) for i, result in enumerate(first)]


def _mean(results: Sequence[Result]) -> Result:
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, Overhead):
        overheads = [result for result in results if isinstance(result, Overhead)]
        return replace(
            first,
            bare=fmean(overhead.bare for overhead in overheads),
            ratio=fmean(overhead.ratio for overhead in overheads),
        )
    duels = [result for result in results if isinstance(result, Duel)]
    ratios = {against: [duel.ratio(against) for duel in duels] for against in PEERS}
    names = [name for name in ("ours", *PEERS) if getattr(first, name) is not None]
    contestants = {
        name: _mean_contestant([getattr(duel, name) for duel in duels]) for name in names
    }
    return replace(first, **contestants, details={**first.details, "ratios": ratios})


def _mean_contestant(each: Sequence[Measured]) -> Measured:
    """Return the mean value, the worst error, and the label of the first seed."""
    return replace(
        each[0],
        value=fmean(result.value for result in each),
        error=max((r.error for r in each if r.error is not None), default=None),
        reached=all(result.reached for result in each),
    )


def to_json(result: Result) -> dict[str, Any]:
    """Convert a result to plain data, including its ratios."""
    data: dict[str, Any] = {"kind": type(result).__name__.lower(), **asdict(result)}
    if isinstance(result, Duel):
        for against in PEERS:
            data[f"ratio_{against}"] = result.ratio(against)
    return data


def from_json(data: Mapping[str, Any]) -> Result:
    """Convert plain data from `to_json` to a result."""
    kinds: dict[str, type[Result]] = {"duel": Duel, "overhead": Overhead}
    kind = kinds[data["kind"]]
    values = {f.name: data[f.name] for f in fields(kind)}
    for contestant in ("ours", *PEERS):
        if isinstance(values.get(contestant), Mapping):
            values[contestant] = Measured(**values[contestant])
    return kind(**values)
