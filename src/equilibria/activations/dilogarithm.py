"""The dilogarithm Li₂(x) = −∫₀ˣ log(1 − t)/t dt at the arguments that softplus needs.

Both functions take the exponent instead of x = ±e^t, which avoids overflow and the cancellation of
1 − x near x = 1. Derivatives of every order are exact, because the first is a closed form.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_PI_SQUARED_12 = math.pi**2 / 12

# B₂ₙ/(2n+1)!, n = 1, 2, …: Li₂(1 − e⁻ᵘ) = u − u²/4 + Σ B₂ₙ u²ⁿ⁺¹/(2n+1)!
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SERIES = tuple(b / math.factorial(2 * n + 1) for n, b in enumerate(_BERNOULLI, start=1))


def softplus(a: Tensor) -> Tensor:
    """Return log(1 + eᵃ) to full precision; PyTorch's softplus ignores e⁻ᵃ beyond a = 20."""
    return -logsigmoid(-a)


def dilogarithm_exp(t: Tensor) -> Tensor:
    """Return the dilogarithm Li₂(e⁻ᵗ) for t ≥ 0; its derivative is log(1 − e⁻ᵗ)."""
    result: Tensor = _DilogarithmExp.apply(t)  # type: ignore[no-untyped-call]
    return result


def softplus_primitive(a: Tensor) -> Tensor:
    """Return ∫₀ᵃ log(1 + eᵗ) dt = −Li₂(−eᵃ) − π²/12; its derivative is softplus."""
    result: Tensor = _SoftplusPrimitive.apply(a)  # type: ignore[no-untyped-call]
    return result


class _SavesItsInput(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class _DilogarithmExp(_SavesItsInput):
    @staticmethod
    def forward(t: Tensor) -> Tensor:
        one_minus_x = -torch.expm1(-t)
        # Li₂(x) + Li₂(1 − x) = π²/6 − log(x) log(1 − x), with −log(x) = t
        near_one = 2 * _PI_SQUARED_12 + torch.xlogy(t, one_minus_x) - _series(t)
        return torch.where(t < math.log(2), near_one, _series(-torch.log1p(-torch.exp(-t))))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        return grad * torch.log(-torch.expm1(-t))


class _SoftplusPrimitive(_SavesItsInput):
    @staticmethod
    def forward(a: Tensor) -> Tensor:
        # Li₂(−eᵃ) + Li₂(−e⁻ᵃ) = −π²/6 − a²/2, so the series is needed only at −e^(−|a|)
        odd = _series(-softplus(-a.abs())) + _PI_SQUARED_12
        return torch.relu(a).square() / 2 + a.sign() * odd

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return grad * softplus(a)


def _series(u: Tensor) -> Tensor:
    """Return Li₂(1 − e⁻ᵘ) for |u| ≤ log 2, where eight terms are exact to float64 precision."""
    square = u.square()
    tail = torch.zeros_like(u)
    for coefficient in reversed(_SERIES):
        tail = (tail + coefficient) * square
    return u - square / 4 + u * tail
