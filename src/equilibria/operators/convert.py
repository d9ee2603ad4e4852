"""What a user has at hand, as an operator."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.operators.base import LinearOperator
from equilibria.operators.conv import Conv2d
from equilibria.operators.dense import Dense


def as_operator(obj: object) -> LinearOperator:
    """The operator that `obj` stands for.

    Accepts an operator (returned as it is), a 2-D tensor (out, in), a 4-D tensor (out, in, k, k),
    and nn.Linear or nn.Conv2d without bias. Parameters stay shared and trainable; plain tensors
    become constants.
    """
    if isinstance(obj, LinearOperator):
        return obj
    if isinstance(obj, Tensor) and obj.dim() == 2:
        return Dense.from_tensor(obj)
    if isinstance(obj, Tensor) and obj.dim() == 4:
        return Conv2d.from_tensor(obj)
    if isinstance(obj, nn.Linear):
        _check_module(obj)
        return Dense.from_tensor(obj.weight)
    if isinstance(obj, nn.Conv2d):
        _check_module(obj)
        return _from_conv(obj)
    shape = f" of shape {tuple(obj.shape)}" if isinstance(obj, Tensor) else ""
    raise TypeError(
        f"cannot make a linear operator of a {type(obj).__name__}{shape}; accepted are a "
        "LinearOperator, a 2-D tensor (out, in), a 4-D tensor (out, in, k, k), and nn.Linear or "
        "nn.Conv2d without bias"
    )


def _check_module(module: nn.Linear | nn.Conv2d) -> None:
    name = type(module).__name__
    if module.bias is not None:
        raise ValueError(
            f"nn.{name} has a bias, which a linear operator cannot hold: build it with bias=False; "
            "the bias belongs to the input term, Input(U, bias=True)"
        )
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"nn.{name} is parametrized, and its weight is no parameter of its own; "
            'use Dense or Conv2d, with norm="bound" to control the norm'
        )


def _from_conv(conv: nn.Conv2d) -> Conv2d:
    unsupported = {
        "groups": conv.groups != 1,
        "dilation": any(d != 1 for d in conv.dilation),
        "padding_mode": conv.padding_mode != "zeros",
        "stride": len(set(conv.stride)) != 1,
        "padding": conv.padding == "same" and any(k % 2 == 0 for k in conv.kernel_size),
    }
    if any(unsupported.values()):
        found = ", ".join(f"{key}={getattr(conv, key)}" for key, bad in unsupported.items() if bad)
        raise ValueError(
            f"nn.Conv2d with {found} is not supported: "
            "only one group, no dilation, zero padding, and one stride for both directions"
        )
    padding: tuple[int, int] | int | None
    if isinstance(conv.padding, str):
        padding = None if conv.padding == "same" else 0
    else:
        padding = (conv.padding[0], conv.padding[1])
    return Conv2d.from_tensor(conv.weight, stride=conv.stride[0], padding=padding)
