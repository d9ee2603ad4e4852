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

MAX_CHARACTERS, MAX_VALUES = 2**18, 10_000
"""Limits for the size of a recipe; those of the package have at most 5,000 and 100."""
PACKAGED = Path(str(resources.files("equilibria") / "recipes"))
"""Folder of the recipes of the package."""
GIVEN = "given"
"""Name in a recipe for a data set that was passed in Python."""
MAX_THREADS = 1024
"""Largest number of threads or workers; starting many more would kill the process."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Model of a recipe.

    Attributes:
        name: Name of a registered model.
        options: Options of the model. Channels and classes follow from the data by default.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Data set of a recipe.

    Attributes:
        name: Name of a registered data set.
        root: Folder of all data sets; by default the environment variable EQUILIBRIA_DATA.
        options: Options of the data set.
        in_memory: Whether to read image files once before the training instead of in every epoch.
        workers: Number of processes that read image files ahead; None for the number of cores
            minus one. Results do not depend on it.
        augmentation: Augmentations of training images in order: names, or names with options.
        normalize: Whether to scale every channel to mean 0 and variance 1, with the published
            statistics or those of a sample of training images.
        validation: Samples that are evaluated after every epoch: a share of the training images,
            which is held out, or "own" for the published validation part.
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
            raise ValueError(f"validation must be in [0, 1) or 'own', got {self.validation}")
        if self.workers is not None and not 0 <= self.workers <= MAX_THREADS:
            raise ValueError(f"workers must be from 0 to {MAX_THREADS}, got {self.workers}")


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """Task of a recipe.

    Attributes:
        name: Name of a registered task. None for classification or segmentation, depending on the
            data.
        options: Options of the named task.
        label_smoothing: Label smoothing of a classification, if `name` is None.
    """

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.name is None and self.options:
            raise ValueError("task.options needs task.name: add the name of the task")
        if self.name is not None and self.label_smoothing:
            raise ValueError("with task.name, move label_smoothing to task.options")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a training run depends on.

    Attributes:
        model: The model and its options.
        data: The data set, augmentation and validation.
        training: Settings of the training.
        task: The task and its options.
        threads: Number of CPU threads; None for PyTorch's default. Small images need only one.
        about: Description of the recipe.

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
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be from 1 to {MAX_THREADS}, got {self.threads}")

    def as_data(self) -> dict[str, Any]:
        """Return the recipe as plain data for YAML, with lists instead of tuples."""
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        for rare in ("continued_at", "steps"):
            if not getattr(self.training, rare):
                del data["training"][rare]
        return data


class RecipeError(ValueError):
    """A recipe is not valid."""


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Prefix errors with the recipe key that caused them."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
    except Exception as error:
        raise RecipeError(f"{place}: {type(error).__name__}: {error}") from error


def recipe_from_data(data: Mapping[str, Any]) -> Recipe:
    """Make a recipe from plain data.

    Args:
        data: Content of a recipe file.

    Raises:
        RecipeError: If a key is unknown or a value is not valid.

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
        raise RecipeError(validation_messages(error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"an option has a value that JSON cannot represent: {error}") from None
    return recipe


@cache
def _types() -> Any:
    """Return the validator of recipes, which is slow to create."""
    from pydantic import TypeAdapter

    return TypeAdapter(Recipe)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe, or choose one for images of the user.

    Args:
        source: YAML file, or name of a recipe (`list_recipes`). For a folder of images with one
            folder per class, or a table of files and labels (CSV), a recipe is chosen.
        overrides: Changes as "key=value". Keys are dotted (`training.epochs=3`,
            `model.options.channels=16`); values are YAML.

    Raises:
        RecipeError: If there is no such recipe, or it is not valid.

    Examples:
        >>> recipe = eq.training.load_recipe("digits-opteq", ["training.epochs=3"])
        >>> recipe.model.name, recipe.training.epochs
        ('opteq-small', 3)
    """
    from equilibria.training.own_images import is_own_images, recipe_for_path

    if str(source) not in list_recipes() and is_own_images(source):
        requested = with_overrides({}, overrides)
        path, data = Path(source), recipe_for_path(source, requested)
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
            data = parse_yaml(file.read(MAX_CHARACTERS + 1))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} is not a recipe: it has no keys")
    return data


def parse_yaml(text: str) -> Any:
    """Parse YAML of bounded size; any problem raises `RecipeError`.

    With aliases, a few lines can describe more values than fit into memory. Values are therefore
    counted before they are built.
    """
    import yaml

    try:
        if len(text) > MAX_CHARACTERS:
            raise RecipeError(f"it has more than {MAX_CHARACTERS:,} characters: shorten it")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _count_values(root, {}) > MAX_VALUES:
            raise RecipeError(
                f"it has more than {MAX_VALUES:,} values including aliases: shorten it"
            )
        return loader.construct_document(root)
    except RecursionError:
        raise RecipeError("it is nested too deeply: use fewer levels") from None
    except RecipeError:
        raise
    except Exception as error:
        # PyYAML does not convert the errors of dates and numbers to its own.
        raise RecipeError(" ".join(str(error).split())) from None


def _count_values(node: Any, counts: dict[int, int]) -> int:
    """Count the values at and below a node, with aliases expanded."""
    if id(node) not in counts:
        # This value is used if the node contains itself, which would be infinite.
        counts[id(node)] = MAX_VALUES + 1
        below = [] if isinstance(node.value, str) else node.value
        parts = (part for item in below for part in (item if isinstance(item, tuple) else (item,)))
        total = 1 + sum(_count_values(part, counts) for part in parts)
        counts[id(node)] = min(total, MAX_VALUES + 1)
    return counts[id(node)]


def recipe_for(
    data: DataSet, source: str | Path | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """Return the recipe `source`, or a chosen one, for a data set that is passed in Python."""
    from equilibria.training.own_images import recipe_for_data

    if source is None:
        chosen = recipe_for_data(data, with_overrides({}, overrides))
    else:
        chosen = _read(find_recipe(source))
    chosen = with_overrides(chosen, overrides)
    chosen["data"] = {**chosen.get("data", {}), "name": GIVEN}
    return with_given_data(recipe_from_data(chosen))


def with_given_data(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe for a data set that is passed in Python."""
    data = dataclasses.replace(recipe.data, name=GIVEN, root=None, options={})
    return dataclasses.replace(recipe, data=data)


def find_recipe(source: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        source: Path or name of the recipe.

    Raises:
        RecipeError: If there is no such recipe.

    Examples:
        >>> from equilibria.training.recipe import find_recipe
        >>> find_recipe("digits-opteq").name
        'digits-opteq.yaml'
    """
    path = Path(source)
    if path.is_file():
        return path
    recipes = list_recipes()
    if str(source) in recipes:
        return recipes[str(source)]
    listed = f" Available: {', '.join(recipes)}." if recipes else ""
    raise RecipeError(
        f"there is no recipe, folder or table {str(source)!r}{nearest(source, recipes)}{listed}"
    )


def list_recipes() -> dict[str, Path]:
    """Return the files of all recipes by name.

    These are the recipes of the package and of the folder `recipes` in the current folder, which
    take precedence.

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


def is_of_package(model: ModelRecipe) -> bool:
    """Return whether a recipe of the package has this model with the same options.

    Args:
        model: Model of a recipe; its tolerance may differ.
    """

    def essential(options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name != "tolerance"}

    for path in PACKAGED.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if model.name in text:
            known = parse_yaml(text)["model"]
            if known["name"] == model.name and essential(known.get("options", {})) == essential(
                model.options
            ):
                return True
    return False


def _checked(data: Mapping[str, Any], kind: type, place: str) -> dict[str, Any]:
    """Return a copy of the data; raise for unknown keys and suggest similar ones."""
    hints = typing.get_type_hints(kind)
    result = dict(data)
    for key, value in data.items():
        if key not in hints:
            where = f" in {place!r}" if place else ""
            raise RecipeError(
                f"unknown key {key!r}{where}{nearest(key, hints)} Known: {', '.join(hints)}."
            )
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            result[key] = _checked(value, hints[key], f"{place}.{key}".lstrip("."))
    return result


def with_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` changes to the data of a recipe, in place.

    Args:
        data: Data of the recipe, which is modified.
        overrides: The changes.

    Returns:
        The modified data.

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
        raise RecipeError(
            f"an override must be key=value, such as training.epochs=3, got {override!r}"
        )
    *parents, last = key.split(".")
    place = data
    for parent in parents:
        below = place.setdefault(parent, {})
        if not isinstance(below, dict):
            raise RecipeError(f"{key!r}: {parent!r} is a value and has no keys")
        place = below
    try:
        place[last] = parse_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"{key!r} is not YAML: {error}") from None


def validation_messages(error: Any) -> str:
    """Return the messages of a `ValidationError`, each with the key in the recipe."""
    messages = []
    for entry in error.errors():
        key = ".".join(str(part) for part in entry["loc"])
        message = entry["msg"].removeprefix("Value error, ")
        messages.append(f"{key}: {message}" if key else message)
    return "; ".join(messages)
