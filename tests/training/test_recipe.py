"""Recipes: validation, overrides and round trips."""

from __future__ import annotations

from pathlib import Path

import pytest

from equilibria.training import Recipe, RecipeError, list_recipes, load_recipe
from equilibria.training.recipe import recipe_from_data

MINIMAL = "model: {name: opteq-small}\ndata: {name: digits}\ntraining: {epochs: 2}\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_recipe_has_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert (recipe.model.name, recipe.data.name) == ("opteq-small", "digits")
    assert recipe.training.epochs == 2
    assert recipe.training.optimizer == "adamw"
    assert recipe.data.augmentation == ()


def test_as_data_can_be_read_again(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["data.augmentation=[{shift: {pixels: 1}}]"])
    assert recipe_from_data(recipe.as_data()) == recipe


def test_overrides_change_values(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "training.epochs=7",
            "model.options.channels=16",
            "data.augmentation=[flip, {crop: {padding: 4}}]",
            "training.tolerance=1e-2",
        ],
    )
    assert recipe.training.epochs == 7
    assert recipe.model.options == {"channels": 16}
    assert recipe.data.augmentation == ("flip", {"crop": {"padding": 4}})
    assert recipe.training.tolerance == 0.01


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=3", r"unknown key 'epoch' in 'training'; did you mean 'epochs'"),
        ("modle.name=a", "unknown key 'modle'; did you mean 'model'"),
        ("training.epochs=many", r"training\.epochs: .*integer"),
        ("training.epochs=0", "epochs must be at least 1"),
        ("training.schedule=linear", r"training\.schedule"),
        ("data.validation=2", r"validation must be in \[0, 1\)"),
        ("training.epochs", "an override must be key=value"),
        ("model.name.x=3", "is a value and has no keys"),
    ],
)
def test_invalid_overrides_raise(recipe_file: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe_file, [override])


def test_files_that_are_not_recipes_raise(tmp_path: Path) -> None:
    path = tmp_path / "invalid.yaml"
    path.write_text("model: [")
    with pytest.raises(RecipeError, match=r"invalid\.yaml is not YAML"):
        load_recipe(path)
    path.write_text("just words")
    with pytest.raises(RecipeError, match="has no keys"):
        load_recipe(path)
    with pytest.raises(RecipeError, match="did you mean 'digits-opteq'"):
        load_recipe("digits-optq")


@pytest.mark.parametrize("name", list(list_recipes()))
def test_all_recipes_of_the_package_are_valid(name: str) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe.about
