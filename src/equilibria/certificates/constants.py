"""Constants of a certificate that hold for every image, to store in an exported program."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from equilibria.certificates.certificate import MarginConstants, NoCertificateError, certifier
from equilibria.certificates.early_exit import layer_criterion
from equilibria.certificates.prepared import PreparedModel
from equilibria.certificates.radii import global_steepness
from equilibria.equilibrium import EquilibriumLayer, capabilities
from equilibria.operators.rounding import NORM_SLACK


@torch.no_grad()
def certificate_constants(model: nn.Module, image_shape: tuple[int, ...]) -> dict[str, Any]:
    """Compute the constants of a certificate that hold for every image of one shape.

    An exported program that returns logits and a residual can be certified by them. They hold in
    exact arithmetic with the weights of `model`; the rounding of the runtime that executes the
    program is not counted.

    Args:
        model: Any model with equilibrium layers.
        image_shape: Shape of one image, (channels, height, width).

    Returns:
        A dictionary with the following keys, where r is the residual that the program returns, and
        a margin is the difference of the logits of two classes k and j:

        - `image_shape`: the shape.
        - `contraction`: contraction factor q of each equilibrium layer's map T; the image T(y) is
          at most q·r/(1 − q) from the equilibrium. None where no q < 1 is known.
        - `margin_error`: [k][j]; times r it bounds the error of that margin.
        - `margin_slope`: [k][j], Lipschitz constant of that margin in the pixels (L2): an image
          whose margins all exceed their errors keeps its class within
          min_j (margin − margin_error·r)/margin_slope.
        - `why_not`: why one of the last two is missing.

    Examples:
        >>> from equilibria.certificates.constants import certificate_constants
        >>> constants = certificate_constants(eq.load("digits-opteq"), (1, 8, 8))
        >>> sorted(constants)[:2]
        ['contraction', 'image_shape']
    """
    limits = contraction_limits(model, image_shape)
    known: dict[str, Any] = {"image_shape": list(image_shape), "contraction": limits}
    try:
        constants = certifier(model, tuple(image_shape)).constants()
    except NoCertificateError as error:
        return known | {"why_not": str(error)}
    known["margin_error"] = constants.margin_error.tolist()
    if constants.margin_slope is None:
        return known | {"why_not": constants.why_no_slope}
    return known | {"margin_slope": constants.margin_slope.tolist()}


@torch.no_grad()
def layer_constants(prepared: PreparedModel) -> MarginConstants:
    """Compute the constants of a model with one equilibrium layer.

    Args:
        prepared: The prepared model.

    Returns:
        The bound of the early exit, and the global bound on the steepness.

    Raises:
        NoCertificateError: If the model has no early exit.
    """
    _, early = layer_criterion(prepared)
    cell, context = prepared.cell, prepared.cell.at.context
    q, entering = cell.contraction(context), cell.input_lipschitz(context)
    if prepared.stem is None or entering is None or q is None or float(q.max()) >= 1:
        why = prepared.no_radius or "no Lipschitz constant in the image is known"
        return MarginConstants(early.bound.per_residual, why_no_slope=why)
    limit = q.max().double() * (1 + NORM_SLACK)
    slope = global_steepness(early.direction, limit, entering.max() * prepared.stem.lipschitz())
    return MarginConstants(early.bound.per_residual, slope * (1 + NORM_SLACK))


def contraction_limits(model: nn.Module, image_shape: tuple[int, ...]) -> list[float | None]:
    """Return a proven q < 1 for each equilibrium layer, 0 for a formula, None if none is known."""
    exact = copy.deepcopy(model).double().eval()  # no twin, which would share its hooks
    limits: list[float | None] = []

    def record(layer: EquilibriumLayer, inputs: tuple[Any, ...]) -> None:
        if capabilities.closed_form(layer.cell) is not None:
            limits.append(0.0)
            return
        bound = layer.contraction_bound(inputs[0])
        q = 1.0 if bound is None else float(bound.max()) * (1 + NORM_SLACK)
        limits.append(q if q < 1 else None)

    for part in exact.modules():
        if isinstance(part, EquilibriumLayer):
            part.register_forward_pre_hook(record)
    exact(torch.zeros(1, *image_shape, dtype=torch.float64))
    return limits
