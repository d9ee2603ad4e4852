"""Test problems with known fixed points and derivatives.

Each problem is a cell with an input x, the exact fixed point y*(x), and the exact Jacobian dy*/dx
of each sample. All registered solvers and gradient rules are tested on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.context import Context, State


@dataclass(frozen=True)
class Problem:
    """A cell with an input x of shape (batch, n), and the exact result in float64."""

    cell: eq.Cell
    x: Tensor
    fixed_point: State
    jacobian: Tensor
    """d(output)/dx of each sample, shape (batch, outputs, n)."""

    def to(self, dtype: torch.dtype, device: torch.device) -> Problem:
        fixed_point = self.fixed_point
        fixed_point = (
            fixed_point.to(device, dtype)
            if isinstance(fixed_point, Tensor)
            else tuple(t.to(device, dtype) for t in fixed_point)
        )
        return Problem(
            self.cell.to(device=device, dtype=dtype),
            self.x.to(device, dtype),
            fixed_point,
            self.jacobian.to(device, dtype),
        )


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _symmetric(n: int, norm: float, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return W with the given spectral norm, and WWᵀ."""
    W = torch.randn(n, rank or n, generator=_generator(n), dtype=torch.float64)
    W = W * (norm / torch.linalg.matrix_norm(W, 2))
    return W, W @ W.T


def _energy_problem(activation: str, states: Tensor, slack: Tensor, W: Tensor) -> Problem:
    """Return the energy cell y = σ(WWᵀy + x) with the input x whose fixed points are `states`.

    x = σ⁻¹(y) − WWᵀy, with `slack` as the element of σ⁻¹(y).
    """
    H = W @ W.T
    x = slack - states @ H
    cell = eq.EnergyCell(eq.Input(eq.operators.Identity()) + eq.Quadratic(W), activation)
    slope = cell.activation.derivative(slack)
    identity = torch.eye(len(H), dtype=torch.float64)
    jacobian = torch.stack(
        [torch.linalg.solve(identity - d[:, None] * H, torch.diag(d)) for d in slope]
    )
    return Problem(cell, x, states, jacobian)


def linear_symmetric() -> Problem:
    W, _ = _symmetric(6, 0.9)
    y = torch.randn(4, 6, generator=_generator(1), dtype=torch.float64)
    return _energy_problem("identity", y, y, W)


def relu_active_set() -> Problem:
    W, _ = _symmetric(6, 0.9)
    a = torch.randn(4, 6, generator=_generator(2), dtype=torch.float64)
    return _energy_problem("relu", a.relu(), a, W)


def relu_nearly_nonexpansive() -> Problem:
    W, _ = _symmetric(5, 0.97, rank=3)
    a = torch.randn(4, 5, generator=_generator(3), dtype=torch.float64) + 0.5
    return _energy_problem("relu", a.relu(), a, W)


def leaky_relu() -> Problem:
    W, _ = _symmetric(5, 0.9)
    a = torch.randn(4, 5, generator=_generator(4), dtype=torch.float64)
    return _energy_problem("leaky_relu", torch.where(a > 0, a, 0.01 * a), a, W)


def tanh() -> Problem:
    W, _ = _symmetric(5, 0.95)
    a = torch.randn(4, 5, generator=_generator(5), dtype=torch.float64)
    return _energy_problem("tanh", a.tanh(), a, W)


def soft_threshold() -> Problem:
    W, _ = _symmetric(5, 0.9)
    a = 0.5 * torch.randn(4, 5, generator=_generator(6), dtype=torch.float64)
    y = torch.sign(a) * (a.abs() - 0.1).clamp_min(0)
    return _energy_problem("soft_threshold", y, a, W)


def fixed_point_at_zero() -> Problem:
    W, _ = _symmetric(4, 0.9)
    a = -torch.rand(4, 4, generator=_generator(7), dtype=torch.float64) - 0.1
    return _energy_problem("relu", torch.zeros_like(a), a, W)


class LinearCell(eq.Cell):
    """y = A y + x for a contraction A without symmetry."""

    def __init__(self, A: Tensor) -> None:
        super().__init__()
        self.A = nn.Parameter(A)

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"x": x})

    def initial_state(self, x: Tensor, context: Context) -> State:
        return torch.zeros_like(x)

    def step(self, state: State, context: Context) -> State:
        return state @ self.A.T + context["x"]


def linear_nonsymmetric() -> Problem:
    A = torch.randn(5, 5, generator=_generator(8), dtype=torch.float64)
    A = A * (0.9 / torch.linalg.matrix_norm(A, 2))
    x = torch.randn(4, 5, generator=_generator(9), dtype=torch.float64)
    inverse = torch.linalg.inv(torch.eye(5, dtype=torch.float64) - A)
    return Problem(LinearCell(A), x, x @ inverse.T, inverse.expand(4, 5, 5))


class RotatingPair(eq.Cell):
    """A state of two tensors with different shapes: a = B b + x, b = tilt(a)/2.

    The Jacobian is far from symmetric.
    """

    def __init__(self, B: Tensor) -> None:
        super().__init__()
        self.B = nn.Parameter(B)

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"x": x})

    def initial_state(self, x: Tensor, context: Context) -> State:
        return torch.zeros_like(x), x.new_zeros(x.shape[0], 2, 2)

    def step(self, state: State, context: Context) -> State:
        a, b = state
        tilted = 0.5 * torch.stack([-a[:, 1], a[:, 0], a[:, 2], -a[:, 3]], dim=1)
        return b.flatten(1) @ self.B.T + context["x"], tilted.reshape(-1, 2, 2)

    def output(self, state: State, context: Context) -> Tensor:
        return torch.cat([part.flatten(1) for part in state], dim=1)


def two_tensors() -> Problem:
    B = torch.randn(4, 4, generator=_generator(10), dtype=torch.float64)
    B = B * (1.2 / torch.linalg.matrix_norm(B, 2))
    R = 0.5 * torch.tensor(
        [[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, -1]], dtype=torch.float64
    )
    x = torch.randn(4, 4, generator=_generator(11), dtype=torch.float64)
    inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - B @ R)
    a = x @ inverse.T
    jacobian = torch.cat([inverse, R @ inverse])
    return Problem(RotatingPair(B), x, (a, (a @ R.T).reshape(-1, 2, 2)), jacobian.expand(4, 8, 4))


class CoupledMean(eq.Cell):
    """y_i = x_i + ½ mean(y): every sample depends on all others, so the batch is one problem."""

    couples_batch = True

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"x": x})

    def initial_state(self, x: Tensor, context: Context) -> State:
        return torch.zeros_like(x)

    def step(self, state: State, context: Context) -> State:
        return context["x"] + 0.5 * state.mean(dim=0, keepdim=True)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    make.__name__: make
    for make in (
        linear_symmetric,
        relu_active_set,
        relu_nearly_nonexpansive,
        leaky_relu,
        tanh,
        soft_threshold,
        fixed_point_at_zero,
        linear_nonsymmetric,
        two_tensors,
    )
}

WITH_OBJECTIVE = {name for name in PROBLEMS if name not in ("linear_nonsymmetric", "two_tensors")}


def layer(
    cell: eq.Cell, solver: str | eq.solvers.Solver = "anderson", **options: object
) -> eq.EquilibriumLayer:
    method = eq.solvers.get_solver(solver, **options) if isinstance(solver, str) else solver
    return eq.EquilibriumLayer(cell=cell, solver=method)
