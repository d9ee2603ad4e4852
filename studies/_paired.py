"""Models compared seed by seed: means, and differences between runs on the same images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

Accuracies = Mapping[int, float]
"""The accuracy of a model at each seed."""


@dataclass(frozen=True)
class Difference:
    """How far a model is above a reference, over the seeds that both have."""

    values: tuple[float, ...]

    @classmethod
    def between(cls, model: Accuracies, reference: Accuracies) -> Difference:
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
        from scipy.stats import t

        count = len(self.values)
        if count < 2:
            return -math.inf, math.inf
        reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * self.deviation / math.sqrt(count)
        return self.mean - reach, self.mean + reach

    @property
    def signs(self) -> tuple[int, int, int]:
        """At how many seeds the model is better, equal, worse."""
        better = sum(value > 0 for value in self.values)
        worse = sum(value < 0 for value in self.values)
        return better, len(self.values) - better - worse, worse

    @property
    def verdict(self) -> str:
        """Which side of zero the interval lies on."""
        low, high = self.interval
        return "above" if low > 0 else "below" if high < 0 else "undecided"


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for a single value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
