"""What the explorer shows of a photograph: how noise leaves it, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data.image_files import BRIGHTEST, as_pixels, decode_image, image_to_tensor
from equilibria.images import Framing
from equilibria.inputs import Denoising, PhotoSettings
from equilibria.models import PhotoRestorer, photo_prior
from equilibria.serving.answers import finite
from equilibria.serving.exploring import as_png
from equilibria.solvers import Solver
from equilibria.solvers.convergence import Iterate, StoppingCriterion

PHOTO_SIDE = 320
"""Of a photograph, so that an answer comes soon."""
SHOWN = (1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 80, 100, 130, 160)
"""Iterations of which the picture is shown on the way: to draw all would take longer than these."""
Tell = Callable[[dict[str, Any]], None]


def sample_photos() -> dict[str, Path]:
    """Photographs that scikit-learn brings along, by name."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "datasets" / "images"
    named = {"temple": folder / "china.jpg", "flower": folder / "flower.jpg"}
    return {name: path for name, path in named.items() if path.is_file()}


@dataclass(frozen=True)
class Watched(StoppingCriterion):
    """Another criterion; what it sees is passed on."""

    criterion: StoppingCriterion
    see: Callable[[Tensor], None]

    def reached(self, iterate: Iterate) -> Tensor:
        state = iterate.problem.unpack(iterate.image)
        assert isinstance(state, Tensor)
        self.see(state)
        return self.criterion.reached(iterate)


@torch.no_grad()
def restored_photo(content: bytes, noise: float, tell: Tell, seed: int = 0) -> dict[str, Any]:
    """A photograph with noise added, and what the prior that comes with the package makes of it.

    tell: is told what the page can show on the way: the noisy picture at once, then iterates.
    """
    image = decode_image(content, is_gray=None, framing=Framing.make(PHOTO_SIDE))
    image.thumbnail((PHOTO_SIDE, PHOTO_SIDE))
    photo = as_pixels(image_to_tensor(image))[None]
    seen = Denoising(noise=noise).corrupt(photo, torch.Generator().manual_seed(seed))
    tell({"seen": as_png(seen.measured[0]), "before": _psnr(seen.measured, photo)})
    restorer = PhotoSettings().restorer(photo_prior(), seen, strength=1.0)
    shown = _Shown(restorer, seen.measured, photo, tell)
    found = restorer.restore(seen.measured, seen.measurement, solver=shown.solver)
    bound = None if found.bound is None else finite(BRIGHTEST * float(found.bound))
    last = shown.step(found.images, found.solution.state, int(found.solution.iterations[0]))
    return {**last, "bound": bound}


class _Shown:
    """Iterates of a solve as the page shows them, with the objective where they are."""

    def __init__(
        self, restorer: PhotoRestorer, measured: Tensor, photo: Tensor, tell: Tell
    ) -> None:
        padded, operator = restorer.mirrored(measured, None)
        layer, inputs = restorer.layer(padded, operator, padded)
        self.objective = layer.objective(inputs)
        self.edge = restorer.margin(operator) * restorer.factor
        self.photo, self.tell, self.count = photo, tell, 0
        usual = layer.solving.solver
        assert isinstance(usual, Solver)
        assert usual.stop is not None
        self.solver = replace(usual, stop=Watched(usual.stop, self.see))

    def see(self, state: Tensor) -> None:
        self.count += 1
        if self.count in SHOWN:
            height, width = (size - self.edge for size in state.shape[2:])
            inside = state[..., self.edge : height, self.edge : width]
            self.tell(self.step(inside, state, self.count))

    def step(self, images: Tensor, state: Any, iteration: int) -> dict[str, Any]:
        return {
            "iteration": iteration,
            "restored": as_png(images[0]),
            "after": _psnr(images, self.photo),
            "objective": finite(float(self.objective.value(state)[0])),
        }


def _psnr(images: Tensor, truth: Tensor) -> float | None:
    return finite(float(-10 * (images.clamp(0, 1) - truth).square().mean().log10()))
