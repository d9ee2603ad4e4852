"""Server metrics in the text format of Prometheus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)
"""Upper bounds of the histogram of request times, in seconds."""


@dataclass
class Metrics:
    """Counters of requests, request times and answers.

    Attributes:
        requests: Number of requests by path and status.
        seconds: Total time of all requests.
        within: Number of requests that took at most each of `BOUNDS`.
        certified: Number of answers with a certified class.
        answered: Number of answers.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: float = 0.0
    within: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    certified: int = 0
    answered: int = 0

    def note(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests[path, status] += 1
        self.seconds += seconds
        for index, bound in enumerate(BOUNDS):
            self.within[index] += seconds <= bound

    def text(self, gauges: Mapping[str, float], batches: Mapping[str, int]) -> str:
        """Return all metrics as text.

        Args:
            gauges: Current values by name.
            batches: Number of batches by the backend that solved them.
        """
        return "\n".join(self._lines(gauges, batches)) + "\n"

    def _lines(self, gauges: Mapping[str, float], batches: Mapping[str, int]) -> Iterator[str]:
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
        yield "# TYPE equilibria_batches_total counter"
        for backend in ("compiled", "eager"):
            count = batches.get(backend, 0)
            yield f'equilibria_batches_total{{backend="{backend}"}} {count}'
        for name, value in gauges.items():
            yield f"# TYPE equilibria_{name} gauge"
            yield f"equilibria_{name} {value:g}"
