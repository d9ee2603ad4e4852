"""`equilibria attack`: how a trained classifier does when somebody changes its images."""

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
from equilibria.cli.images import classifier

if TYPE_CHECKING:
    from torch import Tensor, nn

    from equilibria.report.attacked_files import AttackedFile


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
    eps: Annotated[
        float, Option(help="Largest distance from an image, whose pixels are in [0, 1].")
    ],
    files: ImagesOrTests = None,
    label: Annotated[
        str | None, Option(help="Class that the FILES show; what the model says if not set.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="Folder for the attacked FILES, as large as the model sees them."),
    ] = None,
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
    samples: Annotated[
        int | None, Option(min=1, help="Test images to attack; 1000, or 200 for a --curve.")
    ] = None,
    batch_size: Annotated[int, Option(min=1, help="Of them at a time.")] = 250,
    curve: Annotated[
        bool,
        Option(
            "--curve",
            help="Accuracy over distances up to --eps and over steps, by all methods and those of "
            "Foolbox if it is installed, with what is certified; kept in the run for its report.",
        ),
    ] = False,
    draw: Annotated[
        Path | None,
        Option(
            help="PNG of test images, perturbations and predictions; SVG of the --curve.",
            callback=writable_file,
        ),
    ] = None,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Attack a trained classifier: its accuracy on the worst images near the test images.

    Given FILES, it is these that are attacked; the data set of the run is then not needed.
    """
    from equilibria.report.attacked_files import attack_files

    methods: tuple[eq.inputs.attack_settings.AttackMethod, ...] = get_args(
        eq.inputs.attack_settings.AttackMethod
    )
    if method not in (*methods, "all"):
        raise ValueError(f"--method must be one of {', '.join(methods)} or all, not {method!r}")
    if files and draw is not None:
        raise ValueError("--draw is for test images: --output writes the attacked FILES")
    if not files and (label is not None or output is not None):
        raise ValueError("--label and --output are for FILES: name the images to attack")
    if curve and (files or step_size is not None or warm_start or method != "pgd"):
        raise ValueError(
            "--curve attacks test images by all methods: leave out FILES, --method, --step-size "
            "and --warm-start"
        )
    writable_folder(output)
    check_new(draw, overwrite=overwrite)
    wants_all = method == "all"
    common: dict[str, Any] = {"norm": norm, "eps": eps, "loss": loss, "restarts": restarts}

    def settings_of(name: eq.inputs.attack_settings.AttackMethod) -> eq.inputs.AttackSettings:
        """Among all methods, each takes what it knows: FGSM is one step."""
        takes_steps = name != "fgsm" or not wants_all
        return eq.inputs.AttackSettings(
            method=name,
            **common,
            steps=steps if takes_steps else None,
            step_size=step_size if takes_steps else None,
            warm_start=warm_start and (name == "pgd" or not wants_all),
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
    asked = [settings_of(name) for name in methods if wants_all or name == method]
    where = eq.training.processes.choose_device(device)
    if files:
        found = eq.data.find_images(files)
        attacked_run = classifier(opened_model(run, where, best))
        asked[0].check_eps(attacked_run.images.image_shape)
        problems: list[Exception] = []
        passed_over: list[str] = []
        attacked = attack_files(
            attacked_run,
            found,
            asked,
            where,
            label=label,
            output=output,
            overwrite=overwrite,
            on_unreadable=problems.append,
            on_refused=lambda asked, error: passed_over.append(_refusal(asked, error)),
        )
        _show_files(attacked, len(found) * len(asked), as_json)
        for line in passed_over:
            warn(line)
        note_frames(found)
        complain(unreadable(problems, len(found)))
    else:
        experiment = classifier(opened(run, where, best, root))
        asked[0].check_eps(experiment.images.image_shape)
        images, labels = experiment.some_test_images(samples or 1000)
        some = _attack_images(
            experiment.model, images.to(where), labels.to(where), asked, batch_size, as_json
        )
        if draw is not None:
            eq.training.files.write_atomically(
                draw, eq.report.figures.attack_png(images, some[0], experiment.images.class_names)
            )
        if as_json:
            print_json([result.figures() for result in some])
        else:
            model = experiment.recipe.model.name
            _show(f"{model} on {len(images)} test images, {norm}, eps {eps:g}", some)
            if draw is not None:
                say(f"Drawn: {draw}")
        complain(unanswered(some[0].unanswered, len(images)))


def _refusal(settings: eq.inputs.AttackSettings, error: Exception) -> str:
    """Say why a method is skipped."""
    return f"{settings.method} passed over: {error}"


def _attack_images(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    asked: Sequence[eq.inputs.AttackSettings],
    batch_size: int,
    is_silent: bool,
) -> list[eq.inputs.AttackResult]:
    """Attack by every method that accepts the model; a single method that refuses is an error."""
    found, passed_over = [], []
    with progress_bar(silent=is_silent) as progress:
        batches = math.ceil(len(images) / batch_size)
        task = progress.add_task("attacking", total=batches * len(asked))
        for settings in asked:
            progress.update(task, description=settings.method)
            try:
                found.append(
                    eq.inputs.measure_attack(
                        model, images, labels, settings, batch_size, lambda: progress.advance(task)
                    )
                )
            except (TypeError, ValueError) as error:
                if len(asked) == 1:
                    raise
                passed_over.append(_refusal(settings, error))
    if not found:
        raise ValueError("; ".join(passed_over))
    for line in passed_over:
        warn(line)
    return found


def _show_files(attacked: Iterator[AttackedFile], count: int, as_json: bool) -> None:
    found = []
    with progress_bar(silent=as_json) as progress:
        for one in progress.track(attacked, total=count, description="attacking"):
            found.append(one)
    if as_json:
        print_json(found)
        return
    columns = ("Distance", "Steps", "Evaluations")
    in_file = ("In the file", "Attacked") if any(one.attacked for one in found) else ()
    rows = [
        (
            one.file,
            one.method,
            one.before,
            one.after or "no answer",
            "yes" if one.changed else "no",
            f"{one.distance:.3g}",
            f"{one.steps}",
            f"{one.evaluations}",
            *((one.after_in_file or "no answer", one.attacked or "") if in_file else ()),
        )
        for one in found
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
    """Measure, store and draw accuracy over distance and over steps, and the certified share."""
    from equilibria.inputs.robustness import SHARES, STEP_COUNTS

    where = eq.training.processes.choose_device(device)
    experiment = classifier(opened(run, where, best, root))
    images, labels = (some.to(where) for some in experiment.some_test_images(samples))
    methods = eq.inputs.robustness.curve_methods(settings.norm)
    with progress_bar(silent=as_json) as progress:
        task = progress.add_task("attacking", total=len(methods) * (len(SHARES) + len(STEP_COUNTS)))

        def tell(method: str) -> None:
            progress.update(task, description=method, advance=1)

        curves = eq.inputs.measure_robustness(
            experiment.model, images, labels, settings, batch_size=batch_size, on_measured=tell
        )
        progress.update(task, description="certifying")
        with experiment.solving():
            curves = eq.report.page.with_certified(experiment.model, images, labels, curves)
    if not best and run.is_dir():
        eq.report.stored.store_robustness(run, curves)
    if draw is not None:
        charts = eq.report.figures.robustness_charts(curves)
        eq.training.files.write_atomically(draw, eq.report.figures.themed(charts).light)
    if as_json:
        print_json(curves)
        return
    _show_curves(experiment.recipe.model.name, curves)
    for line in curves.passed_over:
        warn(f"passed over: {line}")
    if curves.why_not_certified:
        say(f"Nothing is certified: {curves.why_not_certified}")
    if draw is not None:
        say(f"Drawn: {draw}")


def _show_curves(model: str, curves: eq.inputs.RobustnessCurves) -> None:
    tables = {
        f"{model} on {curves.samples} test images, {curves.norm}, over eps": curves.over_eps,
        f"over steps, at eps {curves.step_eps:g}": curves.over_steps,
    }
    for title, found in tables.items():
        if not found:
            continue
        over_eps = found is curves.over_eps
        points = next(iter(found.values()))
        headings = [f"{p.eps:g}" if over_eps else f"{p.steps}" for p in points]
        rows = [
            (method, *(f"{p.accuracy:.1%}" for p in places)) for method, places in found.items()
        ]
        if over_eps:
            held = [max((s for e, s in curves.certified if e > p.eps), default=0.0) for p in points]
            rows.append(("certified", *(f"{share:.1%}" for share in held)))
        print_table(("Attack", *headings), rows, right=headings, title=title)
    say(f"Without an attack: {curves.accuracy:.1%}")
