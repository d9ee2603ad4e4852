"""How x moves: step lengths, Adam, quasi-Newton steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equilibria.inputs.constraints import Region
from equilibria.solvers.convergence import row_norms

Rule = Literal["gradient", "quasi-newton", "adam"]
Decay = Literal["cosine", "linear", "late", "none"]

LONGEST_SHARE = 0.25
"""The longest step of a measured length, in units of the region's scale."""
FIRST_SHARE = 0.02
"""The first step of a measured length, before anything is known of the curvature."""
TRUSTED_LAG = 1.0
"""How many times the relative lag of z and μ x must have moved for its gradients to be compared."""
FORGET = 0.97
"""What an estimate of the curvature is multiplied by each step, so that a bad one passes."""
QUASI_NEWTON_MEMORY = 8
FIRST_NEWTON_SHARE, LONGEST_NEWTON_SHARE = 0.125, 0.5
"""Of a quasi-Newton step, as such shares of the region's scale."""
LATE = 65
"""How many iterations come before a late drop (JIIO, Appendix C.3)."""
LOWEST_DECAY = 0.05
"""What a decaying step length ends at."""
CURVED = 1e-3
"""The smallest cosine of a step with its change of the gradient that counts as curvature."""
Pair = tuple[Tensor, Tensor, Tensor]
"""A step, the change of the gradient over it, and one over their product, or 0 to leave it out."""


def decay(kind: Decay, iteration: int, iterations: int, late_factor: float) -> float:
    """The factor of the step length at an iteration."""
    if kind == "late":
        return 1.0 if iteration < LATE else late_factor
    if kind == "none" or iterations < 2:
        return 1.0
    share = iteration / (iterations - 1)
    if kind == "linear":
        return 1.0 - (1 - LOWEST_DECAY) * share
    return LOWEST_DECAY + (1 - LOWEST_DECAY) * (1 + math.cos(math.pi * share)) / 2


@dataclass(kw_only=True)
class Steps:
    """x ← Π(x − α d), with the state that choosing α and d takes, one row a problem.

    normalize: d = g/‖g‖ and α a length. Otherwise d = g, and α is the step size that was given or,
    without one, 1/L with L the largest ‖Δg‖/‖Δx‖ seen of late. Adam divides by a
    running scale of its own. Quasi-Newton steps, d = H g with H from the last steps, are for inputs
    without a constraint (a projection would need H's own metric) and without a given step size;
    elsewhere that rule is the plain one.
    """

    region: Region
    step_size: float | None
    normalize: bool
    rule: Rule
    decay: Decay
    late_factor: float
    share: float
    """The default length of a normalized step, in units of the region's scale."""
    iterations: int

    def __post_init__(self) -> None:
        self.length = self.region.scale
        self.curvature = torch.zeros_like(self.length)
        self.gentlest = torch.full_like(self.length, torch.inf)
        self.last: tuple[Tensor, Tensor] | None = None
        self.moments: tuple[Tensor, Tensor] | None = None
        self.taken = 0
        self.measured = self.step_size is None and not self.normalize
        newton = self.rule == "quasi-newton" and self.region.is_everything and self.measured
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
        factor = decay(self.decay, self.taken, self.iterations, self.late_factor)
        adam = self.rule == "adam"
        if self.measured:
            self._measure(x, gradient, lag, running)
            factor = factor if adam else 1.0
        direction = self._adam(gradient) if adam else gradient
        self.taken += 1
        return self.region.project(x - self._scaled(direction, scale) * factor)

    def restart(self, rows: Tensor, gradient: Tensor) -> None:
        """Discard what these problems have learned, because their gradients were wrong.

        Args:
            rows: The problems, as a mask.
            gradient: Their gradients as they are right.
        """
        self.curvature = torch.where(rows, 0.0, self.curvature)
        self.gentlest = torch.where(rows, torch.inf, self.gentlest)
        if self.newton is not None:
            self.newton.forget(rows)
        if self.last is not None:
            self.last = self.last[0], torch.where(rows[:, None], torch.nan, self.last[1])
        if self.moments is not None:
            # As after as many steps with this gradient.
            own = (1 - 0.9**self.taken) * gradient, (1 - 0.999**self.taken) * gradient.square()
            mean, square = (
                torch.where(rows[:, None], new, old)
                for new, old in zip(own, self.moments, strict=True)
            )
            self.moments = (mean, square)

    def residual(self, x: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
        """‖x − Π(x − α d)‖ with the undecayed α, relative to the region's scale."""
        step = (
            self._scaled(gradient, scale, plain=True)
            if self.newton is None
            else self._newton_step(self.newton, gradient)
        )
        moved = self.region.project(x - step)
        return row_norms(x - moved) / self.length

    def _scaled(self, direction: Tensor, scale: Tensor, *, plain: bool = False) -> Tensor:
        """α d before the decay."""
        if self.rule == "adam" and not plain:
            share = LONGEST_SHARE * self.length[:, None] / direction.shape[1] ** 0.5
            return direction * (share if self.step_size is None else self.step_size)
        norm = row_norms(direction)
        safe = torch.where(norm > 0, norm, 1.0)
        if self.normalize:
            length = self.share * self.length if self.step_size is None else self.step_size
            return direction * (length / safe)[:, None]
        if self.step_size is not None:
            # The step size is that of the loss as it was given; `gradient` is of the scaled one.
            return direction * (self.step_size / scale)[:, None]
        # A kink looks like a huge curvature and makes steps short. What is left to go must not
        # look short as well, so it is told with the gentlest curvature seen of late.
        known = self.curvature > 0
        curvature = torch.minimum(self.gentlest, self.curvature) if plain else self.curvature
        guess = torch.where(known, 1 / torch.where(known, curvature, 1.0), torch.inf)
        first = FIRST_SHARE * self.length / safe
        alpha = torch.where(known, torch.minimum(guess, LONGEST_SHARE * self.length / safe), first)
        return direction * alpha[:, None]

    def _newton_step(self, newton: QuasiNewton, gradient: Tensor) -> Tensor:
        norm = row_norms(gradient)
        safe = torch.where(norm > 0, norm, 1.0)
        step = newton.direction(gradient, FIRST_NEWTON_SHARE * self.length / safe)
        size = row_norms(step)
        longest = LONGEST_NEWTON_SHARE * self.length
        return step * (longest / torch.maximum(size, longest))[:, None]

    def _measure(self, x: Tensor, gradient: Tensor, lag: Tensor, running: Tensor) -> None:
        if self.last is not None:
            moved = row_norms(x - self.last[0])
            turned = row_norms(gradient - self.last[1])
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


class QuasiNewton:
    """H g with H the inverse Hessian as the last steps show it (Nocedal, 1980).

    Steps without positive curvature, which kinks and lagging gradients bring, are left out row by
    row, and push nothing out of a full memory: a row that rests keeps what it knows.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.pairs: list[Pair] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def observe(self, x: Tensor, gradient: Tensor, usable: Tensor) -> None:
        """The gradient at the latest x; `usable`: the rows where its change means something."""
        if self.last is not None:
            step, change = x - self.last[0], gradient - self.last[1]
            product = (step * change).sum(dim=1)
            sizes = row_norms(step) * row_norms(change)
            curved = usable & (product > CURVED * sizes) & torch.isfinite(sizes)
            weight = torch.where(curved, 1 / torch.where(curved, product, 1.0), 0.0)
            self._remember((step, change, weight), curved)
        self.last = (x, gradient)

    def forget(self, rows: Tensor) -> None:
        """Discard all pairs of these rows."""
        self.pairs = [
            (step, change, torch.where(rows, 0.0, weight)) for step, change, weight in self.pairs
        ]
        if self.last is not None:
            self.last = self.last[0], torch.where(rows[:, None], torch.nan, self.last[1])

    def _remember(self, pair: Pair, curved: Tensor) -> None:
        if len(self.pairs) < self.memory:
            self.pairs.append(pair)
            return
        shifted = [*self.pairs[1:], pair]
        if not bool(curved.all()):
            rows = curved[:, None]
            shifted = [
                (
                    torch.where(rows, step, old_step),
                    torch.where(rows, change, old_change),
                    torch.where(curved, weight, old_weight),
                )
                for (step, change, weight), (old_step, old_change, old_weight) in zip(
                    shifted, self.pairs, strict=True
                )
            ]
        self.pairs = shifted

    def direction(self, gradient: Tensor, first: Tensor) -> Tensor:
        """H g, or `first` · g in rows that know no curvature yet."""
        result, coefficients = gradient, []
        scale = torch.full_like(first, torch.nan)
        for step, change, weight in reversed(self.pairs):
            coefficient = weight * (step * result).sum(dim=1)
            coefficients.append(coefficient)
            # A row without weight may hold anything: it must not be multiplied by zero.
            result = result - _scaled(coefficient, change, weight)
            square = change.square().sum(dim=1)
            known = torch.isnan(scale) & (weight > 0) & (square > 0)
            scale = torch.where(known, 1 / (weight * torch.where(known, square, 1.0)), scale)
        result = result * torch.where(torch.isnan(scale), first, scale)[:, None]
        for (step, change, weight), coefficient in zip(
            self.pairs, reversed(coefficients), strict=True
        ):
            back = weight * (change * result).sum(dim=1)
            result = result + _scaled(coefficient - back, step, weight)
        downhill = (result * gradient).sum(dim=1) > 0
        return torch.where(downhill[:, None], result, first[:, None] * gradient)


def _scaled(factor: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.where((weight > 0)[:, None], factor[:, None] * rows, 0.0)
