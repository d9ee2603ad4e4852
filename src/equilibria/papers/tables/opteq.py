"""OptEq on CIFAR-10: Tables 4 and 8.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import CIFAR10, QUICK_CIFAR10, recipe, unrolled
from equilibria.papers.table import Column, PaperTable, Row, register_table
from equilibria.papers.tables.opteq_regularizers import (
    ACCURACY,
    CHOSEN,
    EPOCHS,
    PAPER,
    QUICK,
    TRAINING,
    K,
    inside,
    outside,
    quick_opteq,
)
from equilibria.papers.tables.small import small

# The small training runs of models that the paper quotes from others.
QUOTED = {"epochs": 100, "batch_size": 128, "optimizer": "adam", "weight_decay": 0.0}


def quoted(label: str, full: str, quick: str, size: str, accuracy: str) -> Row:
    return Row(
        label=label,
        paper={"# params": size, "Acc.": accuracy},
        full=recipe(full, CIFAR10, QUOTED),
        quick=small(quick, QUICK_CIFAR10, EPOCHS),
    )


def implicit_row(label: str, size: str, accuracy: str, quick: str, **options: Any) -> Row:
    name = "deep-opteq-1m" if size == "1.4 M" else "deep-opteq-162k"
    return Row(
        label=f"Deep OptEq, {label}",
        paper={"# params": size, "Acc.": accuracy},
        full=recipe(name, CIFAR10, TRAINING, gradient=unrolled(K), **options),
        quick=quick_opteq(quick, alpha=0.8, **options),
    )


register_table(
    PaperTable(
        id="opteq-t4",
        paper=PAPER,
        title="Table 4, implicit models on CIFAR-10",
        columns=(ACCURACY, Column(title="# params")),
        rows=(
            implicit_row(
                "decorrelation*, large",
                "1.4 M",
                "91.0%",
                "deep-opteq-large",
                **inside("decorrelation"),
            ),
            implicit_row(
                "decorrelation†", "162 k", "86.0%", "deep-opteq", **outside("decorrelation")
            ),
            implicit_row("HSIC*", "162 k", "87.4%", "deep-opteq", **inside("hsic")),
            implicit_row("no Reg", "162 k", "85.7%", "deep-opteq"),
            quoted("Neural ODE", "node-172k", "node", "172 K", "53.7%"),
            quoted("Aug. Neural ODE", "anode-172k", "anode", "172 k", "60.6%"),
            quoted("MON, single conv", "mondeq-172k", "mondeq", "172 K", "74.1%"),
            quoted("MON, single conv (large)", "mondeq-854k", "mondeq-large", "854 K", "82.5%"),
        ),
        full_remarks=(
            *CHOSEN,
            "The figures of ODEs and MONs are quoted in the paper; here they are trained with "
            "Adam, learning rate 1e-3 along a cosine, batches of 128, 100 epochs.",
        ),
        quick_remarks=(
            *QUICK,
            "MONs on 8×8 features with 20 and 44 channels, ODEs on the image with 8 filters.",
        ),
    )
)


def gradient_row(
    label: str, printed: str, options: dict[str, Any], tolerance: float | None = None
) -> Row:
    accuracy, inference, backward, residual = printed.split("; ")
    limits = {}
    if tolerance is not None:
        limits = {"tolerance": tolerance, "evaluation_tolerance": tolerance}
    quick = {"gradient": None, **limits}
    return Row(
        label=label,
        paper={
            "Acc.": accuracy,
            "Inference Time": inference,
            "Back-Prop Time": backward,
            "Relative Residual": residual,
        },
        full=recipe("deep-opteq-199k", CIFAR10, {**TRAINING, **limits}, **options),
        quick=small(
            "deep-opteq-unbounded", QUICK_CIFAR10, EPOCHS, training=quick, alpha=0.8, **options
        ),
    )


IFT = {"gradient": "implicit"}


def by_unrolling(steps: int, printed: str) -> Row:
    return gradient_row(f"Unrolling (K = {steps})", printed, {"gradient": unrolled(steps)})


register_table(
    PaperTable(
        id="opteq-t8",
        paper=PAPER,
        title="Table 8, unrolling and implicit differentiation on CIFAR-10",
        columns=(
            ACCURACY,
            Column(title="Inference Time", measure="inference_seconds"),
            Column(title="Back-Prop Time", measure="backward_seconds"),
            Column(title="Relative Residual", measure="mean_residual"),
            Column(title="Memory", measure="peak_bytes"),
        ),
        extras=("efficiency",),
        rows=(
            by_unrolling(5, "83.52%; 1.3s; 1.8s; 1.22e-02"),
            by_unrolling(10, "87.28%; 2.2 s; 3.3 s; 4.88e-03"),
            by_unrolling(20, "87.71%; 3.9 s; 6.4 s; 4.81e-04"),
            by_unrolling(40, "87.83%; 7.5 s; 12.7 s; 1.20e-05"),
            gradient_row("IFT (thd = 1e-03)", "87.63%; 16.3 s; 6.7 s; 7.33e-04", IFT, 1e-3),
            gradient_row("IFT (thd = 1e-02)", "85.95%; 15.6 s; 1.3 s; 9.52e-03", IFT, 1e-2),
        ),
        full_remarks=(
            *CHOSEN[:1],
            "α = 0.8. Ours are times of one batch, the paper's of 80 batches of 125. IFT: "
            "the solver is chosen by the library (the paper: Broyden's method). The paper says of "
            "memory only that IFT needs less.",
        ),
        quick_remarks=(
            *QUICK[:1],
            "Model: five layers of widths 4, 8, 16, 32, 32 (paper: 16, 32, 64, 128, 128) on 16 "
            "channels of 8×8 features.",
            "Processor time of one batch of 64 on one thread (the paper: seconds of a GPU for 80 "
            "batches of 125); memory is that of all tensors of a training step. IFT: the solver is "
            "chosen by the library (the paper: Broyden's method).",
        ),
    )
)
