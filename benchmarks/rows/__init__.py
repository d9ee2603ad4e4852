"""The rows of all topics. New rows go into the `ROWS` of the module of their topic."""

from __future__ import annotations

from benchmarks.rows import backward, forward, growth, memory, mixed, overhead, training
from benchmarks.rows.row import Row

ROWS: dict[str, Row] = {
    row.name: row
    for topic in (forward, mixed, backward, training, memory, overhead, growth)
    for row in topic.ROWS
}

__all__ = ["ROWS", "Row"]
