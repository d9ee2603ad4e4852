"""What the explorer shows of a classifier: a solve step by step, an attack and its certificate."""

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

MOST_STEPS = 60
"""Of a solve, that are shown."""
SAMPLES = 12
SHOWN_SIDE = 160
"""Pixels of a picture on the page, at least."""


@dataclass(frozen=True)
class Knob:
    """An option of a model that can be moved after training: it changes no weight's shape."""

    name: str
    label: str
    least: float
    most: float
    step: float


KNOBS = (
    Knob("alpha", "α, the share of a step", 0.05, 1.0, 0.05),
    Knob("damping", "damping", 0.05, 1.0, 0.05),
    Knob("zeta", "ζ, the bound of ‖W‖", 0.05, 1.2, 0.05),
    Knob("diversity", "λ, the weight of diversity", 0.0, 0.1, 0.005),
)


class Explored:
    """A classifier that can be looked into."""

    def __init__(self, name: str, run: RecipeModel) -> None:
        self.name = name
        self.run = run
        self.answerer = Answerer(run.model)
        own = {**model_options(run.recipe.model.name), **run.recipe.model.options}
        self.knobs = {
            knob: float(own[knob.name])
            for knob in KNOBS
            if isinstance(own.get(knob.name), float | int)
        }

    def facts(self) -> dict[str, Any]:
        """What the page offers."""
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
            # As they are: one that was enlarged would come back blurred.
            "samples": [as_png(image, side=1) for image in self.samples()],
        }

    def samples(self) -> Tensor:
        """Digits for a model of digits; other pictures are drawn or brought along."""
        if tuple(self.run.images.image_shape) != (1, 8, 8):
            return torch.zeros(0, 1, 8, 8)
        return load_digits().test.fetch(torch.arange(SAMPLES))[0]

    def confidence(self) -> float:
        """Confidence of the model in its first sample; 0 where it has no samples or no answer."""
        samples = self.samples()[:1]
        if not len(samples):
            return 0.0
        (answer,) = self.answerer(list(samples))
        return answer.confidence or 0.0

    def changed(self, asked: Mapping[str, float]) -> nn.Module:
        """The model with some knobs moved."""
        moved = {
            knob.name: asked[knob.name]
            for knob, value in self.knobs.items()
            if knob.name in asked and not math.isclose(asked[knob.name], value)
        }
        if not moved:
            return self.run.model
        recipe, images = self.run.recipe, self.run.images
        options = {**fitting_options(recipe.model.name, images), **recipe.model.options, **moved}
        if images.normalization is not None:
            options["normalize"] = images.normalization
        model = create_model(recipe.model.name, images=images, **options)
        model.load_state_dict(self.run.model.state_dict())
        return model.eval()

    def follow(self, image: Tensor, asked: Mapping[str, float], solver: str) -> dict[str, Any]:
        """A solve step by step, and what is certain at its end."""
        model = self.changed(asked)
        answerer = self.answerer if model is self.run.model else Answerer(model)
        tolerance, most = asked.get("tolerance"), int(asked.get("max_iterations", MOST_STEPS))
        chosen = {"tolerance": tolerance, "max_iterations": min(most, MOST_STEPS)}
        steps: list[dict[str, Any]] = []
        with torch.no_grad(), solving(model, solver=solver, **chosen):  # type: ignore[arg-type]
            if isinstance(model, EquilibriumModel):
                # In double precision, where the last digits of an objective still mean something.
                precise = copy.deepcopy(model).cpu().double()
                with solving(precise, solver=solver, **chosen):  # type: ignore[arg-type]
                    steps = _steps(precise, image[None].double())
            (answer,) = answerer([image])
        return {"picture": as_png(image), "steps": steps, "answer": vars(answer)}

    def fool(self, image: Tensor, eps: float, method: str) -> dict[str, Any]:
        """The worst picture within eps, and whether the certificate held."""
        model = self.run.model
        (before,) = self.answerer([image])
        names = self.run.images.class_names
        label = torch.tensor([names.index(before.label) if before.label in names else 0])
        found = attack(model, image[None], label, norm="l2", eps=eps, method=method, steps=20)
        (after,) = self.answerer([found.images[0]])
        promised = before.certified and before.radius is not None and eps <= before.radius
        return {
            "picture": as_png(found.images[0]),
            "difference": as_png(0.5 + 0.5 * _scaled(found.images[0] - image)),
            "distance": float(found.distance[0]),
            "before": vars(before),
            "after": vars(after),
            "changed": after.label != before.label,
            "promised": promised,
        }


def _scaled(difference: Tensor) -> Tensor:
    largest = float(difference.abs().max())
    return difference / largest if largest > 0 else difference


def _steps(model: EquilibriumModel, images: Tensor) -> list[dict[str, Any]]:
    """Residual, objective, error bar, class shares and feature of every iterate."""
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
    for state in solution.trace.states[:MOST_STEPS]:
        residual = float(distance_per_sample(state, cell.step(state, context))[0])
        feature = cell.output(state, context)
        features.append(_map_of(feature if isinstance(feature, Tensor) else state))
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


def _map_of(feature: Any) -> Tensor:
    """One gray picture of a feature: the mean size of its channels, or its numbers in rows."""
    tensor = state_tensors(feature)[0][0].abs().float()
    if tensor.dim() == 3:
        return tensor.mean(dim=0, keepdim=True)
    flat = tensor.flatten()
    side = math.ceil(math.sqrt(len(flat)))
    return torch.cat([flat, flat.new_zeros(side * side - len(flat))]).reshape(1, side, side)


def as_png(image: Tensor, side: int = SHOWN_SIDE) -> str:
    """A picture as an address that holds it; a smaller one is enlarged, pixel by pixel."""
    picture = image_from_tensor(image.detach().cpu())
    times = max(1, -(-side // max(picture.size)))
    picture = picture.resize((picture.width * times, picture.height * times), 0)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
