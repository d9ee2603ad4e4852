"""What an attack is asked to do, and the geometry it does it in."""

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
"""Lengths of PGD's first and last steps as shares of eps; a cosine lies between them."""
LEAST_REACH = 2.0
"""All steps together, as a share of eps: a few are longer, or they would not leave the ball."""


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """The options of `attack`, checked.

    An image may be changed by ‖δ‖ ≤ eps in a norm, and stays an image: its values within `clip`.

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
                f"clip must be the lowest and the highest value, not {self.clip}; None for no range"
            )
        if self.norm == "linf" and self.clip is not None and tuple(self.clip) == (0.0, 1.0):
            check_pixels(eps=self.eps)
        if self.method == "fgsm" and self.steps not in (None, 1):
            raise ValueError(f"fgsm is one step, not {self.steps}: use method='pgd' for more")
        if self.method == "fgsm" and self.step_size is not None:
            raise ValueError("the step of fgsm is as long as eps: leave out step_size")
        for name, method in (("warm_start", "pgd"), ("joint_options", "jiio")):
            if getattr(self, name) and self.method != method:
                raise ValueError(f"{name} is for method={method!r}, not {self.method!r}")

    def check_eps(self, image_shape: Sequence[int]) -> None:
        """Raise `ValueError` if every image of this shape lies within `eps` of every other.

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
        """Number of steps, by default that of the method."""
        return DEFAULT_STEPS[self.method] if self.steps is None else self.steps

    def step_length(self, step: int) -> float:
        """What was asked for; eps for a single step; or a cosine from long steps to short ones."""
        if self.step_size is not None:
            return self.step_size
        steps = self.chosen_steps
        if steps == 1:
            return self.eps
        share = (1 + math.cos(math.pi * step / (steps - 1))) / 2
        reach = steps * (FIRST_STEP + LAST_STEP) / 2
        longer = max(1.0, LEAST_REACH / reach)
        return self.eps * longer * (LAST_STEP + (FIRST_STEP - LAST_STEP) * share)

    def constraint(self, images: Tensor) -> Constraint:
        """Return the set of images within `eps` of `images`, and within `clip`."""
        ball = L2Ball if self.norm == "l2" else LinfBall
        around = ball(images, self.eps)
        return around if self.clip is None else around & Box(*self.clip)

    def distance(self, images: Tensor, others: Tensor) -> Tensor:
        """‖δ‖ of each image, in double precision."""
        difference = (others.double() - images.double()).flatten(1)
        order = 2 if self.norm == "l2" else math.inf
        length: Tensor = torch.linalg.vector_norm(difference, ord=order, dim=1)
        return length

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of length 1 in which the loss grows most: g/‖g‖₂, or sign(g)."""
        if self.norm == "linf":
            return gradient.sign()
        flat = gradient.flatten(1)
        # Divided by the largest entry first: the square of a tiny gradient is zero.
        largest = flat.abs().amax(dim=1, keepdim=True)
        return F.normalize(flat / torch.where(largest > 0, largest, 1.0)).reshape(gradient.shape)

    def random_point(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Uniform in the ball around each image, then brought into the range."""
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
    """The loss of each sample.

    "cross_entropy" is what training minimizes. "margin" is the best wrong logit less the right one:
    above zero where the prediction is wrong, and steep where cross-entropy has become flat.
    """
    if name == "cross_entropy":
        # Where a model is certain, 1 − p is lost in single precision, and the gradient with it.
        precise = logits if logits.device.type == "mps" else logits.double()
        return F.cross_entropy(precise, labels, reduction="none").to(logits.dtype)
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(dim=1) - right
