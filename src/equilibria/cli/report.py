"""`equilibria report`: write an HTML page about one or several runs."""

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
from equilibria.cli.faults import check_new, writable_file
from equilibria.registry import printable

SEVERAL = Path("report.html")
"""Default file for the page of several runs."""


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
            help="HTML file (default: report.html, in the folder of the run or here for several)."
        ),
    ] = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="Finish in seconds, without attacks, as at the end of `train`.",
        ),
    ] = False,
    refine: Annotated[
        bool,
        Option(help="Also compute larger radii from activation patterns, at many times the cost."),
    ] = False,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    device: Device = "auto",
) -> None:
    """Write an HTML report: accuracy, errors, certificates, convergence, robustness.

    The page is a single file without JavaScript or network access. It includes the curves measured
    by `equilibria attack --curve`.
    """
    from equilibria.analysis.compare import read_runs
    from equilibria.analysis.stored import measure_stored_run

    page = output
    if page is None:
        page = eq.training.RunFolder(runs[0]).report if len(runs) == 1 else SEVERAL
    # The report in the folder of a run may be replaced.
    check_new(writable_file(page), overwrite=overwrite or (output is None and len(runs) == 1))
    torch_device = eq.training.processes.choose_device(device)
    names = [str(runs[0])] if len(runs) == 1 else [run.name for run in read_runs(runs)]
    reports = []
    with progress_bar() as bar:
        display = StepDisplay(bar, len(runs))
        for run, name in zip(runs, names, strict=True):
            result = measure_stored_run(
                run,
                device=torch_device,
                weights="best" if best else "last",
                root=root,
                quick=quick,
                refine=refine,
                on_step=partial(display.on_step, name),
            )
            display.on_run()
            reports.append(replace(result, name=name))
    footer = page_footer(eq.training.experiment.trained_model(runs[0])) if len(runs) == 1 else ""
    eq.training.files.write_atomically(page, eq.report.report_page(reports, footer).encode())
    say(f"Report: {page}")


class StepDisplay:
    """Progress over runs: a bar with the current step on terminals, else one line per step.

    Args:
        bar: Progress bar, which is disabled without a terminal.
        runs: Number of runs.
    """

    def __init__(self, bar: Progress, runs: int) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=runs)
        self.last = ""

    def on_step(self, run: str, step: str) -> None:
        """Show the step of a run that starts."""
        line = printable(f"{run}: {step}")
        if not self.bar.disable:
            self.bar.update(self.task, description=escape(line))
        elif line != self.last:
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
        self.last = line

    def on_run(self) -> None:
        """Advance the bar by one run."""
        self.bar.advance(self.task)
