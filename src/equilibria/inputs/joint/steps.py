"""How far x moves: fixed, normalized or measured step lengths, plain or by Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equilibria.inputs.joint.quasi_newton import QuasiNewton
from equilibria.inputs.joint.region import Region

Rule = Literal["gradient", "quasi-newton", "adam"]
Decay = Literal["cosine", "linear", "late", "none"]

SHARE_OF_REGION = 8.0
"""The default length of a normalized step, in units of the region's scale.

So long a step ends where the gradient points, as in the power method; the decay makes it finer.
"""
LONGEST_SHARE = 0.25
"""The longest step of a measured length, as such a share."""
FIRST_SHARE = 0.02
"""The first step of a measured length, before anything is known of the curvature."""
TRUSTED_LAG = 1.0
"""How many times the relative lag of z and μ x must have moved for its gradients to be compared."""
FORGET = 0.97
"""What an estimate of the curvature is multiplied by each step, so that a bad one passes."""
QUASI_NEWTON_MEMORY = 8
FIRST_NEWTON_SHARE, LONGEST_NEWTON_SHARE = 0.125, 0.5
"""Of a quasi-Newton step, as such shares of the region's scale."""
LOWEST_DECAY = 0.05
"""What a decaying step length ends at."""


def decay(kind: Decay, iteration: int, iterations: int) -> float:
    """The factor of the step length at an iteration."""
    if kind == "none" or iterations < 2:
        return 1.0
    share = iteration / (iterations - 1)
    if kind == "late":
        return 1.0 if share < 0.75 else 0.1
    if kind == "linear":
        return 1.0 - (1 - LOWEST_DECAY) * share
    return LOWEST_DECAY + (1 - LOWEST_DECAY) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class StepOptions:
    """The part of `optimize_input`'s options that concerns x."""

    step_size: float | None
    normalize: bool
    rule: Rule
    decay: Decay
    iterations: int


class Steps:
    """x ← Π(x − α d), with the state that choosing α and d takes, one row a problem.

    normalize: d = g/‖g‖ and α a length. Otherwise d = g, and α is the step size that was given or,
    without one, 1/L with L the largest ‖Δg‖/‖Δx‖ seen of late. Adam divides by a
    running scale of its own. Quasi-Newton steps, d = H g with H from the last steps, are for inputs
    without a constraint (a projection would need H's own metric) and without a given step size;
    elsewhere that rule is the plain one.
    """

    def __init__(self, options: StepOptions, region: Region) -> None:
        self.options = options
        self.region = region
        self.length = region.scale
        self.curvature = torch.zeros_like(self.length)
        self.gentlest = torch.full_like(self.length, torch.inf)
        self.last: tuple[Tensor, Tensor] | None = None
        self.moments: tuple[Tensor, Tensor] | None = None
        self.taken = 0
        free = region.center is None and region.low is None
        measured = options.step_size is None and not options.normalize
        newton = options.rule == "quasi-newton" and free and measured
        self.newton = QuasiNewton(QUASI_NEWTON_MEMORY) if newton else None

    def move(
        self, x: Tensor, gradient: Tensor, scale: Tensor, *, lag: Tensor, running: Tensor
    ) -> Tensor:
        """The next x, for a gradient of the scaled loss.

        lag: the residual of z and μ; a change of g means something where x changed by more.
        running: the rows whose estimates are still to change.
        """
        if self.newton is not None:
            self.newton.observe(x, gradient, running)
            self.taken += 1
            return self.region.project(x - self._newton_step(self.newton, gradient))
        factor = decay(self.options.decay, self.taken, self.options.iterations)
        adam = self.options.rule == "adam"
        if self.options.step_size is None and not self.options.normalize:
            self._measure(x, gradient, lag, running)
            factor = factor if adam else 1.0
        direction = self._adam(gradient) if adam else gradient
        self.taken += 1
        return self.region.project(x - self._scaled(direction, scale) * factor)

    def residual(self, x: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
        """‖x − Π(x − α d)‖ with the undecayed α, relative to the region's scale."""
        step = (
            self._scaled(gradient, scale, plain=True)
            if self.newton is None
            else self._newton_step(self.newton, gradient)
        )
        moved = self.region.project(x - step)
        residual: Tensor = torch.linalg.vector_norm(x - moved, dim=1) / self.length
        return residual

    def _scaled(self, direction: Tensor, scale: Tensor, *, plain: bool = False) -> Tensor:
        """α d before the decay."""
        options = self.options
        if options.rule == "adam" and not plain:
            size = options.step_size
            share = LONGEST_SHARE * self.length[:, None] / direction.shape[1] ** 0.5
            return direction * (share if size is None else size)
        norm = torch.linalg.vector_norm(direction, dim=1)
        safe = torch.where(norm > 0, norm, 1.0)
        if options.normalize:
            length = (
                SHARE_OF_REGION * self.length if options.step_size is None else options.step_size
            )
            return direction * (length / safe)[:, None]
        if options.step_size is not None:
            # The step size is that of the loss as it was given; `gradient` is of the scaled one.
            return direction * (options.step_size / scale)[:, None]
        # A kink looks like a huge curvature and makes steps short. What is left to go must not
        # look short as well, so it is told with the gentlest curvature seen of late.
        known = self.curvature > 0
        curvature = torch.minimum(self.gentlest, self.curvature) if plain else self.curvature
        guess = torch.where(known, 1 / torch.where(known, curvature, 1.0), torch.inf)
        first = FIRST_SHARE * self.length / safe
        alpha = torch.where(known, torch.minimum(guess, LONGEST_SHARE * self.length / safe), first)
        return direction * alpha[:, None]

    def _newton_step(self, newton: QuasiNewton, gradient: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(gradient, dim=1)
        safe = torch.where(norm > 0, norm, 1.0)
        step = newton.direction(gradient, FIRST_NEWTON_SHARE * self.length / safe)
        size = torch.linalg.vector_norm(step, dim=1)
        longest = LONGEST_NEWTON_SHARE * self.length
        return step * (longest / torch.maximum(size, longest))[:, None]

    def _measure(self, x: Tensor, gradient: Tensor, lag: Tensor, running: Tensor) -> None:
        if self.last is not None:
            moved = torch.linalg.vector_norm(x - self.last[0], dim=1)
            turned = torch.linalg.vector_norm(gradient - self.last[1], dim=1)
            far = (moved > TRUSTED_LAG * lag * self.length) & torch.isfinite(turned)
            seen = torch.where(far, turned / torch.where(far, moved, 1.0), 0.0)
            latest = torch.maximum(FORGET * self.curvature, seen)
            self.curvature = torch.where(running, latest, self.curvature)
            flattest = torch.minimum(self.gentlest / FORGET, torch.where(seen > 0, seen, torch.inf))
            self.gentlest = torch.where(running, flattest, self.gentlest)
        self.last = (x, gradient)

    def _adam(self, gradient: Tensor) -> Tensor:
        """Adam's direction (Kingma and Ba, 2015) with its usual constants."""
        mean, square = self.moments or (torch.zeros_like(gradient), torch.zeros_like(gradient))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient.square()
        self.moments = (mean, square)
        count = self.taken + 1
        corrected = (square / (1 - 0.999**count)).sqrt()
        tiny = torch.finfo(gradient.dtype).tiny
        floor = (1e-8 * corrected.amax(dim=1, keepdim=True)).clamp_min(tiny)
        return mean / (1 - 0.9**count) / (corrected + floor)
