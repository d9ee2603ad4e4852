"""JIIO: few-shot learning, Tables 6 and 7.

Gurumurthy, Bai, Manchester, Kolter, "Joint inference and input optimization in equilibrium
networks", NeurIPS 2021, Appendix B.1.
"""

from __future__ import annotations

from typing import Any

from equilibria.papers.recipes import recipe
from equilibria.papers.table import Column, PaperTable, RecipeData, Row, register_table

PAPER = "JIIO"
EPISODES = 320
EPOCHS = 6
QUICK_DATA: RecipeData = {
    "name": "omniglot-episodes",
    "options": {
        "ways": 5,
        "shots": 1,
        "queries": 3,
        "episodes": EPISODES,
        "test_episodes": 400,
    },
}
FULL_DATA: RecipeData = {
    "name": "omniglot-episodes",
    "options": {
        "ways": 5,
        "shots": 1,
        "queries": 1,
        "episodes": 100_000,
        "test_episodes": 1000,
    },
}
ADAM: RecipeData = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "warmup_epochs": 0,
    "clip_norm": 10.0,
    "evaluation_batch_size": 50,
}
# Reptile's step is the learning rate of a plain descent along θ − θ′.
DESCENT: RecipeData = {
    **ADAM,
    "optimizer": "sgd",
    "momentum": 0.0,
    "learning_rate": 1.0,
    "schedule": "polynomial",
    "power": 1.0,
    "clip_norm": 1e9,
}
JIIO_FULL: RecipeData = {
    **ADAM,
    "jacobian_weight": 0.5,
    "jacobian_at": "iterate",
    "jacobian_vectors": 2,
}
JIIO_QUICK: RecipeData = {
    **ADAM,
    "learning_rate": 3e-3,
    "tolerance": 1e-2,
    "evaluation_tolerance": 1e-3,
}


def task(name: str, **options: Any) -> RecipeData:
    return {"name": name, "options": options}


MAML = task("maml", inner_steps=1, inner_rate=0.4, evaluation_steps=3)
REPTILE = task("reptile", inner_steps=5, inner_rate=0.003, inner_batch=10, evaluation_steps=20)
IMAML = task("imaml", inner_steps=8, inner_rate=0.1, proximal=0.5, solve_steps=3)
JIIO = task("few-shot", ridge=1e-3, iterations=20, sweeps=2, evaluation_iterations=40)
JIIO_PAPER = task("few-shot", ridge=0.0, iterations=100, sweeps=1, engine="official")


def weights_row(label: str, printed: str, chosen: RecipeData, training: RecipeData) -> Row:
    """A method that adapts the weights of four convolutions."""
    return Row(
        label=label,
        paper={"5-way, 1-shot": printed},
        full=recipe("conv4", FULL_DATA, {**training, "epochs": 10, "batch_size": 32}, task=chosen),
        quick=recipe(
            "conv4",
            QUICK_DATA,
            {**training, "epochs": EPOCHS, "batch_size": 8},
            task=chosen,
            channels=32,
        ),
    )


def vector_row(label: str, paper: dict[str, str], **measures: str | None) -> Row:
    """The equilibrium model, which adapts a task vector."""
    return Row(
        label=label,
        paper=paper,
        full=recipe(
            "few-shot-mdeq",
            FULL_DATA,
            {**JIIO_FULL, "epochs": 10, "batch_size": 16},
            task=JIIO_PAPER,
        ),
        quick=recipe(
            "few-shot-opteq",
            QUICK_DATA,
            {**JIIO_QUICK, "epochs": EPOCHS, "batch_size": 8},
            task=JIIO,
            channels=32,
            task_size=160,
            norm="batch",
        ),
        measures=measures,
    )


FULL_REMARKS = (
    "Left open by the paper: the number of episodes (100,000 an epoch, 10 epochs), the settings of "
    "the baselines (those of their papers, small inner loops), rotated characters (not used).",
)
QUICK_REMARKS = (
    "The two small background sets of Omniglot instead of the whole: characters of the second that "
    "are in no alphabet of the first are tested on; 400 test episodes, three queries a class.",
    f"{EPISODES} episodes an epoch, {EPOCHS} epochs; 32 channels; an OptEq with a task vector of "
    "160 numbers instead of MDEQ with 400.",
    "All networks normalize by the statistics of the support, and of the queries, of an episode "
    "together; the equilibrium of an image sees no other.",
)

register_table(
    PaperTable(
        id="jiio-t6",
        paper=PAPER,
        title="Table 6, Omniglot, 5-way 1-shot",
        columns=(Column(title="5-way, 1-shot", measure="accuracy"),),
        rows=(
            weights_row("MAML", "98.7", MAML, ADAM),
            weights_row("Reptile", "97.68", REPTILE, DESCENT),
            weights_row("iMAML, GD", "99.16", IMAML, ADAM),
            vector_row("JIIO-DEQ", {"5-way, 1-shot": "97.33"}),
        ),
        full_remarks=FULL_REMARKS,
        quick_remarks=QUICK_REMARKS,
    )
)
register_table(
    PaperTable(
        id="jiio-t7",
        paper=PAPER,
        title="Table 7, time of the inner loop of few-shot learning",
        columns=(
            Column(title="time taken (ms)", measure="adam_seconds"),
            Column(title="loss", measure="adam_loss"),
        ),
        rows=(
            vector_row("Adam: 20 iters (the paper's label: PGD)", {"time taken (ms)": "28948"}),
            vector_row(
                "JIIO: 40 iters (paper: 100)",
                {"time taken (ms)": "11836"},
                **{"time taken (ms)": "jiio_seconds", "loss": "jiio_loss"},
            ),
        ),
        extras=("inner_loop_times",),
        full_remarks=FULL_REMARKS,
        quick_remarks=(
            *QUICK_REMARKS,
            "Milliseconds of processor time an episode, 16 at a time; the loss is that of the "
            "support at the task vector found, the ridge included.",
        ),
    )
)
