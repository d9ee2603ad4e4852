"""`equilibria certify`: certificates for the predictions of a classifier."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import Progress, TaskID
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
)
from equilibria.cli.console import print_facts, print_json, print_table, progress_bar, say
from equilibria.cli.csv_files import csv_rows
from equilibria.cli.faults import STANDARD_OUTPUT, check_table, complain, note_frames
from equilibria.cli.images import select_images
from equilibria.registry import check_tolerances

if TYPE_CHECKING:
    import torch

MAX_ROWS = 200
"""Maximum number of rows in a table of files; with more files only the summary is printed."""


@command(
    "certify",
    "equilibria certify runs/opteq",
    "equilibria certify runs/opteq digit.png folder-of-images",
    "equilibria certify --model digits-certified --samples 100",
    "equilibria certify runs/opteq --refine",
    "equilibria certify runs/opteq --tolerance 1e-2 --samples 200 --csv certificates.csv",
    "equilibria certify runs/opteq digit.png --json",
)
def certify(
    run: Classifier,
    files: ImagesOrTests = None,
    tolerance: Annotated[
        float | None,
        Option(help="Relative tolerance of the solves (default: that of the run's evaluation)."),
    ] = None,
    samples: Annotated[int, Option(min=1, help="Number of test images.")] = 360,
    refine: Annotated[
        bool,
        Option(
            help="Also compute larger radii, at many times the cost: in L2 from activation "
            "patterns, for images that can gain more than 1 %, and in L∞ for pixels in [0, 1]."
        ),
    ] = False,
    batch_size: Annotated[int, Option(min=1, help="Images per batch.")] = 32,
    table: Annotated[
        Path | None, Option("--csv", help="CSV file with one line per image; - is standard output.")
    ] = None,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Certify the predictions of a classifier: class, error bars and radius.

    A class is certified if it is provably the class at the exact equilibrium. Within the radius (in
    L2, in pixels) no image has another class. The summary also gives the radius in L∞, and that
    for pixels in [0, 1]. Exit code 1 if nothing can be certified.
    """
    check_tolerances(tolerance=tolerance)
    check_table(table, as_json=as_json, overwrite=overwrite)
    selected = select_images(
        run,
        files or [],
        samples=samples,
        device=eq.training.processes.choose_device(device),
        best=best,
        root=root,
    )
    certificate = _certified(
        selected.run,
        selected.images,
        tolerance,
        refine,
        batch_size,
        as_json or table == STANDARD_OUTPUT,
    )
    rows = list(
        _rows(certificate, selected.names, selected.truths, selected.run.images.class_names)
    )
    if as_json:
        print_json(rows)
    if table is not None:
        _write(table, rows)
    if not as_json and table != STANDARD_OUTPUT:
        if files and len(rows) <= MAX_ROWS:
            _show(rows)
        _summarize(selected.run, certificate, selected.truths)
        if table is not None:
            say(f"Written: {table}")
    note_frames(selected.paths)
    why_none = "" if certificate.certified_class.any() else _main_reason(certificate)
    complain(selected.unreadable, why_none)


@dataclass(frozen=True)
class CertifiedImage:
    """Certificate of the prediction for one image."""

    image: str
    """Name of its file, or its number among the selected test images."""
    label: str | None
    """Predicted class."""
    true_label: str | None
    """True class; None for an image file."""
    certified: bool
    radius: float
    radius_linf: float
    radius_linf_in_range: float
    """With pixels in [0, 1]."""
    margin: float | None
    """Smallest margin to another class."""
    margin_error: float | None
    """Bound on the error of `margin`."""
    error: float
    residual: float
    contraction: float
    reason: str


def _certified(
    run: eq.training.experiment.RecipeModel,
    images: torch.Tensor,
    tolerance: float | None,
    refine: bool,
    batch_size: int,
    is_silent: bool,
) -> eq.certificates.Certificate:
    import torch

    certifier = eq.certificates.certifier(run.model, tuple(images.shape[1:]))
    parts = torch.split(images, batch_size)
    certificates = []
    with (
        run.solving(),
        eq.solving(run.model, tolerance=tolerance),
        progress_bar(silent=is_silent) as bar,
    ):
        batches = bar.track(parts, total=len(parts), description="certifying")
        refining = _Refining(bar)
        for part in batches:
            certificates.append(certifier(part, refine=refine, progress=refining))
    return eq.certificates.Certificate.join(certificates)


class _Refining:
    """Progress line for the refinement of all batches; its total grows with each batch."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task: TaskID | None = None
        self.total = 0

    def __call__(self, pieces: Sequence[Any]) -> Iterator[Any]:
        self.total += len(pieces)
        if self.task is None:
            self.task = self.bar.add_task("refining")
        self.bar.update(self.task, total=self.total)
        for piece in pieces:
            yield piece
            self.bar.advance(self.task)


def _main_reason(certificate: eq.certificates.Certificate) -> str:
    """Return the most frequent reason why an image has no certificate."""
    return Counter(certificate.reasons).most_common(1)[0][0]


def _rows(
    certificate: eq.certificates.Certificate,
    names: Sequence[str],
    truths: Sequence[int | None],
    classes: Sequence[str],
) -> Iterator[CertifiedImage]:
    for i, (name, truth) in enumerate(zip(names, truths, strict=True)):
        predicted = int(certificate.prediction[i])
        margin, margin_error = eq.analysis.certified.nearest_rival(certificate, i) or (None, None)
        yield CertifiedImage(
            image=name,
            label=None if predicted < 0 else classes[predicted],
            true_label=None if truth is None else classes[truth],
            certified=bool(certificate.certified_class[i]),
            radius=float(certificate.radius[i]),
            radius_linf=float(certificate.radius_linf[i]),
            radius_linf_in_range=float(certificate.radius_linf_in_range[i]),
            margin=margin,
            margin_error=margin_error,
            error=float(certificate.error[i]),
            residual=float(certificate.residual[i]),
            contraction=float(certificate.contraction[i]),
            reason=certificate.reasons[i],
        )


def _write(path: Path, rows: Sequence[CertifiedImage]) -> None:
    names = [f.name for f in fields(CertifiedImage)]
    lines = [names, *([asdict(row)[name] for name in names] for row in rows)]
    text = StringIO()
    write = csv_rows(text)
    for line in lines:
        write(line)
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text.getvalue())
    else:
        eq.training.files.write_atomically(path, text.getvalue().encode())


def _show(rows: Sequence[CertifiedImage]) -> None:
    numbers = ("Margin", "±", "Error", "Radius")
    lines = [
        (
            row.image,
            row.label or "no answer",
            "yes" if row.certified else "no",
            "" if row.margin is None else f"{row.margin:.4g}",
            "" if row.margin_error is None else f"{row.margin_error:.1e}",
            f"{row.error:.1e}",
            f"{row.radius:.3g}" if row.radius else "",
            row.reason,
        )
        for row in rows
    ]
    print_table(("Image", "Class", "Certified", *numbers, "Why not"), lines, right=numbers)


def _summarize(
    run: eq.training.experiment.RecipeModel,
    certificate: eq.certificates.Certificate,
    truths: Sequence[int | None],
) -> None:
    print_facts(
        f"{run.recipe.model.name} on {len(certificate)} images",
        eq.report.labels.certificate_rows(certificate, truths),
    )
    for line in eq.report.labels.certificate_reasons(certificate):
        say(line)
