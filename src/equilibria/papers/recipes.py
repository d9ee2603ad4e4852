"""Short ways to write the recipes of a table."""

from __future__ import annotations

from typing import Any

from equilibria.papers.table import RecipeData

CROP_AND_FLIP = [{"crop": {"padding": 4}}, "flip"]


def recipe(
    model: str,
    data: RecipeData,
    training: RecipeData,
    *,
    task: RecipeData | None = None,
    **options: Any,
) -> RecipeData:
    """A recipe; `options` are the model's."""
    made: dict[str, Any] = {
        "model": {"name": model, "options": options},
        "data": dict(data),
        "training": dict(training),
    }
    return made if task is None else {**made, "task": dict(task)}


def sgd(epochs: int, *, milestones: list[int], **options: Any) -> RecipeData:
    """SGD with momentum 0.9 and a learning rate that falls in steps."""
    return {
        "epochs": epochs,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "schedule": "step",
        "milestones": milestones,
        "clip_norm": 5.0,
        **options,
    }


def unrolled(steps: int) -> RecipeData:
    """The gradient rule: differentiate through so many iterations."""
    return {"name": "unrolled", "steps": steps}


def part(name: str, **options: Any) -> RecipeData:
    """A solver, regularizer or gradient rule with its options."""
    return {"name": name, **options}


def sam(regularizer: RecipeData, **options: Any) -> RecipeData:
    """The solver that leads to the fixed point of least regularizer (OptEq Section 5.2, R†)."""
    return {"name": "sam", "regularizer": regularizer, **options}


# --- Full settings ------------------------------------------------------------------------------

CIFAR10: RecipeData = {"name": "cifar10", "augmentation": CROP_AND_FLIP, "normalize": True}
CIFAR100: RecipeData = {**CIFAR10, "name": "cifar100"}
LARGE_IMAGES: RecipeData = {
    "options": {"size": 256, "resize": 256},
    "augmentation": [{"crop": {"padding": 32}}, "flip"],
    "normalize": True,
}
IMAGENETTE: RecipeData = {"name": "imagenette", **LARGE_IMAGES}
IMAGENET100: RecipeData = {"name": "imagenet100", **LARGE_IMAGES}
IMAGENET: RecipeData = {
    "name": "imagenet",
    **LARGE_IMAGES,
    "options": {"size": 224, "resize": 256},
}

# --- Quick settings -----------------------------------------------------------------------------

QUICK_CIFAR10: RecipeData = {
    "name": "cifar10",
    "options": {"train_samples": 2000, "test_samples": 2000},
    "augmentation": CROP_AND_FLIP,
    "normalize": True,
}
_ALPHABETS = ["Greek", "Japanese_(katakana)", "Korean", "Latin"]
_OTHERS = ["Balinese", "Early_Aramaic", "Sanskrit", "Tagalog"]
_DRAWINGS: RecipeData = {"parting": "drawings", "size": 32, "threads": 1}
QUICK_CHARACTERS: RecipeData = {
    "name": "omniglot",
    "options": {**_DRAWINGS, "alphabets": _ALPHABETS},
    "in_memory": True,
}
QUICK_ALPHABETS: RecipeData = {
    "name": "omniglot",
    "options": {
        **_DRAWINGS,
        "alphabets": [*_ALPHABETS, *_OTHERS],
        "labels": "alphabets",
        "train_samples": 2000,
    },
    "in_memory": True,
}
QUICK_STREETS: RecipeData = {
    "name": "camvid",
    "options": {"threads": 1},
    "augmentation": [{"scale_crop": {"size": [88, 120], "scales": [0.75, 1.5]}}, "flip"],
    "in_memory": True,
}


def quick_training(epochs: int, **options: Any) -> RecipeData:
    """The training of all quick runs: AdamW, a cosine, a loose tolerance, one-step gradients."""
    return {
        "epochs": epochs,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "weight_decay": 0.05,
        "tolerance": 1e-2,
        "evaluation_tolerance": 1e-3,
        "gradient": "one_step",
        **options,
    }
