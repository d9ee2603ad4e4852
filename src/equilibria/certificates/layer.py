"""The certifier of models with one equilibrium layer: stem, layer, affine head.

`judge` follows the order of the proof:

1. `_locate` evaluates the map at the computed state, in float64.
2. `_errors` bounds how far that is from the exact equilibrium.
3. `_margins` bounds the error of each margin (`margins.py`), which decides the class.
4. `_radii` divides what is left of each margin by its steepness (`radii.py`, `stem.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.certificates.certificate import (
    GLOBAL,
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
from equilibria.certificates.checks import fenchel_gap, firmness, probe_noise, proposition_two
from equilibria.certificates.constants import layer_constants
from equilibria.certificates.early_exit import LayerExit, layer_criterion
from equilibria.certificates.facts import (
    UNIT,
    CellFacts,
    ObjectiveFacts,
    Setting,
    cell_facts,
    largest,
    per_sample,
)
from equilibria.certificates.margins import ClassPairs, Differences, MarginBound, Margins
from equilibria.certificates.radii import (
    RIVALS,
    Entry,
    Pattern,
    global_steepness,
    sliced_steepness,
    weighted_steepness,
)
from equilibria.certificates.resolvent import Resolvent
from equilibria.certificates.states import READING, flat_rows, norms, readout
from equilibria.certificates.stem import ImagePath, StemBounds, UnboundedError
from equilibria.context import Context, State, map_state
from equilibria.energies import Rounding
from equilibria.energies.kernel_scale import RunningScale
from equilibria.equilibrium import EnergyForm
from equilibria.equilibrium.layer import as_inputs
from equilibria.equilibrium.objective import distance_per_sample
from equilibria.models.affine import why_not_affine
from equilibria.models.base import EquilibriumModel, in_float64, predicted_classes
from equilibria.operators.rounding import NORM_SLACK, accumulated
from equilibria.solvers.blocks import sample_blocks

JUDGED = 8
"""Memory for judging a sample in float64, where convolutions lay out their windows, in units of
what a solve takes: blocks of samples are smaller by this factor, to stay in the cache."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The logits as an affine function of the variables, and what bounds their differences."""

    rows: State
    """One row per class, in the shape of the variables."""
    offset: Tensor
    pairs: ClassPairs
    along: Tensor | None = None
    """λ, Lipschitz constant of ⟨g, T⟩ of all pairs of classes, where it is known."""
    resolvent: Resolvent | None = None
    units: list[Tensor] | None = None
    """Norms of every unit, where activation patterns can be used."""


@dataclass(frozen=True, eq=False)
class Located:
    """The map at the computed states of some images, in float64."""

    images: Tensor
    inputs: tuple[Tensor, ...]
    state: State
    context: Context
    form: EnergyForm | None
    """The hidden objective, in its own variables."""
    image: State
    """T(y)."""
    input_error: Tensor
    """Rounding error of the stem, of each sample."""

    @property
    def variables(self) -> State:
        """Variables that logits are read off: those of the objective, or T(y)."""
        return self.image if self.form is None else self.form.image


@dataclass(frozen=True, eq=False)
class ConvexityFacts:
    """The hidden objective at the computed states."""

    preactivation: State
    pull: Tensor
    """‖p‖, p the subgradient of G of least norm."""
    rounding: Tensor
    """Rounding error of p."""
    convexity: Tensor
    """m, the modulus of strong convexity."""


@dataclass(frozen=True, eq=False)
class Errors:
    """How far the computed states are from the exact equilibria."""

    contraction: Tensor
    """q."""
    residual: Tensor
    rounding: Tensor
    """Rounding error of the map."""
    by_contraction: Tensor
    by_convexity: Tensor
    convex: ConvexityFacts | None


@dataclass(frozen=True, eq=False)
class Steepness:
    """How steep margins are in the image."""

    radii: dict[str, Tensor]
    """The radius by each bound."""
    best: Tensor | None = None
    """Smallest Lipschitz constant that is known for each margin."""
    entry: Entry | None = None
    why_none: str = ""


@dataclass(frozen=True, eq=False)
class LayerCertifier:
    """Certify batches of images of one shape, for a model with one equilibrium layer."""

    model: EquilibriumModel
    exact: EquilibriumModel
    """The model in float64."""
    shape: tuple[int, ...]
    cell: CellFacts
    objective: ObjectiveFacts | None
    path: ImagePath | None
    """The map from the image to the objective's variables."""
    stem: StemBounds | None
    rounding: Rounding | None
    """Rounding of the map."""
    gradient_rounding: Rounding | None
    """Rounding of ∇E."""
    noise: tuple[Tensor, ...]
    reading: Reading | None
    """None where no class is certain."""
    no_class: str
    """Why no class of any sample is certain; empty if some may be."""
    no_radius: str
    """Why there is no radius for any sample, as far as the stem says."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: EquilibriumModel, image_shape: tuple[int, ...]) -> LayerCertifier:
        """Prepare a model: compute everything that depends on parameters only."""
        shape, exact = tuple(image_shape), in_float64(model)
        stem, no_radius = _stem_bounds(exact, shape)
        inputs = as_inputs(exact.injected(next(exact.parameters()).new_zeros(1, *shape)))
        cell = exact.layer.cell
        context = cell.inject(*inputs)
        state = cell.initial_state(*inputs, context)
        facts = cell_facts(cell, Setting(state, context, exact.layer.couples_batch))
        objective = facts.objective()
        rounding = gradient_rounding = facts.rounding(cell, UNIT)
        path: ImagePath | None = None
        noise: tuple[Tensor, ...] = ()
        if objective is not None:
            gradient_rounding = objective.rounding(UNIT)
            form = objective.form
            feature = tuple(inputs[0].shape[1:])
            path = ImagePath(exact, form.cell.energy, form.image, shape, feature, stem)
            noise = probe_noise(objective.layout, inputs[0].device)
        no_class = _why_no_class(model, exact, facts, gradient_rounding)
        reading = None if no_class else _reading(exact, facts, objective, path)
        return cls(
            model=model,
            exact=exact,
            shape=shape,
            cell=facts,
            objective=objective,
            path=path,
            stem=stem,
            rounding=rounding,
            gradient_rounding=gradient_rounding,
            noise=noise,
            reading=reading,
            no_class=no_class,
            no_radius=no_radius,
        )

    @property
    def can_refine(self) -> bool:
        """Whether radii by activation patterns are known for this model."""
        return self.reading is not None and self.reading.units is not None and self.stem is not None

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Certify a batch; the arguments are those of `certify`."""
        return self.judge(images, self.solve(images), refine=refine, progress=progress)

    @torch.no_grad()
    def solve(self, images: Tensor) -> SolvedBatch:
        """Compute the equilibria and the logits of a batch, in evaluation mode."""
        check_shape(images, self.shape)
        was_training = self.model.training
        self.model.eval()
        try:
            solution = self.model.solve(images)
            return SolvedBatch((solution,), self.model.head(self.model.layer.output(solution)))
        finally:
            self.model.train(was_training)

    def exit(self) -> Exit:
        """Return the solve that stops each image when its class is certain."""
        return LayerExit(self.model, *layer_criterion(self))

    def constants(self) -> MarginConstants:
        """Return constants that hold for every image."""
        return layer_constants(self)

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
            solved: What the model computed for it (`solve`).
            refine: As for `certify`.
            progress: As for `certify`.

        Returns:
            The same as a call with these images.
        """
        check_shape(images, self.shape)
        state, said = solved.solution.state, predicted_classes(solved.logits)
        couples = self.exact.layer.couples_batch
        blocks = [slice(0, len(images))] if couples else sample_blocks(state, copies=JUDGED)
        parts = [
            self._certificate(self._locate(images, solved, rows), said[rows]) for rows in blocks
        ]
        found = Certificate.join(parts)
        if not refine or not self.can_refine or WEIGHTED not in found.radii:
            return found
        radius = found.radii[WEIGHTED].clone()
        can_change = (found.radius > 0).nonzero().flatten()
        states = map_state(lambda tensor: tensor[can_change], state)
        blocks = sample_blocks(states, copies=2 * RIVALS) if len(can_change) else []
        for block in progress(blocks):
            rows = can_change[block]
            radius[rows] = self._pattern_radius(self._locate(images, solved, rows))
        radii = {**found.radii, PATTERN: radius}
        return replace(found, radii=radii, radius=torch.maximum(found.radius, radius))

    def _locate(self, images: Tensor, solved: SolvedBatch, rows: slice | Tensor) -> Located:
        """Evaluate the map at the states of some samples."""
        images = images[rows].double()
        cell = self.cell.cell
        state = map_state(lambda tensor: tensor[rows].double(), solved.solution.state)
        inputs = as_inputs(self.exact.injected(images))
        context = cell.inject(*inputs)
        if cell.refresh_until or has_moving_signs(self.cell):
            # Signs and scales that a solve keeps are those of the model's own solve.
            own = solved.solution.context.keep(rows)
            wide = (t.double() if t.is_floating_point() else t for t in own.tensors())
            context = own.replace(list(wide))
        form = None if self.objective is None else self.cell.form(state, context)
        if form is not None and form.cell is cell and self.cell.is_plain:
            image = form.image
        else:
            image = cell.step(state, context)
        error = images.new_zeros(len(images)) if self.stem is None else self.stem.run(images).error
        return Located(images, inputs, state, context, form, image, error)

    def _errors(self, at: Located) -> Errors:
        """Bound how far T(y) is from the exact equilibrium."""
        q = per_sample(self.cell.contraction(at.context), at.images)
        residual = distance_per_sample(at.state, at.image)
        rounding = _rounding(self.rounding, at.context, at.state, at)
        bound = MarginBound.by_contraction(torch.ones_like(q)[:, None], q[:, None])
        by_contraction = bound.error(residual, rounding)[:, 0]
        by_convexity, convex = torch.full_like(q, torch.inf), None
        if at.form is not None:
            convex = self._convexity(at.form, at)
            bound = MarginBound.by_convexity(torch.ones_like(q)[:, None], convex.convexity[:, None])
            by_convexity = bound.error(convex.pull, convex.rounding)[:, 0]
        return Errors(q, residual, rounding, by_contraction, by_convexity, convex)

    def _convexity(self, form: EnergyForm, at: Located) -> ConvexityFacts:
        assert self.objective is not None
        sigma = form.cell.activation
        preactivation = form.cell.energy.descent(form.image, form.context)
        pulls = map_state(
            lambda y, a: sigma.minimal_subgradient(y, y - a), form.image, preactivation
        )
        return ConvexityFacts(
            preactivation=preactivation,
            pull=norms(pulls),
            rounding=_rounding(self.gradient_rounding, form.context, form.image, at),
            convexity=1 - per_sample(self.objective.concavity(form.context), at.images),
        )

    def _certificate(self, at: Located, said: Tensor) -> Certificate:
        """Certify some samples, without radii by the activation pattern."""
        errors = self._errors(at)
        error = errors.by_contraction if at.form is None else errors.by_convexity
        if at.form is not None and at.form.cell is self.cell.cell:
            error = torch.minimum(errors.by_contraction, errors.by_convexity)
        nothing = at.images.new_zeros(len(said), 0)
        certificate = Certificate(
            contraction=errors.contraction,
            unique=(errors.contraction < 1) | errors.by_convexity.isfinite(),
            residual=errors.residual,
            error=error,
            contraction_error=errors.by_contraction,
            convexity_error=errors.by_convexity,
            prediction=said,
            certified_class=torch.zeros_like(said, dtype=torch.bool),
            margin=nothing,
            margin_error=nothing,
            radius=torch.zeros_like(errors.residual),
            radii={},
            checks=self._checks(at, errors),
            reasons=[f"no certificate, because {self.no_class}"] * len(said),
        )
        if self.reading is None:
            return certificate
        return self._with_class(certificate, at, errors, self.reading)

    def _checks(self, at: Located, errors: Errors) -> dict[str, Tensor]:
        checks = {}
        if at.form is not None and errors.convex is not None:
            a = errors.convex.preactivation
            checks["stationarity"] = errors.convex.pull
            checks["fenchel_gap"] = fenchel_gap(at.form, a)
            checks["firmness"] = firmness(at.form, a, self.noise)
            if self.cell.coupling is not None and not self.no_class:
                assert self.objective is not None
                assert self.path is not None
                (feature,) = at.inputs
                checks["proposition_2"] = proposition_two(
                    *(self.exact.layer, self.cell, self.objective, self.path),
                    *(feature, at.form.image),
                )
        inclusion = self.cell.inclusion(at.image, at.context)
        return checks if inclusion is None else {**checks, "inclusion": inclusion}

    def _with_class(
        self, certificate: Certificate, at: Located, errors: Errors, reading: Reading
    ) -> Certificate:
        logits, margins, differences = self._margins(at, errors, reading)
        is_finite = logits.isfinite().all(dim=1)
        said = certificate.prediction
        safe = margins.are_certain & is_finite
        certified = safe & (said == margins.best)
        steepness = self._steepness(at, errors, reading, margins, differences)
        radii = {
            name: torch.where(certified, radius, 0.0) for name, radius in steepness.radii.items()
        }
        radius = torch.stack([torch.zeros_like(errors.residual), *radii.values()]).amax(dim=0)
        facts = (safe, said, margins.best, certificate.unique, radius)
        samples = zip(*(fact.tolist() for fact in facts), strict=True)
        return replace(
            certificate,
            prediction=torch.where(is_finite, margins.best, -1),
            certified_class=certified,
            margin=margins.margin,
            margin_error=margins.error,
            radius=radius,
            radii=radii,
            reasons=[_reason(*sample, no_radius=steepness.why_none) for sample in samples],
        )

    def _margins(
        self, at: Located, errors: Errors, reading: Reading
    ) -> tuple[Tensor, Margins, Differences]:
        """Read the margins, with the bound of their error."""
        image = flat_rows(at.variables)
        logits = image @ reading.pairs.rows.T + reading.offset
        best = logits.argmax(dim=1)
        differences = reading.pairs.of(best)
        direction = differences.direction
        if errors.convex is not None:
            convex = errors.convex
            bound = MarginBound.by_convexity(direction, convex.convexity[:, None], differences.form)
            bound = bound if differences.form is None else bound.widened()
            error = bound.error(convex.pull, convex.rounding)
        else:
            along = None if reading.along is None else reading.along[best] * (1 + NORM_SLACK)
            bound = MarginBound.by_contraction(direction, errors.contraction[:, None], along)
            error = bound.error(errors.residual, errors.rounding)
        rounded = accumulated(8 * READING * image.shape[1], UNIT)
        error = error + rounded * (direction * norms(image)[:, None] + logits.abs())
        return logits, Margins.of(logits, error), differences

    def _steepness(
        self,
        at: Located,
        errors: Errors,
        reading: Reading,
        margins: Margins,
        differences: Differences,
    ) -> Steepness:
        """Compute the radius by each bound that is known, and the steepness behind the best one."""
        if self.stem is None:
            return Steepness({}, why_none=self.no_radius)
        if at.form is None:
            return self._steepness_by_contraction(at, errors, reading, margins, differences)
        assert self.objective is not None
        assert self.path is not None
        assert errors.convex is not None
        direction, convexity = differences.direction, errors.convex.convexity
        entering = self.objective.input_lipschitz(at.form.context)
        if entering is None:
            return Steepness({}, why_none="a scale of its energy (γ) depends on the image")
        entry = Entry(self.path, per_sample(entering, at.images) * self.path.lipschitz)
        curvature = per_sample(self.objective.curvature(at.form.context), at.images)
        steepness = global_steepness(direction, curvature, entry.slope)
        radii = {GLOBAL: margins.radius(steepness)}
        weighted = weighted_steepness(differences, entry, convexity)
        if weighted is None:
            convex = torch.where(convexity > 0, entry.slope / convexity, torch.inf)
            radii[WEIGHTED] = margins.radius(direction * convex[:, None])
            return Steepness(radii)
        steepness = torch.minimum(steepness, weighted)
        return Steepness({**radii, WEIGHTED: margins.radius(steepness)}, steepness, entry)

    def _steepness_by_contraction(
        self,
        at: Located,
        errors: Errors,
        reading: Reading,
        margins: Margins,
        differences: Differences,
    ) -> Steepness:
        assert self.stem is not None
        bound, q = self.cell.input_lipschitz(at.context), errors.contraction
        if bound is None:
            return Steepness({})
        entering = per_sample(bound, at.images) * self.stem.lipschitz()
        direction = differences.direction
        radii = {GLOBAL: margins.radius(global_steepness(direction, q, entering))}
        if reading.along is not None:
            sliced = sliced_steepness(direction, reading.along[margins.best], q, entering)
            radii[WEIGHTED] = margins.radius(sliced)
        return Steepness(radii)

    def _pattern_radius(self, at: Located) -> Tensor:
        """Compute radii by the activation pattern of each sample."""
        reading, errors = self.reading, self._errors(at)
        assert reading is not None
        _, margins, differences = self._margins(at, errors, reading)
        steepness = self._steepness(at, errors, reading, margins, differences)
        convex = errors.convex
        assert convex is not None
        assert reading.units is not None
        assert reading.resolvent is not None
        assert steepness.best is not None
        assert steepness.entry is not None
        pattern = Pattern(
            *(flat_rows(convex.preactivation), errors.by_convexity, convex.rounding),
            reading.units,
        )
        return pattern.radius(
            *(margins, steepness.best, reading.pairs, reading.resolvent),
            *(steepness.entry, convex.convexity),
        )


certifier.register(EquilibriumModel, LayerCertifier.of)


def has_moving_signs(cell: CellFacts) -> bool:
    """Whether the cell has signs that may differ between the state and the equilibrium."""
    return cell.coupling is not None and bool(cell.coupling.coupling.diversity)


def _rounding(bound: Rounding | None, context: Context, state: State, at: Located) -> Tensor:
    """Rounding error of each sample, ∞ if no bound is known."""
    if bound is None:
        return torch.full_like(at.input_error, torch.inf)
    return bound.at(context, norms(state), norms(at.inputs), at.input_error)


def _stem_bounds(exact: EquilibriumModel, shape: tuple[int, ...]) -> tuple[StemBounds | None, str]:
    """Bound the stem, or say why that is not possible."""
    try:
        normalize = getattr(exact, "normalize", None)
        return StemBounds(exact.stem, exact.stem, normalize, shape, UNIT), ""
    except UnboundedError as error:
        return None, str(error)


def _why_no_class(
    model: EquilibriumModel, exact: EquilibriumModel, cell: CellFacts, rounding: Rounding | None
) -> str:
    """Say why no class of any sample is certain, as far as the model shows; or return ""."""
    if exact.layer.couples_batch:
        return "the samples of a batch are coupled: what one shows changes the others"
    for part in model.modules():
        if isinstance(part, RunningScale) and not float(part.patch_energy) > 0:
            return "γ of its kernel has seen no data yet: train the model first"
    if has_moving_signs(cell):
        return (
            "the signs of its diversity term (λ > 0) may flip between the state and the "
            "equilibrium: error bars are relative to the signs of the state"
        )
    if cell.cell.refresh_until:
        return "its map depends on where the first iterations went"
    if why := why_not_affine(exact.head):
        return why
    if not cell.cell.has_linear_output:
        return f"the output of {type(cell.cell).__name__} is not linear in the state"
    if rounding is None:
        return f"no bound of the rounding in {type(cell.cell).__name__} is known"
    return ""


def _reading(
    exact: EquilibriumModel,
    cell: CellFacts,
    objective: ObjectiveFacts | None,
    path: ImagePath | None,
) -> Reading:
    """Read off the logits, and prepare the norms of their differences."""
    if objective is None or path is None:
        rows, offset = readout(cell.cell, exact.head, cell.at.state, cell.at.context)
        return Reading(rows, offset, ClassPairs(flat_rows(rows)), cell.margin_lipschitz(rows))
    form = objective.form
    rows, offset = readout(form.cell, exact.head, form.image, form.context)
    flat, energy = flat_rows(rows), form.cell.energy
    concavity = largest(objective.concavity(form.context))
    if not energy.is_quadratic or concavity >= 1:
        return Reading(rows, offset, ClassPairs(flat))
    resolvent = Resolvent(energy, form.context, objective.layout, concavity)
    resolved = resolvent.solve(flat)
    bounds = objective.units()
    units = None if bounds is None else Pattern.unit_norms(bounds, objective.layout)
    pulled = None if path.stem is None else path.pull_back(resolved.solution)
    pairs = ClassPairs(flat, resolved, pulled, path.length)
    return Reading(rows, offset, pairs, None, resolvent, units)


def _reason(
    safe: bool, said: int, best: int, unique: bool, radius: float, *, no_radius: str
) -> str:
    """Say why a sample has no certified class or no radius; empty if it has both."""
    if not unique:
        why = "no bound of the norms makes the equilibrium unique: use norm='bound'"
    elif not safe:
        why = "the error bar is wider than the margin: lower the tolerance"
    elif said != best:
        why = f"the model says class {said}, and its exact equilibrium {best}"
    else:
        missing = no_radius or "no Lipschitz constant in the image is known"
        return "" if radius > 0 else f"no radius, because {missing}"
    return f"no certificate, because {why}"
