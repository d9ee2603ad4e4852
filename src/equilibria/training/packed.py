"""A trained model in one file: weights, the recipe, and what its images are like."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibria.models.pretrained import HEADER, KIND
from equilibria.training.files import json_text, save_weights

if TYPE_CHECKING:
    from equilibria.training.experiment import RecipeModel


def pack(run: RecipeModel, path: Path, **card: Any) -> None:
    """Write the model of a run, so that `load` needs nothing but the file.

    card: what else there is to say of it, such as measured figures.
    """
    recipe = run.recipe.as_data()
    recipe["data"] |= {"root": None, "workers": None}
    known = {
        "kind": KIND,
        "model": {"name": run.recipe.model.name, "options": run.model_options()},
        "recipe": recipe,
        "images": asdict(run.images),
        "card": card,
    }
    # Sorted, so that equal models are equal files.
    text = json.dumps(json.loads(json_text(known)), sort_keys=True, ensure_ascii=False)
    save_weights(run.model, path, {HEADER: text})
