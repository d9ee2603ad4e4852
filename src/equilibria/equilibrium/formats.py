"""Conversion of layer inputs to a usable type and memory format."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.equilibrium.unsupported import refuse_half_on_cpu
from equilibria.operators.norm_control import is_wrapped


def usable(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return differentiable inputs in the fastest memory format.

    Raises:
        NotImplementedError: If an input is in float16 on a CPU.
    """
    refuse_half_on_cpu(inputs)
    return tuple(in_fastest_format(x.clone() if x.is_inference() else x) for x in inputs)


def in_fastest_format(x: Tensor) -> Tensor:
    """Convert images on a CPU to channels_last, which makes convolutions several times faster.

    The state takes the format of its input, and the solver's buffer that of the state.
    """
    is_cpu_image = (
        x.dim() == 4 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    )
    if not is_cpu_image or is_wrapped(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)
