"""Tables of the papers: every row can be built, and every quick row trains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria.data import DataSet, DataSetCard, Episodes, Split
from equilibria.data.registry import register_dataset
from equilibria.models.registry import model_outline
from equilibria.papers import Row, find_table, list_tables, plan
from equilibria.papers.jobs import Job, make_job, run_job
from equilibria.papers.measures import EXTRAS, MEASURES
from equilibria.papers.pictures import PICTURES
from equilibria.papers.reading import read_tables
from equilibria.papers.report import write_index
from equilibria.papers.table import Setting
from equilibria.training.recipe import recipe_from_data

IDS = [
    *("opteq-t3", "opteq-t4", "opteq-t5", "opteq-t7", "opteq-t8", "opteq-t9", "opteq-t10"),
    *("mopteqs-t1a", "mopteqs-t1b", "mopteqs-t2a", "mopteqs-t2b", "mopteqs-t3", "mopteqs-t4"),
    *("mopteqs-t5", "mopteqs-t6", "mopteqs-f2", "mopteqs-f3a", "mopteqs-f3b", "mopteqs-f3c"),
    "mopteqs-f4",
    *("geq-t1a", "geq-t1b", "geq-t2a", "geq-t2b", "geq-t3", "geq-t5", "geq-f2", "geq-f3", "geq-f4"),
    *("jiio-t1", "jiio-t2", "jiio-t3", "jiio-t4a", "jiio-t4b", "jiio-t4c"),
    *("jiio-t5", "jiio-t6", "jiio-t7", "jiio-t8", "jiio-f6", "jiio-c6"),
]


def distinct_recipes(setting: Setting) -> list[dict[str, Any]]:
    """Return one recipe per model and gradient rule, regardless of α."""
    recipes = {}
    for table in list_tables():
        for row in table.rows:
            recipe = row.recipe(setting)
            if recipe is None:
                continue
            model = recipe["model"]
            options = {name: v for name, v in model["options"].items() if name != "alpha"}
            task = recipe.get("task", {}).get("name")
            key = [model["name"], options, recipe["training"].get("gradient"), task]
            recipes[json.dumps(key, sort_keys=True)] = dict(recipe)
    return list(recipes.values())


TINY = {"camvid": "tiny-pixels", "mnist": "tiny-gray", "omniglot-episodes": "tiny-episodes"}
"""Replacements for data sets of the quick settings; "tiny" replaces all others."""


def tiny_images(name: str) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    if name == "tiny-episodes":
        drawings = torch.randint(256, (6, 4, 1, 28, 28), generator=generator, dtype=torch.uint8)
        part = Episodes(drawings, ways=5, shots=1, queries=3, episodes=8, seed=0)
        return DataSet(name, part, part, tuple("abcde"), kind="episodes")
    images = torch.rand(8, 3, 32, 32, generator=generator)
    if name == "tiny-gray":
        images = images[:, :1, :28, :28]
    shape = (8, 32, 32) if name == "tiny-pixels" else (8,)
    labels = torch.randint(10, shape, generator=generator)
    whole = Split(images, labels)
    kind = "segmentation" if name == "tiny-pixels" else "classification"
    return DataSet(name, whole, whole, tuple("abcdefghij"), kind=kind)


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    from equilibria.data import registry

    names = ("tiny", *TINY.values())
    for name in names:
        register_dataset(DataSetCard(name), lambda name=name: tiny_images(name))
    yield
    for name in names:
        del registry._cards[name], registry._loaders._factories[name]


def test_tables_are_listed_in_order() -> None:
    assert [table.id for table in list_tables() if table.id in IDS] == IDS
    assert find_table("geq-t2a").title == "Table 2 (a), Imagenette"
    with pytest.raises(ValueError, match="did you mean 'mopteqs-t1b'"):
        find_table("MOptEqs-T1b")


@pytest.mark.parametrize("table_id", IDS)
def test_rows_have_printed_numbers_and_recipes(table_id: str) -> None:
    table = find_table(table_id)
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    assert any(row.paper for row in table.rows) or "-f" in table_id  # figures may print no numbers
    assert table.full_remarks
    assert any("instead of" in remark for remark in table.quick_remarks)
    for setting in ("full", "quick"):
        for row in table.rows:
            if row.recipe(setting) is not None:
                recipe_from_data(row.recipe(setting))


@pytest.mark.parametrize("setting", ["full", "quick"])
def test_every_row_of_the_imagenet_table_has_a_recipe(setting: Setting) -> None:
    assert all(row.recipe(setting) for row in find_table("opteq-t7").rows)


def test_models_of_full_settings_can_be_built() -> None:
    """Uses outlines, which allocate no parameters."""
    recipes = distinct_recipes("full")
    for recipe in recipes:
        made = recipe_from_data(recipe).model
        model_outline(made.name, **made.options)
    assert len(recipes) > 50


@pytest.mark.slow
def test_every_quick_row_trains(tmp_path: Path) -> None:
    for place, recipe in enumerate(distinct_recipes("quick")):
        name = TINY.get(recipe["data"]["name"], "tiny")
        data = {"name": name, "augmentation": [] if name == "tiny-episodes" else ["flip"]}
        training = {**recipe["training"], "epochs": 1, "batch_size": 8, "warmup_epochs": 0}
        made = {**recipe, "data": data, "training": training}
        result = run_job(Job(made, tmp_path / str(place)), torch.device("cpu"))
        assert result["samples"]
        assert math.isfinite(result["loss"] or math.nan), recipe["model"]


def folders(table_id: str, tmp_path: Path) -> dict[str, Path]:
    made = plan(find_table(table_id), "quick", [0], tmp_path)
    return {label: job.folder for (label, _), job in made.jobs.items()}


def test_quick_tables_share_runs(tmp_path: Path) -> None:
    first, second = folders("mopteqs-t1b", tmp_path), folders("geq-t1a", tmp_path)
    assert first["MOptEqs (8.1M)"] == second["MOptEqs"]
    assert first["ResNet-18"] == second["ResNet-18"]
    assert first["MDEQ (10M)"] == second["MDEQ"]
    branches, table, kernels = (folders(t, tmp_path) for t in ("mopteqs-t2a", "geq-t1b", "geq-t5"))
    assert branches["MOptEqs (8.1M)"] == table["MOptEqs"] != kernels["MOptEqs"]  # without PE
    assert table["GEQ (8M)"] == kernels["GEQ (8M)"]
    assert (
        folders("mopteqs-t2b", tmp_path)["MOptEqs (10M)"] == folders("geq-t2a", tmp_path)["MOptEqs"]
    )
    grid, effects = folders("opteq-t5", tmp_path), folders("opteq-t3", tmp_path)
    assert len(set(grid.values()) & set(effects.values())) == 9


def test_folder_depends_on_the_resolved_recipe(tmp_path: Path) -> None:
    row: Row = find_table("geq-t1a").rows[0]
    assert row.quick is not None
    job = make_job(row.quick, 0, tmp_path)
    spelled_out = {**row.quick, "task": {"label_smoothing": 0.0}}
    assert make_job(spelled_out, 0, tmp_path).folder == job.folder
    assert make_job(row.quick, 0, tmp_path, root=tmp_path).folder == job.folder
    assert make_job(row.quick, 1, tmp_path).folder != job.folder


def test_results_page_lists_all_recorded_tables() -> None:
    """If this fails, run `python docs/site/results.py`."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    assert write_index(docs / "results") in (docs / "results.md").read_text(encoding="utf-8")


def test_pictures_exist_and_are_distinct() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "results"
    named = {
        name
        for page in folder.glob("*.md")
        for name in re.findall(r"\]\((.+png)\)", page.read_text())
    }
    assert all((folder / name).is_file() for name in named)
    contents = [path.read_bytes() for path in folder.glob("*.png")]
    assert len(set(contents)) == len(contents)


def test_extras_and_pictures_of_tables_exist() -> None:
    for table in list_tables():
        assert set(table.extras) <= set(EXTRAS)
        assert set(table.pictures) <= set(PICTURES)
        for row in table.rows:
            names = {row.measure(column) or "accuracy" for column in table.columns}
            assert {name.partition("@")[0] for name in names} <= set(MEASURES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table_id", "label", "measures"),
    [
        ("jiio-t1", "MDEQ-VAE", ("sample_fid", "reconstruction_psnr", "jiio_reconstruction_fid")),
        ("jiio-t2", "PGD: 20 iters", ("pgd_loss", "warm_pgd_loss", "jiio_loss", "official_loss")),
        ("jiio-t3", "Adam: 40 iters", ("adam_loss", "jiio_40_loss", "official_loss")),
        ("jiio-t4a", "Unsupervised, VAE (Adam)", ("inpaint_psnr", "denoise_04_psnr")),
        ("jiio-t4c", "Supervised, JIIO-MDEQ-100", ("median_psnr",)),
        ("jiio-t5", "MNIST, trained on Clean", ("pgd_accuracy", "jiio_accuracy")),
        ("jiio-t7", "JIIO: 100 iters, as in the paper", ("jiio_loss", "official_loss")),
        ("jiio-c6", "Latents, Adam: 40 iters", ("adam_bytes", "official_bytes", "jiio_40_bytes")),
        ("jiio-c6", "Attack, PGD: 20 iters", ("pgd_bytes", "jiio_bytes", "official_bytes")),
    ],
)
def test_input_optimization_is_measured_and_drawn(
    table_id: str,
    label: str,
    measures: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("equilibria.papers.pictures.BUDGETS", (2, 5))
    table = find_table(table_id)
    recipe = next(dict(row.quick or {}) for row in table.rows if row.label == label)
    training = {**recipe["training"], "epochs": 1, "batch_size": 8, "warmup_epochs": 0}
    made = {
        **recipe,
        "data": {"name": TINY.get(recipe["data"]["name"], "tiny")},
        "training": training,
    }
    job = Job(made, tmp_path / "run", table.extras, table.pictures)
    result = run_job(job, torch.device("cpu"))
    for name in measures:
        assert math.isfinite(result[name] or 0), name
        assert result[name] is not None, name
    for name in table.pictures:
        assert job.picture(name).read_bytes().startswith(b"\x89PNG")


PARTS = """
data: {digits: {name: digits, options: {train_samples: 60}}}
training: {short: {epochs: 1, gradient: one_step}, long: {from: short, epochs: 9}}
models: {wide: {name: opteq-small, channels: 32, pool: 2}, narrow: {channels: 4}}
"""
FILE = """
paper: Digits
runs: {shared: {task: {name: maml, steps: 3}}}
tables:
  digits-t9:
    title: Table 9
    columns: {Acc.: accuracy, Size: null}
    missing: it is too large
    full: {model: wide, data: digits, training: long}
    quick: {model: wide, data: digits, training: short, options: {pool: 4}}
    rows:
      - &two
        - {label: One, paper: ["9.50", 1 M], options: narrow}
        - {label: Two, paper: [null, 2 M], run: shared, quick: opteq-large, measures: [loss]}
      - {label: Three, quick: null, full: {training: {from: long, gradient: null}}}
    full_remarks: [&some [a, b], c]
"""


def test_recipe_merges_table_run_and_row() -> None:
    (table,) = read_tables(FILE, PARTS)
    one, two, three = table.rows
    assert one.paper == {"Acc.": "9.50", "Size": "1 M"}
    assert two.paper == {"Size": "2 M"}
    data = {"name": "digits", "options": {"train_samples": 60}}
    assert one.full == {
        "model": {"name": "opteq-small", "options": {"channels": 4, "pool": 2}},
        "data": data,
        "training": {"epochs": 9, "gradient": "one_step", "tolerance": None},
    }
    assert two.quick == {
        "model": {"name": "opteq-large", "options": {"pool": 4}},
        "data": data,
        "training": {"epochs": 1, "gradient": "one_step", "tolerance": None},
        "task": {"name": "maml", "options": {"steps": 3}},
    }
    assert three.full is not None
    assert three.full["training"] == {"epochs": 9, "gradient": None, "tolerance": None}
    assert three.quick is None
    assert (one.missing, three.missing) == ("", "it is too large")
    assert [row.measure(table.columns[0]) for row in table.rows] == ["accuracy", "loss", "accuracy"]
    assert table.full_remarks == ("a", "b", "c")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('"9.50"', "9.50", "digits-t9, One: paper.0.* valid string, got 9.5.* in quotes"),
        ("options: narrow", "options: narow", "digits-t9, One: .*'narow'; did you mean 'narrow'"),
        ("run: shared", "run: shred", "digits-t9, Two: unknown run 'shred'; .*'shared'"),
        ("measures: [loss]", "measure: [loss]", "digits-t9, Two: measure: Extra inputs"),
        ("[null, 2 M]", "[null, 2 M, 3]", "digits-t9, Two: paper.2"),
        ("[null, 2 M]", "[a, b, c]", "digits-t9, Two: .* more .* than the 2 columns"),
        ("training: long}", "task: null}", "digits-t9, One: the full setting has no training"),
        ("missing: it is too large", "seeds: 2", "digits-t9, Three: .*set 'missing'"),
        ("title: Table 9", "titel: Table 9", "digits-t9: title: Field required"),
    ],
)
def test_error_in_a_file_names_the_row(right: str, wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tables(FILE.replace(right, wrong), PARTS)
