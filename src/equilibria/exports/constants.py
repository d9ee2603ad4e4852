"""What is proven of a model for every image, as numbers that a file can carry."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from equilibria.equilibrium import EquilibriumLayer
from equilibria.models import Certifier, NoCertificateError, ReflectionNetwork
from equilibria.models.early_exit import exit_bounds
from equilibria.models.reflection.model import UnitHead
from equilibria.operators.rounding import NORM_SLACK


@torch.no_grad()
def certificate_constants(model: nn.Module, image_shape: tuple[int, ...]) -> dict[str, Any]:
    """With r the residual that the graph returns, and margins w_k − w_j of its logits:

    contraction: q of each equilibrium; T(y) is at most q·r/(1 − q) from it.
    margin_error: [k][j], times r how far that margin may be from that at the exact equilibrium.
    margin_slope: [k][j], how steep it can be in the pixels (L2): an image whose margins all exceed
        their errors keeps its class within min_j (margin − margin_error·r)/margin_slope.
    why_not: why one of them is missing.

    In exact arithmetic with the weights of the file; the rounding of a runtime is not counted.

    Examples:
        >>> constants = eq.exports.certificate_constants(eq.load("digits-opteq"), (1, 8, 8))
        >>> sorted(constants)[:2]
        ['contraction', 'image_shape']
    """
    limits = _contractions(model, image_shape)
    known: dict[str, Any] = {"image_shape": list(image_shape), "contraction": limits}
    try:
        if isinstance(model, ReflectionNetwork):
            return known | _of_reflections(model, [q for q in limits if q is not None])
        return known | _of_classifier(model, image_shape)
    except NoCertificateError as error:
        return known | {"why_not": str(error)}


def _contractions(model: nn.Module, image_shape: tuple[int, ...]) -> list[float | None]:
    """A proven q < 1 of each equilibrium, or None."""
    exact = copy.deepcopy(model).double().eval()  # no twin, which would share its hooks
    found: list[float | None] = []

    def note(layer: EquilibriumLayer, inputs: tuple[Any, ...]) -> None:
        bound = layer.contraction_bound(inputs[0])
        q = 1.0 if bound is None else float(bound.max()) * (1 + NORM_SLACK)
        found.append(q if q < 1 else None)

    for part in exact.modules():
        if isinstance(part, EquilibriumLayer):
            part.register_forward_pre_hook(note)
    exact(torch.zeros(1, *image_shape, dtype=torch.float64))
    return found


def _of_reflections(model: ReflectionNetwork, limits: list[float]) -> dict[str, Any]:
    """Errors of reflections add up: each is at most 2q/(1 − q) times its residual."""
    if len(limits) < len(model.reflections()):
        raise NoCertificateError("no bound of the norms makes the map a contraction")
    slopes = model.margin_slopes().double() * (1 + NORM_SLACK)
    assert isinstance(model.head, UnitHead)
    rows = model.head.rows.double()
    own = torch.linalg.vector_norm(rows[:, None] - rows[None], dim=2)
    return {
        "margin_error": (own * sum(2 * q / (1 - q) for q in limits)).tolist(),
        "margin_slope": slopes.tolist(),
    }


def _of_classifier(model: nn.Module, image_shape: tuple[int, ...]) -> dict[str, Any]:
    _, early = exit_bounds(model, image_shape)
    found: dict[str, Any] = {"margin_error": early.slope.tolist()}
    by = Certifier(model, image_shape)
    q = by.cell.bounds(by.context, by.layout).contraction
    bound = by.cell.bounds(by.context, by.layout).input
    if by.stem is None or bound is None or q is None or float(q.max()) >= 1:
        return found | {"why_not": by.no_radius or "no Lipschitz constant in the image is known"}
    slope = float(bound.max()) * by.stem.lipschitz / (1 - float(q.max()) * (1 + NORM_SLACK))
    return found | {"margin_slope": (early.direction * slope * (1 + NORM_SLACK)).tolist()}
