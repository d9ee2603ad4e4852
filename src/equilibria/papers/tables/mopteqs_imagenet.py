"""MOptEqs on Imagenette and ImageNet: Tables 2 (b), 4 and 6.

"MOptEqs", the paper on optimization-induced equilibrium networks with several branches.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import (
    IMAGENET,
    IMAGENETTE,
    QUICK_ALPHABETS,
    QUICK_CHARACTERS,
    recipe,
    sgd,
)
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table
from equilibria.papers.tables.mopteqs import (
    CHOSEN,
    COLUMNS,
    PAPER,
    QUICK_CHARACTER,
    QUICK_TRAINING,
    STEPS,
    row,
)
from equilibria.papers.tables.small import ALPHABET_EPOCHS, CHARACTER_EPOCHS, small

# Appendix A.6.3.
IMAGENETTE_TRAINING = sgd(200, milestones=STEPS, batch_size=32, weight_decay=5e-5)
QUICK_ALPHABET = (
    "Data: which of eight alphabets of Omniglot a character is from, at 32×32 (2,000 drawings to "
    "train on, 1,210 to test on), instead of Imagenette; features of 8×8."
)


def ten(label: str, model: str, quick: str, size: str, accuracy: str, **options: Any) -> Row:
    return row(
        f"{label} ({size})",
        size,
        accuracy,
        recipe(model, IMAGENETTE, IMAGENETTE_TRAINING, **options),
        small(quick, QUICK_ALPHABETS, ALPHABET_EPOCHS),
    )


register_table(
    PaperTable(
        id="mopteqs-t2b",
        paper=PAPER,
        title="Table 2 (b), Imagenette",
        columns=COLUMNS,
        rows=(
            ten("MDEQ", "mdeq-2.5m", "mdeq", "2.5M", "90.5 ± 0.2%", downsample=4),
            ten("MDEQ", "mdeq-10m", "mdeq-wide", "10M", "91.3 ± 0.3%", downsample=4),
            ten("MOptEqs", "mopteq-imagenet-1.9m", "mopteq-4-wide", "1.9M", "92.1 ± 0.2%"),
            ten("MOptEqs", "mopteq-imagenet-10m", "mopteq-6", "10M", "92.4%"),
        ),
        full_remarks=(CHOSEN, "All models are trained alike, as the paper says."),
        quick_remarks=(
            QUICK_ALPHABET,
            QUICK_TRAINING.format(ALPHABET_EPOCHS),
            "The models are the quick ones of Table 1 (b).",
        ),
    )
)

IMAGENET_TRAINING = sgd(
    100, milestones=[30, 60, 90], batch_size=64, accumulate=4, weight_decay=5e-5
)


def thousand(label: str, model: str, quick: str, accuracy: str, **options: Any) -> Row:
    return Row(
        label=label,
        paper={"Model Size": "13M", "Natural Accuracy": accuracy},
        full=recipe(model, IMAGENET, IMAGENET_TRAINING, **options),
        quick=small(quick, QUICK_CHARACTERS, CHARACTER_EPOCHS),
    )


register_table(
    PaperTable(
        id="mopteqs-t4",
        paper=PAPER,
        title="Table 4, ImageNet",
        columns=(Column(title="Natural Accuracy", measure="accuracy"), Column(title="Model Size")),
        rows=(
            thousand("ResNet", "resnet-18-imagenet", "resnet-18", "70.3%"),
            thousand("HR-Net", "hrnet-w18-imagenet", "hrnet", "72.3%", width=13, head_width=24),
            thousand("MOptEqs", "mopteq-imagenet-13m", "mopteq-6-imagenet", "72.5%"),
        ),
        full_remarks=(
            "The paper states no setting for ImageNet: SGD with learning rate 0.1, divided by ten "
            "at epochs 30, 60 and 90 of 100, batches of 256, weight decay 5e-5. ResNet is "
            "ResNet-18 with 11.7 M parameters, HR-Net is HRNet with 13 channels at its finest.",
        ),
        quick_remarks=(
            QUICK_CHARACTER.format("ImageNet"),
            QUICK_TRAINING.format(CHARACTER_EPOCHS),
            "MOptEqs: six branches on 64 channels (paper: 384).",
        ),
    )
)


def cost_row(label: str, printed: str, full: RecipeData, quick: RecipeData) -> Row:
    memory, seconds, total, accuracy = printed.split("; ")
    return Row(
        label=label,
        paper={
            "Memory/Batch": memory,
            "Infer Time/Batch": seconds,
            "Total Time": total,
            "Accuracy": accuracy,
        },
        full=full,
        quick=quick,
    )


ONE_STEP: RecipeData = {**IMAGENETTE_TRAINING, "gradient": "one_step"}
BATCH = 32
register_table(
    PaperTable(
        id="mopteqs-t6",
        paper=PAPER,
        title="Table 6, what MDEQ and MOptEqs cost on Imagenette",
        columns=(
            Column(title="Memory/Batch", measure="peak_bytes"),
            Column(title="Infer Time/Batch", measure="inference_seconds"),
            Column(title="Total Time", measure="training_minutes"),
            Column(title="Accuracy", measure="accuracy"),
        ),
        extras=("efficiency",),
        rows=(
            cost_row(
                "MDEQ",
                "8GB; 1.06s; 9h; 91.42%",
                recipe("mdeq-10m", IMAGENETTE, IMAGENETTE_TRAINING, downsample=4),
                small(
                    "mdeq-wide",
                    QUICK_ALPHABETS,
                    ALPHABET_EPOCHS,
                    training={"gradient": "implicit", "batch_size": BATCH},
                ),
            ),
            cost_row(
                "MOptEq (one step)",
                "3GB; 0.26s; 3h; 91.21%",
                recipe("mopteq-imagenet-10m", IMAGENETTE, ONE_STEP),
                small(
                    "mopteq-6",
                    QUICK_ALPHABETS,
                    ALPHABET_EPOCHS,
                    training={"batch_size": BATCH},
                ),
            ),
        ),
        full_remarks=(
            CHOSEN,
            "Which sizes were compared the paper does not say: those of 10 M.",
        ),
        quick_remarks=(
            QUICK_ALPHABET,
            f"{ALPHABET_EPOCHS} epochs of AdamW, batches of {BATCH} as in the paper. MDEQ with the "
            "implicit gradient, MOptEqs with the one-step one. Processor time on one thread; "
            "memory is that of all tensors of a training step.",
        ),
    )
)
