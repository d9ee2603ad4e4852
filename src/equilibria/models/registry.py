"""Models by name: what there is, what is known of each, and how one is made."""

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
    """What is known of a named model before it is built."""

    summary: str = ""
    paper: str = ""
    """Where the model, or the comparison with it, is published."""
    reported: str = ""
    """The number of parameters that the paper reports."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that make the model of its factory."""


_models: Registry[nn.Module] = Registry("model")
_cards: dict[str, ModelCard] = {}

SOLVING = {option.name: option.default for option in dataclasses.fields(Solving)}
"""The single options of how a model solves, which `create_model` makes one `Solving` of."""


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
    """Make a model available by name: `factory` called with `preset` and the user's overrides.

    Without a factory this is a decorator of one, of a class of models for instance.

    `summary` is the line that lists of models show; `paper` and `reported` say where it comes from
    and how many parameters it has there. A factory that takes `solving`, a `Solving`, is given one
    of the options solver, gradient, tolerance, max_iterations and strict.

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
    """Make the models in the `presets.yaml` of a family available, which has them by factory."""
    file = resources.files(f"equilibria.models.{family}") / "presets.yaml"
    table = yaml.safe_load(file.read_text("utf-8"))
    for factory in factories:
        for name, card in table[factory.__name__].items():
            options = {key: _tuples(value) for key, value in card.pop("options", {}).items()}
            register_model(name, factory, **card, **options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def model_card(name: str) -> ModelCard:
    """What is known of a model before it is built.

    Examples:
        >>> from equilibria.models.registry import model_card
        >>> model_card("opteq-small").summary
        'OptEq of width 32 on 32 channels, images of 8×8 to 32×32'
    """
    _models.factory(name)
    return _cards[name]


def list_models() -> list[str]:
    """The names that `create_model` knows.

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
    """The model called `name`, with options overridden.

    A model takes pixels in [0, 1]; `normalize`, the mean and the standard deviation of every
    channel, brings them to mean 0 and variance 1 in its first layer. All models take num_classes
    and in_channels, equilibrium models also solver, gradient, tolerance, max_iterations and strict,
    or all of them as `solving`; `model_options(name)` lists the rest. An unknown name or option is
    an error that names the nearest one.

    images: description of the images that the model expects, stored as `model.images` for
        `predict`, `export` and `serve`. It sets no options.
    pretrained: a trained model that comes with the package, by the name that `equilibria models
        --pretrained` lists; the only options are then those of how it solves.

    Examples:
        >>> model = eq.create_model("opteq-small", num_classes=3, in_channels=1)
        >>> model(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """
    if pretrained:
        from equilibria.models.pretrained import pretrained_model

        if normalize is not None:
            raise ValueError("a trained model has its own normalization: leave out normalize")
        if images is not None:
            raise ValueError("a trained model has its own image specification: leave out images")
        return pretrained_model(name, **overrides)
    factory = _models.factory(name)
    known = model_options(name)
    parameters = inspect.signature(factory).parameters
    check_options(f"model {name!r}", factory, overrides, also=known)
    options = {**_cards[name].options, **overrides}
    for option in ("num_classes", "in_channels"):
        count = options.get(option, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{option} must be a whole number of at least 1, not {count!r}")
    if "solving" in parameters:
        whole = overrides.get("solving")
        given = overrides if whole is not None else options
        single = {option: given[option] for option in SOLVING if option in given}
        options = {option: value for option, value in options.items() if option not in SOLVING}
        options["solving"] = Solving(**single) if whole is None else whole.changed(**single)
    model = factory(**options)
    guard(model)
    if normalize is not None:
        normalize_first(model, *normalize)
    if images is not None:
        model.images = images  # type: ignore[assignment]
    return model


def model_outline(name: str, **overrides: Any) -> nn.Module:
    """The model without memory for its parameters: its structure and sizes, made at once.

    Examples:
        >>> from equilibria.models.registry import model_outline
        >>> outline = model_outline("deep-opteq-1m")
        >>> next(outline.parameters()).device
        device(type='meta')
    """
    with torch.device("meta"):
        return create_model(name, **overrides)


def parameter_count(model: nn.Module) -> int:
    """How many trainable numbers a model has.

    Examples:
        >>> from equilibria.models.registry import parameter_count
        >>> parameter_count(torch.nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def model_options(name: str) -> dict[str, Any]:
    """The options of a model with their values.

    Examples:
        >>> eq.models.model_options("opteq-small")["width"]
        32
    """
    parameters = inspect.signature(_models.factory(name)).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    single = SOLVING if "solving" in options else {}
    return {**options, **single, **_cards[name].options}


def with_options_of(
    *others: Callable[..., Any], without: Iterable[str] = ()
) -> Callable[[Factory], Factory]:
    """For a factory that passes its `**options` on: the keywords of `others` are its options too.

    They show in its signature, and so in `help` and in `model_options`, but for those that the
    factory has itself and those of `without`.
    """
    left_out = set(without)

    def decorate(factory: Factory) -> Factory:
        own = inspect.signature(factory)
        merged = {p.name: p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD}
        for other in others:
            for parameter in _keywords(other):
                if parameter.name not in left_out:
                    merged.setdefault(parameter.name, parameter)
        factory.__signature__ = own.replace(parameters=list(merged.values()))  # type: ignore[attr-defined]
        return factory

    return decorate


def take_options(options: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """The options that are keywords of `function`, taken out."""
    return {p.name: options.pop(p.name) for p in _keywords(function) if p.name in options}


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


@dataclass(frozen=True)
class Part:
    """A module with parameters of its own."""

    path: str
    kind: str
    details: str
    parameters: int


@dataclass(frozen=True)
class ModelDescription:
    """What there is to say of a named model without running it.

    Examples:
        >>> found = eq.models.describe_model("mondeq-small")
        >>> found.is_equilibrium, found.objective_kind
        (True, 'no')
    """

    card: ModelCard
    parameters: int
    is_equilibrium: bool
    objective: str | None
    """The hidden objective as a formula; None where there is none."""
    guarantee: str | None
    """What is proven of the equilibrium; None where nothing is."""
    parts: tuple[Part, ...]

    @property
    def objective_kind(self) -> str:
        """Whether the equilibrium minimizes something: "yes", "no", or it solves an inclusion."""
        if self.objective is None:
            return "no"
        return "inclusion" if "∈" in self.objective else "yes"


def describe_model(name: str, **overrides: Any) -> ModelDescription:
    """The size, the parts, the hidden objective and the guarantee of a named model.

    Examples:
        >>> eq.models.describe_model("opteq-small").objective
        'G(y) = 1ᵀf(y) + ½‖y‖² − ⟨Ux + b, y⟩ − ½‖Wᵀy‖²'
    """
    model = model_outline(name, **overrides)
    layer = getattr(model, "layer", None)
    cell = layer.cell if isinstance(layer, EquilibriumLayer) else None
    parts = []
    for path, module in model.named_modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            parts.append(Part(path, type(module).__name__, module.extra_repr(), own))
    return ModelDescription(
        card=model_card(name),
        parameters=parameter_count(model),
        is_equilibrium=cell is not None,
        objective=None if cell is None else formula(cell),
        guarantee=None if cell is None else guarantee(cell),
        parts=tuple(parts),
    )


def nearest_width(count: Callable[[int], int], parameters: int, *, remedy: str) -> int:
    """The width whose growing `count` is nearest to `parameters`.

    remedy: what to do where even the narrowest network is too large, for the error.

    Examples:
        >>> def count(width):
        ...     return 10 * width**2
        >>> from equilibria.models.registry import nearest_width
        >>> nearest_width(count, 1000, remedy="ask for more")
        10
    """
    if count(1) > parameters:
        raise ValueError(
            f"the smallest network of this form has {count(1)} parameters, more than the "
            f"{parameters} asked for: {remedy}"
        )
    widest = 2
    while count(widest) < parameters:
        widest *= 2
    upper = bisect.bisect_left(range(widest), parameters, lo=2, key=count)
    return min((upper - 1, upper), key=lambda width: abs(count(width) - parameters))
