"""Copies of models whose effective weights and scales are plain tensors, for graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.kernel_scale import HeldScale, RunningScale
from equilibria.operators.norm_control import KernelOperator


class FixedWeightsError(ValueError):
    """The effective weights of a model cannot be fixed; the message states the reason."""


def fix_scales(model: nn.Module) -> None:
    """Replace running scales of Gaussian kernels by tensors.

    Args:
        model: Model to change.
    """
    for module in model.modules():
        if isinstance(module, GaussianKernel) and isinstance(module.scale, RunningScale):
            energy = module.scale.patch_energy.detach()
            if not float(energy) > 0:
                raise FixedWeightsError(
                    "γ of the Gaussian kernel has no data yet; train the model first"
                )
            module.scale = HeldScale(energy)


def fix_weights(model: nn.Module, run: Callable[[], Any]) -> None:
    """Replace the weights of norm-controlled operators by the effective ones.

    Args:
        model: Model to change.
        run: Runs the model once, to record the effective weights.
    """
    recorded: dict[KernelOperator, list[tuple[Tensor, ...]]] = {}
    for operator in model.modules():
        if isinstance(operator, KernelOperator) and operator.norm is not None:
            recorded[operator] = []
            operator.weights = _recording(operator.weights, recorded[operator])  # type: ignore[method-assign]
    run()
    for operator, calls in recorded.items():
        del operator.weights
        if any(not torch.equal(weights[0], calls[0][0]) for weights in calls):
            raise FixedWeightsError(
                f"{operator} acts on maps of several sizes with different weights, which cannot be "
                "exported or compiled as one graph"
            )
        for name, weight in zip(operator.kernel_names, calls[0] if calls else (), strict=False):
            setattr(operator, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
        operator.norm = None


def _recording(weights: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Wrap a `weights` method so that its results are appended to `calls`."""

    def recorded(*shape: Any) -> Any:
        calls.append(weights(*shape))
        return calls[-1]

    return recorded
