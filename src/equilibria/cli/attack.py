"""`equilibria attack`: how a trained classifier does when somebody changes its images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import Best, Device, JsonList, command, opened
from equilibria.cli.console import print_json, print_table, progress_bar, say
from equilibria.cli.faults import complain, unanswered, writable_file


@command(
    "attack",
    "equilibria attack runs/opteq --eps 1",
    "equilibria attack runs/opteq --norm linf --eps 0.1 --method all --draw attack.png",
    "equilibria attack runs/opteq --eps 1 --method jiio --samples 500 --json",
)
def attack(
    run: Annotated[Path, Argument(help="Run of a classifier.")],
    eps: Annotated[float, Option(help="How far a pixel image may be moved.")],
    norm: Annotated[str, Option(help="In which that is measured: l2 or linf.")] = "l2",
    method: Annotated[str, Option(help="pgd, jiio, fgsm, or all of them.")] = "pgd",
    steps: Annotated[int | None, Option(min=1, help="20 for pgd, 40 for jiio.")] = None,
    restarts: Annotated[
        int, Option(min=1, help="All but the first start at random; the worst counts.")
    ] = 1,
    step_size: Annotated[float | None, Option(help="Length of a step.")] = None,
    warm_start: Annotated[
        bool, Option("--warm-start", help="pgd: go on from the last equilibrium.")
    ] = False,
    loss: Annotated[str, Option(help="cross_entropy or margin.")] = "cross_entropy",
    samples: Annotated[int, Option(min=1, help="Test images to attack.")] = 1000,
    batch_size: Annotated[int, Option(min=1, help="Images at a time.")] = 250,
    draw: Annotated[
        Path | None,
        Option(help="PNG of images, perturbations and predictions.", callback=writable_file),
    ] = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Attack a trained classifier: its accuracy on the worst images near the test images."""
    methods: tuple[eq.inputs.Method, ...] = get_args(eq.inputs.Method)
    if method not in (*methods, "all"):
        raise ValueError(f"--method must be one of {', '.join(methods)} or all, not {method!r}")
    wants_all = method == "all"
    common: dict[str, Any] = {"norm": norm, "eps": eps, "loss": loss, "restarts": restarts}

    def settings_of(name: eq.inputs.Method) -> eq.inputs.AttackSettings:
        """Among all methods, each takes what it knows: FGSM is one step."""
        takes_steps = name != "fgsm" or not wants_all
        return eq.inputs.AttackSettings(
            method=name,
            **common,
            steps=steps if takes_steps else None,
            step_size=step_size if takes_steps else None,
            warm_start=warm_start and (name == "pgd" or not wants_all),
        )

    asked = [settings_of(name) for name in methods if wants_all or name == method]
    where = eq.training.choose_device(device)
    experiment = opened(run, where, best)
    data = experiment.data
    if data.kind != "classification":
        raise ValueError(
            f"an attack needs a run that classifies images, and {data.name} is for {data.kind}"
        )
    images, labels = experiment.some_test_images(samples)
    found, passed_over = [], []
    with progress_bar(silent=as_json) as progress:
        batches = math.ceil(len(images) / batch_size)
        task = progress.add_task("attacking", total=batches * len(asked))
        for settings in asked:
            progress.update(task, description=settings.method)
            try:
                found.append(
                    eq.inputs.measure_attack(
                        experiment.model,
                        images.to(where),
                        labels.to(where),
                        settings,
                        batch_size,
                        lambda: progress.advance(task),
                    )
                )
            except (TypeError, ValueError) as error:
                if not wants_all:
                    raise
                passed_over.append(f"{settings.method} passed over: {error}")
    if not found:
        raise ValueError("; ".join(passed_over))
    if draw is not None:
        eq.training.write_atomically(draw, eq.report.attack_png(images, found[0], data.class_names))
    if as_json:
        print_json([result.figures() for result in found])
    else:
        title = f"{experiment.recipe.model.name} on {len(images)} test images, {norm}, eps {eps:g}"
        _show(title, found)
        for line in passed_over:
            say(line)
        if draw is not None:
            say(f"Drawn: {draw}")
    complain(unanswered(found[0].unanswered, len(images)))


def _show(title: str, results: Sequence[eq.inputs.AttackResult]) -> None:
    columns = ("Clean", "Robust", "95% interval", "Loss", "Evaluations", "Pull-backs", "CPU s")
    rows = []
    for row in (result.figures() for result in results):
        runs = f" × {row['restarts']}" if row["restarts"] > 1 else ""
        steps = "" if row["method"] == "fgsm" else f"-{row['steps']}"
        rows.append(
            (
                row["method"] + steps + runs,
                f"{row['accuracy']:.2%}",
                f"{row['robust_accuracy']:.2%}",
                f"{row['low']:.1%} – {row['high']:.1%}",
                f"{row['clean_loss']:.3f} → {row['loss']:.3f}",
                f"{row['evaluations']}",
                f"{row['vjps']}",
                f"{row['cpu_seconds']:.1f}",
            )
        )
    print_table(("Attack", *columns), rows, right=columns, title=title)
