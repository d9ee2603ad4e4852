"""`equilibria explain`: explain the predictions of a classifier."""

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
        Option(help="HTML file (default: explanation.html in the folder of the run, or here)."),
    ] = None,
    samples: Annotated[int, Option(min=1, help="Number of test images.")] = 9,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Explain predictions by the contributions of the terms of the hidden objective.

    The page also shows Grad-CAM, the gradient in the image, attention maps, the convergence of the
    solve, and statistics of the features. With --json the page is written only if --output is set.
    """
    from equilibria.analysis.explanation import explain_predictions
    from equilibria.report.html import explanation_page

    # The page of a pretrained model, which has no folder, is written to the current folder.
    default = run / PAGE if run.is_dir() else Path(f"{run.stem}-{PAGE}")
    page = None if as_json and output is None else output or default
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
        explanation = explain_predictions(
            selected.run.model, selected.images, class_names=selected.run.images.class_names
        )
        explanation = replace(explanation, truths=tuple(selected.truths))
    if page is not None:
        title = f"{selected.run.recipe.model.name} on {selected.run.recipe.data.name}"
        eq.training.files.write_atomically(
            page, explanation_page(explanation, title, page_footer(selected.run)).encode()
        )
    if as_json:
        named = zip(selected.names, explanation.as_data(), strict=True)
        print_json([{"image": name, **data} for name, data in named])
    else:
        _show(selected.names, explanation)
        if explanation.no_contributions:
            say(f"The contributions of terms are not known: {explanation.no_contributions}")
        say(f"Written: {page}")
    note_frames(selected.paths)
    complain(selected.unreadable)


def _show(names: Sequence[str], explanation: eq.analysis.ExplainedPredictions) -> None:
    rows = []
    for index, name in enumerate(names):
        error = explanation.margin_error(index)
        terms = explanation.pulls(index)
        contributions = sorted(terms, key=lambda term: -abs(term[2]))[:NAMED_TERMS]
        steepest = max(terms, key=lambda term: abs(term[1]), default=None)
        rows.append(
            (
                name,
                explanation.name(int(explanation.prediction[index])),
                explanation.name(int(explanation.rival[index])),
                f"{float(explanation.margin[index]):.4g}",
                "" if error is None else f"{error:.1e}",
                "yes" if explanation.certificate.certified_class[index] else "no",
                ", ".join(f"{term} {source:+.3g}" for term, _, source in contributions),
                "" if steepest is None else f"{steepest[0]} {steepest[1]:+.3g}",
            )
        )
    numbers = ("Margin", "±")
    headings = ("Image", "Class", "Over", *numbers, "Certified", "Contributions", "Largest ∂/∂term")
    print_table(headings, rows, right=numbers)
