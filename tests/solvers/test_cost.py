"""Numbers of evaluations and buffers of the solvers, and the choice of "auto"."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.operators import Identity
from equilibria.solvers.base import Memory
from tests.problems import PROBLEMS, layer


def hard_problem() -> tuple[eq.EnergyCell, Tensor]:
    """A ReLU equilibrium with ‖W‖ = 0.99 and most units active, in float64."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    W *= 0.99 / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(8, 64, generator=generator, dtype=torch.float64) + 1
    return eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W), "relu"), x


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_accelerated_solvers_need_fewer_evaluations_than_picard() -> None:
    """Compares counts instead of times, which depend on the machine."""
    cell, x = hard_problem()
    counts = {}
    for solver in eq.solvers.list_solvers():
        run = layer(cell, solver, tolerance=1e-6, max_iterations=2000)
        counts[solver] = run.solve(x).evaluations
    assert counts["accelerated"] < 0.6 * counts["picard"]
    assert counts["anderson"] < 0.45 * counts["picard"]
    assert counts["anderson1"] < 0.45 * counts["picard"]
    assert counts["broyden"] < 0.5 * counts["picard"]
    assert counts["auto"] < counts["anderson"] < counts["accelerated"]


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.parametrize(
    ("solver", "vectors"),
    [
        (eq.Picard(), 0),
        (eq.Accelerated(), 1),
        (eq.Anderson(memory=5), 10),
        (eq.solvers.AndersonTypeOne(memory=5), 12),
        (eq.Broyden(rank=6), 13),
    ],
    ids=str,
)
def test_memory_does_not_grow_with_the_iterations(solver: eq.solvers.Solver, vectors: int) -> None:
    cell, x = hard_problem()
    memories: list[Memory] = []

    class Recording(type(solver)):  # type: ignore[misc]
        def begin(self, start: Tensor) -> Memory:
            memories.append(super().begin(start))
            return memories[-1]

    for iterations in (10, 300):
        recording = Recording(
            **{**dataclasses.asdict(solver), "max_iterations": iterations, "tolerance": 1e-12}
        )
        layer(cell, recording).solve(x)
        tensors = [t for t in vars(memories[-1]).values() if isinstance(t, Tensor)]
        numbers = sum(t.numel() // t.shape[0] for t in tensors if t.dim() > 1 and t.shape[-1] == 64)
        assert numbers == vectors * 64


def test_auto_chooses_by_the_declared_properties_of_the_cell() -> None:
    x = torch.rand(2, 3)

    def chosen(cell: eq.Cell, x: Tensor = x, **options: float) -> str:
        return layer(cell, "auto", **options).solve(x).solver

    def energy(zeta: float) -> eq.Energy:
        W = eq.Dense(3, 3, norm="bound", zeta=zeta)
        return eq.Input(Identity()) + eq.Quadratic(W)

    assert chosen(eq.EnergyCell(energy(0.5))) == "Picard"
    assert chosen(eq.EnergyCell(energy(0.9))) == "Anderson"
    assert chosen(eq.EnergyCell(energy(0.9)), tolerance=1e-2) == "Accelerated"
    assert chosen(eq.EnergyCell(energy(0.9), "sigmoid")) == "Picard"  # L = 1/4
    assert chosen(eq.EnergyCell(energy(0.5), alpha=0.2)) == "Anderson"
    nonsymmetric = PROBLEMS["linear_nonsymmetric"]()
    assert chosen(nonsymmetric.cell, nonsymmetric.x) == "Anderson"
    images = torch.rand(2, 8, 32, 32)
    W = eq.Conv2d(8, 8, 3, norm="bound", zeta=0.9)
    cell = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(W))
    assert chosen(cell, images) == chosen(cell, images, tolerance=1e-2) == "Anderson"
    # This map contracts strongly, but the cell does not declare it.
    unbounded = eq.EnergyCell(eq.Input(Identity()) + eq.Quadratic(0.1 * torch.eye(3)))
    assert chosen(unbounded) == "Anderson"
