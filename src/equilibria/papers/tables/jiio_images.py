"""JIIO: generative models and inverse problems, Tables 1, 3 and 4, Figures 2 to 12.

Gurumurthy, Bai, Manchester, Kolter, "Joint inference and input optimization in equilibrium
networks", NeurIPS 2021.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import recipe
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table

PAPER = "JIIO"
CELEBA: RecipeData = {"name": "celeba", "options": {"size": 64}, "augmentation": ["flip"]}
DIGITS: RecipeData = {"name": "mnist", "options": {"train_samples": 2000, "test_samples": 300}}
# 50,000 steps of 48 of the 162,770 faces are 15 epochs.
FULL: RecipeData = {
    "epochs": 15,
    "batch_size": 48,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "jacobian_weight": 0.1,
    "jacobian_at": "iterate",
    "jacobian_vectors": 2,
}
QUICK: RecipeData = {
    "epochs": 5,
    "batch_size": 32,
    "optimizer": "adam",
    "learning_rate": 3e-3,
    "weight_decay": 0.0,
    "warmup_epochs": 0.3,
    "clip_norm": 20.0,
    "tolerance": 1e-2,
}
EXPLICIT_FULL = {key: value for key, value in FULL.items() if not key.startswith("jacobian")}
EXPLICIT_QUICK: RecipeData = {**QUICK, "epochs": 40}
MDEQ_QUICK: RecipeData = {**QUICK, "epochs": 15, "gradient": "one_step"}
SMALL: dict[str, Any] = {"latent_dim": 32}
DECODER: dict[str, Any] = {
    **SMALL,
    "channels": 32,
    "width": 32,
    "kernel_size": 3,
    "downsample": 4,
}
FACES: dict[str, Any] = {"in_channels": 3, "image_size": 64, "latent_dim": 128}
MDEQ_FACES: dict[str, Any] = {
    **FACES,
    "channels": [32, 64, 128, 256],
    "expansion": 5,
    "downsample": 1,
    "head_channels": 64,
}


def autoencoder(kind: str, **options: Any) -> RecipeData:
    return {"name": "autoencoder", "options": {"kind": kind, **options}}


def generator(iterations: int, evaluation_iterations: int) -> RecipeData:
    options = {"iterations": iterations, "evaluation_iterations": evaluation_iterations}
    return {"name": "generator", "options": {**options, "ridge": 0.01}}


def restoration(corruption: Any) -> RecipeData:
    return {
        "name": "restoration",
        "options": {"corruption": corruption, "iterations": 12, "sweeps": 4, "ridge": 0.01},
    }


def explicit(model: str, task: RecipeData) -> tuple[RecipeData, RecipeData]:
    return (
        recipe(model, CELEBA, EXPLICIT_FULL, task=task, width=128, **FACES),
        recipe(model, DIGITS, EXPLICIT_QUICK, task=task, width=16, **SMALL),
    )


def mdeq(model: str, task: RecipeData) -> tuple[RecipeData, RecipeData]:
    return (
        recipe(model, CELEBA, FULL, task=task, **MDEQ_FACES),
        recipe(model, DIGITS, MDEQ_QUICK, task=task, channels=[8, 16], **SMALL),
    )


def jiio(full_task: RecipeData, quick_task: RecipeData) -> tuple[RecipeData, RecipeData]:
    return (
        recipe("mdeq-decoder-64", CELEBA, FULL, task=full_task),
        recipe("opteq-decoder", DIGITS, QUICK, task=quick_task, **DECODER),
    )


VAE = explicit("vae-conv", autoencoder("vae", kl_weight=0.1))
RAE = explicit("ae-conv", autoencoder("rae", latent_weight=0.05, decoder_weight=1e-4))
MDEQ_VAE = mdeq("mdeq-vae", autoencoder("vae", kl_weight=0.1))
GENERATOR_40 = jiio(generator(40, 100), generator(10, 40))
GENERATOR_100 = jiio(generator(100, 100), generator(20, 40))


def row(
    label: str,
    recipes: tuple[RecipeData, RecipeData],
    paper: dict[str, str],
    **measures: str | None,
) -> Row:
    full, quick = recipes
    return Row(label=label, paper=paper, full=full, quick=quick, measures=measures)


QUICK_REMARKS = (
    "MNIST (2,000 images to train on, 300 to test on) instead of CelebA at 64×64; a latent of 32 "
    "numbers; 5 epochs, 40 for the explicit networks and 15 for the MDEQs: about as much time.",
    "The generator is an OptEq of 32 channels at 7×7; its latents have a ridge of 0.01. JIIO-…-40 "
    "and -100 are trained with 10 and 20 iterations instead of 40 and 100.",
)
FULL_REMARKS = (
    "Left open by the paper: the weight of KL and of RAE's terms, the ridge of the latents (0.01).",
)
FID_REMARK = (
    "FID: distances between features of a small classifier trained on the same data set, not "
    "Inception's; on faces, which have no classes, it is not measured."
)


register_table(
    PaperTable(
        id="jiio-t1",
        paper=PAPER,
        title="Table 1, FID of samples and reconstructions",
        columns=(
            Column(title="Generation", measure="sample_fid"),
            Column(title="Reconstruction", measure="reconstruction_fid"),
            Column(title="PSNR", measure="reconstruction_psnr"),
        ),
        rows=(
            row("VAE", VAE, {"Generation": "48.12", "Reconstruction": "39.12"}),
            row("RAE", RAE, {"Generation": "40.96", "Reconstruction": "36.01"}),
            row("MDEQ-VAE", MDEQ_VAE, {"Generation": "57.15", "Reconstruction": "45.81"}),
            row(
                "MDEQ-VAE (w/ JIIO)",
                MDEQ_VAE,
                {"Generation": "-", "Reconstruction": "42.36"},
                Generation=None,
                Reconstruction="jiio_reconstruction_fid",
                PSNR="jiio_reconstruction_psnr",
            ),
            row("JIIO-MDEQ", GENERATOR_40, {"Generation": "46.82", "Reconstruction": "32.52"}),
        ),
        extras=("generation",),
        pictures=("generated",),
        figures=("jiio-f2", "jiio-f5", "jiio-f6"),
        full_remarks=(*FULL_REMARKS, FID_REMARK),
        quick_remarks=(*QUICK_REMARKS, FID_REMARK),
    )
)
register_table(
    PaperTable(
        id="jiio-t3",
        paper=PAPER,
        title="Table 3, time of JIIO and Adam on latents",
        columns=(
            Column(title="time taken (ms)", measure="adam_seconds"),
            Column(title="loss", measure="adam_loss"),
        ),
        rows=tuple(
            row(
                label,
                GENERATOR_40,
                {"time taken (ms)": printed} if printed else {},
                **{"time taken (ms)": f"{name}_seconds", "loss": f"{name}_loss"},
            )
            for label, name, printed in (
                ("Adam: 40 iters", "adam", "7659"),
                ("Adam: 40 iters, warm starts", "warm_adam", ""),
                ("JIIO: 40 iters", "jiio_40", "862"),
                ("JIIO: 100 iters", "jiio_100", "2156"),
                ("JIIO as in the paper: 40 iters", "official", ""),
            )
        ),
        extras=("latent_times",),
        pictures=("costs",),
        figures=("jiio-f3", "jiio-f4"),
        full_remarks=FULL_REMARKS,
        quick_remarks=(
            *QUICK_REMARKS,
            "Milliseconds of processor time an image, 32 at a time; the loss is the squared error "
            "that the search reaches, the ridge included, so less is better.",
        ),
    )
)

_DAMAGES: tuple[tuple[str, str, Any, str, tuple[str, ...]], ...] = (
    (
        "jiio-t4a",
        "inpainting",
        {"inpaint": {"window": 0.3125}},
        "inpaint_psnr",
        ("jiio-f11", "jiio-f12"),
    ),
    (
        "jiio-t4b",
        "denoising, σ = 0.2",
        {"denoise": {"noise": 0.2}},
        "denoise_02_psnr",
        ("jiio-f7", "jiio-f8"),
    ),
    (
        "jiio-t4c",
        "denoising, σ = 0.4",
        {"denoise": {"noise": 0.4}},
        "denoise_04_psnr",
        ("jiio-f9", "jiio-f10"),
    ),
)
_PRINTED = {
    "Supervised, AE": ("17.9", "18.72", "18.32"),
    "Supervised, MDEQ-AE": ("17.06", "18.58", "18.49"),
    "Supervised, JIIO-MDEQ-100": ("16.90", "18.22", "17.89"),
    "Unsupervised, VAE (Adam)": ("15.34", "15.31", "15.24"),
    "Unsupervised, MDEQ-VAE (Adam)": ("16.62", "16.96", "16.87"),
    "Unsupervised, JIIO-MDEQ-40": ("15.88", "17.08", "16.03"),
    "Unsupervised, JIIO-MDEQ-100": ("15.87", "17.86", "17.55"),
}
for place, (table_id, what, corruption, measured, figures) in enumerate(_DAMAGES):
    supervised = {
        "Supervised, AE": explicit("ae-conv", restoration(corruption)),
        "Supervised, MDEQ-AE": mdeq("mdeq-ae", restoration(corruption)),
        "Supervised, JIIO-MDEQ-100": jiio(restoration(corruption), restoration(corruption)),
    }
    unsupervised = {
        "Unsupervised, VAE (Adam)": VAE,
        "Unsupervised, MDEQ-VAE (Adam)": MDEQ_VAE,
        "Unsupervised, JIIO-MDEQ-40": GENERATOR_40,
        "Unsupervised, JIIO-MDEQ-100": GENERATOR_100,
    }
    register_table(
        PaperTable(
            id=table_id,
            paper=PAPER,
            title=f"Table 4, {what}",
            columns=(Column(title="Median PSNR", measure="median_psnr"),),
            rows=(
                *(
                    row(label, recipes, {"Median PSNR": _PRINTED[label][place]})
                    for label, recipes in supervised.items()
                ),
                *(
                    row(
                        label,
                        recipes,
                        {"Median PSNR": _PRINTED[label][place]},
                        **{"Median PSNR": measured},
                    )
                    for label, recipes in unsupervised.items()
                ),
            ),
            extras=("unsupervised_psnr",),
            pictures=("restored",),
            figures=figures,
            full_remarks=FULL_REMARKS,
            quick_remarks=(
                *QUICK_REMARKS,
                "The window hides 0.31 of each side, as 20 of 64 pixels. Without supervision: 64 "
                "test images, 100 iterations of JIIO, 40 of Adam.",
            ),
        )
    )
