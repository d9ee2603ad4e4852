"""Count the work of the default solver: `python -m benchmarks.work`.

Counts, for each row, forward and backward: evaluations of the map, torch operations (and the
numbers that they read and write), and calls of Python functions of the library. Unlike times,
counts are reproducible. To compare two versions of the library, run this with one of them and
`--json FILE`, then with the other and `--beside FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import equilibria as eq
from benchmarks import ours
from benchmarks.contest import Settings
from benchmarks.rows import forward as f

TOLERANCE = 1e-5


@dataclass
class Work:
    """Counts of one run."""

    evaluations: int = 0
    operations: int = 0
    numbers: int = 0
    calls: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work.operations += 1
        if not func.is_view:
            touched = (x for x in tree_iter((args, kwargs, result)) if isinstance(x, Tensor))
            self.work.numbers += sum(x.numel() for x in touched)
        return result


def counted(run: Callable[[], int]) -> Work:
    """Count the work of a second call of `run`, which returns its number of evaluations."""
    run()
    work = Work()
    library = str(Path(eq.__file__).parent)

    def watch(frame: FrameType, event: str, _: object) -> None:
        work.calls += event == "call" and frame.f_code.co_filename.startswith(library)

    with _Counter(work), _profiled(watch):
        work.evaluations = run()
    return work


@contextmanager
def _profiled(watch: Callable[[FrameType, str, Any], None]) -> Any:
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def rows() -> dict[str, Callable[[], int]]:
    quick = Settings(quick=True)
    makers = (f.dense, f.hard_dense, f.conv, f.hard_conv, f.deep, f.mdeq)
    runs: dict[str, Callable[[], int]] = {}
    for problem in (make(quick) for make in makers):
        runs |= _runs(problem.name, ours.layer(problem.cell, tolerance=TOLERANCE), problem.x)
    for name in ("opteq-small", "geq-small"):
        torch.manual_seed(0)
        runs |= _runs(name, eq.create_model(name), torch.rand(4, 3, 32, 32))
    return runs


def _runs(name: str, module: torch.nn.Module, x: Tensor) -> dict[str, Callable[[], int]]:
    layers: list[Any] = [m for m in module.modules() if isinstance(m, eq.EquilibriumLayer)]

    def forward() -> int:
        module.eval()
        with torch.no_grad():
            module(x)
        return sum(layer.last_solution.evaluations for layer in layers)

    def backward() -> int:
        module.train()
        given = x.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        module.zero_grad()
        return sum(layer.last_backward.evaluations for layer in layers)

    return {f"{name}, forward": forward, f"{name}, forward and backward": backward}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.work", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to FILE")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="print ratios to the counts in FILE"
    )
    options = parser.parse_args()
    before = json.loads(options.beside.read_text()) if options.beside else {}
    torch.set_num_threads(1)
    table = Table("row", *Work.__dataclass_fields__)
    counts = {}
    for name, run in rows().items():
        work = asdict(counted(run))
        counts[name] = work
        table.add_row(
            name, *(_shown(count, before.get(name, {}).get(key)) for key, count in work.items())
        )
    Console(width=120, highlight=False).print(table)
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


def _shown(count: int, before: int | None) -> str:
    return f"{count:,}" if not before else f"{count:,} ({count / before:.3f})"


if __name__ == "__main__":
    main()
