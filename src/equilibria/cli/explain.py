"""`equilibria explain`: why a classifier says what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

import equilibria as eq
from equilibria.cli.app import (
    Best,
    Classifier,
    DataRoot,
    Device,
    ImagesOrTests,
    JsonList,
    OverwriteFiles,
    command,
    page_footer,
)
from equilibria.cli.console import print_json, print_table, say
from equilibria.cli.faults import check_new, complain, note_frames, writable_file
from equilibria.cli.images import select_images

PAGE = "explanation.html"
NAMED_TERMS = 3
"""Number of terms per image in the table."""


@command(
    "explain",
    "equilibria explain runs/opteq",
    "equilibria explain runs/opteq digit.png folder-of-images --output why.html",
    "equilibria explain runs/geq --samples 24",
    "equilibria explain runs/opteq digit.png --json",
)
def explain(
    run: Classifier,
    files: ImagesOrTests = None,
    output: Annotated[
        Path | None,
        Option(help="HTML page; explanation.html in the folder of the run if not set, or here."),
    ] = None,
    samples: Annotated[int, Option(min=1, help="Test images to explain.")] = 9,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Say why a classifier says what it says: the terms of its objective that pulled the decision.

    The page also shows Grad-CAM, the gradient in the image, attention maps, the solve step by step,
    and what the features are like. With --json a page is written only if --output names it.
    """
    # A run keeps its page; that of a model which is no folder is written here.
    own = run / PAGE if run.is_dir() else Path(f"{run.stem}-{PAGE}")
    page = None if as_json and output is None else output or own
    check_new(writable_file(page), overwrite=overwrite or (output is None and run.is_dir()))
    selected = select_images(
        run,
        files or [],
        samples=samples,
        device=eq.training.processes.choose_device(device),
        best=best,
        root=root,
    )
    with Console(stderr=True).status("explaining"), selected.run.solving():
        found = eq.report.explain(
            selected.run.model, selected.images, class_names=selected.run.images.class_names
        )
        found = replace(found, truths=tuple(selected.truths))
    if page is not None:
        title = f"{selected.run.recipe.model.name} on {selected.run.recipe.data.name}"
        eq.training.files.write_atomically(
            page, found.html(title, page_footer(selected.run)).encode()
        )
    if as_json:
        named = zip(selected.names, found.as_data(), strict=True)
        print_json([{"image": name, **said} for name, said in named])
    else:
        _show(selected.names, found)
        if found.no_contributions:
            say(f"Terms cannot be weighed: {found.no_contributions}")
        say(f"Written: {page}")
    note_frames(selected.paths)
    complain(selected.unreadable)


def _show(names: Sequence[str], found: eq.report.Explanation) -> None:
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
