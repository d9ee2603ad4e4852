"""The certifier of reflection networks, and their early exit.

A reflection is solved at û instead of the exact input u, and not to the end. At any z

    ‖z − prox(û)‖ ≤ ‖∇G(z; û)‖,        G is 1-strongly convex

so that û′ = 2z − û is at most 2‖∇G(z; û)‖ + ‖û − u‖ away from R(u), which is nonexpansive. Errors
add up from layer to layer, and nothing enlarges them. The margin over class j is read along
h_k − h_j, and is off by at most ‖h_k − h_j‖ times that sum.

A reflection in closed form, R(u) = u − τQᵀσ(Qu + b), has only rounding errors. It is nonexpansive
for every Q with τ‖Q‖² ≤ 2, and max(1, τ‖Q‖² − 1)-Lipschitz for any Q: R(u) − R(v) is
(I − τQᵀDQ)(u − v) with D diagonal between 0 and 1, and the eigenvalues of QᵀDQ are between 0 and
‖Q‖². So rows that are orthonormal only up to rounding and jitter change nothing as long as
‖Q‖² ≤ 1 + 1/ω, which is checked for the weights at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.certificates.certificate import (
    GLOBAL,
    Certificate,
    MarginConstants,
    NoCertificateError,
    Progress,
    SolvedBatch,
    certifier,
    check_shape,
)
from equilibria.certificates.constants import contraction_limits
from equilibria.certificates.facts import UNIT, CellPoint, EnergyCellFacts, cell_facts
from equilibria.certificates.margins import MarginBound, Margins
from equilibria.certificates.pixel_range import radius_in_range
from equilibria.certificates.radii import within_linf
from equilibria.certificates.reflection_bounds import ClosedFormBound, DualBound
from equilibria.certificates.states import ROUNDINGS_PER_NUMBER, norms
from equilibria.equilibrium import EquilibriumLayer, solving
from equilibria.models.base import in_float64, predicted_classes
from equilibria.models.reflection.dual import DualReflectionCell
from equilibria.models.reflection.model import ReflectionNetwork, UnitHead
from equilibria.models.reflection.orthonormal import OrthonormalReflectionCell
from equilibria.operators.rounding import NORM_SLACK, accumulated, unit_roundoff
from equilibria.solvers import Solution

FIRST_TOLERANCE = 0.1
"""Tolerance of the first solve of an early exit."""


@dataclass(frozen=True, eq=False)
class Reflected:
    """The output of the last reflection at the computed states, with its error bounds."""

    feature: Tensor
    residual: Tensor
    """Sum of ‖∇G‖ over the layers."""
    rounding: Tensor
    """Sum of the rounding errors."""
    contraction: Tensor
    """Largest q of the layers."""
    own_rounding: Tensor
    """Sum of the rounding errors of the model in its own type; ∞ if they are unknown."""


@dataclass(frozen=True, eq=False)
class ReflectionCertifier:
    """Certifier of a reflection network, for images of one shape.

    The states are those that the model computes. Everything else is computed in float64, and its
    rounding error is bounded.
    """

    model: ReflectionNetwork
    exact: ReflectionNetwork
    """The model in float64."""
    closed_forms: Mapping[nn.Module, ClosedFormBound]
    """Bounds of the layers of `exact` that have a closed form."""
    own_forms: Mapping[nn.Module, ClosedFormBound]
    """Bounds of the same layers for the type in which the model computes."""
    duals: Mapping[nn.Module, DualBound]
    """Bounds of the layers of `exact` that are solved in the dual."""
    shape: tuple[int, ...]
    slopes: Tensor
    """Lipschitz constant of each margin in the pixels, (classes, classes)."""
    scale: float
    """Lipschitz constant of the normalization."""

    can_refine = False
    """All L2 radii follow from the margins; activation patterns are not used."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: ReflectionNetwork, image_shape: tuple[int, ...]) -> ReflectionCertifier:
        """Prepare a model: compute everything that depends on parameters only."""
        exact = in_float64(model)
        normalize: Any = getattr(exact, "normalize", None)
        closed_forms: dict[nn.Module, ClosedFormBound] = {}
        own_forms: dict[nn.Module, ClosedFormBound] = {}
        duals: dict[nn.Module, DualBound] = {}
        for layer, own in zip(exact.reflections(), model.reflections(), strict=True):
            if isinstance(layer.cell, OrthonormalReflectionCell):
                assert isinstance(own.cell, OrthonormalReflectionCell)
                closed_forms[layer] = ClosedFormBound.of(layer.cell)
                own_forms[layer] = ClosedFormBound.of(layer.cell, own.cell)
            elif isinstance(layer.cell, DualReflectionCell):
                duals[layer] = DualBound.of(layer.cell)
        steepness = math.prod(bound.steepness for bound in closed_forms.values())
        return cls(
            model=model,
            exact=exact,
            closed_forms=closed_forms,
            own_forms=own_forms,
            duals=duals,
            shape=tuple(image_shape),
            slopes=exact.margin_slopes() * (1 + NORM_SLACK) * steepness,
            scale=1.0 if normalize is None else float((1 / normalize.std).max()),
        )

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Certify a batch; see `judge`.

        If every layer has a closed form, the model computes only the images for which rounding in
        its own type might change the class.
        """
        if self.can_tighten or not _is_plain(images):
            return self.judge(images, self.solve(images), refine=refine, progress=progress)
        check_shape(images, self.shape)
        at = self._reflected(images.double(), [])
        logits, margins = self._margins(at)
        gaps = margins.margin - margins.error - self._own_error(at, logits)
        rivals = torch.arange(logits.shape[1], device=logits.device) != margins.best[:, None]
        agrees = (gaps > 0).logical_or(~rivals).all(dim=1)
        if not bool(agrees.all()):
            open_ones = ~agrees
            answers = predicted_classes(self.solve(images[open_ones]).logits)
            agrees[open_ones] = answers == margins.best[open_ones]
        return self._certificate(images, at, logits, margins, agrees, refine, progress)

    @torch.no_grad()
    def solve(self, images: Tensor, starts: Sequence[Tensor] | None = None) -> SolvedBatch:
        """Compute the equilibrium of each layer and the logits of a batch, in evaluation mode.

        Args:
            images: The batch.
            starts: Initial state of each layer; by default the cell's.

        Returns:
            The solutions, layer by layer, and the logits.
        """
        check_shape(images, self.shape)
        was_training = self.model.training
        self.model.eval()
        try:
            solutions: list[Solution] = []
            remaining = [] if starts is None else list(starts)
            feature = images
            normalize: Any = getattr(self.model, "normalize", None)
            feature = feature if normalize is None else normalize(feature)
            for module in modules_of(self.model):
                if isinstance(module, EquilibriumLayer):
                    solution = module.solve(feature, remaining.pop(0) if remaining else None)
                    solutions.append(solution)
                    feature = module.output(solution)
                else:
                    feature = module(feature)
            return SolvedBatch(tuple(solutions), self.model.head(feature))
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def judge(
        self,
        images: Tensor,
        solved: SolvedBatch,
        *,
        refine: bool = False,
        progress: Progress = iter,
    ) -> Certificate:
        """Certify the predictions of a batch that has been solved already.

        Args:
            images: The batch.
            solved: Result of `solve` for the same images.
            refine: Enlarge `radius_linf_in_range` by a few solves; other radii do not change.
            progress: Wraps the sequence of these solves.

        Returns:
            The same as a call with these images.
        """
        check_shape(images, self.shape)
        at = self._reflected(images.double(), states_of(solved))
        logits, margins = self._margins(at)
        agrees = predicted_classes(solved.logits) == margins.best
        return self._certificate(images, at, logits, margins, agrees, refine, progress)

    def _certificate(
        self,
        images: Tensor,
        at: Reflected,
        logits: Tensor,
        margins: Margins,
        agrees: Tensor,
        refine: bool,
        progress: Progress,
    ) -> Certificate:
        """Return the certificate of images for which `agrees` says if the model has the class."""
        error = 2 * at.residual + at.rounding
        is_finite = logits.isfinite().all(dim=1) & error.isfinite()
        is_certain = margins.are_certain & is_finite
        certified = is_certain & agrees
        radius = torch.where(certified, margins.radius(self.slopes[margins.best]), 0.0)
        radius_linf = within_linf(radius, images[0].numel())
        certificate = Certificate(
            contraction=at.contraction,
            unique=torch.ones_like(certified),
            residual=at.residual,
            error=error,
            contraction_error=torch.full_like(error, torch.inf),
            convexity_error=error,
            prediction=torch.where(is_finite, margins.best, -1),
            certified_class=certified,
            margin=margins.margin,
            margin_error=margins.error,
            radius=radius,
            radii={GLOBAL: radius},
            radius_linf=radius_linf,
            radius_linf_in_range=radius_linf,
            checks={"stationarity": at.residual},
            reasons=[
                _reason(*pair) for pair in zip(is_certain.tolist(), agrees.tolist(), strict=True)
            ],
        )
        if not refine:
            return certificate
        in_range = radius_in_range(self, images, certificate, progress)
        return replace(certificate, radius_linf_in_range=in_range)

    def _reflected(self, images: Tensor, states: list[Tensor]) -> Reflected:
        """Apply the network at the computed states, and add up the errors of the layers."""
        normalize: Any = getattr(self.exact, "normalize", None)
        feature = images if normalize is None else normalize(images)
        # (x − mean)/std rounds twice. Adding 1 to |x| also covers x = mean.
        sizes = norms(feature) + self.scale * (norms(images) + norms(torch.ones_like(images)))
        rounding = 8 * UNIT * sizes if self.scale != 1 else torch.zeros_like(sizes)
        residual, contraction = torch.zeros_like(rounding), torch.zeros_like(rounding)
        own_unit = unit_roundoff(self.model.head.bias.dtype)  # type: ignore[arg-type]
        own = rounding * (own_unit / UNIT)
        remaining = list(states)
        for module in modules_of(self.exact):
            if not isinstance(module, EquilibriumLayer):
                module_rounding = getattr(module, "rounding", None)
                if module_rounding is not None:
                    rounding = rounding + module_rounding(feature, UNIT)
                    own = own + module_rounding(feature, own_unit)
                feature = module(feature)
                continue
            cell = module.cell
            state = remaining.pop(0) if remaining else feature
            context = cell.inject(feature)
            if isinstance(cell, OrthonormalReflectionCell):
                sizes, used = norms(feature), self.own_forms[module]
                own = used.steepness * own + used.rounding(feature, sizes + own)
                formula = self.closed_forms[module]
                rounding = formula.steepness * rounding + formula.rounding(feature, sizes)
                residual = formula.steepness * residual
                feature = cell.output(cell.closed_form(context), context)
                continue
            z = state.double()
            facts = cell_facts(cell, CellPoint(z, context))
            assert isinstance(facts, EnergyCellFacts)
            bound = facts.contraction(context)
            if bound is not None:
                contraction = torch.maximum(contraction, bound.double().expand_as(contraction))
            if isinstance(cell, DualReflectionCell):
                feature, gap, delta = self.duals[module].reflected(cell, feature, z)
                residual, rounding = residual + gap, rounding + delta
                continue
            descent = facts.cell.energy.descent(z, context)
            assert isinstance(descent, Tensor)
            pull = z - descent
            size, delta = norms(z), torch.full_like(rounding, torch.inf)
            gradient = facts.gradient_rounding(UNIT)
            if gradient is not None:
                delta = gradient.at(context, size, norms(feature), torch.zeros_like(size))
            delta = delta + 8 * UNIT * (size + norms(feature) + norms(pull))
            rounding = rounding + 2 * delta
            residual = residual + norms(pull) * (1 + accumulated(2 * z[0].numel(), UNIT))
            feature = 2 * z - feature
        own = own if not self.can_tighten else torch.full_like(own, torch.inf)
        return Reflected(feature, residual, rounding, contraction, own)

    def _margins(self, at: Reflected) -> tuple[Tensor, Margins]:
        """Compute the margins, with their error bounds."""
        logits = self.exact.head(at.feature)
        length = self.slopes[logits.argmax(dim=1)] / self.scale
        error = MarginBound(2 * length, length).error(at.residual, at.rounding)
        rounded = accumulated(8 * ROUNDINGS_PER_NUMBER * at.feature[0].numel(), UNIT)
        largest_bias = self.exact.head.bias.abs().max()  # type: ignore[operator]
        read = rounded * (2 * norms(at.feature)[:, None] + logits.abs() + 2 * largest_bias)
        return logits, Margins.of(logits, error + read)

    def _own_error(self, at: Reflected, logits: Tensor) -> Tensor:
        """Bound the error of each margin as the model computes it in its own type.

        A logit has the error of a sum of products, of the normalization of its row, and of a bias.
        """
        unit = unit_roundoff(self.model.head.bias.dtype)  # type: ignore[arg-type]
        length = self.slopes[logits.argmax(dim=1)] / self.scale
        sizes = norms(at.feature) + at.own_rounding
        largest_bias = self.exact.head.bias.abs().max()  # type: ignore[operator]
        read = accumulated(2 * at.feature[0].numel() + 32, unit) * sizes
        read = 2 * read[:, None] + 8 * unit * (logits.abs() + largest_bias + sizes[:, None])
        return length * at.own_rounding[:, None] + 2 * read

    @property
    def can_tighten(self) -> bool:
        """Whether a smaller tolerance makes the states more precise: not if all are formulas."""
        return len(self.closed_forms) < len(self.exact.reflections())

    def exit(self) -> ReflectionExit:
        """Return the solve that stops each image when its class is certain."""
        return ReflectionExit(self)

    @torch.no_grad()
    def constants(self) -> MarginConstants:
        """Return constants that hold for every image.

        Each layer adds 2q/(1 − q) times its residual.

        Raises:
            NoCertificateError: If the map of a layer is not known to be a contraction.
        """
        limits = [q for q in contraction_limits(self.model, self.shape) if q is not None]
        if len(limits) < len(self.model.reflections()):
            raise NoCertificateError("no bound on the norms makes the map a contraction")
        assert isinstance(self.exact.head, UnitHead)
        rows = self.exact.head.rows
        direction = 2 * torch.linalg.vector_norm(rows[:, None] - rows[None], dim=2)
        bounds = [MarginBound.by_contraction(direction, direction.new_tensor(q)) for q in limits]
        return MarginConstants(
            torch.stack([b.per_residual for b in bounds]).sum(dim=0), self.slopes
        )


certifier.register(ReflectionNetwork, ReflectionCertifier.of)


def _is_plain(images: Tensor) -> bool:
    """Whether products are computed in the type of the images, as sums in any order."""
    device = images.device.type
    return (
        device == "cpu"
        and images.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled(device)
        and torch.get_float32_matmul_precision() == "highest"
    )


def modules_of(model: ReflectionNetwork) -> list[nn.Module]:
    """Return the modules between the pixels and the head, in order."""
    assert isinstance(model.stem, nn.Sequential)
    return [*model.stem, model.layer]


class ReflectionExit:
    """Early exit that tightens the tolerance until the class is certain.

    The error of one reflection enters the next, so no layer can stop by itself. All layers are
    solved to a tolerance of 0.1 and judged. Images without a certain class continue from there to
    a tenth of that tolerance, down to the tolerance of the model. Images that remain uncertain are
    solved again as the model solves them.
    """

    def __init__(self, certifier: ReflectionCertifier) -> None:
        self.certifier = certifier

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and whether the class of each image is certain."""
        certifier, all_logits = self.certifier, None
        last = certifier.model.layer.solver.tolerance
        first = max(FIRST_TOLERANCE, last) if certifier.can_tighten else last
        uncertain = torch.arange(len(images), device=images.device)
        certified = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        tolerance, starts = first, None
        while True:
            with solving(certifier.model, tolerance=tolerance):
                solved = certifier.solve(images[uncertain], starts)
            is_certain = certifier.judge(images[uncertain], solved).certified_class
            logits = solved.logits
            all_logits = (
                logits if all_logits is None else all_logits.index_copy(0, uncertain, logits)
            )
            certified[uncertain] = is_certain
            is_last = tolerance <= last
            uncertain = uncertain[~is_certain]
            if is_last and starts is not None and len(uncertain):
                logits = certifier.solve(images[uncertain]).logits
                all_logits = all_logits.index_copy(0, uncertain, logits)
            if is_last or not len(uncertain):
                return all_logits, certified
            starts = [state[~is_certain] for state in states_of(solved)]
            tolerance = max(tolerance / 10, last)


def states_of(solved: SolvedBatch) -> list[Tensor]:
    """Return the state of each layer."""
    states = [solution.state for solution in solved.solutions]
    return [state for state in states if isinstance(state, Tensor)]


def _reason(is_certain: bool, agrees: bool) -> str:
    if not is_certain:
        return "no certificate, because the error bar is wider than the margin: lower the tolerance"
    if not agrees:
        return "no certificate, because its exact equilibria have another class than the prediction"
    return ""
