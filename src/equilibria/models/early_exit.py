"""Solving until the class is certain, and no longer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from equilibria.context import State
from equilibria.equilibrium import EnergyCell, capabilities, solving
from equilibria.equilibrium.certificates import CertifiedClass, flat_rows
from equilibria.models.base import EquilibriumModel
from equilibria.models.certificates import Certifier, NoCertificateError, readout
from equilibria.models.lipschitz import StemBounds, UnboundedError
from equilibria.models.opteq.cells import DeepOptEqCell
from equilibria.operators.rounding import NORM_SLACK, unit_roundoff, upper_norm


class CertifiedExit(nn.Module):
    """A classifier that solves each sample until its class is certain, or to the tolerance.

    The class of a sample that stops early is that of the exact equilibrium (see `certify`), which a
    full solve approximates; all others are solved as the model solves them. The rounding of the
    model's own arithmetic is bounded: nothing is computed in float64 but what is read off. For
    inference: it has no gradients.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> quick = eq.models.CertifiedExit(eq.load("digits-opteq"), images.shape[1:])
        >>> quick(images).argmax(dim=1)
        tensor([0, 3])
    """

    def __init__(self, model: nn.Module, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        own: Callable[[tuple[int, ...]], Exit] | None = getattr(model, "certified_exit", None)
        self._exit = (own or partial(_LayerExit, model))(tuple(image_shape))
        self.certified = torch.zeros(0, dtype=torch.bool)
        """Of the samples of the last batch, whether their class is certain."""
        self._seen = self._certain = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    @property
    def share_certified(self) -> float:
        """Of all samples so far."""
        return self._certain / max(self._seen, 1)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        logits, self.certified = self._exit(images)
        self._seen += len(self.certified)
        self._certain += int(self.certified.sum())
        return logits


Exit: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits of images, and of which the class is certain."""


class _LayerExit:
    """Of a model with one layer, whose iterates a criterion judges."""

    def __init__(self, model: nn.Module, image_shape: tuple[int, ...]) -> None:
        self.model: Any = model
        self.stem, self.criterion = exit_bounds(model, image_shape)

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
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
def exit_bounds(
    model: nn.Module, image_shape: tuple[int, ...]
) -> tuple[StemBounds, CertifiedClass]:
    """Of the model in the type it computes in, for images of this shape."""
    unit = _unit(model)
    by = Certifier(model, image_shape)
    if by.no_class:
        raise NoCertificateError(f"no certificate, because {by.no_class}")
    assert isinstance(model, EquilibriumModel)
    cell, context = by.cell, by.context
    normalize = getattr(model, "normalize", None)
    try:
        stem = StemBounds(model.stem, by.exact.stem, normalize, image_shape, unit)
    except UnboundedError as error:
        raise NoCertificateError(f"no certificate in {_name(model)}, because {error}") from None
    rounding = capabilities.rounding(model.layer.cell, cell, context, by.layout, unit)
    if rounding is None:
        raise NoCertificateError(
            f"no certificate, because the rounding of {type(cell).__name__} is not bounded"
        )
    rows, offset = readout(cell, by.exact.head, by.state, context)
    flat = flat_rows(rows)
    direction = torch.linalg.vector_norm(flat[:, None] - flat[None], dim=2) * (1 + NORM_SLACK)
    slope, blur = _energy_slopes(by, direction)
    if not bool(slope.isfinite().all()):
        slope, blur = _contraction_slopes(by, direction, rows)
    if not bool(slope.isfinite().all()):
        raise NoCertificateError(
            "no certificate, because no bound of the norms makes the equilibrium unique: bound "
            "them with norm='bound'"
        )
    nothing = torch.zeros(0)
    criterion = CertifiedClass(
        tolerance=0.0,
        readout=rows,
        offset=offset,
        slope=slope * (1 + NORM_SLACK),
        blur=blur * (1 + NORM_SLACK),
        direction=direction,
        rounding=rounding,
        unit=unit,
        feature=nothing,
        feature_error=nothing,
    )
    return stem, criterion


def _contraction_slopes(by: Certifier, direction: Tensor, rows: State) -> tuple[Tensor, Tensor]:
    """‖g‖q/(1 − q) and ‖g‖/(1 − q); of a Deep OptEq λ_g/(1 − q) and ‖g‖ + λ_g/(1 − q).

    ⟨g, T(z) − z*⟩ ≤ λ_g‖z − z*‖ with λ_g ≤ ‖g‖q the slope of the map along g, and
    ‖z − z*‖ ≤ (r + δ)/(1 − q).
    """
    bound = by.cell.bounds(by.context, by.layout).contraction
    q = torch.inf if bound is None or bound.numel() > 1 else float(bound) * (1 + NORM_SLACK)
    if q >= 1:
        nothing = torch.full_like(direction, torch.inf)
        return nothing, nothing
    along = by.along(rows)
    slope = (direction * q if along is None else torch.minimum(direction * q, along)) / (1 - q)
    return slope, direction + slope


def _energy_slopes(by: Certifier, direction: Tensor) -> tuple[Tensor, Tensor]:
    """How far a margin can be off at T(y), by the hidden objective: for each unit of r and of δ.

    T(y) is the equilibrium for an input that is off by s = ∇E(T(y)) − ∇E(y), besides what is
    rounded in ∇E: margins are off by √(gᵀXg)·‖s‖/√(1 − h), or ‖g‖‖s‖/(1 − h). Where z is iterated
    s = W(z − T(z)), taken at the exact T(z), and rounding moves z itself.
    """
    nothing = torch.full_like(direction, torch.inf)
    form, steepness = by.form, _gradient_lipschitz(by)
    if form is None or steepness is None or not by.is_unrelaxed:
        return nothing, nothing
    concavity = form.cell.energy.bounds(form.context, by.form_layout).concavity
    convexity = 0.0 if concavity is None else 1 - float(concavity.max()) * (1 + NORM_SLACK)
    is_shared = concavity is not None and concavity.numel() == 1
    if convexity <= 0 or not is_shared:
        return nothing, nothing
    if by.resolved is not None:
        classes = torch.arange(len(by.offset))
        square = (len(classes), len(classes))
        pairs = by.resolved.difference(classes[:, None].expand(square), classes.expand(square))
        per_input = pairs.form()[1].sqrt() / math.sqrt(convexity)
    elif form.cell is by.cell:
        per_input = direction / convexity
    else:
        return nothing, nothing
    slope = per_input * steepness
    return slope, per_input if form.cell is by.cell else slope + direction


def _gradient_lipschitz(by: Certifier) -> float | None:
    """Of s in T(y) − y."""
    if by.form is None:
        return None
    if isinstance(by.cell, DeepOptEqCell):
        return upper_norm(by.cell.units()[0].W, by.layout[0])
    if isinstance(by.cell, EnergyCell):
        bound = by.cell.energy.bounds(by.form.context, by.form_layout).curvature
        return None if bound is None else float(bound.max()) * (1 + NORM_SLACK)
    return None


def _unit(model: nn.Module) -> float:
    """The unit roundoff of the model's type, where its convolutions are plain sums of products."""
    parameter = next(model.parameters())
    place, dtype = parameter.device.type, parameter.dtype
    if dtype not in (torch.float32, torch.float64) or (place != "cpu" and dtype == torch.float32):
        raise NoCertificateError(
            f"no certificate in {_name(model)} on {place}, where convolutions may not be plain "
            "sums of products: use float32 on the CPU, or model.double()"
        )
    if torch.get_float32_matmul_precision() != "highest":
        raise NoCertificateError(
            "no certificate, because torch.set_float32_matmul_precision allows products of less "
            "than single precision: set it to 'highest'"
        )
    return unit_roundoff(dtype)


def _name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
