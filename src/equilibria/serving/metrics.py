"""What a server has done so far, in the text format that Prometheus reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)
"""Of the seconds that requests took."""


@dataclass
class Metrics:
    """Counters of a server."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    seconds: float = 0.0
    within: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    """How many requests took at most each of `BOUNDS`."""
    certified: int = 0
    answered: int = 0

    def note(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.seconds += seconds
        for place, bound in enumerate(BOUNDS):
            self.within[place] += seconds <= bound

    def text(self, now: Mapping[str, float]) -> str:
        """now: what is so at this moment, by name."""
        return "\n".join(self._lines(now)) + "\n"

    def _lines(self, now: Mapping[str, float]) -> Iterator[str]:
        yield "# TYPE equilibria_requests_total counter"
        for (path, status), count in sorted(self.requests.items()):
            yield f'equilibria_requests_total{{path="{path}",status="{status}"}} {count}'
        yield "# TYPE equilibria_request_seconds histogram"
        for bound, count in zip(BOUNDS, self.within, strict=True):
            name = "+Inf" if math.isinf(bound) else f"{bound:g}"
            yield f'equilibria_request_seconds_bucket{{le="{name}"}} {count}'
        yield f"equilibria_request_seconds_sum {self.seconds:.6f}"
        yield f"equilibria_request_seconds_count {self.within[-1]}"
        yield "# TYPE equilibria_answers_total counter"
        yield f"equilibria_answers_total {self.answered}"
        yield "# TYPE equilibria_certified_answers_total counter"
        yield f"equilibria_certified_answers_total {self.certified}"
        for name, value in now.items():
            yield f"# TYPE equilibria_{name} gauge"
            yield f"equilibria_{name} {value:g}"
