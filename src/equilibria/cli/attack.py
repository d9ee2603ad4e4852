"""`equilibria attack`: how a trained classifier does when somebody changes its images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

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
from equilibria.cli.console import print_json, say
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
    from equilibria.cli.attacking import (
        attack_images,
        classifier,
        draw_curves,
        refusal,
        show,
        show_files,
    )

    methods: tuple[eq.inputs.Method, ...] = get_args(eq.inputs.Method)
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

    if curve:
        draw_curves(
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
    where = eq.training.choose_device(device)
    if files:
        found = eq.data.find_images(files)
        attacked_run = classifier(opened_model(run, where, best))
        asked[0].check_eps(attacked_run.images.image_shape)
        problems: list[Exception] = []
        passed_over: list[str] = []
        attacked = eq.report.attack_files(
            attacked_run,
            found,
            asked,
            where,
            label=label,
            output=output,
            overwrite=overwrite,
            on_unreadable=problems.append,
            on_refused=lambda asked, error: passed_over.append(refusal(asked, error)),
        )
        show_files(attacked, len(found) * len(asked), as_json)
        for line in passed_over:
            warn(line)
        note_frames(found)
        complain(unreadable(problems, len(found)))
    else:
        experiment = classifier(opened(run, where, best, root))
        asked[0].check_eps(experiment.images.image_shape)
        images, labels = experiment.some_test_images(samples or 1000)
        some = attack_images(
            experiment.model, images.to(where), labels.to(where), asked, batch_size, as_json
        )
        if draw is not None:
            eq.training.write_atomically(
                draw, eq.report.attack_png(images, some[0], experiment.images.class_names)
            )
        if as_json:
            print_json([result.figures() for result in some])
        else:
            model = experiment.recipe.model.name
            show(f"{model} on {len(images)} test images, {norm}, eps {eps:g}", some)
            if draw is not None:
                say(f"Drawn: {draw}")
        complain(unanswered(some[0].unanswered, len(images)))
