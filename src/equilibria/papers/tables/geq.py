"""GEQ: Tables 1 (a), 1 (b), 2 (a), 2 (b) and 5.

"GEQ", the paper on equilibrium networks induced by a Gaussian kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from equilibria.papers.recipes import (
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
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table
from equilibria.papers.tables.mopteqs import (
    QUICK_CHARACTER,
    QUICK_CIFAR,
    QUICK_TRAINING,
    STEPS,
)
from equilibria.papers.tables.mopteqs_imagenet import QUICK_ALPHABET
from equilibria.papers.tables.small import (
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


class Experiments(NamedTuple):
    """What the rows of a table have in common: data and training, in both settings."""

    data: RecipeData
    training: RecipeData
    quick_data: RecipeData
    quick_epochs: int

    def row(
        self, label: str, size: str, accuracy: str, model: str, quick: str, **options: Any
    ) -> Row:
        return Row(
            label=f"{label} ({size})" if label == "GEQ" else label,
            paper={"Model Size": size, "Accuracy": accuracy},
            full=recipe(model, augmented(self.data), self.training, **options),
            quick=small(quick, self.quick_data, self.quick_epochs),
        )


ON_CIFAR10 = Experiments(CIFAR10, SMALL_IMAGES, QUICK_CIFAR10, CIFAR_EPOCHS)
ON_CIFAR100 = Experiments(CIFAR100, SMALL_IMAGES, QUICK_CHARACTERS, CHARACTER_EPOCHS)
ON_IMAGENETTE = Experiments(IMAGENETTE, LARGE_IMAGES, QUICK_ALPHABETS, ALPHABET_EPOCHS)
ON_IMAGENET100 = Experiments(IMAGENET100, LARGE_IMAGES, QUICK_CHARACTERS, CHARACTER_EPOCHS)


register_table(
    PaperTable(
        id="geq-t1a",
        paper=PAPER,
        title="Table 1 (a), CIFAR-10",
        columns=COLUMNS,
        rows=(
            ON_CIFAR10.row("ResNet-18", "10M", "93.5 ± 0.2%", "resnet-18", "resnet-18"),
            ON_CIFAR10.row("ResNet-50", "23M", "95.2 ± 0.2", "resnet-50", "resnet-50"),
            ON_CIFAR10.row("MDEQ", "10M", "94.2 ± 0.3%", "mdeq-10m", "mdeq-wide"),
            ON_CIFAR10.row("MOptEqs", "8M", "94.6 ± 0.2%", "mopteq-8m", "mopteq-6"),
            ON_CIFAR10.row("GEQ", "5M", "94.8 ± 0.1%", "geq-5m", "geq"),
            ON_CIFAR10.row("GEQ", "8M", "95.6 ± 0.2%", "geq-8m", "geq-wide"),
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
            ON_CIFAR100.row("ResNet-18", "10M", "74.5 ± 0.2%", "resnet-18", "resnet-18"),
            ON_CIFAR100.row("ResNet-50", "23M", "77.9 ± 0.1%", "resnet-50", "resnet-50"),
            ON_CIFAR100.row("MDEQ", "10M", "74.7 ± 0.3%", "mdeq-10m", "mdeq-wide"),
            ON_CIFAR100.row("MOptEqs", "8M", "75.6 ± 0.2%", "mopteq-8m", "mopteq-6"),
            ON_CIFAR100.row("GEQ", "5M", "76.4 ± 0.3%", "geq-5m", "geq"),
            ON_CIFAR100.row("GEQ", "8M", "78.2 ± 0.2%", "geq-8m", "geq-wide"),
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
            ON_IMAGENETTE.row("ResNet-18", "11M", "92.3 ± 0.1%", "resnet-18-imagenet", "resnet-18"),
            ON_IMAGENETTE.row("ResNet-50", "23M", "93.0 ± 0.2%", "resnet-50-imagenet", "resnet-50"),
            ON_IMAGENETTE.row("MDEQ", "10M", "91.5 ± 0.2%", "mdeq-10m", "mdeq-wide", downsample=4),
            ON_IMAGENETTE.row("MOptEqs", "10M", "92.4 ± 0.2%", "mopteq-imagenet-10m", "mopteq-6"),
            ON_IMAGENETTE.row("GEQ", "6M", "92.9 ± 0.2%", "geq-imagenet-6m", "geq-imagenet"),
            ON_IMAGENETTE.row("GEQ", "13M", "93.2 ± 0.1%", "geq-imagenet-13m", "geq-imagenet-wide"),
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
            ON_IMAGENET100.row(
                "ResNet-18", "11M", "80.9 ± 0.3%", "resnet-18-imagenet", "resnet-18"
            ),
            ON_IMAGENET100.row(
                "ResNet-50", "23M", "81.7 ± 0.2%", "resnet-50-imagenet", "resnet-50"
            ),
            ON_IMAGENET100.row("MDEQ", "10M", "81.3 ± 0,2%", "mdeq-10m", "mdeq-wide", downsample=4),
            ON_IMAGENET100.row(
                "MOptEqs", "13M", "81.5 ± 0.4%", "mopteq-imagenet-13m", "mopteq-6-imagenet"
            ),
            ON_IMAGENET100.row("GEQ", "6M", "82.2 ± 0.2%", "geq-imagenet-6m", "geq-imagenet"),
            ON_IMAGENET100.row(
                "GEQ", "13M", "83.9 ± 0.3%", "geq-imagenet-13m", "geq-imagenet-wide"
            ),
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
            ON_CIFAR100.row("MOptEqs", "8M", "75.6 ± 0.2%", "mopteq-8m", "mopteq-6"),
            ON_CIFAR100.row(
                "MOptEqs (Polynomial)",
                "8M",
                "75.1 ± 0.4%",
                "mopteq-polynomial-8m",
                "mopteq-6-polynomial",
            ),
            ON_CIFAR100.row(
                "MOptEqs (Sigmoid)", "8M", "76.1 ± 0.3%", "mopteq-sigmoid-8m", "mopteq-6-sigmoid"
            ),
            ON_CIFAR100.row("GEQ", "8M", "78.2 ± 0.2%", "geq-8m", "geq-wide"),
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
