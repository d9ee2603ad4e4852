"""Paired comparisons: differences between models over common seeds, and the verdicts.

The rule, fixed before any run. With d the difference over paired seeds, a claim "A is above B"

- **holds** if the 95 % interval of d lies above zero;
- **does not** if it lies below zero, or within ± a margin of irrelevance;
- is **undecided** otherwise. The result then includes the number of seeds at which an interval of
  this spread would lie on one side of zero or within the margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
MAX_SEEDS = 100_000

Scores = Mapping[int, float]
"""A measure of a model by seed."""
Answer = Literal["holds", "does not", "undecided"]


@dataclass(frozen=True)
class Difference:
    """Differences between a model and a reference, over their common seeds."""

    values: tuple[float, ...]

    @classmethod
    def between(cls, model: Scores, reference: Scores) -> Difference:
        return cls(tuple(model[seed] - reference[seed] for seed in model if seed in reference))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        return deviation(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean (Student's t)."""
        count = len(self.values)
        if count < 2:
            return -math.inf, math.inf
        reach = half_width(self.deviation, count)
        return self.mean - reach, self.mean + reach

    @property
    def signs(self) -> tuple[int, int, int]:
        """Number of seeds at which the model is better, equal and worse."""
        better = sum(value > 0 for value in self.values)
        worse = sum(value < 0 for value in self.values)
        return better, len(self.values) - better - worse, worse

    def answer(self, margin: float) -> Answer:
        """Return whether the model is better than the reference, from the 95 % interval.

        "holds" if the confidence interval of the mean difference lies above zero; "does not" if it
        lies below zero or within ±`margin`; otherwise "undecided".

        Args:
            margin: Size below which a difference does not matter.
        """
        low, high = self.interval
        if low > 0:
            return "holds"
        return "does not" if high < 0 or (-margin < low and high < margin) else "undecided"

    def seeds_needed(self, margin: float) -> int:
        """Return the number of seeds that would decide the claim at this mean and deviation.

        The 95 % interval of the mean difference then excludes zero or lies within ±`margin`.

        Args:
            margin: Size below which a difference does not matter.
        """
        room = max(abs(self.mean), margin - abs(self.mean))
        count = 2
        while count < MAX_SEEDS and half_width(self.deviation, count) >= room:
            count += 1
        return count


def half_width(spread: float, count: int) -> float:
    """Return half the width of the 95 % confidence interval (Student's t) of a mean.

    Args:
        spread: Standard deviation of the values.
        count: Number of values, at least 2.
    """
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * spread / math.sqrt(count)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; NaN for a single value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
