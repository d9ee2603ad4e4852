"""The inputs of a layer in the form in which it computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.equilibrium.unsupported import refuse_half_on_cpu
from equilibria.operators.norm_control import is_wrapped


def usable(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return inputs that can be differentiated, in the memory format in which they are fastest.

    Raises:
        NotImplementedError: If an input is in float16 on a CPU.
    """
    refuse_half_on_cpu(inputs)
    return tuple(in_fastest_format(one.clone() if one.is_inference() else one) for one in inputs)


def in_fastest_format(x: Tensor) -> Tensor:
    """Return images on a CPU in channels_last: convolutions are several times faster there.

    The state takes the format of its input, and the solver's buffer that of the state.
    """
    fast = x.dim() == 4 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    if not fast or is_wrapped(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)
