"""OptEq on ImageNet: Tables 7 and 9.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import IMAGENET, QUICK_CHARACTERS, part, recipe, unrolled
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table
from equilibria.papers.tables.small import small

PAPER = "OptEq"
EPOCHS = 4
BATCH = 32
K = 5
# Section 7.3.2: batches of 1024.
TRAINING: RecipeData = {
    "epochs": 300,
    "batch_size": 256,
    "accumulate": 4,
    "learning_rate": 1e-3,
    "weight_decay": 0.05,
}
DECORRELATION: dict[str, Any] = {
    "regularizer": part("decorrelation"),
    "gamma": 0.01,
    "placement": "paper",
}
OPTEQ: dict[str, Any] = {"gradient": unrolled(K), **DECORRELATION}
FIXED: dict[str, Any] = {"learnable_alpha": False}
NARROW: dict[str, Any] = {"channels": 8}
QUICK = (
    "Data: characters of four alphabets of Omniglot at 32×32 (137 classes, 15 drawings of each to "
    "train on and 5 to test on) instead of ImageNet. With ten classes the top five would say "
    "little.",
    f"{EPOCHS} epochs in batches of {BATCH} instead of 300 in batches of 1024; widths are about an "
    "eighth of the paper's.",
)


def row(label: str, printed: str, full: RecipeData, quick: RecipeData) -> Row:
    top1, top5, size = printed.split("; ")
    return Row(
        label=label,
        paper={"top1 Acc.": top1, "top5 Acc.": top5, "Size": size},
        full=full,
        quick=quick,
    )


def quick_of(model: str, *, training_gradient: str | None = None, **options: Any) -> RecipeData:
    training = {"gradient": training_gradient, "batch_size": BATCH}
    return small(model, QUICK_CHARACTERS, EPOCHS, training=training, **options)


def narrow(model: str) -> RecipeData:
    """A residual network of the library with an eighth of its channels."""
    made = quick_of("resnet-18")
    return {**made, "model": {"name": model, "options": NARROW}}


def explicit(label: str, printed: str, model: str) -> Row:
    return row(label, printed, recipe(model, IMAGENET, TRAINING), narrow(model))


def mdeq(label: str, printed: str, model: str, quick: str, **options: Any) -> Row:
    training_gradient = None if "gradient" in options else "one_step"
    return row(
        label,
        printed,
        recipe(model, IMAGENET, TRAINING, **options),
        quick_of(quick, training_gradient=training_gradient, **options),
    )


def opteq(label: str, printed: str, size: str, **options: Any) -> Row:
    quick = "opteq-imagenet" if size == "small" else "opteq-imagenet-mid"
    chosen = {**OPTEQ, **options}
    return row(
        label,
        printed,
        recipe(f"deep-opteq-imagenet-{size}", IMAGENET, TRAINING, **chosen),
        quick_of(quick, **chosen),
    )


register_table(
    PaperTable(
        id="opteq-t7",
        paper=PAPER,
        title="Table 7, ImageNet",
        columns=(
            Column(title="top1 Acc.", measure="accuracy"),
            Column(title="top5 Acc.", measure="top5_accuracy"),
            Column(title="Size"),
        ),
        rows=(
            explicit("ResNet-18", "70.2%; 89.9%; 13 M", "resnet-18-imagenet"),
            explicit("ResNet-34", "74.8%; 91.1%; 21 M", "resnet-34-imagenet"),
            Row(
                label="Inception-V2",
                paper={"top1 Acc.": "74.8%", "top5 Acc.": "92.2%", "Size": "12 M"},
                missing="this library has no Inception network",
            ),
            explicit("ResNet-50", "75.1%; 92.5%; 26 M", "resnet-50-imagenet"),
            row(
                "Res-Extr. + Cls.",
                "71.2%; 89.5%; 11 M",
                recipe("resnet-50-extractor-imagenet", IMAGENET, TRAINING),
                quick_of("extractor"),
            ),
            row(
                "HRNet-W18",
                "76.8%; 93.4%; 21 M",
                recipe("hrnet-w18-imagenet", IMAGENET, TRAINING),
                quick_of("hrnet"),
            ),
            mdeq("MDEQ-single branch", "72.9%; 91.0%; 18 M", "mdeq-imagenet-single", "mdeq-single"),
            mdeq("MDEQ-small", "75.5%; 92.7%; 18 M", "mdeq-imagenet-small", "mdeq"),
            opteq("OptEq (learnable α's)", "76.7%; 93.1%; 18 M", "small"),
            opteq("OptEq-small", "76.9%; 93.1%; 18 M", "small", **FIXED),
            explicit("ResNet-101", "77.1%; 93.5%; 52 M", "resnet-101-imagenet"),
            explicit("W-ResNet-50", "78.1%; 93.9%; 69 M", "wide-resnet-50-imagenet"),
            row(
                "W-Res-Extr. + Cls.",
                "73.4%; 90.9%; 27 M",
                recipe("wide-resnet-50-extractor-imagenet", IMAGENET, TRAINING),
                quick_of("wide-extractor"),
            ),
            mdeq("MDEQ-large", "77.5%; 93.6%; 63 M", "mdeq-imagenet-large", "mdeq-large"),
            mdeq(
                "MDEQ (Unrolled)",
                "75.9%; 93.0%; 63 M",
                "mdeq-imagenet-large",
                "mdeq-large",
                gradient=unrolled(K),
            ),
            opteq("OptEq-Mid.", "78.3%; 94.0%; 40 M", "mid", **FIXED),
        ),
        full_remarks=(
            "Left open by the paper: the weight of the decorrelation, γ = 0.01; crops with a frame "
            "of 32 pixels and flips; the setting of the models that it quotes: that of OptEq "
            "(AdamW, weight decay 0.05, cosine from 1e-3, batches of 1024, 300 epochs). "
            f"MDEQ (Unrolled): K = {K}.",
            "OptEq's models as described cannot have the reported sizes; see the list of models.",
        ),
        quick_remarks=QUICK,
    )
)

# Speed needs no trained network, but an untrained equilibrium network solves in fewer iterations.
SPEED: RecipeData = {**TRAINING, "epochs": 1, "batch_size": 768, "accumulate": 1}
SOME_OF_IMAGENET: RecipeData = {
    **IMAGENET,
    "options": {"size": 224, "resize": 256, "train_samples": 76_800, "test_samples": 5_000},
}
PLAIN: dict[str, Any] = {**FIXED, **DECORRELATION}


def speed(label: str, fps: str, size: str, model: str, quick: RecipeData, **options: Any) -> Row:
    return Row(
        label=label,
        paper={"FPS (images/s)": fps, "Size": size},
        full=recipe(model, SOME_OF_IMAGENET, SPEED, **options),
        quick=quick,
    )


register_table(
    PaperTable(
        id="opteq-t9",
        paper=PAPER,
        title="Table 9, images a second in training on ImageNet",
        columns=(
            Column(title="FPS (images/s)", measure="images_per_second"),
            Column(title="Size"),
        ),
        extras=("efficiency",),
        rows=(
            speed(
                "ResNet-50", "4597/s", "26 M", "resnet-50-imagenet", narrow("resnet-50-imagenet")
            ),
            speed(
                "MDEQ-single branch",
                "257/s",
                "18 M",
                "mdeq-imagenet-single",
                quick_of("mdeq-single"),
                solver="broyden",
            ),
            speed(
                "MDEQ",
                "1057/s",
                "18 M",
                "mdeq-imagenet-small",
                quick_of("mdeq"),
                solver="broyden",
                downsample=2,
            ),
            speed(
                f"OptEq (unrolling K={K})",
                "1835/s",
                "18 M",
                "deep-opteq-imagenet-small",
                quick_of("opteq-imagenet", **OPTEQ, **FIXED),
                **OPTEQ,
                **FIXED,
            ),
            speed(
                "OptEq (IFT with dw-conv)",
                "200/s",
                "18 M",
                "deep-opteq-imagenet-small",
                quick_of("opteq-imagenet", gradient="implicit", **PLAIN),
                gradient="implicit",
                solver="broyden",
                **PLAIN,
            ),
            Row(
                label="OptEq (IFT w/o dw-conv)",
                paper={"FPS (images/s)": "1137/s", "Size": "18 M"},
                missing="the layers of this model are depthwise-separable here",
            ),
        ),
        full_remarks=(
            "One device, batches of 768; the paper: eight A100. Measured after one epoch on 76,800 "
            "images: an untrained equilibrium network solves in fewer iterations. Broyden's method "
            "in implicit differentiation, and MDEQ with downsampling by 2, as in the paper.",
        ),
        quick_remarks=(
            *QUICK,
            "Images a second of processor time on one thread; solvers are chosen by "
            "the library (the paper: Broyden's method), MDEQ and OptEq (IFT) with implicit "
            "differentiation.",
        ),
    )
)
