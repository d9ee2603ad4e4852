"""The commands of what optimizes inputs: attack, generate, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.cli.annotations import Best, Device

ATTACK_EXAMPLES = (
    "[bold]Examples[/bold]\n\nequilibria attack runs/opteq --eps 1\n\n"
    "equilibria attack runs/opteq --norm linf --eps 0.1 --method all --draw attack.png\n\n"
    "equilibria attack runs/opteq --eps 1 --method jiio --samples 500 --json"
)


def attack_command(
    run: Annotated[Path, typer.Argument(help="Run of a classifier.")],
    eps: Annotated[float, typer.Option(help="How far a pixel image may be moved.")],
    norm: Annotated[str, typer.Option(help="In which that is measured: l2 or linf.")] = "l2",
    method: Annotated[str, typer.Option(help="pgd, jiio, fgsm, or all of them.")] = "pgd",
    steps: Annotated[int | None, typer.Option(min=1, help="20 for pgd, 40 for jiio.")] = None,
    restarts: Annotated[
        int, typer.Option(min=1, help="All but the first start at random; the worst counts.")
    ] = 1,
    step_size: Annotated[float | None, typer.Option(help="Length of a step.")] = None,
    warm_start: Annotated[
        bool, typer.Option("--warm-start", help="pgd: go on from the last equilibrium.")
    ] = False,
    loss: Annotated[str, typer.Option(help="cross_entropy or margin.")] = "cross_entropy",
    samples: Annotated[int, typer.Option(min=1, help="Test images to attack.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 250,
    draw: Annotated[
        Path | None, typer.Option(help="PNG of images, perturbations and predictions.")
    ] = None,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    device: Device = "auto",
) -> None:
    """Attack a trained classifier: its accuracy on the worst images near the test images."""
    from equilibria.cli.attack import run_attack

    run_attack(
        folder=run,
        norm=norm,
        eps=eps,
        method=method,
        steps=steps,
        restarts=restarts,
        step_size=step_size,
        warm_start=warm_start,
        loss=loss,
        samples=samples,
        batch_size=batch_size,
        best=best,
        draw=draw,
        device_name=device,
        as_json=as_json,
    )


GENERATE_EXAMPLES = (
    "[bold]Examples[/bold]\n\nequilibria generate runs/generator\n\n"
    "equilibria generate runs/vae --samples 64 --output samples.png --density vae-gmm"
)


def generate_command(
    run: Annotated[Path, typer.Argument(help="Run of a generator or an autoencoder.")],
    output: Annotated[
        Path, typer.Option(help="PNG of samples; reconstructions are drawn beside it.")
    ] = Path("equilibria-samples.png"),
    samples: Annotated[int, typer.Option(min=1, help="Images to draw.")] = 64,
    density: Annotated[str, typer.Option(help="Of the latents: gmm or vae-gmm.")] = "gmm",
    latents: Annotated[
        int, typer.Option(min=2, help="Training images whose latents the density is fitted to.")
    ] = 2000,
    images: Annotated[
        int, typer.Option(min=2, help="Test images that are reconstructed and compared with.")
    ] = 500,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of density and samples.")] = 0,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: Device = "auto",
) -> None:
    """Draw new images and reconstructions with a trained generator, and measure both."""
    from equilibria.cli.generate import GenerationRequest, run_generation

    run_generation(
        GenerationRequest(
            folder=run,
            output=output,
            samples=samples,
            density=density,
            latents=latents,
            images=images,
            best=best,
            seed=seed,
            device_name=device,
            as_json=as_json,
        )
    )


RESTORE_EXAMPLES = (
    "[bold]Examples[/bold]\n\nequilibria restore runs/generator digit.png --task inpaint\n\n"
    "equilibria restore runs/generator digits --task denoise --noise 0.4 --stop-at-noise\n\n"
    "equilibria restore runs/generator old.png --task inpaint --damaged --mask scratches.png\n\n"
    "equilibria restore runs/denoiser digit.png --json\n\n"
    "equilibria restore runs/generator --test 200 --task denoise --noise 0.2"
)


def restore_command(
    run: Annotated[Path, typer.Argument(help="Run of a generator, autoencoder or restorer.")],
    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or folders of them.")
    ] = None,
    test: Annotated[
        int | None,
        typer.Option(min=1, help="Restore this many of the run's own test images instead."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="inpaint, denoise, deblur or superres; what the run learned if not set."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path(
        "equilibria-restored"
    ),
    noise: Annotated[float | None, typer.Option(min=0, help="Deviation of the noise.")] = None,
    window: Annotated[
        float | None, typer.Option(help="Side of the hidden window: a share, or pixels from 1.")
    ] = None,
    blur: Annotated[float | None, typer.Option(help="Width of the blur in pixels.")] = None,
    factor: Annotated[int | None, typer.Option(help="Of the lower resolution.")] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="The images are damaged already: do not damage them.")
    ] = False,
    mask: Annotated[
        Path | None, typer.Option(help="Image whose bright pixels are missing, to inpaint.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Of the search.")] = None,
    starts: Annotated[
        int | None, typer.Option(min=1, help="Searches from random latents; the best counts.")
    ] = None,
    ridge: Annotated[
        float | None, typer.Option(min=0, help="Weight of the latent's squared norm.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Of the search: secant, adam, …")] = None,
    stop_at_noise: Annotated[
        bool, typer.Option("--stop-at-noise", help="End where noise explains what is left.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of damage and starts.")] = 0,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    device: Device = "auto",
) -> None:
    """Damage images and restore them with a trained model, or restore damaged ones."""
    from equilibria.cli.restore import run_restoration
    from equilibria.cli.restore_files import RestorationRequest

    damage = {"noise": noise, "window": window, "width": blur, "factor": factor}
    search = {"iterations": iterations, "starts": starts, "ridge": ridge, "engine": engine}
    run_restoration(
        RestorationRequest(
            folder=run,
            images=images or [],
            task=task,
            output=output,
            test=test,
            options={name: value for name, value in damage.items() if value is not None},
            search={name: value for name, value in search.items() if value is not None},
            stop_at_noise=stop_at_noise,
            damaged=damaged,
            mask=mask,
            seed=seed,
            best=best,
            device_name=device,
            as_json=as_json,
        )
    )


def add_input_commands(app: typer.Typer) -> None:
    app.command("attack", epilog=ATTACK_EXAMPLES)(attack_command)
    app.command("generate", epilog=GENERATE_EXAMPLES)(generate_command)
    app.command("restore", epilog=RESTORE_EXAMPLES)(restore_command)
