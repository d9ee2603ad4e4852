"""Trained models that come with the package: weights, and a card that says where they are from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from equilibria.images import ImageSpec
from equilibria.models.registry import SOLVING, create_model
from equilibria.registry import nearest

SHIPPED = Path(str(resources.files("equilibria") / "weights"))
"""A file of weights and a card, NAME.safetensors and NAME.yaml, for each."""
HEADER = "equilibria"
"""The entry of a file's metadata that describes its model."""
KIND = "equilibria model"
LATENTS = "equilibria.latents"
"""The tensor of a generator's file that holds latents of training images, beside its weights."""


@dataclass(frozen=True, kw_only=True)
class PretrainedCard:
    """What a trained model is, how it was made, and what was measured of it.

    Examples:
        >>> card = eq.models.pretrained_cards()["digits-opteq"]
        >>> card.command
        'equilibria train digits-opteq --output runs/digits-opteq'
        >>> card.figures["accuracy"] > 0.98
        True
    """

    name: str
    summary: str
    model: str
    """The architecture, as `create_model` knows it."""
    task: str
    recipe: str
    command: str
    """What trains it again."""
    data: str
    seed: int
    figures: dict[str, Any] = field(default_factory=dict)
    """Measured on all test images, by the command in `measured_by`."""
    measured_by: str = ""
    certificate: dict[str, Any] = field(default_factory=dict)
    """What is proven of its answers to test images."""
    use: str = ""
    """A command to try."""

    @property
    def file(self) -> Path:
        """Path of the weights."""
        return SHIPPED / f"{self.name}.safetensors"


def pretrained_cards() -> dict[str, PretrainedCard]:
    """The cards of all trained models that come with the package, by name.

    Examples:
        >>> card = eq.models.pretrained_cards()["digits-certified"]
        >>> card.recipe, card.seed
        ('digits-certified', 0)
    """
    found = {}
    for file in sorted(SHIPPED.glob("*.yaml")):
        found[file.stem] = PretrainedCard(
            name=file.stem, **yaml.safe_load(file.read_text(encoding="utf-8"))
        )
    return found


def pretrained_file(name: str) -> Path:
    """The weights of a trained model that comes with the package.

    Examples:
        >>> from equilibria.models.pretrained import pretrained_file
        >>> pretrained_file("digits-opteq").name
        'digits-opteq.safetensors'
    """
    cards = pretrained_cards()
    if name not in cards:
        raise ValueError(
            f"no trained model is called {name!r}{nearest(name, cards)} There are: "
            f"{', '.join(cards)}"
        )
    if cards[name].task == "restore":
        raise ValueError(f"{name} is a prior, and no network of its own: {cards[name].use}")
    return cards[name].file


def header_of(path: Path) -> dict[str, Any]:
    """What a file of weights says of its model; an error where it says nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            held = (opened.metadata() or {}).get(HEADER)
        described = None if held is None else json.loads(held)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no file of weights: {error}") from None
    if not isinstance(described, dict) or described.get("kind") != KIND:
        raise ValueError(
            f"{path} holds weights that do not say of which model: write it by `equilibria export "
            "RUN --format safetensors`"
        )
    return described


def pretrained_model(name: str, **solving: Any) -> nn.Module:
    """A trained model that comes with the package, in evaluation mode.

    It takes pixels in [0, 1], and describes them as `model.images`. solving: options of how it
    solves; others would make another model.
    """
    from safetensors.torch import load_file

    refused = [option for option in solving if option not in SOLVING]
    if refused:
        raise ValueError(
            f"{refused[0]} would make another model than the trained one: leave it out, or train "
            "anew"
        )
    file = pretrained_file(name)
    described = header_of(file)
    options = {**described["model"]["options"], **solving}
    images = ImageSpec.from_data(described["images"])
    model = create_model(described["model"]["name"], images=images, **options)
    weights = load_file(file)
    weights.pop(LATENTS, None)
    model.load_state_dict(weights)
    return model.eval()
