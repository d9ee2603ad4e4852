"""Models compared seed by seed: differences between runs on the same images, and what they decide.

The rule, written down before any run. A claim "A is above B" by a difference d of paired seeds

- **holds** where the 95 % interval of d lies above zero;
- **does not** where it lies below zero, or within ± a margin that is of no account: then the
  opposite holds, or neither;
- **cannot be told here** otherwise, with the number of seeds at which an interval of this spread
  would lie on one side of zero or within the margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
MOST_SEEDS = 100_000

Scores = Mapping[int, float]
"""A number of a model at each seed."""
Answer = Literal["holds", "does not", "cannot be told here"]


@dataclass(frozen=True)
class Difference:
    """How far a model is above a reference, over the seeds that both have."""

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
        """Student's interval for the mean, at 95 %."""
        count = len(self.values)
        if count < 2:
            return -math.inf, math.inf
        reach = half_width(self.deviation, count)
        return self.mean - reach, self.mean + reach

    @property
    def signs(self) -> tuple[int, int, int]:
        """At how many seeds the model is better, equal, worse."""
        better = sum(value > 0 for value in self.values)
        worse = sum(value < 0 for value in self.values)
        return better, len(self.values) - better - worse, worse

    def answer(self, margin: float) -> Answer:
        """Whether the model is above the reference, by the rule above."""
        low, high = self.interval
        if low > 0:
            return "holds"
        return (
            "does not" if high < 0 or (-margin < low and high < margin) else "cannot be told here"
        )

    def seeds_needed(self, margin: float) -> int:
        """With how many seeds of this mean and deviation there is an answer.

        The interval then reaches neither zero nor, where the mean is within it, the margin.
        """
        room = max(abs(self.mean), margin - abs(self.mean))
        count = 2
        while count < MOST_SEEDS and half_width(self.deviation, count) >= room:
            count += 1
        return count


def half_width(spread: float, count: int) -> float:
    """Half of Student's interval for the mean of `count` values of this standard deviation."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * spread / math.sqrt(count)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for a single value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
