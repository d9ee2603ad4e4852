"""Early exit: a solve stops as soon as the class is certain.

`CertifiedExit` wraps a model. For a model with one equilibrium layer, `CertifiedClass` stops each
sample of the solve, with the bound of `margins.py` in the model's own arithmetic.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.certificates.certificate import NoCertificateError, certifier
from equilibria.certificates.facts import UNIT, largest
from equilibria.certificates.margins import MarginBound, Margins
from equilibria.certificates.prepared import PreparedModel
from equilibria.certificates.states import (
    ROUNDINGS_PER_NUMBER,
    flat_rows,
    reading_error,
    readout,
)
from equilibria.certificates.stem import StemBounds, UnboundedError
from equilibria.context import Context, State
from equilibria.context.state import Packing
from equilibria.energies.rounding import Rounding
from equilibria.equilibrium import solving
from equilibria.operators.rounding import NORM_SLACK, accumulated, unit_roundoff
from equilibria.solvers import Descent, Iterate, Solution, StoppingCriterion

FEATURE, FEATURE_ERROR = "feature size", "feature error"


class CertifiedExit(nn.Module):
    """A classifier that solves each sample until its class is certain, or to the tolerance.

    The class of a sample that stops early is that of the exact equilibrium (see `certify`), which a
    full solve approximates. All other samples are solved as the model solves them. The rounding of
    the model's own arithmetic is bounded: only the logits are computed in float64. For inference:
    it has no gradients.

    Args:
        model: Classifier with an equilibrium layer.
        image_shape: Shape of one image, (channels, height, width).

    Raises:
        NoCertificateError: If no class of the model can be certain before the end of a solve.

    Attributes:
        certified: Whether the class is certain, for each sample of the last batch.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> quick = eq.certificates.CertifiedExit(eq.load("digits-opteq"), images.shape[1:])
        >>> quick(images).argmax(dim=1)
        tensor([0, 3])
    """

    def __init__(self, model: nn.Module, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self._exit = certifier(model, tuple(image_shape)).exit()
        self.certified = torch.zeros(0, dtype=torch.bool)
        self._count = self._certain = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    @property
    def share_certified(self) -> float:
        """Share of all samples so far whose class is certain."""
        return self._certain / max(self._count, 1)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch, each solved until its class is certain.

        Args:
            images: Batch of images, shape (B, channels, height, width).
        """
        logits, self.certified = self._exit(images)
        self._count += len(self.certified)
        self._certain += int(self.certified.sum())
        return logits


@dataclass(frozen=True, eq=False)
class CertifiedClass(StoppingCriterion):
    """Criterion that stops a sample as soon as its class is certain, or at the tolerance.

    A class is certain if every margin over another class exceeds its error (`margins.py`), with the
    residual ‖T(y) − y‖ and the rounding of T.

    Args:
        tolerance: Relative residual at which a sample stops in any case.
        readout: Logits are ⟨readout, y⟩ + offset; one row per class, in float64.
        offset: Offset of each class.
        bound: Error of each margin, (classes, classes).
        direction: ‖readout_k − readout_j‖; `constants.py` uses it for radii.
        rounding: Rounding error of the map in the floating-point type of the model.
        unit: Unit roundoff of that type.
        feature: Norm of the layer's input, per sample.
        feature_error: Rounding error of the layer's input, per sample.
    """

    tolerance: float
    readout: State
    offset: Tensor
    bound: MarginBound
    direction: Tensor
    rounding: Rounding
    unit: float
    feature: Tensor
    feature_error: Tensor

    def notes(self) -> dict[str, Tensor]:
        return {FEATURE: self.feature, FEATURE_ERROR: self.feature_error}

    def reached(self, iterate: Iterate) -> Tensor:
        problem, residuals = iterate.problem, iterate.residuals
        is_close = residuals.relative <= self.tolerance
        is_rougher = problem.epsilon > 2 * self.unit  # under autocast
        is_known = iterate.is_state and FEATURE in problem.context.sample
        if problem.couples_batch or is_rougher or not is_known:
            return is_close
        image = iterate.image if problem.unit is None else iterate.image * problem.unit
        absolute = problem.in_numbers(residuals.absolute)
        return is_close | self._certain(image, absolute, problem.packing, problem.context)

    def holds(self, solution: Solution) -> Tensor:
        """Return for which samples the class at the state of a solution is certain."""
        if FEATURE not in solution.context.sample or Descent.__name__ in solution.solver:
            return torch.zeros_like(solution.converged)
        packing = Packing.of(solution.state)
        rows = packing.pack(solution.state)
        return self._certain(rows, solution.absolute_residual, packing, solution.context)

    def _certain(
        self, image: Tensor, absolute: Tensor, packing: Packing, context: Context
    ) -> Tensor:
        numbers = image.shape[1]
        summed = accumulated(2 * numbers + 8, self.unit)
        # The residual has the type of the map; logits are read in float64.
        image, rows = image.double(), packing.pack(self.readout)
        logits = image @ rows.T + self.offset
        best = logits.argmax(dim=1)
        residual = absolute.double() * (1 + summed)
        size = torch.linalg.vector_norm(image, dim=1) * (1 + summed)
        sizes = (size + residual, context[FEATURE], context[FEATURE_ERROR])
        delta = self.rounding.at(context, *sizes) * (1 + 4 * summed)
        error = self.bound.of(best).error(residual, delta)
        share = accumulated(8 * ROUNDINGS_PER_NUMBER * numbers, UNIT)
        read = reading_error(rows, self.offset, size, logits, share)
        return Margins.of(logits, (error + read) * (1 + 1e-6)).are_certain


@dataclass(frozen=True, eq=False)
class LayerExit:
    """The solve of a model with one equilibrium layer, which stops where the class is certain."""

    model: Any
    stem: StemBounds
    """Bounds on the stem in the model's type."""
    criterion: CertifiedClass
    """The criterion, for no sample yet."""

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and whether the class of each image is certain."""
        model = self.model
        features = self.stem.run(images)
        solver = model.layer.solver
        criterion = dataclasses.replace(
            self.criterion,
            tolerance=solver.tolerance,
            feature=features.size,
            feature_error=features.error,
        )
        with solving(model, solver=dataclasses.replace(solver, stop=criterion)):
            solution = model.layer.solve(features.values)
        return model.head(model.layer.output(solution)), criterion.holds(solution)


@torch.no_grad()
def layer_criterion(prepared: PreparedModel) -> tuple[StemBounds, CertifiedClass]:
    """Prepare the early exit of a model, in the floating-point type of the model.

    Args:
        prepared: The prepared model.

    Returns:
        The bounds of the stem, and the stopping criterion, for no sample yet.

    Raises:
        NoCertificateError: If no class can be certain, or no bound on the rounding of the model is
            known.
    """
    if prepared.no_class:
        raise NoCertificateError(f"no certificate, because {prepared.no_class}")
    model, exact = prepared.model, prepared.exact
    unit = _unit(model)
    normalize = getattr(model, "normalize", None)
    try:
        stem = StemBounds.of(model.stem, exact.stem, normalize, prepared.shape, unit)
    except UnboundedError as error:
        raise NoCertificateError(f"no certificate in {_name(model)}, because {error}") from None
    cell, at = prepared.cell.cell, prepared.cell.at
    rounding = prepared.cell.rounding(model.layer.cell, unit)
    if rounding is None:
        raise NoCertificateError(
            f"no certificate, because no bound on the rounding error of {type(cell).__name__} is "
            "known"
        )
    rows, offset = readout(cell, exact.head, at.state, at.context)
    flat = flat_rows(rows)
    direction = torch.linalg.vector_norm(flat[:, None] - flat[None], dim=2) * (1 + NORM_SLACK)
    bound = _bound_by_convexity(prepared, direction)
    if bound is None or not bound.is_known:
        bound = _bound_by_contraction(prepared, direction, rows)
    if not bound.is_known:
        raise NoCertificateError(
            "no certificate, because no bound on the norms makes the equilibrium unique: bound "
            "them with norm='bound'"
        )
    nothing = torch.zeros(0)
    return stem, CertifiedClass(
        tolerance=0.0,
        readout=rows,
        offset=offset,
        bound=bound.widened(),
        direction=direction,
        rounding=rounding,
        unit=unit,
        feature=nothing,
        feature_error=nothing,
    )


def _bound_by_contraction(prepared: PreparedModel, direction: Tensor, rows: State) -> MarginBound:
    """Bound margins at T(y) by the Lipschitz constant of the map."""
    bound = prepared.cell.contraction(prepared.cell.at.context)
    q = torch.inf if bound is None or bound.numel() > 1 else largest(bound)
    margin_lipschitz = prepared.cell.margin_lipschitz(rows)
    return MarginBound.by_contraction(direction, direction.new_tensor(q), margin_lipschitz)


def _bound_by_convexity(prepared: PreparedModel, direction: Tensor) -> MarginBound | None:
    """Bound margins at T(y) by the hidden objective.

    Up to the rounding of ∇E, T(y) is the equilibrium of an input that is off by
    s = ∇E(T(y)) − ∇E(y). s is a subgradient of G at T(y), and ‖s‖ is at most a Lipschitz constant
    times the residual. If z is iterated, s = W(z − T(z)) at the exact T(z), and rounding moves z.
    """
    objective, reading = prepared.objective, prepared.reading
    if objective is None or reading is None or not prepared.cell.is_plain:
        return None
    steepness = prepared.cell.gradient_lipschitz(objective)
    concavity = objective.concavity(objective.form.context)
    is_shared = concavity is not None and concavity.numel() == 1
    is_own = objective.form.cell is prepared.cell.cell
    is_resolved = reading.pairs.resolved is not None
    if steepness is None or not is_shared or not (is_own or is_resolved):
        return None
    convexity = direction.new_tensor(1 - largest(concavity))
    quadratic = reading.pairs.of_all().quadratic
    lengths = reading.pairs.of_all().direction if not is_own else direction
    per_input = MarginBound.by_convexity(lengths, convexity, quadratic)
    per_residual = per_input.per_residual * steepness
    per_rounding = per_input.per_rounding if is_own else per_residual + direction
    return MarginBound(per_residual, per_rounding)


def _unit(model: nn.Module) -> float:
    """Return the unit roundoff of the model's type.

    Raises:
        NoCertificateError: If convolutions in that type need not be plain sums of products.
    """
    parameter = next(model.parameters())
    place, dtype = parameter.device.type, parameter.dtype
    if dtype not in (torch.float32, torch.float64) or (place != "cpu" and dtype == torch.float32):
        raise NoCertificateError(
            f"no certificate in {_name(model)} on {place}, because convolutions there need not be "
            "plain sums of products: use float32 on the CPU, or model.double()"
        )
    if torch.get_float32_matmul_precision() != "highest":
        raise NoCertificateError(
            "no certificate, because torch.set_float32_matmul_precision allows products of less "
            "than single precision: set it to 'highest'"
        )
    return unit_roundoff(dtype)


def _name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
