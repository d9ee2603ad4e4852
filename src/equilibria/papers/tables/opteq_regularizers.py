"""OptEq's regularizers on CIFAR-10: Tables 3 and 5, and what other tables share with them.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import (
    CIFAR10,
    QUICK_CIFAR10,
    part,
    recipe,
    sam,
    sgd,
    unrolled,
)
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table
from equilibria.papers.tables.small import small

PAPER = "OptEq"
K = 20
QUICK_K = 5
EPOCHS = 6
ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
QUICK_ALPHAS = (0.01, 0.4, 0.8)
GAMMA = 0.01

# Section 7.2.2. Table 3 shares its figures with Table 5, so its runs are taken to be the same ones,
# although Section 7.1 halves the learning rate every 30 epochs.
TRAINING = sgd(
    200, milestones=list(range(20, 200, 20)), decay=0.7, batch_size=125, weight_decay=3e-4
)
ACCURACY = Column(title="Acc.", measure="accuracy")
CHOSEN = (
    f"Left open by the paper: momentum 0.9, one epoch of warm-up, gradients clipped at norm 5, "
    f"crops and flips, weight γ = {GAMMA:g} of a regularizer in R*, Lipschitz constant 1 in R†.",
    "R* stands where the paper prints it (placement='paper'); R† is SAM, unrolled like the rest.",
)
QUICK = (
    "Data: 2,000 images of CIFAR-10 to train on and 2,000 to test on, instead of 50,000 and "
    f"10,000; {EPOCHS} epochs instead of 200, AdamW instead of SGD.",
    "Model: five layers of widths 4, 8, 16, 32, 32 (paper: 16, 32, 64, 128, 128) on 16 channels "
    f"of 4×4 features; unrolled K = {QUICK_K} iterations instead of {K}.",
)
FEWER = "the quick setting has α = 0.01, 0.4 and 0.8 only"


def full_opteq(**options: Any) -> RecipeData:
    return recipe("deep-opteq-199k", CIFAR10, TRAINING, **{"gradient": unrolled(K), **options})


def quick_opteq(model: str = "deep-opteq", **options: Any) -> RecipeData:
    chosen = {"gradient": unrolled(QUICK_K), **options}
    return small(model, QUICK_CIFAR10, EPOCHS, training={"gradient": None}, **chosen)


def inside(name: str, gamma: float = GAMMA) -> dict[str, Any]:
    """R*: the regularizer in the hidden objective (Section 5.1)."""
    return {"regularizer": part(name), "gamma": gamma, "placement": "paper"}


def outside(name: str) -> dict[str, Any]:
    """R†: the regularizer by SAM (Section 5.2)."""
    return {"solver": sam(part(name))}


def cell(label: str, alpha: float, printed: str, options: dict[str, Any]) -> Row:
    """A cell of the tables over α."""
    is_quick = alpha in QUICK_ALPHAS
    return Row(
        label=f"{label}, α = {alpha:g}",
        paper={"Acc.": printed},
        full=full_opteq(alpha=alpha, **options),
        quick=quick_opteq(alpha=alpha, **options) if is_quick else None,
        missing="" if is_quick else FEWER,
    )


def cells(label: str, printed: str, options: dict[str, Any]) -> list[Row]:
    values = printed.split()
    return [cell(label, a, value, options) for a, value in zip(ALPHAS, values, strict=True)]


NO_REG = cells("no Reg", "58.4% 56.8% 86.9% 87.4% 87.2%", {})
DECORRELATION_OUTSIDE = cells(
    "decorrelation†", "72.7% 61.5% 86.5% 87.0% 87.7%", outside("decorrelation")
)
DECORRELATION_INSIDE = cells(
    "decorrelation*", "72.6% 60.0% 88.0% 87.6% 87.5%", inside("decorrelation")
)


def norm_row(name: str, symbol: str, weight: float, mean: str, accuracy: str) -> Row:
    # Our L2 is ½‖z‖², the paper's here ‖z‖².
    options = inside(name, weight if name == "l1" else 2 * weight)
    column = "mean ‖·‖₁" if name == "l1" else "mean ‖·‖²"
    return Row(
        label=f"R* = {weight:g}{symbol}",
        paper={"Acc.": accuracy, column: mean},
        full=full_opteq(**options),
        quick=quick_opteq(**options),
    )


register_table(
    PaperTable(
        id="opteq-t3",
        paper=PAPER,
        title="Table 3, Deep OptEq with and without regularizers on CIFAR-10",
        columns=(
            ACCURACY,
            Column(title="mean ‖·‖₁", measure="feature_size"),
            Column(title="mean ‖·‖²", measure="feature_energy"),
        ),
        extras=("features",),
        rows=(
            *NO_REG,
            *DECORRELATION_OUTSIDE,
            *DECORRELATION_INSIDE,
            Row(
                label="DNN",
                paper={"Acc.": "82.7%"},
                full=recipe("dnn-199k", CIFAR10, TRAINING),
                quick=small("dnn", QUICK_CIFAR10, EPOCHS, training={"gradient": None}),
            ),
            norm_row("l1", "‖·‖₁", 0.01, "> 5", "86.4%"),
            norm_row("l1", "‖·‖₁", 0.15, "0.81", "87.7%"),
            norm_row("l1", "‖·‖₁", 0.5, "0.34", "86.9%"),
            norm_row("l2", "‖·‖²", 0.01, "> 10", "87.3%"),
            norm_row("l2", "‖·‖²", 1.0, "1.56", "87.6%"),
            norm_row("l2", "‖·‖²", 10.0, "0.82", "86.7%"),
        ),
        full_remarks=(*CHOSEN, "α = 0.8 in the rows that do not name it."),
        quick_remarks=(*QUICK, f"{FEWER[0].upper()}{FEWER[1:]}; α = 0.8 where none is named."),
    )
)

register_table(
    PaperTable(
        id="opteq-t5",
        paper=PAPER,
        title="Table 5, regularizers and α on CIFAR-10",
        columns=(ACCURACY,),
        rows=(
            *NO_REG,
            *cells("½‖·‖²†", "69.4% 61.9% 87.3% 87.3% 87.4%", outside("l2")),
            *cells("incay†", "75.0% 63.2% 78.4% 87.3% 87.0%", outside("incay")),
            *cells("incay*", "64.9% 64.7% 87.7% 87.5% 87.6%", inside("incay")),
            *DECORRELATION_OUTSIDE,
            *DECORRELATION_INSIDE,
            *cells("HSIC†", "70.6% 66.1% 85.1% 87.6% 88.1%", outside("hsic")),
            *cells("HSIC*", "72.2% 64.5% 85.5% 87.5% 87.9%", inside("hsic")),
        ),
        full_remarks=CHOSEN,
        quick_remarks=(*QUICK, f"{FEWER[0].upper()}{FEWER[1:]}."),
    )
)
