"""JIIO: attacks and adversarial training, Tables 2, 5 and 8.

Gurumurthy, Bai, Manchester, Kolter, "Joint inference and input optimization in equilibrium
networks", NeurIPS 2021.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import recipe
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table

PAPER = "JIIO"
QUICK_MNIST: RecipeData = {
    "name": "mnist",
    "options": {"train_samples": 2000, "test_samples": 1000},
}
QUICK_CIFAR10: RecipeData = {
    "name": "cifar10",
    "options": {"train_samples": 2000, "test_samples": 1000},
}
QUICK_TRAINING: RecipeData = {
    "batch_size": 64,
    "learning_rate": 1e-2,
    "tolerance": 1e-2,
    "evaluation_tolerance": 1e-4,
    "gradient": "one_step",
}
QUICK_MODEL: dict[str, Any] = {
    "channels": 24,
    "width": 24,
    "stem_depth": 2,
    "stem_strides": 2,
    "pool": 4,
}
EPOCHS = {"mnist": 4, "cifar10": 6}
# Appendix C, Table 9: batches of 96, Adam from 1e-3; 20 epochs on CIFAR-10, 10 on MNIST.
FULL_TRAINING: RecipeData = {
    "batch_size": 96,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "jacobian_weight": 0.01,
    "jacobian_at": "iterate",
    "jacobian_vectors": 2,
}
FULL_EPOCHS = {"mnist": 10, "cifar10": 20}
FULL_MODEL: dict[str, Any] = {"channels": [24, 24], "expansion": 5, "outer_norm": "group"}
METHODS = {"Clean": "clean", "PGD": "pgd", "JIIO": "jiio"}
FULL_STEPS = {"pgd": 20, "jiio": 40}
QUICK_STEPS = {"pgd": 20, "jiio": 12}
"""Of x, at every training step; what attacks the trained models is the same in both."""


def adversary(method: str, eps: float, steps: dict[str, int]) -> RecipeData:
    """The task; the test images are attacked afterwards, so its own evaluation attacks few."""
    options: dict[str, Any] = {"method": method, "norm": "l2", "eps": eps, "attack_share": 0.05}
    if method in steps:
        options["steps"] = steps[method]
    return {"name": "adversarial", "options": options}


def trained_row(
    label: str,
    data: str,
    method: str,
    eps: float,
    paper: dict[str, str],
    **measures: str | None,
) -> Row:
    quick_data = QUICK_MNIST if data == "mnist" else QUICK_CIFAR10
    return Row(
        label=label,
        paper=paper,
        full=recipe(
            "mdeq-small",
            {"name": data},
            {**FULL_TRAINING, "epochs": FULL_EPOCHS[data]},
            task=adversary(method, eps, FULL_STEPS),
            **FULL_MODEL,
        ),
        quick=recipe(
            "opteq-small",
            quick_data,
            {**QUICK_TRAINING, "epochs": EPOCHS[data]},
            task=adversary(method, eps, QUICK_STEPS),
            **QUICK_MODEL,
        ),
        measures=measures,
    )


def rows(data: str, eps: float, printed: dict[str, str]) -> list[Row]:
    name = "MNIST" if data == "mnist" else "CIFAR"
    return [
        trained_row(
            f"{name}, trained on {label}",
            data,
            method,
            eps,
            dict(zip(METHODS, printed[label].split("; "), strict=True)),
        )
        for label, method in METHODS.items()
    ]


COLUMNS = (
    Column(title="Clean", measure="accuracy"),
    Column(title="PGD", measure="pgd_accuracy"),
    Column(title="JIIO", measure="jiio_accuracy"),
)
FULL_REMARKS = (
    "Left open by the paper: the step of PGD (a fifth of ε here, projected after each step) and "
    "the images on which Table 2 is timed.",
    "JIIO runs with this library's engine for 40 steps of x; the paper's form is `engine: "
    "official`.",
)
QUICK_REMARKS = (
    "OptEq with 24 channels of 7×7 or 8×8 features instead of MDEQ with two branches; 2,000 "
    f"training images, {EPOCHS['mnist']} epochs (MNIST) and {EPOCHS['cifar10']} (CIFAR-10).",
    "Under attack: 500 test images, L2, PGD with 20 steps and JIIO with 40, images kept in [0, 1].",
)
TRAINING_REMARK = (
    f"Trained with {QUICK_STEPS['pgd']} steps of PGD or {QUICK_STEPS['jiio']} of JIIO a batch."
)

register_table(
    PaperTable(
        id="jiio-t2",
        paper=PAPER,
        title="Table 2, time to compute an adversarial example on MNIST",
        columns=(
            Column(title="time taken (ms)", measure="pgd_seconds"),
            Column(title="loss", measure="pgd_loss"),
        ),
        rows=tuple(
            trained_row(
                label,
                "mnist",
                "clean",
                1.0,
                {"time taken (ms)": printed} if printed else {},
                **{"time taken (ms)": f"{way}_seconds", "loss": f"{way}_loss"},
            )
            for label, way, printed in (
                ("PGD: 20 iters", "pgd", "4360"),
                ("PGD: 20 iters, warm starts", "warm_pgd", ""),
                ("JIIO: 40 iters, this library's engine", "jiio", ""),
                ("JIIO: 80 iters, as in the paper", "official", "1401"),
            )
        ),
        extras=("attack_times",),
        full_remarks=FULL_REMARKS,
        quick_remarks=(
            *QUICK_REMARKS,
            "Milliseconds of processor time an image, in a batch of 32; the loss is the mean "
            "cross-entropy that the attack reaches, so more is better.",
        ),
    )
)
register_table(
    PaperTable(
        id="jiio-t5",
        paper=PAPER,
        title="Table 5, adversarial training, L2, ε = 1",
        columns=COLUMNS,
        rows=(
            *rows(
                "mnist",
                1.0,
                {
                    "Clean": "99.45 ± 0.03; 80.1 ± 1.87; 65.88 ± 4.72",
                    "PGD": "99.18 ± 0.03; 96.53 ± 0.05; 95.74 ± 0.04",
                    "JIIO": "99.32 ± 0.09; 95.74 ± 0.22; 96.63 ± 0.58",
                },
            ),
            *rows(
                "cifar10",
                1.0,
                {
                    "Clean": "78.47 ± 0.94; 2.38 ± 0.41; 3.71 ± 4.01",
                    "PGD": "54.91 ± 1.01; 37.4 ± 0.26; 36.17 ± 0.55",
                    "JIIO": "55.54 ± 0.82; 37.31 ± 0.67; 37.77 ± 0.84",
                },
            ),
        ),
        extras=("robustness",),
        plotted="PGD",
        full_remarks=FULL_REMARKS,
        quick_remarks=(*QUICK_REMARKS, TRAINING_REMARK),
    )
)
register_table(
    PaperTable(
        id="jiio-t8",
        paper=PAPER,
        title="Table 8, adversarial training on CIFAR-10, L2, ε = 0.5",
        columns=COLUMNS,
        rows=tuple(
            rows(
                "cifar10",
                0.5,
                {
                    "Clean": "78.47 ± 0.94; 4.54 ± 1.33; 4.85 ± 2.93",
                    "PGD": "68.48 ± 0.81; 51.77 ± 0.75; 50.14 ± 0.74",
                    "JIIO": "67.79 ± 2.33; 51.39 ± 0.56; 51.25 ± 0.66",
                },
            )
        ),
        extras=("robustness",),
        plotted="PGD",
        full_remarks=FULL_REMARKS,
        quick_remarks=(*QUICK_REMARKS, TRAINING_REMARK),
    )
)
