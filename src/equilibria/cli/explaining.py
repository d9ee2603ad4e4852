"""What `equilibria explain` and `equilibria report` do, and what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from equilibria.cli.console import print_json, print_table, progress_bar, say
from equilibria.cli.faults import check_new, complain, note_frames, printable, writable_file
from equilibria.cli.images import select_images
from equilibria.cli.training import footer
from equilibria.report import Explanation, explain, read_runs, report_of, report_page
from equilibria.training import RunFolder, choose_device, trained_model, write_atomically
from equilibria.training.weights_source import Weights

PAGE = "explanation.html"
NAMED_TERMS = 3
"""Of an image, in a table."""
SEVERAL = Path("report.html")
"""Where the page of several runs goes if no place is named."""


def explain_images(
    run: Path,
    files: Sequence[Path],
    *,
    output: Path | None,
    samples: int,
    overwrite: bool,
    root: Path | None,
    best: bool,
    as_json: bool,
    device: str,
) -> None:
    """The options are those of the command."""
    # A run keeps its page; that of a model which is no folder is written here.
    own = run / PAGE if run.is_dir() else Path(f"{run.stem}-{PAGE}")
    page = None if as_json and output is None else output or own
    check_new(writable_file(page), overwrite=overwrite or (output is None and run.is_dir()))
    asked = select_images(
        run, files, samples=samples, device=choose_device(device), best=best, root=root
    )
    with Console(stderr=True).status("explaining"), asked.run.solving():
        found = explain(asked.run.model, asked.images, class_names=asked.run.images.class_names)
        found = replace(found, truths=tuple(asked.truths))
    if page is not None:
        title = f"{asked.run.recipe.model.name} on {asked.run.recipe.data.name}"
        write_atomically(page, found.html(title, footer(asked.run)).encode())
    if as_json:
        named = zip(asked.names, found.as_data(), strict=True)
        print_json([{"image": name, **said} for name, said in named])
    else:
        _show(asked.names, found)
        if found.no_contributions:
            say(f"Terms cannot be weighed: {found.no_contributions}")
        say(f"Written: {page}")
    note_frames(asked.paths)
    complain(asked.unreadable)


def _show(names: Sequence[str], found: Explanation) -> None:
    rows = []
    for place, name in enumerate(names):
        error = found.margin_error(place)
        terms = found.pulls(place)
        brought = sorted(terms, key=lambda term: -abs(term[2]))[:NAMED_TERMS]
        pulled = max(terms, key=lambda term: abs(term[1]), default=None)
        rows.append(
            (
                name,
                found.name(int(found.prediction[place])),
                found.name(int(found.rival[place])),
                f"{float(found.margin[place]):.4g}",
                "" if error is None else f"{error:.1e}",
                "yes" if found.certificate.certified_class[place] else "no",
                ", ".join(f"{term} {source:+.3g}" for term, _, source in brought),
                "" if pulled is None else f"{pulled[0]} {pulled[1]:+.3g}",
            )
        )
    numbers = ("Margin", "±")
    headings = ("Image", "Class", "Over", *numbers, "Certified", "Brought by", "Largest ∂/∂term")
    print_table(headings, rows, right=numbers)


def write_reports(
    runs: Sequence[Path],
    *,
    output: Path | None,
    quick: bool,
    refine: bool,
    overwrite: bool,
    root: Path | None,
    best: bool,
    device: str,
) -> None:
    """The options are those of the command."""
    place = output
    if place is None:
        place = RunFolder(runs[0]).report if len(runs) == 1 else SEVERAL
    # The report of a run is its own to renew.
    check_new(writable_file(place), overwrite=overwrite or (output is None and len(runs) == 1))
    where = choose_device(device)
    names = [str(runs[0])] if len(runs) == 1 else [run.name for run in read_runs(runs)]
    weights: Weights = "best" if best else "last"
    found = []
    with progress_bar() as bar:
        shown = StepDisplay(bar, len(runs))
        for run, name in zip(runs, names, strict=True):
            one = report_of(
                run,
                device=where,
                weights=weights,
                root=root,
                quick=quick,
                refine=refine,
                on_step=partial(shown.on_step, name),
            )
            shown.on_run()
            found.append(replace(one, name=name))
    said = footer(trained_model(runs[0])) if len(runs) == 1 else ""
    write_atomically(place, report_page(found, said).encode())
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
