"""What is certain about what a reflection network says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Packing
from equilibria.energies.capabilities import rounding as rounding_of
from equilibria.equilibrium import EnergyCell, EquilibriumLayer, solving
from equilibria.equilibrium.certificates import READING
from equilibria.models.base import predicted_classes
from equilibria.models.certificates import (
    UNIT,
    Certificate,
    Progress,
    Solved,
    check_shape,
    in_float64,
    norms,
)
from equilibria.models.radii import GLOBAL
from equilibria.operators.rounding import NORM_SLACK, accumulated
from equilibria.solvers import Solution

FIRST_TOLERANCE = 0.1
"""Of an early exit."""


class ReflectionCertifier:
    """`certify` for batches of one shape.

    A reflection is solved at û instead of the exact input u, and not to the end. At any z

        ‖z − prox(û)‖ ≤ ‖∇G(z; û)‖,        G is 1-strongly convex

    so that û′ = 2z − û is at most 2‖∇G(z; û)‖ + ‖û − u‖ away from R(u), which is nonexpansive:
    errors add up from layer to layer and nothing makes them larger. States are the model's own; all
    else is computed in float64, with a bound of what that rounds.
    """

    @torch.no_grad()
    def __init__(self, model: Any, image_shape: tuple[int, ...]) -> None:
        self.model = model
        self.shape = tuple(image_shape)
        exact: Any = in_float64(model)
        self.exact = exact
        self.slopes: Tensor = exact.margin_slopes() * (1 + NORM_SLACK)
        normalize = getattr(self.exact, "normalize", None)
        self.steepness = 1.0 if normalize is None else float((1 / normalize.std).max())

    can_refine = False
    """All radii are those of the margins."""

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """The certificate of a batch; there is nothing to refine."""
        return self.judge(images, self.solve(images))

    @torch.no_grad()
    def solve(self, images: Tensor, starts: Sequence[Tensor] | None = None) -> Solved:
        """Compute the equilibrium of each layer and the logits of a batch, in evaluation mode.

        Args:
            images: The batch.
            starts: A state for each layer to start from.

        Returns:
            The solutions, layer by layer, and the logits.
        """
        check_shape(images, self.shape)
        was_training = self.model.training
        self.model.eval()
        try:
            solutions: list[Solution] = []
            left = [] if starts is None else list(starts)
            feature = images
            normalize = getattr(self.model, "normalize", None)
            feature = feature if normalize is None else normalize(feature)
            for part in self._parts(self.model):
                if isinstance(part, EquilibriumLayer):
                    solution = part.solve(feature, left.pop(0) if left else None)
                    solutions.append(solution)
                    feature = part.output(solution)
                else:
                    feature = part(feature)
            return Solved(tuple(solutions), self.model.head(feature))
        finally:
            self.model.train(was_training)

    @staticmethod
    def _parts(model: Any) -> list[nn.Module]:
        return [*model.stem, model.layer]

    @torch.no_grad()
    def judge(
        self, images: Tensor, solved: Solved, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Certify the predictions of a batch that has been solved already.

        Args:
            images: The batch.
            solved: What the model computed for it (`solve`).
            refine: Without effect, as is `progress`.
            progress: Without effect.

        Returns:
            The same as a call with these images.
        """
        check_shape(images, self.shape)
        images, exact = images.double(), self.exact
        feature = images if getattr(exact, "normalize", None) is None else exact.normalize(images)
        # (x − mean)/std rounds twice; 1 more than covers |x| where x = mean.
        sizes = norms(feature) + self.steepness * (norms(images) + norms(torch.ones_like(images)))
        error = 8 * UNIT * sizes if self.steepness != 1 else torch.zeros_like(sizes)
        residual, contraction = torch.zeros_like(error), torch.zeros_like(error)
        left = states_of(solved)
        for part in self._parts(exact):
            if not isinstance(part, EquilibriumLayer):
                rounding = getattr(part, "rounding", None)
                error = error if rounding is None else error + rounding(feature, UNIT)
                feature = part(feature)
                continue
            z, cell = left.pop(0).double(), part.cell
            context = cell.inject(feature)
            layout = Packing.of(z).layout
            assert isinstance(cell, EnergyCell)
            pull = z - cell.energy.descent(z, context)  # type: ignore[operator]
            found = rounding_of(cell.energy, cell.energy, context, layout, UNIT)
            delta = torch.full_like(error, torch.inf)
            size = norms(z)
            if found is not None:
                delta = found.at(context, size, norms(feature), torch.zeros_like(size))
            delta = delta + 8 * UNIT * (size + norms(feature) + norms(pull))
            slope = norms(pull) * (1 + accumulated(2 * z[0].numel(), UNIT))
            error = error + 2 * (slope + delta)
            residual = residual + slope
            bound = cell.bounds(context, layout).contraction
            if bound is not None:
                contraction = torch.maximum(contraction, bound.double().expand_as(contraction))
            feature = 2 * z - feature
        said = predicted_classes(solved.logits)
        return self._with_classes(feature, error, residual, contraction, said)

    def _with_classes(
        self, feature: Tensor, error: Tensor, residual: Tensor, contraction: Tensor, said: Tensor
    ) -> Certificate:
        logits = self.exact.head(feature)
        best = logits.argmax(dim=1)
        margin = logits.gather(1, best[:, None]) - logits
        slope = self.slopes[best] / self.steepness
        reading = accumulated(8 * READING * feature[0].numel(), UNIT)
        own = self.exact.head.bias.abs().max()
        read = reading * (2 * norms(feature)[:, None] + logits.abs() + 2 * own)
        margin_error = slope * error[:, None] + read
        is_own = torch.zeros_like(margin, dtype=torch.bool).scatter(1, best[:, None], True)
        is_finite = logits.isfinite().all(dim=1) & error.isfinite()
        room = torch.where(is_own, torch.inf, (margin - margin_error) / self.slopes[best])
        radius = room.amin(dim=1) * (1 - NORM_SLACK)
        safe = (radius > 0) & is_finite
        certified = safe & (said == best)
        radius = torch.where(certified, radius, 0.0)
        unknown = torch.full_like(error, torch.inf)
        return Certificate(
            contraction=contraction,
            unique=torch.ones_like(certified),
            residual=residual,
            error=error,
            contraction_error=unknown,
            convexity_error=error,
            prediction=torch.where(is_finite, best, -1),
            certified_class=certified,
            margin=margin,
            margin_error=margin_error,
            radius=radius,
            radii={GLOBAL: radius},
            checks={"stationarity": residual},
            reasons=[
                _reason(*pair) for pair in zip(safe.tolist(), (said == best).tolist(), strict=True)
            ],
        )


class ReflectionExit:
    """Solves ever further until the class is certain, or the tolerance is reached.

    What one reflection leaves open enters the next, so that no layer knows by itself when it is
    enough: all of them are solved to a tolerance of 0.1 and judged; images that are still open go
    on from there, to a tenth of it. What stays open is answered as the model answers it.
    """

    def __init__(self, by: ReflectionCertifier) -> None:
        self.by = by

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and of which images the class is certain."""
        by, found = self.by, None
        last = by.model.layer.solver.tolerance
        still = torch.arange(len(images), device=images.device)
        certified = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        tolerance, starts = max(FIRST_TOLERANCE, last), None
        while True:
            with solving(by.model, tolerance=tolerance):
                solved = by.solve(images[still], starts)
            sure, logits = by.judge(images[still], solved).certified_class, solved.logits
            found = logits if found is None else found.index_copy(0, still, logits)
            certified[still] = sure
            is_last = tolerance <= last
            still = still[~sure]
            if is_last and starts is not None and len(still):
                found = found.index_copy(0, still, by.solve(images[still]).logits)
            if is_last or not len(still):
                return found, certified
            starts = [state[~sure] for state in states_of(solved)]
            tolerance = max(tolerance / 10, last)


def states_of(solved: Solved) -> list[Tensor]:
    """The state of each layer."""
    states = [solution.state for solution in solved.solutions]
    return [state for state in states if isinstance(state, Tensor)]


def _reason(safe: bool, agrees: bool) -> str:
    if not safe:
        return "no certificate, because the error bar is wider than the margin: lower the tolerance"
    if not agrees:
        return "no certificate, because the model says another class than its exact equilibria"
    return ""
