"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import peer
from benchmarks.contest import Settings
from benchmarks.machine import describe_run
from benchmarks.report import print_tables
from benchmarks.results import Result, averaged, to_json
from benchmarks.rows import ROWS, Row

JSON_FORMAT = 2

SEEDS = 3
"""Number of random weights and inputs that a full run averages over."""

WIDTH = 160
"""Width of the output in columns if it is not a terminal. The tables are wide."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    if options.list:
        console.print(_list_of_rows())
        return 0
    if unknown := [name for name in options.rows or () if not _matching(name)]:
        parser.error(f"there is no row {unknown[0]!r}; --list prints all rows")
    rows = _chosen_rows(options.rows)
    if not peer.is_installed() and any(row.needs_peer for row in rows):
        parser.error(
            "TorchDEQ is not installed; the benchmarks compare with it. Run `make bench`, or "
            "`pip install -c constraints.txt -e '.[bench]'` in the checkout"
        )
    settings = Settings(
        quick=options.quick, repeats=options.repeats or (3 if options.quick else Settings.repeats)
    )
    # The sizes of a quick run are too small for a second thread, whose waiting counts as CPU time.
    torch.set_num_threads(options.threads or (1 if options.quick else torch.get_num_threads()))
    run = describe_run(_without_output(arguments), settings)
    results: list[Result] = []
    for row in rows:
        with console.status(row.name):
            seeds = range(options.seeds or (1 if options.quick else SEEDS))
            runs = [
                list(row.measure(replace(settings, seed=seed)))
                for seed in (seeds if row.depends_on_seed else seeds[:1])
            ]
            results += averaged(runs)
        # Write after every row, so that an interrupted run keeps its results.
        _write(options.json, {"format": JSON_FORMAT, **run, "rows": list(map(to_json, results))})
    print_tables(results, console)
    if options.json is not None:
        console.print(f"All results are in {options.json}", soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare Equilibria with TorchDEQ in one process on the same maps.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, less than a minute")
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="names of rows, or of topics (see --list)"
    )
    parser.add_argument("--repeats", type=_positive, help="rounds per row (7; --quick: 3)")
    parser.add_argument(
        "--seeds", type=_positive, help="number of seeds to average over (3; --quick: 1)"
    )
    parser.add_argument(
        "--threads", type=_positive, help="number of threads (PyTorch's default; --quick: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _without_output(arguments: Sequence[str]) -> list[str]:
    """The arguments without --json, which does not affect the results."""
    result: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith("--json"):
            result.append(argument)
        skip = argument == "--json"
    return result


def _matching(name: str) -> list[Row]:
    """The row of this name, or all rows of this topic."""
    if name in ROWS:
        return [ROWS[name]]
    return [row for row in ROWS.values() if row.name.startswith(f"{name}-")]


def _chosen_rows(names: Sequence[str] | None) -> list[Row]:
    if not names:
        return list(ROWS.values())
    return list({row.name: row for name in names for row in _matching(name)}.values())


def _list_of_rows() -> Table:
    table = Table("row", "measures")
    for row in ROWS.values():
        table.add_row(row.name, row.about)
    return table


def _write(file: Path | None, run: dict[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
