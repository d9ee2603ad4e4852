"""Steps of x: step lengths, Adam, quasi-Newton steps."""

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

MAX_STEP = 0.25
"""Longest step whose length comes from the curvature, in units of the region's scale."""
FIRST_STEP = 0.02
"""First such step, before the curvature is known, in units of the region's scale."""
MIN_MOVE_PER_LAG = 1.0
"""Gradients are compared only if x moved by this multiple of the residual of z and μ."""
CURVATURE_DECAY = 0.97
"""Factor of the curvature estimate per step, so that a bad estimate fades."""
QUASI_NEWTON_MEMORY = 8
FIRST_NEWTON_STEP, MAX_NEWTON_STEP = 0.125, 0.5
"""First and longest quasi-Newton step, in units of the region's scale."""
LATE_ITERATION = 65
"""Iteration of the late drop of the step length (JIIO, Appendix C.3)."""
MIN_DECAY = 0.05
"""Factor of the step length at the end of a decay."""
MIN_CURVATURE_COSINE = 1e-3
"""Smallest cosine between a step and the change of the gradient that counts as curvature."""
Pair = tuple[Tensor, Tensor, Tensor]
"""A step, the change of the gradient, and the inverse of their product, or 0 to ignore the pair."""


def decay(kind: Decay, iteration: int, iterations: int, late_factor: float) -> float:
    """Return the factor of the step length at an iteration."""
    if kind == "late":
        return 1.0 if iteration < LATE_ITERATION else late_factor
    if kind == "none" or iterations < 2:
        return 1.0
    share = iteration / (iterations - 1)
    if kind == "linear":
        return 1.0 - (1 - MIN_DECAY) * share
    return MIN_DECAY + (1 - MIN_DECAY) * (1 + math.cos(math.pi * share)) / 2


@dataclass(kw_only=True)
class Steps:
    """Step rule x ← Π(x − α d) of a search, with its state; one row per problem.

    Π projects to the region of the input x, g is the gradient. With `normalize`, d = g/‖g‖ and α is
    a length. Otherwise d = g, and α is the step size or, by default, 1/L with L the largest recent
    ‖Δg‖/‖Δx‖. Adam scales its direction by running moments. Quasi-Newton steps, d = H g with the
    estimated inverse Hessian H from the last steps, need unconstrained inputs (otherwise the
    projection would have to use the metric of H) and no step size; elsewhere that rule takes
    gradient steps.

    Args:
        region: Region of x.
        step_size: Step size; None chooses it from the curvature.
        normalize: Divide the gradient by its norm.
        rule: Direction of the steps.
        decay: Decay of the step length.
        late_factor: Factor of the step length after the drop of decay="late".
        share: Default length of a normalized step, in units of the region's scale.
        iterations: Number of steps over which the length decays.
    """

    region: Region
    step_size: float | None
    normalize: bool
    rule: Rule
    decay: Decay
    late_factor: float
    share: float
    iterations: int

    def __post_init__(self) -> None:
        self.length = self.region.scale
        self.curvature = torch.zeros_like(self.length)
        """Largest recent curvature; 0 if none is known."""
        self.min_curvature = torch.full_like(self.length, torch.inf)
        """Smallest recent curvature; infinite if none is known."""
        self.last: tuple[Tensor, Tensor] | None = None
        self.moments: tuple[Tensor, Tensor] | None = None
        self.taken = 0
        self.measured = self.step_size is None and not self.normalize
        newton = self.rule == "quasi-newton" and self.region.is_everything and self.measured
        self.newton = QuasiNewton(QUASI_NEWTON_MEMORY) if newton else None

    def move(
        self, x: Tensor, gradient: Tensor, scale: Tensor, *, lag: Tensor, running: Tensor
    ) -> Tensor:
        """Take a step: return the next input x.

        Args:
            x: Inputs, flat, one row per problem.
            gradient: Gradient of the scaled loss.
            scale: Factor of the loss of each problem.
            lag: Residual of equilibrium and adjoint. Changes of the gradient count only if x moved
                by more.
            running: Mask of the problems whose estimates are updated.
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
        """Discard the estimates of problems whose gradients were wrong.

        Args:
            rows: Mask of the problems.
            gradient: Correct gradients.
        """
        self.curvature = torch.where(rows, 0.0, self.curvature)
        self.min_curvature = torch.where(rows, torch.inf, self.min_curvature)
        if self.newton is not None:
            self.newton.forget(rows)
        if self.last is not None:
            self.last = self.last[0], torch.where(rows[:, None], torch.nan, self.last[1])
        if self.moments is not None:
            # The moments after the same number of steps with this gradient.
            moments = (1 - 0.9**self.taken) * gradient, (1 - 0.999**self.taken) * gradient.square()
            mean, square = (
                torch.where(rows[:, None], new, old)
                for new, old in zip(moments, self.moments, strict=True)
            )
            self.moments = (mean, square)

    def residual(self, x: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
        """Return the length ‖x − Π(x − α d)‖ of an undecayed, projected step of x.

        It is relative to the scale of the region.
        """
        step = (
            self._scaled(gradient, scale, plain=True)
            if self.newton is None
            else self._newton_step(self.newton, gradient)
        )
        moved = self.region.project(x - step)
        return row_norms(x - moved) / self.length

    def _scaled(self, direction: Tensor, scale: Tensor, *, plain: bool = False) -> Tensor:
        """Return α d before the decay; `plain` is for residuals, which do not depend on Adam."""
        if self.rule == "adam" and not plain:
            rate = MAX_STEP * self.length[:, None] / direction.shape[1] ** 0.5
            return direction * (rate if self.step_size is None else self.step_size)
        norm = row_norms(direction)
        safe = torch.where(norm > 0, norm, 1.0)
        if self.normalize:
            length = self.share * self.length if self.step_size is None else self.step_size
            return direction * (length / safe)[:, None]
        if self.step_size is not None:
            # The step size is for the loss in its own unit; `direction` is for the scaled loss.
            return direction * (self.step_size / scale)[:, None]
        # A kink looks like a huge curvature and shortens steps. The residual must not become small
        # with them, so it uses the smallest recent curvature.
        known = self.curvature > 0
        curvature = torch.minimum(self.min_curvature, self.curvature) if plain else self.curvature
        inverse = torch.where(known, 1 / torch.where(known, curvature, 1.0), torch.inf)
        first = FIRST_STEP * self.length / safe
        alpha = torch.where(known, torch.minimum(inverse, MAX_STEP * self.length / safe), first)
        return direction * alpha[:, None]

    def _newton_step(self, newton: QuasiNewton, gradient: Tensor) -> Tensor:
        norm = row_norms(gradient)
        safe = torch.where(norm > 0, norm, 1.0)
        step = newton.direction(gradient, FIRST_NEWTON_STEP * self.length / safe)
        size = row_norms(step)
        longest = MAX_NEWTON_STEP * self.length
        return step * (longest / torch.maximum(size, longest))[:, None]

    def _measure(self, x: Tensor, gradient: Tensor, lag: Tensor, running: Tensor) -> None:
        if self.last is not None:
            moved = row_norms(x - self.last[0])
            change = row_norms(gradient - self.last[1])
            usable = (moved > MIN_MOVE_PER_LAG * lag * self.length) & torch.isfinite(change)
            observed = torch.where(usable, change / torch.where(usable, moved, 1.0), 0.0)
            largest = torch.maximum(CURVATURE_DECAY * self.curvature, observed)
            self.curvature = torch.where(running, largest, self.curvature)
            smallest = torch.minimum(
                self.min_curvature / CURVATURE_DECAY,
                torch.where(observed > 0, observed, torch.inf),
            )
            self.min_curvature = torch.where(running, smallest, self.min_curvature)
        self.last = (x, gradient)

    def _adam(self, gradient: Tensor) -> Tensor:
        """Return Adam's direction (Kingma and Ba, 2015) with its default constants."""
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
    """L-BFGS direction H g of a gradient g, H the inverse Hessian estimated from the last steps.

    Steps without positive curvature, which kinks and inexact gradients cause, are ignored row by
    row and do not replace older steps in a full memory.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.pairs: list[Pair] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def observe(self, x: Tensor, gradient: Tensor, usable: Tensor) -> None:
        """Record the gradient at the latest input; `usable` masks the rows whose change counts."""
        if self.last is not None:
            step, change = x - self.last[0], gradient - self.last[1]
            product = (step * change).sum(dim=1)
            sizes = row_norms(step) * row_norms(change)
            curved = usable & (product > MIN_CURVATURE_COSINE * sizes) & torch.isfinite(sizes)
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
        """Return H g for the gradient g, with H the estimated inverse Hessian.

        Rows without known curvature get `first` · g.
        """
        result, coefficients = gradient, []
        scale = torch.full_like(first, torch.nan)
        for step, change, weight in reversed(self.pairs):
            coefficient = weight * (step * result).sum(dim=1)
            coefficients.append(coefficient)
            # Rows with weight 0 may hold NaN, so they must be masked instead of multiplied by 0.
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
