"""Data for the explorer about a classifier: solves step by step, attacks and certificates."""

from __future__ import annotations

import base64
import copy
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context.state import state_tensors
from equilibria.data import load_digits
from equilibria.data.image_files import image_from_tensor
from equilibria.equilibrium import solving
from equilibria.equilibrium.capabilities import formula
from equilibria.equilibrium.objective import NoObjectiveError, distance_per_sample
from equilibria.inputs import attack
from equilibria.models import EquilibriumModel, create_model, model_options
from equilibria.serving.answers import Answerer, finite
from equilibria.solvers import list_solvers
from equilibria.training.experiment import RecipeModel, fitting_options

MAX_STEPS = 60
"""Maximum number of displayed steps of a solve."""
SAMPLES = 12
"""Number of sample images."""
MIN_SIDE = 160
"""Minimum side length of an image on the page, in pixels."""


@dataclass(frozen=True)
class Knob:
    """Model option that can be changed after training without changing the shape of weights.

    Attributes:
        name: Name of the option.
        label: Label on the page.
        least: Minimum.
        most: Maximum.
        step: Step size of the slider.
    """

    name: str
    label: str
    least: float
    most: float
    step: float


KNOBS = (
    Knob("alpha", "α, relaxation", 0.05, 1.0, 0.05),
    Knob("damping", "damping", 0.05, 1.0, 0.05),
    Knob("zeta", "ζ, bound on ‖W‖", 0.05, 1.2, 0.05),
    Knob("diversity", "λ, weight of diversity", 0.0, 0.1, 0.005),
)


class Explored:
    """A classifier in the explorer.

    Args:
        name: Name shown on the page.
        run: The trained model with its recipe.
    """

    def __init__(self, name: str, run: RecipeModel) -> None:
        self.name = name
        self.run = run
        self.answerer = Answerer(run.model)
        options = {**model_options(run.recipe.model.name), **run.recipe.model.options}
        self.knobs = {
            knob: float(options[knob.name])
            for knob in KNOBS
            if isinstance(options.get(knob.name), float | int)
        }
        """Options that can be changed, with their trained values."""

    def facts(self) -> dict[str, Any]:
        """Return name, description, options and sample images for the page."""
        model = self.run.model
        objective = formula(model.layer.cell) if isinstance(model, EquilibriumModel) else None
        return {
            "name": self.name,
            "model": self.run.recipe.model.name,
            "about": self.run.recipe.about,
            "formula": objective,
            "classes": list(self.run.images.class_names),
            "shape": list(self.run.images.image_shape),
            "solvers": list_solvers(),
            "knobs": [{**vars(knob), "value": value} for knob, value in self.knobs.items()],
            # In original size, because the page sends them back for classification.
            "samples": [as_png(image, side=1) for image in self.samples()],
        }

    def samples(self) -> Tensor:
        """Return sample images: test digits for models of 8×8 digits, otherwise none."""
        if tuple(self.run.images.image_shape) != (1, 8, 8):
            return torch.zeros(0, 1, 8, 8)
        return load_digits().test.fetch(torch.arange(SAMPLES))[0]

    def confidence(self) -> float:
        """Return the confidence in the first sample; 0 without samples or prediction."""
        samples = self.samples()[:1]
        if not len(samples):
            return 0.0
        (answer,) = self.answerer(list(samples))
        return answer.confidence or 0.0

    def changed(self, options: Mapping[str, float]) -> nn.Module:
        """Return the model with changed options, or the model itself if none differ.

        Args:
            options: Values of knobs by name; other entries are ignored.
        """
        changes = {
            knob.name: options[knob.name]
            for knob, value in self.knobs.items()
            if knob.name in options and not math.isclose(options[knob.name], value)
        }
        if not changes:
            return self.run.model
        recipe, images = self.run.recipe, self.run.images
        name = recipe.model.name
        all_options = {**fitting_options(name, images), **recipe.model.options, **changes}
        if images.normalization is not None:
            all_options["normalize"] = images.normalization
        model = create_model(name, images=images, **all_options)
        model.load_state_dict(self.run.model.state_dict())
        return model.eval()

    def follow(self, image: Tensor, options: Mapping[str, float], solver: str) -> dict[str, Any]:
        """Return the iterates of a solve, and the prediction with its certificate, for the page.

        Args:
            image: Image in the model's format, shape (C, H, W).
            options: Values of knobs by name, and optionally `tolerance` and `max_iterations`.
            solver: Name of the solver.
        """
        model = self.changed(options)
        answerer = self.answerer if model is self.run.model else Answerer(model)
        max_iterations = int(options.get("max_iterations", MAX_STEPS))
        limits = {
            "tolerance": options.get("tolerance"),
            "max_iterations": min(max_iterations, MAX_STEPS),
        }
        steps: list[dict[str, Any]] = []
        with torch.no_grad(), solving(model, solver=solver, **limits):  # type: ignore[arg-type]
            if isinstance(model, EquilibriumModel):
                # Double precision resolves small differences of the objective.
                precise = copy.deepcopy(model).cpu().double()
                with solving(precise, solver=solver, **limits):  # type: ignore[arg-type]
                    steps = _steps(precise, image[None].double())
            (answer,) = answerer([image])
        return {"picture": as_png(image), "steps": steps, "answer": vars(answer)}

    def fool(self, image: Tensor, eps: float, method: str) -> dict[str, Any]:
        """Attack an image, and return the predictions before and after.

        Args:
            image: Image in the model's format, shape (C, H, W).
            eps: Maximum L2 distance of the attack, for pixels in [0, 1].
            method: Name of the attack.
        """
        model = self.run.model
        (before,) = self.answerer([image])
        names = self.run.images.class_names
        label = torch.tensor([names.index(before.label) if before.label in names else 0])
        attacked = attack(model, image[None], label, norm="l2", eps=eps, method=method, steps=20)
        (after,) = self.answerer([attacked.images[0]])
        is_certified = before.certified and before.radius is not None and eps <= before.radius
        return {
            "picture": as_png(attacked.images[0]),
            "difference": as_png(0.5 + 0.5 * _scaled(attacked.images[0] - image)),
            "distance": float(attacked.distance[0]),
            "before": vars(before),
            "after": vars(after),
            "changed": after.label != before.label,
            "promised": is_certified,
        }


def _scaled(difference: Tensor) -> Tensor:
    largest = float(difference.abs().max())
    return difference / largest if largest > 0 else difference


def _steps(model: EquilibriumModel, images: Tensor) -> list[dict[str, Any]]:
    """Return residual, error bound, objective, class probabilities and feature of each iterate."""
    solution = model.solve(images, trace="states")
    assert solution.trace is not None
    assert solution.trace.states is not None
    cell, context = model.layer.cell, solution.context
    bound = model.contraction_bound(images)
    q = math.inf if bound is None else float(bound.max())
    try:
        objective = model.objective(images)
        is_minimized = objective.is_minimized
    except NoObjectiveError:
        is_minimized = False
    steps: list[dict[str, Any]] = []
    features: list[Tensor] = []
    for state in solution.trace.states[:MAX_STEPS]:
        residual = float(distance_per_sample(state, cell.step(state, context))[0])
        feature = cell.output(state, context)
        features.append(_as_gray_image(feature if isinstance(feature, Tensor) else state))
        steps.append(
            {
                "residual": finite(residual),
                "error": finite(residual / (1 - q)) if q < 1 else None,
                "objective": finite(float(objective.value(state)[0])) if is_minimized else None,
                "shares": [finite(v) for v in model.head(feature)[0].softmax(dim=0).tolist()],
            }
        )
    brightest = max((float(feature.max()) for feature in features), default=1.0) or 1.0
    for step, feature in zip(steps, features, strict=True):
        step["feature"] = as_png(feature / brightest)
    return steps


def _as_gray_image(feature: Any) -> Tensor:
    """Return a feature as a grayscale image.

    Maps are averaged over channels by magnitude; vectors are arranged in rows.
    """
    tensor = state_tensors(feature)[0][0].abs().float()
    if tensor.dim() == 3:
        return tensor.mean(dim=0, keepdim=True)
    flat = tensor.flatten()
    side = math.ceil(math.sqrt(len(flat)))
    return torch.cat([flat, flat.new_zeros(side * side - len(flat))]).reshape(1, side, side)


def as_png(image: Tensor, side: int = MIN_SIDE) -> str:
    """Return an image as a PNG data URL.

    Args:
        image: Image with values in [0, 1], shape (C, H, W).
        side: Minimum length of the longer side; smaller images are enlarged by a whole factor.
    """
    picture = image_from_tensor(image.detach().cpu())
    factor = max(1, -(-side // max(picture.size)))
    picture = picture.resize((picture.width * factor, picture.height * factor), 0)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
