"""`make bench`: run the benchmarks and print their tables."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import overhead


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="runs of each (default 9)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(title=f"Time per evaluation ÷ the bare map ({arguments.threads} threads)")
    table.add_column("problem")
    table.add_column("solver")
    table.add_column("bare map, CPU ms", justify="right")
    table.add_column("ratio", justify="right")
    for row in overhead.measure(arguments.repeats):
        table.add_row(row.problem, row.solver, f"{row.bare_milliseconds:.2f}", f"{row.ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
