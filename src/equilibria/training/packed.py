"""A trained model in one file: weights, recipe, and description of the images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibria.models.pretrained import HEADER, KIND, LATENTS, pretrained_cards, pretrained_file
from equilibria.training.files import (
    WEIGHTS_OVERHEAD,
    check_run_file,
    json_text,
    read_weights,
    save_tensors,
)
from equilibria.training.folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from equilibria.training.experiment import RecipeModel


def kept_latents(place: str | Path) -> Tensor | None:
    """Return the latents of training images that are stored with a generator, or None.

    Args:
        place: Folder of a run, a file written by `pack`, or the name of a pretrained model.

    Examples:
        >>> from equilibria.models.pretrained import pretrained_file
        >>> from equilibria.training.packed import kept_latents
        >>> kept_latents(pretrained_file("mnist-generator")).shape
        torch.Size([2000, 24])
    """
    path = Path(place)
    if not path.exists() and str(place) in pretrained_cards():
        path = pretrained_file(str(place))
    if path.is_file():
        return read_weights(path).get(LATENTS)
    run = RunFolder(path)
    # If a run was given more epochs and interrupted, its latents are those of older weights.
    if not run.latents.is_file() or not run.is_finished():
        return None
    check_run_file(run.latents, path)
    return read_weights(run.latents, WEIGHTS_OVERHEAD)["latents"]


def pack(run: RecipeModel, path: Path, *, latents: Tensor | None = None, **card: Any) -> None:
    """Write the model of a run to one file, which `load` reads.

    Args:
        run: The run.
        path: File to write (safetensors).
        latents: For a generator, latents of training images, to which `generate` fits a density.
        card: Further facts to store, such as measured accuracies.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.experiment import trained_model
        >>> eq.training.pack(trained_model("digits-opteq"), Path("mine.safetensors"))
        >>> eq.load("mine.safetensors").images.image_shape
        (1, 8, 8)
    """
    recipe = run.recipe.as_data()
    recipe["data"] |= {"root": None, "workers": None}
    header = {
        "kind": KIND,
        "model": {"name": run.recipe.model.name, "options": run.model_options()},
        "recipe": recipe,
        "images": run.images.as_data(),
        "card": card,
    }
    # Sorted, so that equal models give equal files.
    text = json.dumps(json.loads(json_text(header)), sort_keys=True, ensure_ascii=False)
    extra = {} if latents is None else {LATENTS: latents}
    save_tensors({**run.model.state_dict(), **extra}, path, {HEADER: text})
