"""`equilibria report`: a page on a run, or on several side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import Best, DataRoot, Device, OverwriteFiles, command, page_footer
from equilibria.cli.console import progress_bar, say
from equilibria.cli.faults import check_new, printable, writable_file

SEVERAL = Path("report.html")
"""Where the page of several runs goes if no place is named."""


@command(
    "report",
    "equilibria report runs/opteq",
    "equilibria report runs/opteq runs/geq runs/mopteq --output side-by-side.html",
    "equilibria report runs/opteq --quick",
)
def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs.")],
    output: Annotated[
        Path | None,
        Option(
            help="HTML page; report.html in the folder of the run if not set, or here for several."
        ),
    ] = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="As `train` writes it, in seconds: no attacks.",
        ),
    ] = False,
    refine: Annotated[
        bool, Option(help="Larger radii by activation patterns, at many times the cost.")
    ] = False,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    device: Device = "auto",
) -> None:
    """Write one page on a run: certificates, convergence, errors, examples, robustness.

    The page is one file that needs no network and no JavaScript. Curves that `equilibria attack
    --curve` has measured are used.
    """
    from equilibria.report.compare import read_runs

    place = output
    if place is None:
        place = eq.training.RunFolder(runs[0]).report if len(runs) == 1 else SEVERAL
    # The report of a run is its own to renew.
    check_new(writable_file(place), overwrite=overwrite or (output is None and len(runs) == 1))
    where = eq.training.processes.choose_device(device)
    names = [str(runs[0])] if len(runs) == 1 else [run.name for run in read_runs(runs)]
    found = []
    with progress_bar() as bar:
        shown = StepDisplay(bar, len(runs))
        for run, name in zip(runs, names, strict=True):
            one = eq.report.stored.report_of(
                run,
                device=where,
                weights="best" if best else "last",
                root=root,
                quick=quick,
                refine=refine,
                on_step=partial(shown.on_step, name),
            )
            shown.on_run()
            found.append(replace(one, name=name))
    said = page_footer(eq.training.experiment.trained_model(runs[0])) if len(runs) == 1 else ""
    eq.training.files.write_atomically(place, eq.report.report_page(found, said).encode())
    say(f"Report: {place}")


class StepDisplay:
    """A bar over the runs with the present step on a terminal; elsewhere one line per step.

    Args:
        bar: The bar; it is disabled where there is no terminal.
        runs: Number of runs.
    """

    def __init__(self, bar: Progress, runs: int) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=runs)
        self.last = ""

    def on_step(self, run: str, step: str) -> None:
        """Show the step of a run that starts now."""
        line = printable(f"{run}: {step}")
        if not self.bar.disable:
            self.bar.update(self.task, description=escape(line))
        elif line != self.last:
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
        self.last = line

    def on_run(self) -> None:
        """A run is done."""
        self.bar.advance(self.task)
