"""The registry of models: `create_model`, the options, cards and descriptions of named models."""

from __future__ import annotations

import bisect
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar, overload

import torch
import yaml
from torch import nn

from equilibria.equilibrium import EquilibriumLayer, Solving
from equilibria.equilibrium.capabilities import formula, guarantee
from equilibria.images import ImageSpec
from equilibria.models.blocks import normalize_first
from equilibria.models.non_finite import guard
from equilibria.registry import Registry, check_options

Factory = TypeVar("Factory", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class ModelCard:
    """Metadata of a named model.

    Attributes:
        summary: One line for lists of models.
        paper: Publication of the model or of a comparison with it.
        reported: Number of parameters that the paper reports, such as "199 k".
        options: Options passed to the factory.
    """

    summary: str = ""
    paper: str = ""
    reported: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


_models: Registry[nn.Module] = Registry("model")
_cards: dict[str, ModelCard] = {}

SOLVING = {option.name: option.default for option in dataclasses.fields(Solving)}
"""Fields of `Solving` with their defaults; `create_model` takes each as a separate option."""


@overload
def register_model(name: str, factory: Factory, **options: Any) -> Factory: ...


@overload
def register_model(name: str, **options: Any) -> Callable[[Factory], Factory]: ...


def register_model(
    name: str,
    factory: Callable[..., nn.Module] | None = None,
    *,
    summary: str = "",
    paper: str = "",
    reported: str = "",
    replace: bool = False,
    **preset: Any,
) -> Any:
    """Register a model under a name for `create_model`.

    Without `factory`, this is a decorator for a function or a class of models.

    Args:
        name: Name of the model.
        factory: Callable that builds the model from keyword arguments. If it has an argument
            `solving`, `create_model` also accepts the fields of `Solving` as separate options.
        summary: One line for lists of models.
        paper: Publication of the model.
        reported: Number of parameters that the paper reports.
        replace: Replace a model of the same name instead of raising an error.
        preset: Default options of the model, which override those of `factory`.

    Returns:
        The factory, unchanged.

    Examples:
        >>> @eq.register_model("my-net")
        ... def my_net(*, num_classes=10, in_channels=3, width=8):
        ...     return torch.nn.Conv2d(in_channels, num_classes, width)
        >>> eq.create_model("my-net", num_classes=2, in_channels=1)(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 2, 1, 1])
    """
    card = ModelCard(summary, paper, reported, preset)

    def register(made_by: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _models.register(name, made_by, replace=replace)
        _cards[name] = card
        return made_by

    return register if factory is None else register(factory)


def register_presets(family: str, *factories: Callable[..., nn.Module]) -> None:
    """Register the models in the `presets.yaml` of a family.

    Args:
        family: Name of a subpackage of `equilibria.models`.
        factories: Factories whose names are the keys of the file.
    """
    file = resources.files(f"equilibria.models.{family}") / "presets.yaml"
    table = yaml.safe_load(file.read_text("utf-8"))
    for factory in factories:
        for name, card in table[factory.__name__].items():
            options = {key: _tuples(value) for key, value in card.pop("options", {}).items()}
            register_model(name, factory, **card, **options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def model_card(name: str) -> ModelCard:
    """Return the metadata of a named model.

    Args:
        name: Name of the model.

    Examples:
        >>> from equilibria.models.registry import model_card
        >>> model_card("opteq-small").summary
        'OptEq of width 32 on 32 channels, images of 8×8 to 32×32'
    """
    _models.factory(name)
    return _cards[name]


def list_models() -> list[str]:
    """Return the names of all registered models.

    Examples:
        >>> "mopteq-small" in eq.list_models()
        True
    """
    return _models.names()


def create_model(
    name: str,
    *,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    images: ImageSpec | None = None,
    pretrained: bool = False,
    **overrides: Any,
) -> nn.Module:
    """Build a named model.

    Args:
        name: Name of the model; `list_models()` returns all.
        normalize: Mean and standard deviation of each channel. The first layer then normalizes
            pixels in [0, 1] to mean 0 and variance 1.
        images: Description of the images that the model expects, stored as `model.images` for
            `predict`, `export` and `serve`. It sets no options.
        pretrained: Load a trained model shipped with the package (`equilibria models
            --pretrained` lists them). `overrides` may then only have fields of `Solving`.
        overrides: Options of the model (see `model_options`), such as num_classes and in_channels.
            Equilibrium models also take `solving`, or any fields of it (see `Solving`).

    Returns:
        The model, in training mode; in evaluation mode if `pretrained`.

    Raises:
        ValueError: If the name or the value of an option is unknown or invalid.
        TypeError: If the model has no such option.

    Examples:
        >>> model = eq.create_model("opteq-small", num_classes=3, in_channels=1)
        >>> model(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """
    if pretrained:
        from equilibria.models.pretrained import pretrained_model

        if normalize is not None:
            raise ValueError("a trained model has its own normalization; omit normalize")
        if images is not None:
            raise ValueError("a trained model has its own image specification; omit images")
        return pretrained_model(name, **overrides)
    factory = _models.factory(name)
    known = model_options(name)
    parameters = inspect.signature(factory).parameters
    check_options(f"model {name!r}", factory, overrides, also=known)
    options = {**_cards[name].options, **overrides}
    for option in ("num_classes", "in_channels"):
        count = options.get(option, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{option} must be an integer of at least 1, got {count!r}")
    if "solving" in parameters:
        solving = overrides.get("solving")
        source = options if solving is None else overrides  # `solving` overrides the preset's
        fields = {option: source[option] for option in SOLVING if option in source}
        options = {option: value for option, value in options.items() if option not in SOLVING}
        options["solving"] = Solving(**fields) if solving is None else solving.changed(**fields)
    model = factory(**options)
    guard(model)
    if normalize is not None:
        normalize_first(model, *normalize)
    if images is not None:
        model.images = images  # type: ignore[assignment]
    return model


def model_outline(name: str, **overrides: Any) -> nn.Module:
    """Build a named model on the meta device: its structure and shapes, without any values.

    Args:
        name: Name of the model.
        overrides: Options of the model, as for `create_model`.

    Examples:
        >>> from equilibria.models.registry import model_outline
        >>> outline = model_outline("deep-opteq-1m")
        >>> next(outline.parameters()).device
        device(type='meta')
    """
    with torch.device("meta"):
        return create_model(name, **overrides)


def parameter_count(model: nn.Module) -> int:
    """Return the number of trainable parameters of a model.

    Args:
        model: Any module.

    Examples:
        >>> from equilibria.models.registry import parameter_count
        >>> parameter_count(torch.nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def model_options(name: str) -> dict[str, Any]:
    """Return the options of a named model with their default values.

    Args:
        name: Name of the model.

    Examples:
        >>> eq.models.model_options("opteq-small")["width"]
        32
    """
    parameters = inspect.signature(_models.factory(name)).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    solving = SOLVING if "solving" in options else {}
    return {**options, **solving, **_cards[name].options}


def with_options_of(
    *others: Callable[..., Any], without: Iterable[str] = ()
) -> Callable[[Factory], Factory]:
    """Add keywords of other functions to the signature of a factory that forwards `**options`.

    `help` and `model_options` then list them. Keywords that the factory already has stay.

    Args:
        others: Functions that receive the forwarded options.
        without: Keywords of `others` to exclude.

    Returns:
        A decorator for the factory.
    """
    excluded = set(without)

    def decorate(factory: Factory) -> Factory:
        signature = inspect.signature(factory)
        merged = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
        for other in others:
            for parameter in _keywords(other):
                if parameter.name not in excluded:
                    merged.setdefault(parameter.name, parameter)
        factory.__signature__ = signature.replace(parameters=list(merged.values()))  # type: ignore[attr-defined]
        return factory

    return decorate


def take_options(options: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Remove the options that are keywords of a function, and return them.

    Args:
        options: Options by name; changed in place.
        function: Function whose keyword-only arguments are taken.
    """
    return {p.name: options.pop(p.name) for p in _keywords(function) if p.name in options}


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


@dataclass(frozen=True)
class Part:
    """A submodule that owns parameters.

    Attributes:
        path: Name of the module in the model; empty for the model itself.
        kind: Class of the module.
        details: Its settings, as its `repr` shows them.
        parameters: Number of parameters, excluding those of its submodules.
    """

    path: str
    kind: str
    details: str
    parameters: int


@dataclass(frozen=True)
class ModelDescription:
    """Size, structure, hidden objective and guarantee of a named model.

    Attributes:
        card: Metadata of the model.
        parameters: Number of trainable parameters.
        is_equilibrium: Whether the model has an equilibrium layer.
        objective: Formula of the hidden objective; None if it has none.
        guarantee: Proven properties of the equilibrium; None if there are none.
        parts: Submodules that own parameters.

    Examples:
        >>> description = eq.models.describe_model("mondeq-small")
        >>> description.is_equilibrium, description.objective_kind
        (True, 'no')
    """

    card: ModelCard
    parameters: int
    is_equilibrium: bool
    objective: str | None
    guarantee: str | None
    parts: tuple[Part, ...]

    @property
    def objective_kind(self) -> str:
        """Kind of hidden objective: "yes", "no", or "inclusion" if y* solves an inclusion."""
        if self.objective is None:
            return "no"
        return "inclusion" if "∈" in self.objective else "yes"


def describe_model(name: str, **overrides: Any) -> ModelDescription:
    """Describe a named model without running it.

    Args:
        name: Name of the model.
        overrides: Options of the model, as for `create_model`.

    Examples:
        >>> eq.models.describe_model("opteq-small").objective
        'G(y) = 1ᵀf(y) + ½‖y‖² − ⟨Ux + b, y⟩ − ½‖Wᵀy‖²'
    """
    model = model_outline(name, **overrides)
    layer = getattr(model, "layer", None)
    cell = layer.cell if isinstance(layer, EquilibriumLayer) else None
    parts = []
    for path, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if size:
            parts.append(Part(path, type(module).__name__, module.extra_repr(), size))
    return ModelDescription(
        card=model_card(name),
        parameters=parameter_count(model),
        is_equilibrium=cell is not None,
        objective=None if cell is None else formula(cell),
        guarantee=None if cell is None else guarantee(cell),
        parts=tuple(parts),
    )


def nearest_width(count: Callable[[int], int], parameters: int, *, remedy: str) -> int:
    """Return the width whose parameter count is nearest to a target.

    Args:
        count: Number of parameters as an increasing function of the width.
        parameters: Target number of parameters.
        remedy: Advice for the error message.

    Raises:
        ValueError: If even width 1 has more than `parameters`.

    Examples:
        >>> def count(width):
        ...     return 10 * width**2
        >>> from equilibria.models.registry import nearest_width
        >>> nearest_width(count, 1000, remedy="use fewer layers")
        10
    """
    if count(1) > parameters:
        raise ValueError(
            f"a network of width 1 has {count(1)} parameters, more than parameters={parameters}; "
            f"{remedy}"
        )
    widest = 2
    while count(widest) < parameters:
        widest *= 2
    upper = bisect.bisect_left(range(widest), parameters, lo=2, key=count)
    return min((upper - 1, upper), key=lambda width: abs(count(width) - parameters))
