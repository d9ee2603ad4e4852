"""What is certain about a prediction: `certify`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from equilibria.activations import IdentityActivation, ReLU
from equilibria.context import Context, Layout, Packing, State, map_state, state_tensors, twin
from equilibria.energies import Energy
from equilibria.energies.capabilities import first_descent
from equilibria.energies.capabilities import rounding as rounding_of
from equilibria.energies.kernel_scale import RunningScale
from equilibria.equilibrium import Cell, EnergyForm, capabilities
from equilibria.equilibrium.certificates import READING, Resolved, Resolvent, flat_rows
from equilibria.equilibrium.layer import as_inputs
from equilibria.equilibrium.objective import distance_per_sample
from equilibria.models.base import EquilibriumModel, predicted_classes
from equilibria.models.lipschitz import StemBounds, UnboundedError, why_not_affine
from equilibria.models.opteq.cells import DeepOptEqCell
from equilibria.models.radii import (
    GLOBAL,
    PATTERN,
    RIVALS,
    WEIGHTED,
    ClassPairs,
    InputSide,
    Pattern,
    Rivals,
    weighted_steepness,
)
from equilibria.operators.rounding import NORM_SLACK, accumulated, unit_roundoff
from equilibria.solvers import Solution
from equilibria.solvers.blocks import sample_blocks

UNIT = unit_roundoff(torch.float64)
JUDGED = 8
"""Memory for judging a sample in float64, where convolutions lay out their windows, in units of
what a solve takes: blocks of samples are smaller by this factor, to stay in the cache."""
PERTURBATION = 0.01
"""ε of Proposition 2's check, in the feature g(x)."""


@dataclass(frozen=True)
class Certificate:
    """What is proven of each sample of a batch; tensors are float64 and have the batch first.

    It is a statement about the exact equilibrium: that of the model in exact arithmetic, with the
    weights it has stored (effective weights as float64 makes them of those). The bounds of norms
    that it rests on are measured, and rounding is accounted for.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> certificate = eq.certify(eq.load("digits-certified"), images)
        >>> len(certificate), certificate.share_certified, certificate.reasons
        (2, 1.0, ['', ''])
    """

    contraction: Tensor
    """q, a bound of the Lipschitz constant of the map; ∞ where none is known."""
    unique: Tensor
    """Whether there is exactly one equilibrium."""
    residual: Tensor
    """‖T(y) − y‖ at the state y that the model found."""
    error: Tensor
    """‖T(y) − y*‖ at most, in the variables of the hidden objective where there is one."""
    contraction_error: Tensor
    """q‖T(y) − y‖/(1 − q), for the state; ∞ where nothing is known."""
    convexity_error: Tensor
    """‖∂G‖/m, m the modulus of strong convexity, in the variables of G; ∞ likewise."""
    prediction: Tensor
    """The class at T(y); −1 where there is none."""
    certified_class: Tensor
    """Whether the exact equilibrium has that class, and the model says so."""
    margin: Tensor
    """The logit of that class less that of every class, (samples, classes)."""
    margin_error: Tensor
    """How far each margin may be from that at the exact equilibrium."""
    radius: Tensor
    """No image closer than this (in L2, in pixels) has another class; 0 where nothing is known."""
    radii: dict[str, Tensor]
    """The same by each bound: global, weighted, and with `refine` pattern (`models/radii.py`)."""
    checks: dict[str, Tensor]
    """What must vanish at an equilibrium: stationarity ‖∂G‖, the Fenchel gap
    1ᵀ[S*(y) + S(a) − ay] of y and its pre-activation a, by how much σ fails to be firmly
    nonexpansive (a proximal operator), and of a Deep OptEq the residual of Theorem 2's inclusion.
    Of MOptEqs also both sides of Proposition 2 as a quotient, at least 1."""
    reasons: list[str] = field(default_factory=list)
    """Why a sample has no certified class, or no radius; empty where it has both."""

    def __len__(self) -> int:
        return len(self.contraction)

    @property
    def share_certified(self) -> float:
        return float(self.certified_class.double().mean()) if len(self) else 0.0

    def gains(self) -> dict[str, float]:
        """How many times larger than the global one the radius by each bound is, in the median."""
        sure = self.radii[GLOBAL] > 0 if GLOBAL in self.radii else self.certified_class[:0]
        if not bool(sure.any()):
            return {}
        quotients = {
            name: found[sure] / self.radii[GLOBAL][sure] for name, found in self.radii.items()
        }
        return {name: float(quotient.median()) for name, quotient in quotients.items()}


def joined(certificates: Sequence[Certificate]) -> Certificate:
    """The certificates of several batches as one."""
    if not certificates:
        raise ValueError("there is nothing to join: no batch was certified")

    def together(name: str) -> Any:
        values = [getattr(one, name) for one in certificates]
        if isinstance(values[0], Tensor):
            return torch.cat(values)
        if isinstance(values[0], dict):
            return {key: torch.cat([value[key] for value in values]) for key in values[0]}
        return [item for value in values for item in value]

    return Certificate(**{f.name: together(f.name) for f in fields(Certificate)})


class NoCertificateError(ValueError):
    """There is nothing that could be certified; the message says why."""


Progress: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
"""Goes around a sequence of pieces of work to show how far they are: `rich.progress.track`, `tqdm`
or, to show nothing, `iter`."""


@dataclass(frozen=True)
class Solved:
    """The equilibria that a model has computed for a batch, and its logits.

    `Certifying.solve` returns it and `Certifying.judge` takes it, so that one solve serves both a
    prediction and its certificate. A certificate holds for any state: one that is far from the
    equilibrium, or of other images, only proves less.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> certify = eq.models.certifier(model, images.shape[1:])
        >>> solved = certify.solve(images)
        >>> solved.logits.argmax(dim=1), solved.solution.converged
        (tensor([0, 3]), tensor([True, True]))
        >>> certify.judge(images, solved).certified_class
        tensor([True, True])
    """

    solutions: tuple[Solution, ...]
    """One per equilibrium layer, in the order in which the model applies them."""
    logits: Tensor
    """Output of the model for these equilibria, (samples, classes)."""

    @property
    def solution(self) -> Solution:
        """Solution of the last equilibrium layer."""
        return self.solutions[-1]


def certify(
    model: nn.Module, images: Tensor, *, refine: bool = False, progress: Progress = iter
) -> Certificate:
    """Certify the predictions of a classifier.

    For each image, bounds the error of the computed equilibrium and the largest perturbation that
    provably cannot change the predicted class. The model solves as it is set up (use
    `with eq.solving(model, tolerance=1e-3)` for another tolerance); the certificate is computed in
    float64 from the state that it found.

    Args:
        model: Classifier with an equilibrium layer.
        images: Batch of images, shape (B, channels, height, width), pixels in [0, 1].
        refine: Also compute radii by the activation pattern of each image, which are larger and
            cost dozens of evaluations of the map per image. Only images whose answer this can
            change are refined: those with a certified class and a radius, as long as the radius can
            still grow by more than 1 % (`radii.WORTHWHILE`). Classes and error bars do not depend
            on it.
        progress: Wraps the sequence of batches that are refined, to show a progress bar, for
            example `rich.progress.track`.

    Returns:
        Bounds for each image; `radius` is 0 where nothing is certified, and `reasons` says why.

    Raises:
        NoCertificateError: If the model has no equilibrium layer.
        ValueError: If the images are not of the shape that the model was prepared for.

    Examples:
        >>> images = eq.data.load_digits().test.images[:3]
        >>> found = eq.certify(eq.load("digits-certified"), images)
        >>> found.certified_class, (found.radius > 0.1).all()
        (tensor([True, True, True]), tensor(True))
    """
    by = certifier(model, tuple(images.shape[1:]))
    return by(images, refine=refine, progress=progress)


class Certifying(Protocol):
    """An object that certifies batches of images of one shape."""

    @property
    def can_refine(self) -> bool:
        """Whether `refine` can make a radius of this model larger."""
        ...

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Return `judge(images, solve(images))`; the arguments are those of `certify`."""
        ...

    def solve(self, images: Tensor) -> Solved:
        """Compute the equilibria and the logits of a batch, in evaluation mode."""
        ...

    def judge(
        self, images: Tensor, solved: Solved, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """Certify the predictions of a batch that has been solved already."""
        ...


def certifier(model: nn.Module, image_shape: tuple[int, ...]) -> Certifying:
    """`certify` for many batches: a model's own, or a `Certifier`.

    Examples:
        >>> images = eq.data.load_digits().test.images
        >>> certify = eq.models.certifier(eq.load("digits-certified"), images.shape[1:])
        >>> [certify(batch).share_certified for batch in images[:4].split(2)]
        [1.0, 1.0]
    """
    own: Callable[[tuple[int, ...]], Certifying] | None = getattr(model, "certifier", None)
    return Certifier(model, image_shape) if own is None else own(image_shape)


class Certifier:
    """`certify` for many batches of images of one shape: what all samples share is found once.

    Examples:
        >>> images = eq.data.load_digits().test.images
        >>> certifier = eq.models.Certifier(eq.load("digits-opteq"), images.shape[1:])
        >>> certifier(images[:2]).error.shape
        torch.Size([2])
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, image_shape: tuple[int, ...]) -> None:
        if not isinstance(model, EquilibriumModel):
            raise NoCertificateError(
                f"a {type(model).__name__} has no equilibrium: certificates are for models with a "
                "stem, an equilibrium layer and a head"
            )
        self.model = model
        self.shape = tuple(image_shape)
        self.exact = in_float64(model)
        self.cell: Cell = self.exact.layer.cell
        self.stem: StemBounds | None = None
        self._bounds: dict[str, Tensor | None] = {}
        self.no_radius = ""
        try:
            normalize = getattr(self.exact, "normalize", None)
            self.stem = StemBounds(self.exact.stem, self.exact.stem, normalize, self.shape, UNIT)
        except UnboundedError as error:
            self.no_radius = str(error)
        probe = next(self.exact.parameters()).new_zeros(1, *self.shape)
        inputs = as_inputs(self.exact.injected(probe))
        self.feature_shape = tuple(inputs[0].shape[1:])
        self.context = self.cell.inject(*inputs)
        self.state = self.cell.initial_state(*inputs, self.context)
        self.layout = Packing.of(self.state).layout
        self.form = self._form(self.state, self.context)
        self.form_layout = self.layout
        self.noise: list[Tensor] = []
        if self.form is not None:
            self.form_layout = Packing.of(self.form.image).layout
            energy = self.form.cell.energy
            self.rounding = rounding_of(energy, energy, self.form.context, self.form_layout, UNIT)
            generator = torch.Generator().manual_seed(0)
            for shape in self.form_layout:
                noise = torch.randn(shape, generator=generator, dtype=torch.float64)
                self.noise.append(noise.to(probe.device))
        self.map_rounding = capabilities.rounding(
            self.cell, self.cell, self.context, self.layout, UNIT
        )
        if self.form is None:
            self.rounding = self.map_rounding
        self.no_class = self._why_no_class()
        self.slopes: Tensor | None = None
        self.resolvent: Resolvent | None = None
        self.resolved: Resolved | None = None
        self.units: list[Tensor] | None = None
        if not self.no_class:
            self._read_off()

    def _form(self, state: State, context: Context) -> EnergyForm | None:
        """The hidden objective, where its subgradients are computed without rounding σ."""
        if self.exact.layer.couples_batch:
            return None
        form = capabilities.energy_form(self.cell, state, context)
        is_exact = form is not None and isinstance(form.cell.activation, ReLU | IdentityActivation)
        return form if is_exact else None

    def _why_no_class(self) -> str:
        """Why no class of any sample is certain, as far as the model itself says; or empty."""
        if self.exact.layer.couples_batch:
            return "the samples of a batch are coupled: what one shows changes the others"
        for part in self.model.modules():
            if isinstance(part, RunningScale) and not float(part.patch_energy) > 0:
                return "γ of its kernel has seen no data yet: train the model first"
        if self.has_moving_signs:
            return (
                "the signs of its diversity term (λ > 0) may flip between the state and the "
                "equilibrium: error bars are relative to the signs of the state"
            )
        if capabilities.refresh_until(self.cell):
            return "its map depends on where the first iterations went"
        if why := why_not_affine(self.exact.head):
            return why
        if capabilities.output_form(self.cell) != "linear":
            return f"the output of {type(self.cell).__name__} is not linear in the state"
        if self.rounding is None:
            return f"no bound of the rounding in {type(self.cell).__name__} is known"
        return ""

    @property
    def can_refine(self) -> bool:
        """Whether radii by activation patterns are known for this model."""
        return self.units is not None and self.stem is not None

    @property
    def coupled_branches(self) -> Any:
        """MOptEqs' coupling between branches, or None."""
        lifted = getattr(self.cell, "lifted", self.cell)
        return getattr(lifted, "heritage_diversity", None)

    @property
    def has_moving_signs(self) -> bool:
        return self.coupled_branches is not None and bool(self.coupled_branches.coupling.diversity)

    @property
    def is_unrelaxed(self) -> bool:
        """Whether the map is y ↦ σ(−∇E(y)) itself."""
        if isinstance(self.cell, DeepOptEqCell):
            return all(layer.raw_alpha == 1.0 for layer in self.cell.units())
        cell = getattr(self.cell, "lifted", self.cell)
        return bool(getattr(cell, "alpha", 0) == 1 and getattr(cell, "damping", 0) == 1)

    def _read_off(self) -> None:
        """Logits as a function of the state, or of y, and what their steepness needs."""
        if self.form is None:
            found = readout(self.cell, self.exact.head, self.state, self.context)
            self.readout, self.offset = found
            self.slopes = self.along(self.readout)
            self.pairs = ClassPairs(flat_rows(self.readout))
            return
        form = self.form
        self.readout, self.offset = readout(form.cell, self.exact.head, form.image, form.context)
        energy = form.cell.energy
        known = energy.bounds(form.context, self.form_layout)
        bound = known.concavity
        concavity = torch.inf if bound is None else float(bound.max()) * (1 + NORM_SLACK)
        if energy.facts.is_quadratic and concavity < 1:
            self.resolvent = Resolvent(energy, form.context, self.form_layout, concavity)
            self.resolved = self.resolvent.solve(flat_rows(self.readout))
            if known.units is not None:
                self.units = Pattern.unit_norms(known.units, self.form_layout)
        pulled = None
        if self.resolved is not None and self.stem is not None:
            pulled = self.pull_back(self.resolved.solution)
        self.pairs = ClassPairs(flat_rows(self.readout), self.resolved, pulled)

    def pull_back(self, rows: Tensor, at_image: bool = True) -> Tensor:
        """(US)ᵀu at the image where the stem S is affine; else Uᵀu, times the stem's steepness.

        Args:
            rows: The rows u, of the size of the hidden objective's variables.
            at_image: Whether S is included.

        Returns:
            One row for each u.
        """
        assert self.form is not None
        energy = self.form.cell.energy
        whole = at_image and self.stem is not None and self.stem.is_affine
        with torch.enable_grad():
            at = rows.new_zeros(len(rows), *(self.shape if whole else self.feature_shape))
            at.requires_grad_()
            inputs = as_inputs(self.exact.injected(at) if whole else at)
            context = energy.inject(*inputs)
            descent = first_descent(energy, context)
            if descent is None:
                zero = map_state(lambda t: t.new_zeros(len(rows), *t.shape[1:]), self.form.image)
                descent = energy.descent(zero, energy.complete(context, self.form_layout))
            (pulled,) = torch.autograd.grad(flat_rows(descent), at, rows)
        steep = 1.0 if whole or not at_image or self.stem is None else self.stem.lipschitz
        return pulled.flatten(1) * steep

    def bound(
        self, name: str, owner: Cell | Energy, context: Context, layout: Layout
    ) -> Tensor | None:
        """A bound of the cell or of its energy, computed once where it is one for all inputs.

        Args:
            name: The name of a number in `owner.bounds(context, layout)`. By its contract it is
                one number where it holds for every input, and else one for each sample.
            owner: The cell or its energy.
            context: That of the samples.
            layout: Shapes of the state.

        Returns:
            That number, or None where it is not known.
        """
        if name not in self._bounds:
            found: Tensor | None = getattr(owner.bounds(context, layout), name)
            if found is not None and found.dim():
                return found
            self._bounds[name] = found
        return self._bounds[name]

    def along(self, rows: State) -> Tensor | None:
        """λ_g: how fast ⟨g, T(z)⟩ can change with z, g the differences of rows; of Deep OptEqs."""
        if not isinstance(self.cell, DeepOptEqCell) or not isinstance(rows, Tensor):
            return None
        found = self.cell.slopes_along(rows, self.context, self.layout)
        return None if found is None else found * (1 + NORM_SLACK)

    def __call__(
        self, images: Tensor, *, refine: bool = False, progress: Progress = iter
    ) -> Certificate:
        """The certificate of a batch; the arguments are those of `certify`."""
        return self.judge(images, self.solve(images), refine=refine, progress=progress)

    @torch.no_grad()
    def solve(self, images: Tensor) -> Solved:
        """Compute the equilibria and the logits of a batch, in evaluation mode."""
        check_shape(images, self.shape)
        was_training = self.model.training
        self.model.eval()
        try:
            solution = self.model.solve(images)
            return Solved((solution,), self.model.head(self.model.layer.output(solution)))
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def judge(
        self, images: Tensor, solved: Solved, *, refine: bool = False, progress: Progress = iter
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
        parts = [_Judged(self, images, solved, rows).found(said[rows]) for rows in blocks]
        found = joined(parts)
        if not refine or not self.can_refine or WEIGHTED not in found.radii:
            return found
        radius = found.radii[WEIGHTED].clone()
        can_change = (found.radius > 0).nonzero().flatten()
        states = map_state(lambda tensor: tensor[can_change], state)
        blocks = sample_blocks(states, copies=2 * RIVALS) if len(can_change) else []
        for block in progress(blocks):
            rows = can_change[block]
            radius[rows] = _Judged(self, images, solved, rows).refined(said[rows])
        radii = {**found.radii, PATTERN: radius}
        return replace(found, radii=radii, radius=torch.maximum(found.radius, radius))


class _Judged:
    """Some samples of a batch, in float64."""

    def __init__(self, by: Certifier, images: Tensor, solved: Solved, rows: slice | Tensor) -> None:
        self.by = by
        self.images = images[rows].double()
        self.state = map_state(lambda tensor: tensor[rows].double(), solved.solution.state)
        self.inputs = as_inputs(by.exact.injected(self.images))
        self.context = by.cell.inject(*self.inputs)
        if capabilities.refresh_until(by.cell) or by.has_moving_signs:
            # Signs and scales that a solve keeps are those of the model's own solve.
            own = solved.solution.context.keep(rows)
            wide = (t.double() if t.is_floating_point() else t for t in own.tensors())
            self.context = own.replace(list(wide))
        self.form = None
        if by.form is not None:
            self.form = capabilities.energy_form(by.cell, self.state, self.context)
        if self.form is not None and self.form.cell is by.cell and by.is_unrelaxed:
            self.image = self.form.image
        else:
            self.image = by.cell.step(self.state, self.context)
        self.sizes = (norms(self.inputs), self._stem_error())
        self.no_radius = by.no_radius

    def _stem_error(self) -> Tensor:
        return self._filled(0.0) if self.by.stem is None else self.by.stem.run(self.images).error

    def _filled(self, value: float) -> Tensor:
        return self.images.new_full((len(self.images),), value)

    def _per_sample(
        self, name: str, owner: Cell | Energy, context: Context, layout: Layout
    ) -> Tensor:
        """A bound that a cell or an energy computes, infinite where it knows none."""
        bound = self.by.bound(name, owner, context, layout)
        known = self._filled(torch.inf) if bound is None else bound.double()
        return known.expand(len(self.images)) * (1 + NORM_SLACK)

    def found(self, said: Tensor) -> Certificate:
        """The certificate, without radii by the activation pattern."""
        by, cell = self.by, self.by.cell
        q = self._per_sample("contraction", cell, self.context, by.layout)
        residual = distance_per_sample(self.state, self.image)
        by_contraction = self._contraction_error(q, residual)
        by_convexity, checks = self._filled(torch.inf), {}
        if self.form is not None:
            by_convexity = self._convexity_error(self.form)
            checks = self._checks(self.form)
        if isinstance(cell, DeepOptEqCell) and not by.exact.layer.couples_batch:
            checks["inclusion"] = cell.objective(self.context).residual(self.image)
        error = by_contraction if self.form is None else by_convexity
        if self.form is not None and self.form.cell is cell:
            error = torch.minimum(by_contraction, by_convexity)
        nothing = self.images.new_zeros(len(said), 0)
        found = Certificate(
            contraction=q,
            unique=(q < 1) | by_convexity.isfinite(),
            residual=residual,
            error=error,
            contraction_error=by_contraction,
            convexity_error=by_convexity,
            prediction=said,
            certified_class=torch.zeros_like(said, dtype=torch.bool),
            margin=nothing,
            margin_error=nothing,
            radius=self._filled(0.0),
            radii={},
            checks=checks,
            reasons=[f"no certificate, because {by.no_class}"] * len(said),
        )
        return found if by.no_class else self._with_classes(found, said)

    def refined(self, said: Tensor) -> Tensor:
        """Radii by the activation pattern."""
        by, found = self.by, self.found(said)
        assert by.units is not None
        assert by.resolvent is not None
        pattern = Pattern(
            flat_rows(self.preactivation), found.convexity_error, self.rounding, by.units
        )
        return pattern.radius(
            self.rivals, self.steepness, by.pairs, by.resolvent, self.side, self.convexity
        )

    def _contraction_error(self, q: Tensor, residual: Tensor) -> Tensor:
        """(qr + δ)/(1 − q) for T(y), by Banach's theorem, δ the rounding of T in float64."""
        self.delta = self._filled(torch.inf)
        if self.by.map_rounding is not None:
            self.delta = self.by.map_rounding.at(self.context, norms(self.state), *self.sizes)
        return torch.where(q < 1, (q * residual + self.delta) / (1 - q), torch.inf)

    def _convexity_error(self, form: EnergyForm) -> Tensor:
        """‖y − y*‖ ≤ ‖p‖/m for p ∈ ∂G(y), G m-strongly convex, at y = σ(…).

        p is the subgradient of least norm: y is the exact equilibrium for c + p.
        """
        energy, sigma, layout = form.cell.energy, form.cell.activation, self.by.form_layout
        self.preactivation = energy.descent(form.image, form.context)
        pulls = map_state(
            lambda y, a: sigma.minimal_subgradient(y, y - a), form.image, self.preactivation
        )
        self.pull = norms(pulls)
        self.rounding = self._filled(torch.inf)
        if self.by.rounding is not None:
            self.rounding = self.by.rounding.at(form.context, norms(form.image), *self.sizes)
        self.convexity = 1 - self._per_sample("concavity", energy, form.context, layout)
        bound = (self.pull + self.rounding) / self.convexity
        return torch.where(self.convexity > 0, bound, torch.inf)

    def _checks(self, form: EnergyForm) -> dict[str, Tensor]:
        sigma = form.cell.activation
        gap, excess = self._filled(0.0), self._filled(0.0)
        tensors = state_tensors(form.image), state_tensors(self.preactivation)
        for y, a, noise in zip(*tensors, self.by.noise, strict=True):
            gaps = sigma.conjugate(y) + sigma.primitive(a) - a * y
            gap += gaps.flatten(1).sum(dim=1)
            moved = sigma(a + noise) - sigma(a)
            excess += (moved.square() - moved * noise).flatten(1).sum(dim=1)
        found = {"stationarity": self.pull, "fenchel_gap": gap, "firmness": excess.clamp_min(0)}
        if self.by.coupled_branches is not None and not self.by.no_class:
            found["proposition_2"] = self._proposition_two(form)
        return found

    def _proposition_two(self, form: EnergyForm) -> Tensor:
        """MOptEqs' Proposition 2 at δ = ε sign(Uᵀy*), as left side ÷ right side, at least 1.

        max{G(y′*; g − δ) − G(y*; g), √Nε‖U‖‖y′* − y*‖} ≥ ½(ε‖Uᵀy*‖₁ − Nε²), N the numbers of g, in
        the variables y = W^{−T}z and without its ‖U‖ ≤ 1.
        """
        by = self.by
        (feature,) = self.inputs
        pulled = by.pull_back(flat_rows(form.image), at_image=False).view(feature.shape)
        ends = []
        for g in (feature, feature - PERTURBATION * pulled.sign()):
            context = by.cell.inject(g)
            solution = by.exact.layer.solve(g, solver="picard")
            end = capabilities.energy_form(by.cell, solution.state, context)
            assert end is not None
            ends.append((end.image, end.cell.objective(end.context).value(end.image)))
        (y, value), (moved, moved_value) = ends
        numbers = feature[0].numel()
        distance = self._per_sample("input", form.cell.energy, form.context, by.form_layout)
        distance = distance * distance_per_sample(y, moved)
        left = torch.maximum(moved_value - value, numbers**0.5 * PERTURBATION * distance)
        sizes = pulled.flatten(1).abs().sum(dim=1)
        right = 0.5 * (PERTURBATION * sizes - numbers * PERTURBATION**2)
        return torch.where(right > 0, left / right, torch.inf)

    def _with_classes(self, found: Certificate, said: Tensor) -> Certificate:
        by = self.by
        image = flat_rows(self.image if self.form is None else self.form.image)
        logits = image @ by.pairs.rows.T + by.offset
        best = logits.argmax(dim=1)
        margin = logits.gather(1, best[:, None]) - logits
        self.differences = by.pairs.of(best)
        direction = self.differences.direction
        is_own = torch.zeros_like(margin, dtype=torch.bool).scatter(1, best[:, None], True)
        error = self._margin_error(found, best)
        reading = accumulated(8 * READING * image.shape[1], UNIT)
        error = error + reading * (direction * norms(image)[:, None] + logits.abs())
        self.rivals = Rivals(best, margin - error, is_own)
        is_finite = logits.isfinite().all(dim=1)
        safe = ((margin > error) | is_own).all(dim=1) & is_finite
        certified = safe & (said == best)
        radii = {
            name: torch.where(certified, radius, 0.0) for name, radius in self._radii(found).items()
        }
        radius = torch.stack([self._filled(0.0), *radii.values()]).amax(dim=0)
        facts = (safe, said, best, found.unique, radius)
        samples = zip(*(fact.tolist() for fact in facts), strict=True)
        return replace(
            found,
            prediction=torch.where(is_finite, best, -1),
            certified_class=certified,
            margin=margin,
            margin_error=error,
            radius=radius,
            radii=radii,
            reasons=[self._reason(*sample) for sample in samples],
        )

    def _margin_error(self, found: Certificate, best: Tensor) -> Tensor:
        """‖g‖ times the error, or √(gᵀXg)·‖p‖/√(1 − h) (`equilibrium/certificates.py`).

        Of a Deep OptEq also λ_g‖z − z*‖ + ‖g‖δ, with ‖z − z*‖ ≤ (r + δ)/(1 − q).
        """
        direction, form = self.differences.direction, self.differences.form
        if self.form is None:
            error = direction * found.contraction_error[:, None]
            if self.by.slopes is None:
                return error
            gap = (found.residual + self.delta) / (1 - found.contraction)
            gap = torch.where(found.contraction < 1, gap, torch.inf)
            rounded = direction * self.delta[:, None]
            along = self.by.slopes[best] * gap[:, None] + rounded
            return torch.minimum(error, along * (1 + NORM_SLACK))
        error = direction * found.convexity_error[:, None]
        if form is None:
            return error
        pull = (self.pull + self.rounding) / self.convexity.clamp_min(0).sqrt()
        return torch.minimum(error, form.sqrt() * pull[:, None]) * (1 + NORM_SLACK)

    def _reason(self, safe: bool, said: int, best: int, unique: bool, radius: float) -> str:
        if not unique:
            why = "no bound of the norms makes the equilibrium unique: use norm='bound'"
        elif not safe:
            why = "the error bar is wider than the margin: lower the tolerance"
        elif said != best:
            why = f"the model says class {said}, and its exact equilibrium {best}"
        else:
            missing = self.no_radius or "no Lipschitz constant in the image is known"
            return "" if radius > 0 else f"no radius, because {missing}"
        return f"no certificate, because {why}"

    def _radii(self, found: Certificate) -> dict[str, Tensor]:
        """Radii by the bounds that hold (`radii.py`)."""
        by, rivals, direction = self.by, self.rivals, self.differences.direction
        if by.stem is None:
            return {}
        if self.form is None:
            entering = self._per_sample("input", by.cell, self.context, by.layout)
            entering = entering * by.stem.lipschitz
            slope = entering / (1 - found.contraction)
            slope = torch.where(found.contraction < 1, slope, torch.inf)
            known = {GLOBAL: rivals.radius(direction * slope[:, None])}
            if by.slopes is not None:
                # z* moves by at most `slope`, of which ⟨g, T⟩ sees λ_g, and what enters anew.
                along = by.slopes[rivals.best] * slope[:, None]
                along = along + direction * entering[:, None]
                known[WEIGHTED] = rivals.radius(along * (1 + NORM_SLACK))
            is_known = by.bound("input", by.cell, self.context, by.layout) is not None
            return known if is_known else {}
        energy, context, layout = self.form.cell.energy, self.form.context, by.form_layout
        if by.bound("input", energy, context, layout) is None:
            self.no_radius = self.no_radius or "a scale of its energy (γ) depends on the image"
            return {}
        slope = self._per_sample("input", energy, context, layout) * by.stem.lipschitz
        curvature = self._per_sample("curvature", energy, context, layout)
        plain = torch.where(curvature < 1, slope / (1 - curvature), torch.inf)
        self.steepness = direction * plain[:, None]
        radii = {GLOBAL: rivals.radius(self.steepness)}
        self.side = InputSide(by.stem.lipschitz, slope, by.pull_back)
        weighted = weighted_steepness(self.differences, self.side, self.convexity)
        if weighted is None:
            convex = torch.where(self.convexity > 0, slope / self.convexity, torch.inf)
            return {**radii, WEIGHTED: rivals.radius(direction * convex[:, None])}
        self.steepness = torch.minimum(self.steepness, weighted)
        return {**radii, WEIGHTED: rivals.radius(self.steepness)}


def readout(cell: Cell, head: nn.Module, state: State, context: Context) -> tuple[State, Tensor]:
    """Logits as ⟨readout_k, y⟩ + offset_k: a row a class in the shape of the state; the offset."""
    zero = map_state(lambda t: torch.zeros_like(t[:1]), state)
    offset: Tensor = head(cell.output(zero, context))[0]
    with torch.enable_grad():
        at = map_state(lambda t: t.repeat(len(offset), *[1] * (t.dim() - 1)).requires_grad_(), zero)
        logits = head(cell.output(at, context))
        found = torch.autograd.grad(logits.diagonal().sum(), state_tensors(at))
    return (found[0] if isinstance(state, Tensor) else tuple(found)), offset.detach()


def in_float64(model: EquilibriumModel) -> EquilibriumModel:
    """A twin in float64 and evaluation mode: the same numbers, since float32 is exact there."""

    def wide(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        return kept.to(torch.float64, copy=True) if kept.is_floating_point() else kept

    return twin(model, wide).eval()


def check_shape(images: Tensor, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if images are not of this shape."""
    if tuple(images.shape[1:]) != shape:
        raise ValueError(f"expected images of shape {shape}, not {tuple(images.shape)}")


def norms(state: State) -> Tensor:
    """‖·‖ of each sample."""
    squares = [tensor.flatten(1).square().sum(dim=1) for tensor in state_tensors(state)]
    return torch.stack(squares).sum(dim=0).sqrt()
