"""A recipe: everything that a training run depends on, as a YAML file."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from equilibria.data import DataSet
from equilibria.registry import nearest
from equilibria.training.settings import TrainingSettings

MOST_CHARACTERS, MOST_VALUES = 2**18, 10_000
"""Of a recipe; the longest here has fewer than 5,000 and 100."""
PACKAGED = Path(str(resources.files("equilibria") / "recipes"))
"""Where the recipes are that come with the package."""
GIVEN = "given"
"""In the place of the name of a data set that was given in Python."""
MOST_THREADS = 1024
"""Or workers: more than any machine has use for; far beyond it, starting them ends the process."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """A registered model; channels and classes come from the data unless the options say them."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """A registered data set.

    root: its folder; by default the environment variable EQUILIBRIA_DATA.
    in_memory: read image files once, before the training, instead of in every epoch.
    workers: processes that read image files ahead; None: as many as there are cores, less one. The
        results are the same.
    augmentation: what happens to training images, in this order: names, or a name with options.
    normalize: bring every channel to mean 0 and variance 1, as published for the data set, or else
        as measured on some training images.
    validation: what is evaluated after every epoch: a share of the training images, held out, or
        "own", the part that the authors of the data set made for it.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    in_memory: bool = False
    workers: int | None = None
    augmentation: tuple[str | dict[str, Any], ...] = ()
    normalize: bool = False
    validation: float | Literal["own"] = 0.0

    def __post_init__(self) -> None:
        if self.validation != "own" and not 0 <= self.validation < 1:
            raise ValueError(f"validation must be in [0, 1), or 'own', not {self.validation}")
        if self.workers is not None and not 0 <= self.workers <= MOST_THREADS:
            raise ValueError(f"workers must be from 0 to {MOST_THREADS}, not {self.workers}")


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """What is learned.

    name: a registered task; None: it follows from the data, classes of images or of their pixels.
    options: of a task that has a name.
    label_smoothing: softens the targets of a classification.
    """

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.name is None and self.options:
            raise ValueError("options are of a task with a name: add task.name")
        if self.name is not None and self.label_smoothing:
            raise ValueError("with task.name, label_smoothing belongs into task.options")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

    threads: of the processor; small images give a second one nothing to do.

    Examples:
        >>> recipe = eq.training.load_recipe("digits-opteq")
        >>> recipe.model.name, recipe.data.name, recipe.training.epochs
        ('opteq-small', 'digits', 30)
    """

    model: ModelRecipe
    data: DataRecipe
    training: TrainingSettings
    task: TaskRecipe = field(default_factory=TaskRecipe)
    threads: int | None = None
    about: str = ""

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads must be from 1 to {MOST_THREADS}, not {self.threads}")

    def as_data(self) -> dict[str, Any]:
        """The resolved recipe, as YAML holds it: with lists for tuples."""
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        for few in ("continued_at", "steps"):  # runs have
            if not getattr(self.training, few):
                del data["training"][few]
        return data


class RecipeError(ValueError):
    """A recipe that cannot be followed, and why."""


@contextmanager
def told_where(place: str) -> Iterator[None]:
    """Around what takes options of a recipe: what they cause is told with where they are."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
    except Exception as error:
        raise RecipeError(f"{place}: {type(error).__name__}: {error}") from error


def recipe_from_data(data: Mapping[str, Any]) -> Recipe:
    """A recipe checked against its types; an unknown key is an error that names the nearest.

    Examples:
        >>> data = {"model": {"name": "opteq-small"}, "data": {"name": "digits"}}
        >>> from equilibria.training.recipe import recipe_from_data
        >>> recipe_from_data({**data, "training": {"epochs": 3}}).training.epochs
        3
    """
    from pydantic import ValidationError

    checked = _checked(data, Recipe, "")
    try:
        recipe: Recipe = _types().validate_python(checked)
        recipe.as_data()
    except ValidationError as error:
        raise RecipeError(explained(error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"options hold what no file of a run can: {error}") from None
    return recipe


@cache
def _types() -> Any:
    """What checks a recipe against its types; making it takes longer than checking."""
    from pydantic import TypeAdapter

    return TypeAdapter(Recipe)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or the one of that name (`list_recipes`), with `key=value` overrides.

    Keys are dotted (`training.epochs=3`, `model.options.channels=16`); values are YAML. For a
    folder of images, one folder a class, or a table of files and labels (CSV), a recipe is chosen
    by what the images are like.

    Examples:
        >>> recipe = eq.training.load_recipe("digits-opteq", ["training.epochs=3"])
        >>> recipe.model.name, recipe.training.epochs
        ('opteq-small', 3)
    """
    from equilibria.training.own_images import is_own_images, recipe_for_path

    if str(source) not in list_recipes() and is_own_images(source):
        asked = with_overrides({}, overrides)
        path, data = Path(source), recipe_for_path(source, asked)
    else:
        path = find_recipe(source)
        data = _read(path)
    data = with_overrides(data, overrides)
    try:
        return recipe_from_data(data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            data = parse_yaml(file.read(MOST_CHARACTERS + 1))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} is not a recipe: it holds no keys")
    return data


def parse_yaml(text: str) -> Any:
    """The data in a text; an error, whatever is wrong with it.

    An alias refers to what stands elsewhere, so that a few lines could hold more than any memory:
    what they hold when all is written out is counted before anything is built.
    """
    import yaml

    try:
        if len(text) > MOST_CHARACTERS:
            raise RecipeError(f"longer than {MOST_CHARACTERS:,} characters: shorten it")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _written_out(root, {}) > MOST_VALUES:
            raise RecipeError(f"more than {MOST_VALUES:,} values with its aliases: write fewer")
        return loader.construct_document(root)
    except RecursionError:
        raise RecipeError("nested too deeply: write fewer levels") from None
    except RecipeError:
        raise
    except Exception as error:
        # Besides its own errors, PyYAML lets those of dates and numbers pass.
        raise RecipeError(" ".join(str(error).split())) from None


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values there are at a node and below it, each as often as it is referred to."""
    if id(node) not in known:
        # A node that is below itself has no end.
        known[id(node)] = MOST_VALUES + 1
        below = [] if isinstance(node.value, str) else node.value
        parts = (part for item in below for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = min(1 + sum(_written_out(part, known) for part in parts), MOST_VALUES + 1)
    return known[id(node)]


def recipe_for(
    data: DataSet, source: str | Path | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe for a data set that is given in Python: one that is chosen, or `source`."""
    from equilibria.training.own_images import recipe_for_data

    if source is None:
        chosen = recipe_for_data(data, with_overrides({}, overrides))
    else:
        chosen = _read(find_recipe(source))
    chosen = with_overrides(chosen, overrides)
    chosen["data"] = {**chosen.get("data", {}), "name": GIVEN}
    return given_to(recipe_from_data(chosen))


def given_to(recipe: Recipe) -> Recipe:
    """The recipe with a data set that is given in Python in the place of its own."""
    data = dataclasses.replace(recipe.data, name=GIVEN, root=None, options={})
    return dataclasses.replace(recipe, data=data)


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe, given by its path or its name.

    Examples:
        >>> from equilibria.training.recipe import find_recipe
        >>> find_recipe("digits-opteq").name
        'digits-opteq.yaml'
    """
    path = Path(source)
    if path.is_file():
        return path
    known = list_recipes()
    if str(source) in known:
        return known[str(source)]
    listed = f" There are: {', '.join(known)}." if known else ""
    raise RecipeError(
        f"there is no recipe, folder or table {str(source)!r}{nearest(source, known)}{listed}"
    )


def list_recipes() -> dict[str, Path]:
    """The recipes by name: those of the package, and those of a folder `recipes` here.

    A recipe here comes before one of the package that has the same name.

    Examples:
        >>> "digits-opteq" in eq.training.list_recipes()
        True
    """
    return {
        path.stem: path
        for folder in (PACKAGED, Path("recipes").resolve())
        if folder.is_dir()
        for path in sorted(folder.glob("*.yaml"))
    }


def _checked(data: Mapping[str, Any], kind: type, place: str) -> dict[str, Any]:
    """Refuse an unknown key, naming the nearest known one."""
    hints = typing.get_type_hints(kind)
    found = dict(data)
    for key, value in data.items():
        if key not in hints:
            where = f" in {place!r}" if place else ""
            raise RecipeError(
                f"unknown key {key!r}{where}{nearest(key, hints)} Known: {', '.join(hints)}."
            )
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            found[key] = _checked(value, hints[key], f"{place}.{key}".lstrip("."))
    return found


def with_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The data of a recipe with `key=value` changes, made in it.

    Examples:
        >>> from equilibria.training.recipe import with_overrides
        >>> with_overrides({"training": {"epochs": 30}}, ["training.epochs=3"])
        {'training': {'epochs': 3}}
    """
    for override in overrides:
        _override(data, override)
    return data


def _override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"an override is key=value, e.g. training.epochs=3, not {override!r}")
    *parents, last = key.split(".")
    place = data
    for parent in parents:
        below = place.setdefault(parent, {})
        if not isinstance(below, dict):
            raise RecipeError(f"{key!r}: {parent!r} holds a value, not further keys")
        place = below
    try:
        place[last] = parse_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"{key!r} is not YAML: {error}") from None


def explained(error: Any) -> str:
    """Pydantic's findings, a line each, with the place in the recipe's own words."""
    lines = []
    for finding in error.errors():
        place = ".".join(str(part) for part in finding["loc"])
        message = finding["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)
