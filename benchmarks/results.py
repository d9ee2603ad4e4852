"""What a run of the benchmarks found, and its JSON."""

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
    """The solver, and what else was chosen."""
    value: float
    """The median: CPU milliseconds, or MiB."""
    evaluations: int | None = None
    """Calls of the map, and products with its Jacobian, of one run."""
    error: float | None = None
    """What an independent check found at the result."""
    reached: bool = True
    """Whether that is within what the row asks for."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Duel:
    """A row: ours against the peer's best and the peer's default.

    `tuned` is the peer with its best options; `rewritten` the same with the map rewritten by hand
    so that the peer's flattening copies nothing.
    """

    row: str
    topic: str
    ours: Measured
    tuned: Measured | None = None
    default: Measured | None = None
    rewritten: Measured | None = None
    unit: str = "ms"
    wanted: float | None = None
    """The error that each contestant has to reach."""
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
        """That of each seed, where there were several."""
        each = self.details.get("ratios", {}).get(against, [])
        return [ratio for ratio in each if ratio is not None]

    def counts(self, against: str) -> bool:
        """Whether a ratio is one of equals: both did what the row asks for."""
        peer: Measured | None = getattr(self, against)
        return peer is not None and self.ours.reached and peer.reached

    def is_won(self, against: str) -> bool:
        ratio = self.ratio(against)
        return ratio is not None and self.counts(against) and ratio < 1


@dataclass(frozen=True)
class Overhead:
    """A row: the cost of one evaluation within a solver ÷ that of the bare map."""

    row: str
    topic: str
    library: str
    solver: str
    bare: float
    """Milliseconds of the bare map, in its fastest memory format."""
    ratio: float
    aim: float | None = None


Result = Duel | Overhead


def averaged(runs: Sequence[Sequence[Result]]) -> list[Result]:
    """The same rows measured with several seeds, as one: means, and a ratio for each seed."""
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
            bare=fmean(one.bare for one in overheads),
            ratio=fmean(one.ratio for one in overheads),
        )
    duels = [result for result in results if isinstance(result, Duel)]
    ratios = {against: [duel.ratio(against) for duel in duels] for against in PEERS}
    names = [name for name in ("ours", *PEERS) if getattr(first, name) is not None]
    contestants = {
        name: _mean_contestant([getattr(duel, name) for duel in duels]) for name in names
    }
    return replace(first, **contestants, details={**first.details, "ratios": ratios})


def _mean_contestant(each: Sequence[Measured]) -> Measured:
    """The mean value, the worst error, and the label of the first seed."""
    return replace(
        each[0],
        value=fmean(one.value for one in each),
        error=max((one.error for one in each if one.error is not None), default=None),
        reached=all(one.reached for one in each),
    )


def to_json(result: Result) -> dict[str, Any]:
    """A result as plain data, with the ratios spelled out."""
    data: dict[str, Any] = {"kind": type(result).__name__.lower(), **asdict(result)}
    if isinstance(result, Duel):
        for against in PEERS:
            data[f"ratio_{against}"] = result.ratio(against)
    return data


def from_json(data: Mapping[str, Any]) -> Result:
    """The inverse of `to_json`."""
    kinds: dict[str, type[Result]] = {"duel": Duel, "overhead": Overhead}
    kind = kinds[data["kind"]]
    values = {f.name: data[f.name] for f in fields(kind)}
    for contestant in ("ours", *PEERS):
        if isinstance(values.get(contestant), Mapping):
            values[contestant] = Measured(**values[contestant])
    return kind(**values)
