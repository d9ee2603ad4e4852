"""Trained models shipped with the package: a file of weights and a descriptive card for each."""

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
"""Folder with NAME.safetensors (weights) and NAME.yaml (card) per model."""
HEADER = "equilibria"
"""Metadata key of a weights file under which the model is described."""
KIND = "equilibria model"
LATENTS = "equilibria.latents"
"""Name of the tensor with latents of training images in the weights file of a generator."""


@dataclass(frozen=True, kw_only=True)
class PretrainedCard:
    """Description of a trained model: architecture, training, measured accuracy and guarantees.

    Attributes:
        name: Name for `create_model(name, pretrained=True)`.
        summary: One line for lists of models.
        model: Name of the architecture for `create_model`.
        task: Command that uses the model, such as "predict".
        recipe: Name of the training recipe.
        command: Command that trains the model again.
        data: Name of the data set.
        seed: Random seed of the training.
        figures: Measurements on all test images, made by the command in `measured_by`.
        measured_by: Command that measures `figures`.
        certificate: Guarantees for outputs on test images.
        use: Example command.

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
    task: str
    recipe: str
    command: str
    data: str
    seed: int
    figures: dict[str, Any] = field(default_factory=dict)
    measured_by: str = ""
    certificate: dict[str, Any] = field(default_factory=dict)
    use: str = ""

    @property
    def file(self) -> Path:
        """Path of the weights."""
        return SHIPPED / f"{self.name}.safetensors"


def pretrained_cards() -> dict[str, PretrainedCard]:
    """Return the cards of all trained models shipped with the package, by name.

    Examples:
        >>> card = eq.models.pretrained_cards()["digits-certified"]
        >>> card.recipe, card.seed
        ('digits-certified', 0)
    """
    cards = {}
    for file in sorted(SHIPPED.glob("*.yaml")):
        cards[file.stem] = PretrainedCard(
            name=file.stem, **yaml.safe_load(file.read_text(encoding="utf-8"))
        )
    return cards


def pretrained_file(name: str) -> Path:
    """Return the path of the weights of a trained model shipped with the package.

    Args:
        name: Name of the trained model, a key of `pretrained_cards()`.

    Raises:
        ValueError: If there is no such model, or it is a prior that cannot run on its own.

    Examples:
        >>> from equilibria.models.pretrained import pretrained_file
        >>> pretrained_file("digits-opteq").name
        'digits-opteq.safetensors'
    """
    cards = pretrained_cards()
    if name not in cards:
        raise ValueError(
            f"there is no trained model {name!r}{nearest(name, cards)} Available: "
            f"{', '.join(cards)}"
        )
    if cards[name].task == "restore":
        raise ValueError(f"{name} is a prior, which cannot run alone; use {cards[name].use!r}")
    return cards[name].file


def header_of(path: Path) -> dict[str, Any]:
    """Read the description of the model from the header of a weights file.

    Args:
        path: Path of a safetensors file.

    Raises:
        ValueError: If the file cannot be read or has no description.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(HEADER)
        header = None if text is None else json.loads(text)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise ValueError(
            f"{path} holds weights without a description of their model; write the file with "
            "`equilibria export RUN --format safetensors`"
        )
    return header


def pretrained_model(name: str, **solving: Any) -> nn.Module:
    """Load a trained model shipped with the package, in evaluation mode.

    Args:
        name: Name of the trained model.
        solving: Options of `Solving`, such as `tolerance`.

    Returns:
        The model, for pixels in [0, 1]; `model.images` describes the images it expects.

    Raises:
        ValueError: If an option is not one of `Solving`, or there is no such model.
    """
    from safetensors.torch import load_file

    refused = [option for option in solving if option not in SOLVING]
    if refused:
        raise ValueError(
            f"a trained model cannot change its option {refused[0]}; omit it, or train a new model"
        )
    file = pretrained_file(name)
    header = header_of(file)
    options = {**header["model"]["options"], **solving}
    images = ImageSpec.from_data(header["images"])
    model = create_model(header["model"]["name"], images=images, **options)
    weights = load_file(file)
    weights.pop(LATENTS, None)
    model.load_state_dict(weights)
    return model.eval()
