"""GEQ: Tables 1 (a), 1 (b), 2 (a), 2 (b) and 5.

"GEQ", the paper on equilibrium networks induced by a Gaussian kernel.
"""

from __future__ import annotations

from typing import Any

from equilibria.reproduce.recipes import (
    CIFAR10,
    CIFAR100,
    IMAGENET100,
    IMAGENETTE,
    QUICK_ALPHABETS,
    QUICK_CHARACTERS,
    QUICK_CIFAR10,
    recipe,
    sgd,
)
from equilibria.reproduce.table import Column, PaperTable, RecipeData, Row, register_table
from equilibria.reproduce.tables.mopteqs import (
    QUICK_CHARACTER,
    QUICK_CIFAR,
    QUICK_TRAINING,
    STEPS,
)
from equilibria.reproduce.tables.mopteqs_imagenet import QUICK_ALPHABET
from equilibria.reproduce.tables.small import (
    ALPHABET_EPOCHS,
    CHARACTER_EPOCHS,
    CIFAR_EPOCHS,
    small,
)

PAPER = "GEQ"
SMALL_IMAGES = sgd(200, milestones=STEPS, batch_size=128, weight_decay=1e-3)
LARGE_IMAGES = sgd(200, milestones=STEPS, batch_size=32, weight_decay=5e-5)
COLUMNS = (Column(title="Accuracy", measure="accuracy"), Column(title="Model Size"))
CHOSEN = (
    "The paper names SGD with momentum, a step schedule and RandAugment for all models, without "
    "numbers: learning rate 0.1 divided by ten at epochs 100, 150 and 175 of 200, {}, as in the "
    "MOptEqs paper; momentum 0.9, one epoch of warm-up, gradients clipped at norm 5, RandAugment "
    "as the library sets it.",
    "GEQ with phantom gradients as in the paper; its γ is a running mean, because with the printed "
    "one the map has no objective.",
)
ON_SMALL = "batches of 128, weight decay 1e-3"
ON_LARGE = "batches of 32, weight decay 5e-5"
QUICK_MODELS = (
    "GEQ and MOptEqs: six branches on up to 64 channels, resolutions 8, 4, 2, 2, 1, 1; no "
    "RandAugment."
)


def augmented(data: RecipeData) -> RecipeData:
    return {**data, "augmentation": [*data["augmentation"], "randaugment"]}


def row(
    label: str,
    size: str,
    accuracy: str,
    full: tuple[str, RecipeData, RecipeData],
    quick: tuple[str, RecipeData, int],
    **options: Any,
) -> Row:
    model, data, training = full
    return Row(
        label=f"{label} ({size})" if label == "GEQ" else label,
        paper={"Model Size": size, "Accuracy": accuracy},
        full=recipe(model, augmented(data), training, **options),
        quick=small(*quick),
    )


def on_cifar10(label: str, size: str, accuracy: str, model: str, quick: str) -> Row:
    return row(
        label,
        size,
        accuracy,
        (model, CIFAR10, SMALL_IMAGES),
        (quick, QUICK_CIFAR10, CIFAR_EPOCHS),
    )


def on_cifar100(label: str, size: str, accuracy: str, model: str, quick: str) -> Row:
    return row(
        label,
        size,
        accuracy,
        (model, CIFAR100, SMALL_IMAGES),
        (quick, QUICK_CHARACTERS, CHARACTER_EPOCHS),
    )


def on_imagenette(
    label: str, size: str, accuracy: str, model: str, quick: str, **options: Any
) -> Row:
    return row(
        label,
        size,
        accuracy,
        (model, IMAGENETTE, LARGE_IMAGES),
        (quick, QUICK_ALPHABETS, ALPHABET_EPOCHS),
        **options,
    )


def on_imagenet100(
    label: str, size: str, accuracy: str, model: str, quick: str, **options: Any
) -> Row:
    return row(
        label,
        size,
        accuracy,
        (model, IMAGENET100, LARGE_IMAGES),
        (quick, QUICK_CHARACTERS, CHARACTER_EPOCHS),
        **options,
    )


register_table(
    PaperTable(
        id="geq-t1a",
        paper=PAPER,
        title="Table 1 (a), CIFAR-10",
        columns=COLUMNS,
        rows=(
            on_cifar10("ResNet-18", "10M", "93.5 ± 0.2%", "resnet-18", "resnet-18"),
            on_cifar10("ResNet-50", "23M", "95.2 ± 0.2", "resnet-50", "resnet-50"),
            on_cifar10("MDEQ", "10M", "94.2 ± 0.3%", "mdeq-10m", "mdeq-wide"),
            on_cifar10("MOptEqs", "8M", "94.6 ± 0.2%", "mopteq-8m", "mopteq-6"),
            on_cifar10("GEQ", "5M", "94.8 ± 0.1%", "geq-5m", "geq"),
            on_cifar10("GEQ", "8M", "95.6 ± 0.2%", "geq-8m", "geq-wide"),
        ),
        full_remarks=(CHOSEN[0].format(ON_SMALL), CHOSEN[1]),
        quick_remarks=(QUICK_CIFAR, QUICK_TRAINING.format(CIFAR_EPOCHS), QUICK_MODELS),
    )
)
register_table(
    PaperTable(
        id="geq-t1b",
        paper=PAPER,
        title="Table 1 (b), CIFAR-100",
        columns=COLUMNS,
        rows=(
            on_cifar100("ResNet-18", "10M", "74.5 ± 0.2%", "resnet-18", "resnet-18"),
            on_cifar100("ResNet-50", "23M", "77.9 ± 0.1%", "resnet-50", "resnet-50"),
            on_cifar100("MDEQ", "10M", "74.7 ± 0.3%", "mdeq-10m", "mdeq-wide"),
            on_cifar100("MOptEqs", "8M", "75.6 ± 0.2%", "mopteq-8m", "mopteq-6"),
            on_cifar100("GEQ", "5M", "76.4 ± 0.3%", "geq-5m", "geq"),
            on_cifar100("GEQ", "8M", "78.2 ± 0.2%", "geq-8m", "geq-wide"),
        ),
        full_remarks=(CHOSEN[0].format(ON_SMALL), CHOSEN[1]),
        quick_remarks=(
            QUICK_CHARACTER.format("CIFAR-100"),
            QUICK_TRAINING.format(CHARACTER_EPOCHS),
            QUICK_MODELS,
        ),
    )
)
register_table(
    PaperTable(
        id="geq-t2a",
        paper=PAPER,
        title="Table 2 (a), Imagenette",
        columns=COLUMNS,
        rows=(
            on_imagenette("ResNet-18", "11M", "92.3 ± 0.1%", "resnet-18-imagenet", "resnet-18"),
            on_imagenette("ResNet-50", "23M", "93.0 ± 0.2%", "resnet-50-imagenet", "resnet-50"),
            on_imagenette("MDEQ", "10M", "91.5 ± 0.2%", "mdeq-10m", "mdeq-wide", downsample=4),
            on_imagenette("MOptEqs", "10M", "92.4 ± 0.2%", "mopteq-imagenet-10m", "mopteq-6"),
            on_imagenette("GEQ", "6M", "92.9 ± 0.2%", "geq-imagenet-6m", "geq-imagenet"),
            on_imagenette("GEQ", "13M", "93.2 ± 0.1%", "geq-imagenet-13m", "geq-imagenet-wide"),
        ),
        full_remarks=(CHOSEN[0].format(ON_LARGE), CHOSEN[1]),
        quick_remarks=(QUICK_ALPHABET, QUICK_TRAINING.format(ALPHABET_EPOCHS), QUICK_MODELS),
    )
)
register_table(
    PaperTable(
        id="geq-t2b",
        paper=PAPER,
        title="Table 2 (b), ImageNet-100",
        columns=COLUMNS,
        rows=(
            on_imagenet100("ResNet-18", "11M", "80.9 ± 0.3%", "resnet-18-imagenet", "resnet-18"),
            on_imagenet100("ResNet-50", "23M", "81.7 ± 0.2%", "resnet-50-imagenet", "resnet-50"),
            on_imagenet100("MDEQ", "10M", "81.3 ± 0,2%", "mdeq-10m", "mdeq-wide", downsample=4),
            on_imagenet100(
                "MOptEqs", "13M", "81.5 ± 0.4%", "mopteq-imagenet-13m", "mopteq-6-imagenet"
            ),
            on_imagenet100("GEQ", "6M", "82.2 ± 0.2%", "geq-imagenet-6m", "geq-imagenet"),
            on_imagenet100("GEQ", "13M", "83.9 ± 0.3%", "geq-imagenet-13m", "geq-imagenet-wide"),
        ),
        full_remarks=(CHOSEN[0].format(ON_LARGE), CHOSEN[1]),
        quick_remarks=(
            QUICK_CHARACTER.format("ImageNet-100"),
            QUICK_TRAINING.format(CHARACTER_EPOCHS),
            QUICK_MODELS,
        ),
    )
)
register_table(
    PaperTable(
        id="geq-t5",
        paper=PAPER,
        title="Table 5, kernels on CIFAR-100",
        columns=COLUMNS,
        rows=(
            on_cifar100("MOptEqs", "8M", "75.6 ± 0.2%", "mopteq-8m", "mopteq-6"),
            on_cifar100(
                "MOptEqs (Polynomial)",
                "8M",
                "75.1 ± 0.4%",
                "mopteq-polynomial-8m",
                "mopteq-6-polynomial",
            ),
            on_cifar100(
                "MOptEqs (Sigmoid)", "8M", "76.1 ± 0.3%", "mopteq-sigmoid-8m", "mopteq-6-sigmoid"
            ),
            on_cifar100("GEQ", "8M", "78.2 ± 0.2%", "geq-8m", "geq-wide"),
        ),
        full_remarks=(
            CHOSEN[0].format(ON_SMALL),
            CHOSEN[1],
            "The polynomial is of order 2; it and the sigmoid kernel measure ⟨Ux + b, y⟩ by its "
            "number of terms, because as printed they are trapped at zero or saturate.",
        ),
        quick_remarks=(
            QUICK_CHARACTER.format("CIFAR-100"),
            QUICK_TRAINING.format(CHARACTER_EPOCHS),
            QUICK_MODELS,
        ),
    )
)
