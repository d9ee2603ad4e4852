"""Energies of many kinds: smooth, stiff, flat, kinked, with several minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.context import Context
from equilibria.energies import Energy, Input
from equilibria.energies.function import FunctionEnergy
from equilibria.operators import Dense

SIZE = 24
INPUTS = 8


@dataclass(frozen=True)
class Entry:
    """An energy E, to which Input(U) is added.

    Attributes:
        name: Name in tables.
        make: Makes E from a generator for its constants and a number of units.
        convex: Whether E is convex.
        size: Number of units.
    """

    name: str
    make: Callable[[torch.Generator, int], Energy]
    convex: bool = True
    size: int = SIZE

    def energy(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Energy:
        generator = torch.Generator().manual_seed(seed)
        pull = Dense.from_tensor(torch.randn(self.size, INPUTS, generator=generator) / 2)
        return (Input(pull) + self.make(generator, self.size)).to(dtype)


class Ridge(Energy):
    """Σ ψ((yA)_c): a function of linear forms."""

    def __init__(self, psi: Callable[[Tensor], Tensor], forms: Tensor) -> None:
        super().__init__()
        self.psi = psi
        self.register_buffer("forms", forms.double())

    def value(self, y: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        return self.psi(y @ self.forms).sum(dim=1)


def _differences(y: Tensor) -> Tensor:
    return y[:, 1:] - y[:, :-1]


def _chain(psi: Callable[[Tensor], Tensor], factor: float = 1.0) -> Callable[..., Energy]:
    """A function of the differences between neighbors."""
    return lambda generator, size: (
        factor * FunctionEnergy(lambda y, x: psi(_differences(y)).sum(dim=1))
    )


def _each(psi: Callable[[Tensor], Tensor]) -> Callable[..., Energy]:
    """A function of each unit."""
    return lambda generator, size: FunctionEnergy(lambda y, x: psi(y).sum(dim=1))


def _forms(psi: Callable[[Tensor], Tensor]) -> Callable[..., Energy]:
    """A function of random linear forms, twice as many as units."""

    def make(generator: torch.Generator, size: int) -> Energy:
        forms = torch.randn(size, 2 * size, generator=generator, dtype=torch.float64)
        return Ridge(psi, forms)

    return make


def _quadratic(condition: float) -> Callable[..., Energy]:
    """½yᵀHy with eigenvalues from 1 to `condition`."""

    def make(generator: torch.Generator, size: int) -> Energy:
        random = torch.randn(size, size, generator=generator, dtype=torch.float64)
        vectors = torch.linalg.qr(random).Q
        values = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
        return Ridge(lambda t: t.square() / 2, vectors * values.sqrt())

    return make


def _laplacian(factor: float) -> Callable[..., Energy]:
    """½ factor Σ (y_i − y_j)² over the edges of a random graph."""

    def make(generator: torch.Generator, size: int) -> Energy:
        edges = torch.randint(0, size, (5 * size // 2, 2), generator=generator)
        forms = F.one_hot(edges[:, 0], size) - F.one_hot(edges[:, 1], size)
        return Ridge(lambda t: factor / 2 * t.square(), forms.T)

    return make


def _attention(beta: float) -> Callable[..., Energy]:
    """−log Σ exp(β⟨m, y⟩)/β over stored patterns m: Hopfield's energy, whose step is attention."""

    def make(generator: torch.Generator, size: int) -> Energy:
        patterns = torch.randn(size, 40, generator=generator, dtype=torch.float64)
        return FunctionEnergy(lambda y, x: -torch.logsumexp(beta * y @ patterns.to(y), 1) / beta)

    return make


def _gaussian(gamma: float) -> Callable[..., Energy]:
    """−exp(−γ‖c − yA‖²)/2γ: GEQ's kernel."""

    def make(generator: torch.Generator, size: int) -> Energy:
        forms = torch.randn(size, size, generator=generator, dtype=torch.float64) / 5
        return FunctionEnergy(
            lambda y, x: -(-gamma * (1 - y @ forms.to(y)).square().sum(dim=1)).exp() / (2 * gamma)
        )

    return make


def _log_sum_exp(factor: float, steepness: float) -> Callable[..., Energy]:
    return lambda generator, size: FunctionEnergy(
        lambda y, x: factor * torch.logsumexp(steepness * y, 1)
    )


def _log_cosh(t: Tensor) -> Tensor:
    return t.abs() + torch.log1p(torch.exp(-2 * t.abs()))


def _smoothed_absolute(width: float) -> Callable[[Tensor], Tensor]:
    return lambda t: (t.square() + width**2).sqrt()


BANK = [
    *(
        Entry(f"smoothness × {factor:g}", _chain(torch.square, factor))
        for factor in (0.01, 0.1, 1, 2, 10, 100)
    ),
    *(
        Entry(
            f"total variation × {factor:g}, smoothed {width:g}",
            _chain(_smoothed_absolute(width), factor),
        )
        for factor, width in ((1.0, 0.1), (1.0, 1e-3), (10.0, 0.1), (10.0, 1e-3))
    ),
    Entry("log-cosh ridges", _forms(_log_cosh)),
    Entry("log-cosh ridges × 10", _forms(lambda t: 10 * _log_cosh(t))),
    Entry("Student-t ridges", _forms(lambda t: torch.log1p(t.square())), convex=False),
    Entry("Student-t ridges × 10", _forms(lambda t: 10 * torch.log1p(t.square())), convex=False),
    Entry("logistic losses", _forms(lambda t: F.softplus(-3 * t))),
    Entry("logistic losses × 30", _forms(lambda t: 30 * F.softplus(-t))),
    Entry("Huber losses", _forms(lambda t: 20 * _smoothed_absolute(0.1)(t))),
    Entry("entropy", _each(lambda y: torch.special.xlogy(y.square() + 1, y.square() + 1))),
    Entry("log-sum-exp", _log_sum_exp(5, 3)),
    *(Entry(f"quadratic form, condition {c:.0e}", _quadratic(c)) for c in (1e1, 1e2, 1e4, 1e6)),
    Entry("Laplacian of a graph", _laplacian(1.0)),
    Entry("Laplacian of a graph × 30", _laplacian(30.0)),
    Entry("quartic", _each(lambda y: y.pow(4) / 4)),
    Entry("quartic chain", _chain(lambda t: 5 * t.pow(4))),
    Entry("exponential", _each(lambda y: torch.exp(2 * y))),
    Entry("steep softplus", _each(lambda y: F.softplus(30 * y))),
    Entry("double wells", _each(lambda y: (y.square() - 1).square()), convex=False),
    Entry("attention, β = 4", _attention(4.0), convex=False),
    Entry("Gaussian kernel, γ = 20", _gaussian(20.0), convex=False),
    Entry("cosines", _each(lambda y: 3 * torch.cos(2 * y)), convex=False),
]
"""Energies for development. Where E is not convex, a solve ends at a stationary point."""

HELD_OUT_SEED = 7

HELD_OUT = [
    replace(entry, size=60)
    for entry in (
        *(Entry(f"smoothness × {f:g}", _chain(torch.square, f)) for f in (0.5, 5, 30)),
        *(
            Entry(f"total variation × {f:g}, smoothed {w:g}", _chain(_smoothed_absolute(w), f))
            for f, w in ((0.5, 0.03), (3.0, 0.3), (5.0, 0.01))
        ),
        Entry("log-cosh ridges × 3", _forms(lambda t: 3 * _log_cosh(t))),
        Entry("Student-t ridges × 4", _forms(lambda t: 4 * torch.log1p(t.square())), convex=False),
        Entry("logistic losses × 5", _forms(lambda t: 5 * F.softplus(-2 * t))),
        Entry("Huber losses × 3", _forms(lambda t: 3 * _smoothed_absolute(0.5)(t))),
        Entry("entropy × 3", _each(lambda y: 3 * torch.special.xlogy(y * y + 1, y * y + 1))),
        Entry("log-sum-exp × 2", _log_sum_exp(2, 8)),
        *(Entry(f"quadratic form, condition {c:.0e}", _quadratic(c)) for c in (30, 1e3, 1e5)),
        Entry("Laplacian of a graph × 5", _laplacian(5.0)),
        Entry("quartic × 6", _each(lambda y: 1.5 * y.pow(4))),
        Entry("quartic chain × 0.2", _chain(lambda t: t.pow(4))),
        Entry("exponential, falling", _each(lambda y: torch.exp(-1.5 * y))),
        Entry("double wells × 0.3", _each(lambda y: 0.3 * (y * y - 2).square()), convex=False),
        Entry("attention, β = 1", _attention(1.0), convex=False),
        Entry("cosines × 0.7", _each(lambda y: 2 * torch.cos(3 * y)), convex=False),
    )
]
"""Energies with other sizes and constants, not used for any choice in the solver."""


def inputs(samples: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return 2 * torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
