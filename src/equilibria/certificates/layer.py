"""The certifier of models with one equilibrium layer: stem, layer, affine head.

Notation: x is the image, S the stem, T the map of the layer, ŷ the state that the solver computed,
and y* = T(y*) the exact equilibrium. If the layer minimizes a hidden objective G with an energy E,
y* = σ(−∇E(y*)). In OptEq −∇E(y) = WWᵀy + US(x) + b.

`judge` follows the order of the proof:

1. `_locate` evaluates the map at ŷ in float64. The result is y′ (`Located.variables`): σ(−∇E) in
   the variables of G if there is a G, else T(ŷ). Both bounds of the next step are about y′.
2. `_errors` bounds the distance from y′ to y*, with q the Lipschitz constant of T and m the modulus
   of strong convexity of G: q‖T(ŷ) − ŷ‖/(1 − q), and ‖p‖/m for p ∈ ∂G(y′), each with rounding.
3. `_margins` reads logit_k = ⟨row_k, y′⟩ + offset_k. With k the class of the largest logit,
   margin_j = logit_k − logit_j is read along g_j = row_k − row_j, with an error bound error_j
   (`margins.py`). The class is certain if margin_j > error_j for all j ≠ k, and certified if the
   model predicts k, too.
4. `_radii` returns min_j (margin_j − error_j)/L_j, with L_j a Lipschitz constant of margin_j in the
   image (`radii.py`, `stem.py`), or 0 if the class is not certified.

Every bound is enlarged by a share of `NORM_SLACK` (1e-9), for the rounding of evaluating it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.certificates.certificate import (
    PATTERN,
    WEIGHTED,
    Certificate,
    Exit,
    MarginConstants,
    Progress,
    SolvedBatch,
    certifier,
    check_shape,
)
from equilibria.certificates.checks import fenchel_gap, firmness, proposition_two
from equilibria.certificates.constants import layer_constants
from equilibria.certificates.early_exit import LayerExit, layer_criterion
from equilibria.certificates.facts import UNIT, per_sample
from equilibria.certificates.margins import ClassDifferences, MarginBound, Margins
from equilibria.certificates.pixel_range import radius_in_range
from equilibria.certificates.prepared import PreparedModel, Reading
from equilibria.certificates.radii import (
    NEAREST_CLASSES,
    Entry,
    Pattern,
    Radii,
    radii_by_contraction,
    radii_by_convexity,
    within_linf,
)
from equilibria.certificates.states import (
    ROUNDINGS_PER_NUMBER,
    flat_rows,
    norms,
    reading_error,
)
from equilibria.certificates.stem import L2, LINF, ImageNorm
from equilibria.context import Context, State
from equilibria.context.state import map_state
from equilibria.energies.rounding import Rounding
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.capabilities import EnergyForm
from equilibria.equilibrium.layer import as_inputs
from equilibria.equilibrium.objective import distance_per_sample
from equilibria.models.base import EquilibriumModel, predicted_classes
from equilibria.operators.rounding import accumulated
from equilibria.solvers._cpu import sample_blocks

JUDGE_MEMORY_FACTOR = 8
"""Memory for judging a sample, in units of the memory of a solve. Convolutions in float64 unfold
their windows. Blocks of samples are smaller by this factor to stay in the cache."""


@dataclass(frozen=True, eq=False)
class Located:
    """The map at the computed states of some images, in float64."""

    images: Tensor
    """x."""
    inputs: tuple[Tensor, ...]
    """Inputs of the layer, S(x)."""
    state: State
    """ŷ."""
    context: Context
    form: EnergyForm | None
    """The hidden objective, in its own variables; `form.image` is σ(−∇E) for the state ŷ."""
    mapped: State
    """T(ŷ)."""
    input_error: Tensor
    """Rounding error of the stem, per sample."""

    @property
    def variables(self) -> State:
        """y′, of which the logits are an affine function: `form.image`, or T(ŷ)."""
        return self.mapped if self.form is None else self.form.image


@dataclass(frozen=True, eq=False)
class ConvexityFacts:
    """The hidden objective at y′."""

    preactivation: State
    """a = −∇E(y′)."""
    pull: Tensor
    """‖p‖, p the element of ∂G(y′) = y′ − a + ∂f(y′) of least norm."""
    rounding: Tensor
    """Rounding error of p."""
    convexity: Tensor
    """m, the modulus of strong convexity."""


@dataclass(frozen=True, eq=False)
class Errors:
    """Bounds on the distance ‖y′ − y*‖ to the exact equilibria, per sample."""

    contraction: Tensor
    """q."""
    residual: Tensor
    """‖T(ŷ) − ŷ‖."""
    rounding: Tensor
    """Rounding error of the map."""
    by_contraction: Tensor
    """In the variables of the state."""
    by_convexity: Tensor
    """In the variables of the hidden objective."""
    convex: ConvexityFacts | None


@dataclass(frozen=True, eq=False)
class LayerCertifier:
    """Certifier of a model with one equilibrium layer, for images of one shape."""

    prepared: PreparedModel

    @classmethod
    def of(cls, model: EquilibriumModel, image_shape: tuple[int, ...]) -> LayerCertifier:
        """Prepare a model: compute everything that depends on parameters only."""
        return cls(PreparedModel.of(model, image_shape))

    @property
    def can_refine(self) -> bool:
        """Whether radii by activation patterns are known for this model."""
        reading = self.prepared.reading
        return reading is not None and reading.units is not None and self.prepared.stem is not None

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Certify a batch; the arguments are those of `certify`."""
        return self.judge(images, self.solve(images), refine=refine, progress=progress)

    @torch.no_grad()
    def solve(self, images: Tensor) -> SolvedBatch:
        """Compute the equilibria and the logits of a batch, in evaluation mode."""
        check_shape(images, self.prepared.shape)
        model, was_training = self.prepared.model, self.prepared.model.training
        model.eval()
        try:
            solution = model.solve(images)
            return SolvedBatch((solution,), model.head(model.layer.output(solution)))
        finally:
            model.train(was_training)

    def exit(self) -> Exit:
        """Return the solve that stops each image when its class is certain."""
        return LayerExit(self.prepared.model, *layer_criterion(self.prepared))

    def constants(self) -> MarginConstants:
        """Return constants that hold for every image."""
        return layer_constants(self.prepared)

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
            refine: As for `certify`.
            progress: As for `certify`.

        Returns:
            The same as a call with these images.
        """
        check_shape(images, self.prepared.shape)
        state, predicted = solved.solution.state, predicted_classes(solved.logits)
        couples = self.prepared.exact.layer.couples_batch
        blocks = (
            [slice(0, len(images))] if couples else sample_blocks(state, copies=JUDGE_MEMORY_FACTOR)
        )
        parts = [
            self._certificate(self._locate(images, solved, rows), predicted[rows])
            for rows in blocks
        ]
        certificate = Certificate.join(parts)
        if not refine:
            return certificate
        if self.can_refine and WEIGHTED in certificate.radii:
            certificate = self._refined(images, solved, certificate, progress)
        in_range = radius_in_range(self, images, certificate)
        return replace(certificate, radius_linf_in_range=in_range)

    def _refined(
        self, images: Tensor, solved: SolvedBatch, certificate: Certificate, progress: Progress
    ) -> Certificate:
        """Add the radius by the activation pattern."""
        state = solved.solution.state
        radius = certificate.radii[WEIGHTED].clone()
        can_change = (certificate.radius > 0).nonzero().flatten()
        states = map_state(lambda tensor: tensor[can_change], state)
        blocks = sample_blocks(states, copies=2 * NEAREST_CLASSES) if len(can_change) else []
        for block in progress(blocks):
            rows = can_change[block]
            radius[rows] = self._pattern_radius(self._locate(images, solved, rows))
        radii = {**certificate.radii, PATTERN: radius}
        best = torch.maximum(certificate.radius, radius)
        linf = torch.maximum(certificate.radius_linf, within_linf(best, images[0].numel()))
        return replace(
            certificate, radii=radii, radius=best, radius_linf=linf, radius_linf_in_range=linf
        )

    def _locate(self, images: Tensor, solved: SolvedBatch, rows: slice | Tensor) -> Located:
        """Evaluate the map at the states of some samples."""
        images = images[rows].double()
        cell = self.prepared.cell.cell
        state = map_state(lambda tensor: tensor[rows].double(), solved.solution.state)
        inputs = as_inputs(self.prepared.exact.injected(images))
        context = cell.inject(*inputs)
        if capabilities.refresh_until(cell) or self.prepared.cell.has_moving_signs:
            # Use the signs and scales that the model's own solve froze.
            solve_context = solved.solution.context.keep(rows)
            wide = (t.double() if t.is_floating_point() else t for t in solve_context.tensors())
            context = solve_context.replace(list(wide))
        form = None if self.prepared.objective is None else self.prepared.cell.form(state, context)
        if form is not None and form.cell is cell and self.prepared.cell.is_plain:
            mapped = form.image
        else:
            mapped = cell.step(state, context)
        return Located(
            images, inputs, state, context, form, mapped, self.prepared.stem_error(images)
        )

    def _errors(self, at: Located) -> Errors:
        """Bound the distance of y′ from the exact equilibrium."""
        q = per_sample(self.prepared.cell.contraction(at.context), at.images)
        residual = distance_per_sample(at.state, at.mapped)
        rounding = _rounding(self.prepared.rounding, at.context, at.state, at)
        # With ‖g‖ = 1 the bound of a margin is that of the distance itself.
        bound = MarginBound.by_contraction(torch.ones_like(q)[:, None], q[:, None])
        by_contraction = bound.error(residual, rounding)[:, 0]
        by_convexity, convex = torch.full_like(q, torch.inf), None
        if at.form is not None:
            convex = self._convexity(at.form, at)
            bound = MarginBound.by_convexity(torch.ones_like(q)[:, None], convex.convexity[:, None])
            by_convexity = bound.error(convex.pull, convex.rounding)[:, 0]
        return Errors(q, residual, rounding, by_contraction, by_convexity, convex)

    def _convexity(self, form: EnergyForm, at: Located) -> ConvexityFacts:
        assert self.prepared.objective is not None
        sigma = form.cell.activation
        preactivation = form.cell.energy.descent(form.image, form.context)
        pulls = map_state(
            lambda y, a: sigma.minimal_subgradient(y, y - a), form.image, preactivation
        )
        return ConvexityFacts(
            preactivation=preactivation,
            pull=norms(pulls),
            rounding=_rounding(self.prepared.gradient_rounding, form.context, form.image, at),
            # m = 1 − h with −∇²E ≼ h
            convexity=1 - per_sample(self.prepared.objective.concavity(form.context), at.images),
        )

    def _certificate(self, at: Located, predicted: Tensor) -> Certificate:
        """Certify some samples, without radii by the activation pattern."""
        errors = self._errors(at)
        error = errors.by_contraction if at.form is None else errors.by_convexity
        if at.form is not None and at.form.cell is self.prepared.cell.cell:
            # The state and the objective have the same variables.
            error = torch.minimum(errors.by_contraction, errors.by_convexity)
        nothing = at.images.new_zeros(len(predicted), 0)
        certificate = Certificate(
            contraction=errors.contraction,
            unique=(errors.contraction < 1) | errors.by_convexity.isfinite(),
            residual=errors.residual,
            error=error,
            contraction_error=errors.by_contraction,
            convexity_error=errors.by_convexity,
            prediction=predicted,
            certified_class=torch.zeros_like(predicted, dtype=torch.bool),
            margin=nothing,
            margin_error=nothing,
            radius=torch.zeros_like(errors.residual),
            radii={},
            radius_linf=torch.zeros_like(errors.residual),
            radius_linf_in_range=torch.zeros_like(errors.residual),
            checks=self._checks(at, errors),
            reasons=[f"no certificate, because {self.prepared.no_class}"] * len(predicted),
        )
        if self.prepared.reading is None:
            return certificate
        return self._with_class(certificate, at, errors, self.prepared.reading)

    def _checks(self, at: Located, errors: Errors) -> dict[str, Tensor]:
        checks = {}
        if at.form is not None and errors.convex is not None:
            a = errors.convex.preactivation
            checks["stationarity"] = errors.convex.pull
            checks["fenchel_gap"] = fenchel_gap(at.form, a)
            checks["firmness"] = firmness(at.form, a, self.prepared.noise)
            if self.prepared.cell.coupling is not None and not self.prepared.no_class:
                assert self.prepared.objective is not None
                assert self.prepared.path is not None
                (feature,) = at.inputs
                checks["proposition_2"] = proposition_two(
                    *(
                        self.prepared.exact.layer,
                        self.prepared.cell,
                        self.prepared.objective,
                        self.prepared.path,
                    ),
                    *(feature, at.form.image),
                )
        inclusion = self.prepared.cell.inclusion(at.mapped, at.context)
        return checks if inclusion is None else {**checks, "inclusion": inclusion}

    def _with_class(
        self, certificate: Certificate, at: Located, errors: Errors, reading: Reading
    ) -> Certificate:
        logits, margins, differences = self._margins(at, errors, reading)
        is_finite = logits.isfinite().all(dim=1)
        predicted = certificate.prediction
        is_certain = margins.are_certain & is_finite
        certified = is_certain & (predicted == margins.best)
        known = self._radii(at, errors, margins, differences)
        radii = {
            name: torch.where(certified, radius, 0.0) for name, radius in known.by_bound.items()
        }
        radius = torch.stack([torch.zeros_like(errors.residual), *radii.values()]).amax(dim=0)
        linf = within_linf(radius, at.images[0].numel())
        if reading.pairs_linf is not None:
            differences = reading.pairs_linf.of(margins.best)
            linf_radii = self._radii(at, errors, margins, differences, LINF).by_bound
            by_dual_norm = torch.where(certified, linf_radii.get(WEIGHTED, linf), 0.0)
            linf = torch.maximum(linf, by_dual_norm)
        facts = (is_certain, predicted, margins.best, certificate.unique, radius)
        samples = zip(*(fact.tolist() for fact in facts), strict=True)
        return replace(
            certificate,
            prediction=torch.where(is_finite, margins.best, -1),
            certified_class=certified,
            margin=margins.margin,
            margin_error=margins.error,
            radius=radius,
            radii=radii,
            radius_linf=linf,
            radius_linf_in_range=linf,
            reasons=[_reason(*sample, no_radius=known.why_none) for sample in samples],
        )

    def _margins(
        self, at: Located, errors: Errors, reading: Reading
    ) -> tuple[Tensor, Margins, ClassDifferences]:
        """Read the margins, with their error bounds."""
        variables = flat_rows(at.variables)  # y′
        logits = variables @ reading.pairs.rows.T + reading.offset
        best = logits.argmax(dim=1)
        differences = reading.pairs.of(best)
        direction = differences.direction
        if errors.convex is not None:
            convex = errors.convex
            bound = MarginBound.by_convexity(
                direction, convex.convexity[:, None], differences.quadratic
            )
            error = bound.widened().error(convex.pull, convex.rounding)
        else:
            known = reading.margin_lipschitz
            known = None if known is None else known[best]
            bound = MarginBound.by_contraction(direction, errors.contraction[:, None], known)
            error = bound.widened().error(errors.residual, errors.rounding)
        share = accumulated(8 * ROUNDINGS_PER_NUMBER * variables.shape[1], UNIT)
        read = reading_error(reading.pairs.rows, reading.offset, norms(variables), logits, share)
        return logits, Margins.of(logits, error + read), differences

    def _radii(
        self,
        at: Located,
        errors: Errors,
        margins: Margins,
        differences: ClassDifferences,
        norm: ImageNorm = L2,
    ) -> Radii:
        """Compute the radius by each known bound except the activation pattern."""
        if self.prepared.stem is None:
            return Radii({}, why_none=self.prepared.no_radius)
        if errors.convex is None:
            bound = self.prepared.cell.input_lipschitz(at.context)
            if bound is None:
                return Radii({})
            in_image = per_sample(bound, at.images) * self.prepared.stem.lipschitz(norm)
            reading = self.prepared.reading
            known = None if reading is None else reading.margin_lipschitz
            known = None if known is None else known[margins.best]
            q = errors.contraction
            return radii_by_contraction(margins, differences.direction, q, in_image, known)
        entry = self._entry(at, norm)
        if entry is None:
            return Radii({}, why_none="a scale of its energy (γ) depends on the image")
        assert self.prepared.objective is not None
        assert at.form is not None
        # Lipschitz constant of ∇E, at least h
        curvature = per_sample(self.prepared.objective.curvature(at.form.context), at.images)
        return radii_by_convexity(margins, differences, entry, curvature, errors.convex.convexity)

    def _entry(self, at: Located, norm: ImageNorm = L2) -> Entry | None:
        """Return how the image enters the hidden objective, or None if ‖U‖ is not known."""
        if self.prepared.objective is None or self.prepared.path is None or at.form is None:
            return None
        injection = self.prepared.objective.input_lipschitz(at.form.context)
        if injection is None:
            return None
        path = self.prepared.path.in_norm(norm)
        return Entry(path, per_sample(injection, at.images) * path.lipschitz)

    def _pattern_radius(self, at: Located) -> Tensor:
        """Compute radii by the activation pattern of each sample."""
        reading, errors, entry = self.prepared.reading, self._errors(at), self._entry(at)
        assert reading is not None
        assert entry is not None
        _, margins, differences = self._margins(at, errors, reading)
        steepness = self._radii(at, errors, margins, differences).steepness
        convex = errors.convex
        assert convex is not None
        assert reading.units is not None
        assert reading.resolvent is not None
        assert steepness is not None
        pattern = Pattern(
            *(flat_rows(convex.preactivation), errors.by_convexity, convex.rounding),
            reading.units,
        )
        return pattern.radius(
            *(margins, steepness, reading.pairs, reading.resolvent, entry, convex.convexity)
        )


certifier.register(EquilibriumModel, LayerCertifier.of)


def _rounding(bound: Rounding | None, context: Context, state: State, at: Located) -> Tensor:
    """Rounding error per sample, ∞ if no bound is known."""
    if bound is None:
        return torch.full_like(at.input_error, torch.inf)
    return bound.at(context, norms(state), norms(at.inputs), at.input_error)


def _reason(
    is_certain: bool, predicted: int, best: int, unique: bool, radius: float, *, no_radius: str
) -> str:
    """Return why a sample has no certified class or no radius; empty if it has both."""
    if not unique:
        why = "no bound on the norms makes the equilibrium unique: use norm='bound'"
    elif not is_certain:
        why = "the error bar is wider than the margin: lower the tolerance"
    elif predicted != best:
        why = f"the model predicts class {predicted}, but its exact equilibrium has class {best}"
    else:
        missing = no_radius or "no Lipschitz constant in the image is known"
        return "" if radius > 0 else f"no radius, because {missing}"
    return f"no certificate, because {why}"
