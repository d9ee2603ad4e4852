"""The full settings of tables, compared with those of the papers."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

import pytest
import yaml

from equilibria.papers import PaperTable, Row, find_table, list_tables
from equilibria.papers.measures import PAPER_STEPS, PAPER_TIMED, PGD_STEPS
from equilibria.papers.reading import FILES
from equilibria.papers.settings import (
    NO_NOTE,
    NOT_STATED,
    SET_BY_ROW,
    _all_settings,
    compared_settings,
    full_settings,
    stated_in_paper,
)
from tests.program import invoke

TABLES = [table.id for table in list_tables()]


@pytest.mark.parametrize("table_id", TABLES)
def test_every_setting_has_a_note_and_differences_have_reasons(table_id: str) -> None:
    lines = compared_settings(find_table(table_id))
    assert lines
    for line in lines:
        place = (line.name, line.paper, line.ours, line.rows)
        assert line.paper != NO_NOTE, place
        assert line.agrees is not False or line.why, place
        assert line.agrees is None or line.paper not in (NOT_STATED, SET_BY_ROW), place


@pytest.mark.parametrize("table_id", TABLES)
def test_recipe_has_the_value_of_an_agreeing_note(table_id: str) -> None:
    table = find_table(table_id)
    agreeing = [line for line in compared_settings(table) if line.agrees]
    for row in table.rows:
        if row.full is None:
            continue
        ours = full_settings(row)
        for line in agreeing:
            if row.label in line.rows and line.name in ours:
                stated = stated_in_paper(row, line.name)
                assert stated is not None
                assert stated.paper == ours[line.name]


SGD_OPTEQ = {
    "training.optimizer": "sgd",
    "training.learning_rate": 0.1,
    "training.epochs": 200,
    "training.batch_size": 125,
    "training.weight_decay": 0.0003,
    "training.milestones": [20, 40, 60, 80, 100, 120, 140, 160, 180],
    "training.decay": 0.7,
}
SGD_MOPTEQS = {
    "training.optimizer": "sgd",
    "training.learning_rate": 0.1,
    "training.epochs": 200,
    "training.milestones": [100, 150, 175],
    "training.decay": 0.1,
}
MDEQ_OF_JIIO = {
    "training.optimizer": "adam",
    "training.weight_decay": 0.0,
    "training.jacobian_vectors": 2,
    "training.jacobian_at": "iterate",
    "model.options.expansion": 5,
    "model.options.groups": 8,
    "model.options.solver.name": "broyden",
    "model.options.solver.rank": 20,
    "model.options.max_iterations": 18,
    "model.options.gradient.max_iterations": 20,
}
FACES = {
    **MDEQ_OF_JIIO,
    "training.batch_size": 48,
    "training.learning_rate": 0.001,
    "model.options.channels": [32, 64, 128, 256],
    "model.options.latent_dim": 128,
    "data.options.size": 64,
    "data.augmentation": ["flip"],
    "task.options.engine": "official",
    "task.options.ridge": 0.0,
    "task.options.search.alphas": [0.8, 0.6, 0.01],
    "task.options.search.late_alpha": 0.003,
    "task.options.search.memory": 40,
}
FACES_40 = {"training.steps": 50000, "training.jacobian_weight": 0.1, "task.options.iterations": 40}
FACES_100 = {
    "training.steps": 25000,
    "training.jacobian_weight": 2.0,
    "task.options.iterations": 100,
}
ATTACKED = {
    **MDEQ_OF_JIIO,
    "training.batch_size": 96,
    "training.learning_rate": 0.001,
    "training.jacobian_weight": 0.01,
    "model.options.channels": [24, 24],
    "task.options.norm": "l2",
}
FROM_PAPERS: dict[tuple[str, str], dict[str, Any]] = {
    # OptEq, Sections 5, 7 and Algorithm 1.
    ("opteq-t3", "no Reg*"): {
        **SGD_OPTEQ,
        "training.milestones": [30, 60, 90, 120, 150, 180],
        "training.decay": 0.5,
        "model.options.widths": [16, 32, 64, 128, 128],
        "model.options.kernel_size": 3,
        "model.options.gradient.name": "unrolled",
        "model.options.gradient.steps": 20,
        "model.options.z0": "input",
        "model.options.norm": None,
    },
    ("opteq-t3", "R[*] = 0.15*"): {"model.options.gamma": 0.15},
    ("opteq-t3", "R[*] = 10*"): {"model.options.gamma": 20.0},  # of ½‖z‖²
    ("opteq-t4", "Deep OptEq, HSIC*"): {
        **SGD_OPTEQ,
        "model.options.widths": [16, 32, 64, 64, 128],
        "model.options.stem_depth": 1,
        "model.options.z0": "input",
        "model.options.norm": None,
    },
    ("opteq-t5", "*"): {**SGD_OPTEQ, "model.options.z0": "input", "model.options.norm": None},
    ("opteq-t7", "OptEq*"): {
        "training.optimizer": "adamw",
        "training.learning_rate": 0.001,
        "training.schedule": "cosine",
        "training.weight_decay": 0.05,
        "training.epochs": 300,
        "model.options.gradient.steps": 5,
        "model.options.regularizer.name": "decorrelation",
        "model.options.head_widths": [1024, 2048],
        "model.options.channels": 512,
        "model.options.alpha": 0.8,
        "model.options.z0": "input",
        "model.options.norm": None,
        "data.options.size": 224,
    },
    ("opteq-t8", "IFT*"): {
        **SGD_OPTEQ,
        "model.options.alpha": 0.8,
        "model.options.solver": "broyden",
    },
    ("opteq-t9", "OptEq (IFT*"): {"training.batch_size": 768, "model.options.solver": "broyden"},
    ("opteq-t9", "MDEQ"): {"model.options.downsample": 2, "model.options.solver": "broyden"},
    ("opteq-t10", "*"): {
        "training.learning_rate": 0.01,
        "training.schedule": "polynomial",
        "training.power": 0.9,
        "training.momentum": 0.9,
        "training.weight_decay": 0.001,
        "training.steps": 40000,
        "training.batch_size": 8,
        "model.options.widths": [256, 512, 512],
    },
    # MOptEqs, Section 3 and Appendix A.6 to A.11.
    ("mopteqs-t1a", "*OptEqs (*"): {
        **SGD_MOPTEQS,
        "training.batch_size": 128,
        "training.weight_decay": 0.001,
        "model.options.channels": 32,
        "model.options.scales": [1, 1, 1],
    },
    ("mopteqs-t1a", "MOptEqs"): {
        "model.options.diversity": 0.01,
        "model.options.epsilon": 0.1,
        "model.options.pe": "train",
    },
    ("mopteqs-t1b", "MOptEqs (0.48M)"): {
        **SGD_MOPTEQS,
        "training.batch_size": 128,
        "training.weight_decay": 0.001,
        "model.options.channels": 128,
        "model.options.scales": [1, 2, 4, 8],
        "model.options.diversity": 0.001,
        "model.options.epsilon": 0.1,
    },
    ("mopteqs-t2a", "MOptEqs (1.9M)"): {"model.options.channels": 256, **SGD_MOPTEQS},
    ("mopteqs-t2a", "MDEQ*"): {"model.options.dropout": 0.3},
    ("mopteqs-t2b", "*"): {
        **SGD_MOPTEQS,
        "training.batch_size": 32,
        "training.weight_decay": 5e-5,
        "data.options.size": 256,
    },
    ("mopteqs-t6", "MOptEq (one step)"): {
        **SGD_MOPTEQS,
        "training.batch_size": 32,
        "training.gradient": "one_step",
    },
    # GEQ, Section 4.1 and Appendix A.7.
    ("geq-t1a", "GEQ (5M)"): {
        "training.optimizer": "sgd",
        "training.schedule": "step",
        "model.options.channels": 256,
        "model.options.widths": [64, 128, 128, 128, 256, 256],
        "model.options.scales": [1, 2, 4, 4, 8, 8],
        "model.options.patch": 2,
        "model.options.channel_split": 8,
        "model.options.hidden": 64,
        "model.options.solver": "anderson",
        "model.options.gradient": "phantom",
    },
    ("geq-t1b", "GEQ (8M)"): {
        "model.options.channels": 320,
        "model.options.widths": [80, 160, 160, 160, 320, 320],
        "model.options.solver": "anderson",
    },
    ("geq-t2a", "GEQ (6M)"): {
        "model.options.channels": 256,
        "model.options.widths": [32, 64, 128, 128, 256, 256],
        "model.options.hidden": 128,
        "model.options.stem_strides": 2,
        "data.options.size": 256,
    },
    ("geq-t2b", "GEQ (13M)"): {
        "model.options.channels": 384,
        "model.options.widths": [48, 96, 192, 192, 384, 384],
    },
    ("geq-t5", "MOptEqs*"): {"model.options.pe": "off"},
    # JIIO, Section 4, Appendices B and C, Table 9.
    ("jiio-t1", "JIIO-MDEQ"): {
        **FACES,
        **FACES_40,
        "task.options.evaluation_iterations": 100,
        "task.options.density.name": "vae-gmm",
        "task.options.density.hidden": 2096,
        "task.options.density.codes": 384,
        "task.options.density.components": 20,
    },
    ("jiio-t3", "*"): {**FACES, **FACES_40},
    ("jiio-t4a", "*JIIO-MDEQ-100"): {**FACES, **FACES_100},
    ("jiio-t4a", "Supervised, *"): {"task.options.corruption.inpaint.window": 20 / 64},
    ("jiio-t4b", "Supervised, JIIO-MDEQ-100"): {
        **FACES,
        **FACES_100,
        "task.options.corruption.denoise.noise": 0.2,
    },
    ("jiio-t4b", "Unsupervised, JIIO-MDEQ-40"): {**FACES, **FACES_40},
    ("jiio-t4c", "Supervised, JIIO-MDEQ-100"): {
        **FACES,
        **FACES_100,
        "task.options.corruption.denoise.noise": 0.4,
    },
    ("jiio-t2", "*"): {**ATTACKED, "training.epochs": 10, "task.options.eps": 1.0},
    ("jiio-t5", "*"): {**ATTACKED, "task.options.eps": 1.0},
    ("jiio-t5", "MNIST*"): {"training.epochs": 10},
    ("jiio-t5", "CIFAR*"): {"training.epochs": 20},
    ("jiio-t5", "*PGD"): {"task.options.steps": 20},
    ("jiio-t5", "MNIST*JIIO"): {
        "task.options.steps": 80,
        "task.options.search.alphas": [0.8, 0.6, 0.6],
        "task.options.search.late_alpha": 0.2,
        "task.options.search.memory": 20,
    },
    ("jiio-t8", "*"): {**ATTACKED, "training.epochs": 20, "task.options.eps": 0.5},
    ("jiio-t8", "*JIIO"): {
        "task.options.steps": 80,
        "task.options.search.alphas": [0.8, 0.6, 0.1],
        "task.options.search.memory": 20,
    },
    ("jiio-t6", "JIIO-DEQ"): {
        **MDEQ_OF_JIIO,
        "training.batch_size": 80,
        "training.jacobian_weight": 0.5,
        "model.options.channels": [64, 128],
        "model.options.task_size": 400,
        "data.options.ways": 5,
        "data.options.shots": 1,
        "task.options.iterations": 100,
        "task.options.search.alphas": [0.8, 0.6, 0.04],
        "task.options.search.late_alpha": 0.01,
        "task.options.search.memory": 10,
    },
    ("jiio-t7", "*"): {"training.batch_size": 80, "task.options.iterations": 100},
    ("jiio-f6", "*"): {
        **{name: FACES[name] for name in FACES if name.startswith("task.")},
        "task.options.iterations": 100,
        "model.options.latent_dim": 384,
        "model.options.downsample": 4,
        "data.options.size": 256,
    },
}
"""Required values of full settings, read from the papers, by table and pattern of rows."""


@pytest.mark.parametrize(("table_id", "rows"), FROM_PAPERS)
def test_full_setting_matches_the_paper(table_id: str, rows: str) -> None:
    chosen = [row for row in find_table(table_id).rows if fnmatchcase(row.label, rows)]
    assert chosen
    for row in chosen:
        ours = full_settings(row)
        expected = FROM_PAPERS[table_id, rows]
        assert {name: ours.get(name) for name in expected} == expected, row.label


def test_attacks_and_times_use_the_numbers_of_jiio() -> None:
    assert (PGD_STEPS, PAPER_STEPS, PAPER_TIMED) == (20, 80, 200)


def rows_of(paper: str) -> list[tuple[PaperTable, Row]]:
    rows = [(table, row) for table in list_tables() for row in table.rows]
    return [(t, row) for t, row in rows if row.full is not None and t.id.split("-")[0] == paper]


@pytest.mark.parametrize("name", FILES)
def test_every_note_applies_to_a_row(name: str) -> None:
    folder = resources.files("equilibria.papers") / "tables"
    file = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    rows = rows_of(name)
    known = {key for _, row in rows for key in _all_settings(row)}
    models = {row.full["model"]["name"] for _, row in rows if row.full is not None}
    for pattern in file["settings_of"]:
        assert any(fnmatchcase(model, pattern) for model in models), pattern
    noted = [file["settings"], *file["settings_of"].values()]
    noted += [run.get("settings", {}) for run in file.get("runs", {}).values()]
    noted += [table.get("settings", {}) for table in file["tables"].values()]
    for key in {key for notes in noted for key in notes}:
        parts = key.startswith(("model.", "data.", "training.", "task.")) and key != "model.options"
        assert not parts or any(fnmatchcase(name, key) for name in known), key


def test_command_prints_paper_ours_and_reason() -> None:
    result = invoke("reproduce", "jiio-f6", "--settings")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for expected in ("Paper", "Ours", "Why", "not stated", "384 (B.3)", "E εᵀJᵀJε"):
        assert expected in words
