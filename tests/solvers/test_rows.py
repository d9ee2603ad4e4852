"""The bookkeeping of a single problem follows the same rules as that of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.solvers import FixedPointProblem, Minimizer, Solver, _rows, base

MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contracts": lambda y, x: 0.9 * torch.tanh(y.flip(1)) + x,
    "diverges": lambda y, x: 3 * y + x,
    "stalls": lambda y, x: 2 * torch.sin(2 * y.flip(1)) + x,
    "becomes NaN": lambda y, x: torch.where(y.norm(dim=1, keepdim=True) > 2, torch.nan, y + x),
    "is constant": lambda y, x: x,
    "has its fixed point at zero": lambda y, x: (y + y.flip(1)) / 4,
}
SOLVERS: list[Solver[Any]] = [
    eq.Picard(tolerance=1e-9, max_iterations=400),
    eq.Picard(tolerance=1e-9, max_iterations=80, check_every=3),
    eq.Picard(tolerance=1e-9, max_iterations=80, patience=5, check_every=2),
    eq.Accelerated(tolerance=1e-9, max_iterations=80),
    eq.Picard(tolerance=1e-9, max_iterations=80, iterate="last"),
    eq.Anderson(tolerance=1e-9, max_iterations=80, patience=5),
    eq.Broyden(tolerance=1e-9, max_iterations=80),
]


def problem(name: str, *, couples_batch: bool) -> FixedPointProblem:
    x = torch.tensor([[0.7, -0.3, 0.4]], dtype=torch.float64)
    x = torch.cat([x, -2 * x]) if couples_batch else x
    return FixedPointProblem(
        lambda y, context: MAPS[name](y, context["x"]),  # type: ignore[arg-type]
        eq.Context(sample={"x": x}),
        torch.ones_like(x),
        couples_batch=couples_batch,
    )


@pytest.mark.parametrize("couples_batch", [False, True])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_one_row_gives_the_same_solution_as_rows(
    name: str, solver: Solver[Any], couples_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = solver.solve(problem(name, couples_batch=couples_batch), trace=True)
    monkeypatch.setattr(base, "track", lambda _, *given, **options: _rows.Rows(*given, **options))
    rows = solver.solve(problem(name, couples_batch=couples_batch), trace=True)
    for field in dataclasses.fields(eq.Solution):
        expected, actual = getattr(rows, field.name), getattr(single, field.name)
        if isinstance(expected, Tensor):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14, equal_nan=True)
        elif field.name == "trace":
            torch.testing.assert_close(
                actual.residual, expected.residual, rtol=1e-12, atol=1e-14, equal_nan=True
            )
        elif field.name != "context":
            assert actual == expected, field.name


def test_anderson_stores_the_newest_residuals() -> None:
    solver = eq.Anderson(memory=3)
    memory = solver.begin(torch.zeros(2, 4))
    residuals = [torch.full((2, 4), float(step)) for step in range(1, 6)]
    slots = [memory.push(residual, residual, 1.0, 0.0) for residual in residuals]
    assert slots == [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)]
    assert memory.residuals[0, :, 0].tolist() == [4.0, 5.0, 3.0]
    expected = memory.residuals[0] @ memory.residuals[0].T
    torch.testing.assert_close(memory.gram[0].float(), expected)


def test_a_minimizer_is_a_method_but_not_a_solver() -> None:
    descent = eq.solvers.get_solver("descent", tolerance=1e-6)
    assert isinstance(descent, Minimizer)
    assert not isinstance(descent, Solver)
    assert not hasattr(descent, "propose")
    with pytest.raises(TypeError, match="drop_share"):
        eq.solvers.get_solver("descent", drop_share=0.5)
