"""`equilibria restore`: damaged images restored, and how far that came."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from equilibria.cli.console import fail, print_table
from equilibria.cli.predict import WIDTH_OF_A_FILE, find_images
from equilibria.cli.restore_files import (
    RestorationRequest,
    RestoredImage,
    chosen_damage,
    restored_files,
)
from equilibria.cli.restore_test_images import restored_test_images
from equilibria.inputs import Corruption
from equilibria.training import Experiment, choose_device, trained


def run_restoration(request: RestorationRequest) -> None:
    """Restore image files, all images in folders, or test images; pictures go to `output`."""
    try:
        _check(request)
        device = choose_device(request.device_name)
        files = find_images(request.images) if request.images else []
        weights: Literal["last", "best"] = "best" if request.best else "last"
        experiment = trained(request.folder, device=device, weights=weights)
        damage = chosen_damage(request, experiment)
        if request.test is not None:
            _tell_of_test_images(request, experiment, damage, device)
            return
        results = list(restored_files(request, experiment, damage, files, device))
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if request.as_json:
        print(json.dumps([asdict(r) for r in results], indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_FILE)
    console.print(_table(results))
    done = sum(r.status == "converged" for r in results)
    if any(r.residual is not None for r in results):
        console.print(f"{done} of {len(results)} converged")
        worst = next((r for r in results if r.status not in ("converged", "")), None)
        if worst is not None:
            console.print(f"{escape(worst.file)}: {worst.message}", soft_wrap=True)


def _check(request: RestorationRequest) -> None:
    if (request.test is None) == (not request.images):
        raise ValueError(
            "name image files or folders to restore, or --test N for N of the run's own test "
            "images, one of both"
        )
    if request.test is not None and (request.damaged or request.mask is not None):
        raise ValueError("--damaged and --mask are for image files: test images are undamaged")


def _tell_of_test_images(
    request: RestorationRequest, experiment: Experiment, damage: Corruption, device: torch.device
) -> None:
    found = restored_test_images(request, experiment, damage, device)
    if request.as_json:
        print(json.dumps(asdict(found), indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    print_table(console, f"{found.images} test images of {found.data}, {damage}", found.rows())
    if found.message:
        console.print(f"The first that did not converge: {found.message}", soft_wrap=True)
    console.print(f"Drawn: {found.sheet}", soft_wrap=True)


def _table(results: list[RestoredImage]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("File", "Restored"):
        table.add_column(column, overflow="fold")
    columns = ("PSNR before", "after", "Misfit", "Status", "Residual", "Iterations")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for r in results:
        table.add_row(
            escape(r.file),
            escape(r.restored),
            "" if r.measured_psnr is None else f"{r.measured_psnr:.2f} dB",
            "" if r.restored_psnr is None else f"{r.restored_psnr:.2f} dB",
            f"{r.misfit:.3g}",
            r.status,
            "" if r.residual is None else f"{r.residual:.1e}",
            "" if r.iterations is None else str(r.iterations),
        )
    return table
