"""Settings of adversarial attacks, with their geometry and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.inputs.constraints import Box, Constraint, L2Ball, LinfBall
from equilibria.registry import check_pixels, check_values, gray_levels_hint

Norm = Literal["l2", "linf"]
AttackLoss = Literal["cross_entropy", "margin"]
AttackMethod = Literal["pgd", "jiio", "fgsm"]
CHOICES = {"norm": Norm, "loss": AttackLoss, "method": AttackMethod}
DEFAULT_STEPS: dict[AttackMethod, int] = {"pgd": 20, "jiio": 40, "fgsm": 1}
FIRST_STEP, LAST_STEP = 0.5, 0.025
"""Lengths of PGD's first and last steps, in units of eps. They decay as a cosine in between."""
MIN_TOTAL_LENGTH = 2.0
"""Sum of the lengths of all steps, in units of eps. A search with few steps takes longer ones."""


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """Options of `attack`.

    The perturbation δ of an image satisfies ‖δ‖ ≤ eps, and the pixels stay within `clip`.

    Args:
        eps: Largest norm of the perturbation.
        norm: "l2" or "linf", over all pixels of an image.
        method: "pgd" is projected gradient ascent, with one forward and one backward solve per
            step; "fgsm" is a single step of length eps; "jiio" optimizes the image, its equilibrium
            and its adjoint together (`optimize_input`).
        steps: Number of steps; by default 20 for PGD and 40 for JIIO.
        restarts: Number of searches per image, of which the worst image counts. All but the first
            start at random points of the ball.
        step_size: Step length of PGD, by default eps/2 at first and eps/40 at the end, as a cosine,
            and longer for fewer than eight steps. For JIIO the `step_size` of `SearchSettings`.
        random_start: Start the first search at a random point, too.
        warm_start: Start each solve of PGD at the equilibrium of the previous step.
        clip: Lowest and highest value of a pixel; None for no limits.
        loss: Loss that is maximized, "cross_entropy" or "margin".
        tolerance: Tolerance of the solves; by default the model's.
        joint_options: Options of JIIO: engine, iterations, and fields of `SearchSettings`.

    Examples:
        >>> eq.inputs.AttackSettings(eps=0.5, norm="linf", method="pgd", steps=10).steps
        10
    """

    eps: float
    norm: Norm = "l2"
    method: AttackMethod = "pgd"
    steps: int | None = None
    restarts: int = 1
    step_size: float | None = None
    random_start: bool = False
    warm_start: bool = False
    clip: tuple[float, float] | None = (0.0, 1.0)
    loss: AttackLoss = "cross_entropy"
    tolerance: float | None = None
    joint_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(
            self,
            at_least_one=("steps", "restarts"),
            positive=("step_size",),
            not_negative=("eps",),
            tolerances=("tolerance",),
            one_of={name: get_args(kind) for name, kind in CHOICES.items()},
        )
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise ValueError(
                f"clip must be (lowest, highest) with lowest < highest, got {self.clip}; use None "
                "for pixels without limits"
            )
        if self.norm == "linf" and self.clip is not None and tuple(self.clip) == (0.0, 1.0):
            check_pixels(eps=self.eps)
        if self.method == "fgsm" and self.steps not in (None, 1):
            raise ValueError(
                f"fgsm takes a single step, got steps={self.steps}; use method='pgd' for more"
            )
        if self.method == "fgsm" and self.step_size is not None:
            raise ValueError(
                f"the step of fgsm has length eps, got step_size={self.step_size:g}; leave it out"
            )
        for name, method in (("warm_start", "pgd"), ("joint_options", "jiio")):
            if getattr(self, name) and self.method != method:
                raise ValueError(f"{name} needs method={method!r}, got method={self.method!r}")

    def check_eps(self, image_shape: Sequence[int]) -> None:
        """Raise `ValueError` if `eps` exceeds the largest distance between two images.

        Args:
            image_shape: Shape of one image, such as (channels, height, width).
        """
        if self.clip is None:
            return
        largest = self.clip[1] - self.clip[0]
        if self.norm == "l2":
            largest *= math.sqrt(math.prod(image_shape))
        if self.eps > largest * (1 + 1e-6):
            shape = "×".join(map(str, image_shape))
            raise ValueError(
                f"eps must be at most {largest:.4g}, the largest distance ({self.norm}) between two"
                f" images of shape {shape}, got {self.eps:g}{gray_levels_hint(self.eps)}"
            )

    @property
    def chosen_steps(self) -> int:
        """Number of steps; the default of the method if `steps` is None."""
        return DEFAULT_STEPS[self.method] if self.steps is None else self.steps

    def step_length(self, step: int) -> float:
        """Return the length of a step: `step_size`, eps for a single step, or a cosine decay.

        Args:
            step: Index of the step, from 0.
        """
        if self.step_size is not None:
            return self.step_size
        steps = self.chosen_steps
        if steps == 1:
            return self.eps
        share = (1 + math.cos(math.pi * step / (steps - 1))) / 2
        reach = steps * (FIRST_STEP + LAST_STEP) / 2
        longer = max(1.0, MIN_TOTAL_LENGTH / reach)
        return self.eps * longer * (LAST_STEP + (FIRST_STEP - LAST_STEP) * share)

    def constraint(self, images: Tensor) -> Constraint:
        """Return the set of images within `eps` of `images` and within `clip`.

        Args:
            images: Original images, one row per problem.
        """
        ball = L2Ball if self.norm == "l2" else LinfBall
        around = ball(images, self.eps)
        return around if self.clip is None else around & Box(*self.clip)

    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """Return the norm ‖others − images‖ of each image, in double precision.

        Args:
            images: Original images.
            others: Changed images, of the same shape.
        """
        difference = (others.double() - images.double()).flatten(1)
        order = 2 if self.norm == "l2" else math.inf
        length: Tensor = torch.linalg.vector_norm(difference, ord=order, dim=1)
        return length

    def steepest(self, gradient: Tensor) -> Tensor:
        """Return the direction of steepest ascent with norm 1: g/‖g‖₂, or sign(g).

        Args:
            gradient: Gradient g of the loss, one row per image.
        """
        if self.norm == "linf":
            return gradient.sign()
        flat = gradient.flatten(1)
        # Divide by the largest entry first, because the square of a tiny gradient underflows.
        largest = flat.abs().amax(dim=1, keepdim=True)
        return F.normalize(flat / torch.where(largest > 0, largest, 1.0)).reshape(gradient.shape)

    def random_point(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a uniform point of the ball around each image, and project it to `clip`.

        Args:
            images: Original images.
            generator: Source of random numbers; None uses torch's global generator.
        """
        device = images.device if generator is None else generator.device
        count, size = len(images), images[0].numel()
        if self.norm == "linf":
            unit = 2 * torch.rand(count, size, generator=generator, device=device) - 1
        else:
            direction = torch.randn(count, size, generator=generator, device=device)
            direction /= torch.linalg.vector_norm(direction, dim=1, keepdim=True)
            radius = torch.rand(count, 1, generator=generator, device=device) ** (1 / size)
            unit = radius * direction
        moved = images + self.eps * unit.to(images).reshape(images.shape)
        return self.constraint(images).project(moved)


def attack_losses(name: AttackLoss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample.

    "cross_entropy" is the usual training loss. "margin" is the largest wrong logit minus the right
    one: it is positive if the prediction is wrong, and steep where cross-entropy is flat.
    """
    if name == "cross_entropy":
        # In single precision 1 − p of a confident model rounds to zero, and so does the gradient.
        precise = logits if logits.device.type == "mps" else logits.double()
        return F.cross_entropy(precise, labels, reduction="none").to(logits.dtype)
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(dim=1) - right
