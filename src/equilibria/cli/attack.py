"""`equilibria attack`: accuracy of a classifier under adversarial perturbations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

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
    opened,
    opened_model,
)
from equilibria.cli.console import print_json, print_table, progress_bar, say
from equilibria.cli.faults import (
    check_new,
    complain,
    note_frames,
    unanswered,
    unreadable,
    warn,
    writable_file,
    writable_folder,
)
from equilibria.cli.file_attacks import AttackedFile, attack_files
from equilibria.cli.images import classifier

if TYPE_CHECKING:
    from torch import Tensor, nn


@command(
    "attack",
    "equilibria attack runs/opteq --eps 1",
    "equilibria attack runs/opteq --norm linf --eps 0.1 --method all --draw attack.png",
    "equilibria attack runs/opteq --eps 1 --curve --draw curve.svg",
    "equilibria attack runs/opteq digit.png --eps 1 --output attacked",
    "equilibria attack runs/opteq digit.png --eps 1 --label 3 --method jiio --json",
)
def attack(
    run: Classifier,
    eps: Annotated[float, Option(help="Largest distance from the image; pixels are in [0, 1].")],
    files: ImagesOrTests = None,
    label: Annotated[
        str | None, Option(help="True class of the FILES (default: the predicted class of each).")
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="Folder for the attacked FILES, in the size of the model's input."),
    ] = None,
    norm: Annotated[str, Option(help="Norm of the distance: l2 or linf.")] = "l2",
    method: Annotated[str, Option(help="pgd, jiio, fgsm, or all.")] = "pgd",
    steps: Annotated[
        int | None, Option(min=1, help="Number of steps (default: 20 for pgd, 40 for jiio).")
    ] = None,
    restarts: Annotated[
        int,
        Option(
            min=1,
            help="Number of searches, all but the first from random images; the worst counts.",
        ),
    ] = 1,
    step_size: Annotated[
        float | None, Option(help="Length of a step, in the norm of the distance.")
    ] = None,
    warm_start: Annotated[
        bool, Option("--warm-start", help="For pgd: start each solve at the last equilibrium.")
    ] = False,
    loss: Annotated[
        str, Option(help="Loss to increase: cross_entropy or margin.")
    ] = "cross_entropy",
    samples: Annotated[
        int | None,
        Option(min=1, help="Number of test images (default: 1000, or 200 with --curve)."),
    ] = None,
    batch_size: Annotated[int, Option(min=1, help="Images per batch.")] = 250,
    curve: Annotated[
        bool,
        Option(
            "--curve",
            help="Measure accuracy over distances up to --eps and over steps, by all methods "
            "(and those of Foolbox if installed), and certified accuracy. The curves are stored in "
            "the run for its report.",
        ),
    ] = False,
    draw: Annotated[
        Path | None,
        Option(
            help="PNG file of images, perturbations and predictions; with --curve, an SVG file.",
            callback=writable_file,
        ),
    ] = None,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Measure the accuracy of a classifier on the worst images near the test images.

    With FILES, these images are attacked, and the data set of the run is not needed.
    """
    methods: tuple[eq.inputs.attack_settings.AttackMethod, ...] = get_args(
        eq.inputs.attack_settings.AttackMethod
    )
    if method not in (*methods, "all"):
        raise ValueError(f"--method must be {', '.join(methods)} or all, got {method!r}")
    if files and draw is not None:
        raise ValueError(
            "--draw is for test images; use --output FOLDER to write the attacked FILES"
        )
    if not files and (label is not None or output is not None):
        raise ValueError("--label and --output need FILES: give the images to attack")
    if curve and (files or step_size is not None or warm_start or method != "pgd"):
        raise ValueError(
            "--curve attacks test images by all methods; remove FILES, --method, --step-size and "
            "--warm-start"
        )
    writable_folder(output)
    check_new(draw, overwrite=overwrite)
    uses_all = method == "all"
    common: dict[str, Any] = {"norm": norm, "eps": eps, "loss": loss, "restarts": restarts}

    def settings_of(name: eq.inputs.attack_settings.AttackMethod) -> eq.inputs.AttackSettings:
        """Return the settings of a method; with `all`, without options that it does not have."""
        takes_steps = name != "fgsm" or not uses_all
        return eq.inputs.AttackSettings(
            method=name,
            **common,
            steps=steps if takes_steps else None,
            step_size=step_size if takes_steps else None,
            warm_start=warm_start and (name == "pgd" or not uses_all),
        )

    if curve:
        _measure_curves(
            run,
            eq.inputs.AttackSettings(**common, steps=steps),
            samples=samples or 200,
            batch_size=batch_size,
            draw=draw,
            as_json=as_json,
            device=device,
            best=best,
            root=root,
        )
        return
    attacks = [settings_of(name) for name in methods if uses_all or name == method]
    torch_device = eq.training.processes.choose_device(device)
    if files:
        paths = eq.data.find_images(files)
        attacked_run = classifier(opened_model(run, torch_device, best))
        attacks[0].check_eps(attacked_run.images.image_shape)
        problems: list[Exception] = []
        skipped: list[str] = []
        attacked = attack_files(
            attacked_run,
            paths,
            attacks,
            torch_device,
            label=label,
            output=output,
            overwrite=overwrite,
            on_unreadable=problems.append,
            on_refused=lambda settings, error: skipped.append(_refusal(settings, error)),
        )
        _show_files(attacked, len(paths) * len(attacks), as_json)
        for line in skipped:
            warn(line)
        note_frames(paths)
        complain(unreadable(problems, len(paths)))
    else:
        experiment = classifier(opened(run, torch_device, best, root))
        attacks[0].check_eps(experiment.images.image_shape)
        images, labels = experiment.some_test_images(samples or 1000)
        results = _attack_images(
            experiment.model,
            images.to(torch_device),
            labels.to(torch_device),
            attacks,
            batch_size,
            as_json,
        )
        if draw is not None:
            eq.training.files.write_atomically(
                draw,
                eq.report.figures.attack_png(images, results[0], experiment.images.class_names),
            )
        if as_json:
            print_json([result.figures() for result in results])
        else:
            model = experiment.recipe.model.name
            _show(f"{model} on {len(images)} test images, {norm}, eps {eps:g}", results)
            if draw is not None:
                say(f"Written: {draw}")
        complain(unanswered(results[0].unanswered, len(images)))


def _refusal(settings: eq.inputs.AttackSettings, error: Exception) -> str:
    """Return the warning for a skipped method."""
    return f"{settings.method} skipped: {error}"


def _attack_images(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    attacks: Sequence[eq.inputs.AttackSettings],
    batch_size: int,
    is_silent: bool,
) -> list[eq.inputs.AttackResult]:
    """Attack with every method that supports the model; raise an error if none does."""
    results, skipped = [], []
    with progress_bar(silent=is_silent) as progress:
        batches = math.ceil(len(images) / batch_size)
        task = progress.add_task("attacking", total=batches * len(attacks))
        for settings in attacks:
            progress.update(task, description=settings.method)
            try:
                results.append(
                    eq.inputs.measure_attack(
                        model, images, labels, settings, batch_size, lambda: progress.advance(task)
                    )
                )
            except (TypeError, ValueError) as error:
                if len(attacks) == 1:
                    raise
                skipped.append(_refusal(settings, error))
    if not results:
        raise ValueError("; ".join(skipped))
    for line in skipped:
        warn(line)
    return results


def _show_files(attacked: Iterator[AttackedFile], count: int, as_json: bool) -> None:
    with progress_bar(silent=as_json) as progress:
        results = list(progress.track(attacked, total=count, description="attacking"))
    if as_json:
        print_json(results)
        return
    columns = ("Distance", "Steps", "Evaluations")
    in_file = ("In the file", "Attacked") if any(result.attacked for result in results) else ()
    rows = [
        (
            result.file,
            result.method,
            result.before,
            result.after or "no answer",
            "yes" if result.changed else "no",
            f"{result.distance:.3g}",
            f"{result.steps}",
            f"{result.evaluations}",
            *((result.after_in_file or "no answer", result.attacked or "") if in_file else ()),
        )
        for result in results
    ]
    print_table(
        ("File", "Attack", "Class", "After", "Changed", *columns, *in_file), rows, right=columns
    )


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


def _measure_curves(
    run: Path,
    settings: eq.inputs.AttackSettings,
    *,
    samples: int,
    batch_size: int,
    draw: Path | None,
    as_json: bool,
    device: str,
    best: bool,
    root: Path | None,
) -> None:
    """Measure, store and draw accuracy over distances and steps, and certified accuracy."""
    from equilibria.analysis.certified import with_certified
    from equilibria.analysis.stored import store_robustness
    from equilibria.inputs.robustness import SHARES, STEP_COUNTS

    torch_device = eq.training.processes.choose_device(device)
    experiment = classifier(opened(run, torch_device, best, root))
    images, labels = (batch.to(torch_device) for batch in experiment.some_test_images(samples))
    methods = eq.inputs.robustness.curve_methods(settings.norm)
    with progress_bar(silent=as_json) as progress:
        task = progress.add_task("attacking", total=len(methods) * (len(SHARES) + len(STEP_COUNTS)))

        def on_measured(method: str) -> None:
            progress.update(task, description=method, advance=1)

        curves = eq.inputs.measure_robustness(
            experiment.model,
            images,
            labels,
            settings,
            batch_size=batch_size,
            on_measured=on_measured,
        )
        progress.update(task, description="certifying")
        with experiment.solving():
            curves = with_certified(experiment.model, images, labels, curves)
    if not best and run.is_dir():
        store_robustness(run, curves)
    if draw is not None:
        charts = eq.report.figures.robustness_charts(curves)
        eq.training.files.write_atomically(draw, eq.report.figures.themed(charts).light)
    if as_json:
        print_json(curves)
        return
    _show_curves(experiment.recipe.model.name, curves)
    for line in curves.passed_over:
        warn(f"skipped: {line}")
    if curves.why_not_certified:
        say(f"No lower bound is certified: {curves.why_not_certified}")
    if draw is not None:
        say(f"Written: {draw}")


def _show_curves(model: str, curves: eq.inputs.RobustnessCurves) -> None:
    tables = {
        f"{model} on {curves.samples} test images, {curves.norm}, over eps": curves.over_eps,
        f"over steps, at eps {curves.step_eps:g}": curves.over_steps,
    }
    for title, table in tables.items():
        if not table:
            continue
        over_eps = table is curves.over_eps
        points = next(iter(table.values()))
        headings = [f"{p.eps:g}" if over_eps else f"{p.steps}" for p in points]
        rows = [
            (method, *(f"{p.accuracy:.1%}" for p in measured)) for method, measured in table.items()
        ]
        if over_eps:
            certified = [
                max((s for e, s in curves.certified if e > p.eps), default=0.0) for p in points
            ]
            rows.append(("certified", *(f"{share:.1%}" for share in certified)))
        print_table(("Attack", *headings), rows, right=headings, title=title)
    say(f"Without an attack: {curves.accuracy:.1%}")
