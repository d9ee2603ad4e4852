"""`equilibria report`: a page on a run, or on several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from equilibria.cli.app import Best, DataRoot, Device, OverwriteFiles, command


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
    from equilibria.cli.explaining import write_reports

    write_reports(
        runs,
        output=output,
        quick=quick,
        refine=refine,
        overwrite=overwrite,
        root=root,
        best=best,
        device=device,
    )
