"""MOptEqs on CIFAR: Tables 1 (a), 1 (b) and 2 (a).

"MOptEqs", the paper on optimization-induced equilibrium networks with several branches.
"""

from __future__ import annotations

from equilibria.papers.recipes import (
    CIFAR10,
    CIFAR100,
    QUICK_CHARACTERS,
    QUICK_CIFAR10,
    recipe,
    sgd,
)
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table
from equilibria.papers.tables.opteq import QUOTED
from equilibria.papers.tables.opteq_regularizers import EPOCHS as SINGLE_VIEW_EPOCHS
from equilibria.papers.tables.opteq_regularizers import full_opteq, quick_opteq
from equilibria.papers.tables.small import (
    CHARACTER_EPOCHS,
    CIFAR_EPOCHS,
    small,
)

PAPER = "MOptEqs"
STEPS = [100, 150, 175]
# Appendices A.6.1 and A.6.2.
TRAINING = sgd(200, milestones=STEPS, batch_size=128, weight_decay=1e-3)
# "The same as Bai et al. (2020) proposed": that of their configuration for CIFAR-10.
MDEQ_TRAINING: RecipeData = {
    "epochs": 220,
    "batch_size": 128,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
}
COLUMNS = (Column(title="Accuracy", measure="accuracy"), Column(title="Model Size"))
CHOSEN = (
    "Left open by the paper: momentum 0.9, one epoch of warm-up, gradients clipped at norm 5, the "
    "implicit gradient by conjugate gradients or GMRES; |M| in D is smoothed."
)
QUICK_CIFAR = (
    "Data: 2,000 images of CIFAR-10 to train on and 2,000 to test on, instead of 50,000 and "
    "10,000; features of 8×8 instead of 32×32."
)
QUICK_CHARACTER = (
    "Data: characters of four alphabets of Omniglot at 32×32 (137 classes, 15 drawings of each to "
    "train on and 5 to test on) instead of {}; features of 8×8."
)
QUICK_TRAINING = "{} epochs of AdamW with the one-step gradient instead of 200 of SGD."


def row(label: str, size: str, accuracy: str, full: RecipeData, quick: RecipeData) -> Row:
    return Row(
        label=label,
        paper={"Model Size": size, "Accuracy": accuracy},
        full=full,
        quick=quick,
    )


def quick_single(model: str) -> RecipeData:
    return small(model, QUICK_CIFAR10, SINGLE_VIEW_EPOCHS)


register_table(
    PaperTable(
        id="mopteqs-t1a",
        paper=PAPER,
        title="Table 1 (a), models of a single scale on CIFAR-10",
        columns=COLUMNS,
        rows=(
            row(
                "Neural ODEs",
                "172K",
                "53.7%",
                recipe("node-172k", CIFAR10, QUOTED),
                quick_single("node"),
            ),
            row(
                "Aug. Neural ODEs",
                "172K",
                "60.6%",
                recipe("anode-172k", CIFAR10, QUOTED),
                quick_single("anode"),
            ),
            row(
                "Single-tire MonDEQ",
                "854K",
                "82.5%",
                recipe("mondeq-854k", CIFAR10, QUOTED),
                quick_single("mondeq-large"),
            ),
            row(
                "Deep OptEqs",
                "199K",
                "87.4%",
                full_opteq(alpha=0.8),
                quick_opteq("deep-opteq-unbounded", alpha=0.8),
            ),
            row(
                "Parallel-OptEqs",
                "193K",
                "87.4%",
                recipe("popteq-193k", CIFAR10, TRAINING),
                quick_single("popteq"),
            ),
            row(
                "POptEqs (sum)",
                "193K",
                "88.4%",
                recipe("popteq-sum-193k", CIFAR10, TRAINING),
                quick_single("popteq-sum"),
            ),
            row(
                "POptEqs (conv)",
                "276K",
                "88.9%",
                recipe("popteq-conv-276k", CIFAR10, TRAINING),
                quick_single("popteq-conv"),
            ),
            row(
                "MOptEqs (w/o PE)",
                "193K",
                "89.1%",
                recipe("mopteq-1view-193k", CIFAR10, TRAINING, pe="off"),
                quick_single("mopteq-1view-no-pe"),
            ),
            row(
                "MOptEqs",
                "193K",
                "89.5%",
                recipe("mopteq-1view-193k", CIFAR10, TRAINING),
                quick_single("mopteq-1view"),
            ),
        ),
        full_remarks=(
            CHOSEN,
            "The first four figures are quoted in the paper. Here ODEs and MonDEQ are trained with "
            "Adam, learning rate 1e-3 along a cosine, batches of 128, 100 epochs, and Deep OptEq "
            "as in its own paper.",
        ),
        quick_remarks=(
            QUICK_CIFAR,
            QUICK_TRAINING.format(SINGLE_VIEW_EPOCHS),
            "Branches of widths 32, 64, 64 on 16 channels (paper: 64, 128, 128 on 32). Deep OptEq "
            "is that of OptEq's Table 8: smaller, and unrolled (K = 5).",
        ),
    )
)


def multi_scale(model: str, quick: str, size: str, accuracy: str, label: str = "MOptEqs") -> Row:
    return row(
        label,
        size,
        accuracy,
        recipe(model, CIFAR10, TRAINING),
        small(quick, QUICK_CIFAR10, CIFAR_EPOCHS),
    )


def mdeq_row(model: str, quick: str, size: str, accuracy: str) -> Row:
    return row(
        f"MDEQ ({size})",
        size,
        accuracy,
        recipe(model, CIFAR10, MDEQ_TRAINING, dropout=0.3),
        small(quick, QUICK_CIFAR10, CIFAR_EPOCHS),
    )


register_table(
    PaperTable(
        id="mopteqs-t1b",
        paper=PAPER,
        title="Table 1 (b), models of several scales on CIFAR-10",
        columns=COLUMNS,
        rows=(
            multi_scale("resnet-18", "resnet-18", "10M", "92.9 ± 0.2%", "ResNet-18"),
            row(
                "MonDEQ (multi-tier)",
                "1M",
                "89.7%",
                recipe("mondeq-multi-1m", CIFAR10, QUOTED),
                small("mondeq-multi", QUICK_CIFAR10, CIFAR_EPOCHS),
            ),
            mdeq_row("mdeq-2.5m", "mdeq", "2.53M", "92.6 ± 0.2%"),
            mdeq_row("mdeq-10m", "mdeq-wide", "10M", "93.8 ± 0.3%"),
            multi_scale("mopteq-480k", "mopteq-4", "0.48M", "92.9 ± 0.2%", "MOptEqs (0.48M)"),
            multi_scale("mopteq-1.9m", "mopteq-4-wide", "1.9M", "94.0 ± 0.1%", "MOptEqs (1.9M)"),
            multi_scale("mopteq-8m", "mopteq-6", "8.1M", "94.6%", "MOptEqs (8.1M)"),
        ),
        full_remarks=(
            CHOSEN,
            "MDEQ is trained as its authors' configuration for CIFAR-10 says (Adam, cosine from "
            "1e-3, 220 epochs, dropout 0.3); MonDEQ with Adam, cosine from 1e-3, 100 epochs.",
        ),
        quick_remarks=(
            QUICK_CIFAR,
            QUICK_TRAINING.format(CIFAR_EPOCHS),
            "MOptEqs: four branches on 32 and on 64 channels, six on 64 (paper: 128, 256, 320), "
            "resolutions 8, 4, 2, 1; the other models shrink along.",
        ),
    )
)


def hundred(label: str, model: str, quick: str, size: str, accuracy: str) -> Row:
    training = MDEQ_TRAINING if model.startswith("mdeq") else TRAINING
    return row(
        f"{label} ({size})",
        size,
        accuracy,
        recipe(model, CIFAR100, training),
        small(quick, QUICK_CHARACTERS, CHARACTER_EPOCHS),
    )


register_table(
    PaperTable(
        id="mopteqs-t2a",
        paper=PAPER,
        title="Table 2 (a), CIFAR-100",
        columns=COLUMNS,
        rows=(
            hundred("MDEQ", "mdeq-2.5m", "mdeq", "2.6M", "70.8 ± 0.2%"),
            hundred("MDEQ", "mdeq-11m", "mdeq-wide", "11M", "72.4 ± 0.2%"),
            hundred("MOptEqs", "mopteq-1.9m", "mopteq-4-wide", "1.9M", "73.4 ± 0.2%"),
            hundred("MOptEqs", "mopteq-8m", "mopteq-6", "8.1M", "74.7%"),
        ),
        full_remarks=(CHOSEN, "MDEQ is trained as its authors' configuration for CIFAR-10 says."),
        quick_remarks=(
            QUICK_CHARACTER.format("CIFAR-100"),
            QUICK_TRAINING.format(CHARACTER_EPOCHS),
            "The models are the quick ones of Table 1 (b).",
        ),
    )
)
