"""The iteration of graphs, run as a Python loop: fixed points, counts and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.solvers.graph import GraphIteration, conjugate_gradients, run_loop

SIZE = 12


def map_of(seed: int, norm: float) -> tuple[Callable[[Tensor, Sequence[Tensor]], Tensor], Tensor]:
    """Return a nonlinear map with this Lipschitz constant, and inputs for eight samples."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    matrix *= norm / torch.linalg.matrix_norm(matrix, 2)
    x = torch.randn(8, SIZE, generator=generator, dtype=torch.float64)

    def evaluate(y: Tensor, constants: Sequence[Tensor]) -> Tensor:
        return torch.tanh(y @ matrix.T + constants[0])

    return evaluate, x


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), norm=st.floats(0.1, 0.98), memory=st.sampled_from([1, 3, 5]))
def test_all_rows_converge_to_the_fixed_point(seed: int, norm: float, memory: int) -> None:
    evaluate, x = map_of(seed, norm)
    iteration = GraphIteration(tolerance=1e-8, max_iterations=2000, memory=memory)
    result = iteration.solve(evaluate, torch.zeros_like(x), (x,), run_loop)
    assert bool(result.converged.all())
    assert bool((result.residual <= 1e-8).all())
    image = evaluate(result.state, (x,))
    bound = norm / (1 - norm) * result.absolute + 1e-12
    assert bool(((image - result.state).norm(dim=1) <= bound * (1 + norm)).all())


def test_states_of_several_tensors_take_the_plain_steps_of_their_concatenation() -> None:
    evaluate, x = map_of(2, 0.9)

    def step(state: tuple[Tensor, ...], constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        a, b = state
        image = evaluate(torch.cat([a.flatten(1), b], dim=1), constants)
        return image[:, :8].reshape(a.shape), image[:, 8:]

    iteration = GraphIteration(tolerance=1e-8, max_iterations=500)
    whole = iteration.solve(evaluate, torch.zeros_like(x), (x,), run_loop)
    start = x.new_zeros(len(x), 2, 2, 2), x.new_zeros(len(x), 4)
    (a, b), absolute, iterations = iteration.iterate(step, start, (x,), run_loop)
    torch.testing.assert_close(torch.cat([a.flatten(1), b], dim=1), whole.state)
    torch.testing.assert_close(absolute, whole.absolute)
    assert iterations.tolist() == whole.iterations.tolist()


def test_rows_do_not_depend_on_the_rest_of_the_batch() -> None:
    evaluate, x = map_of(0, 0.9)
    iteration = GraphIteration(tolerance=1e-8, max_iterations=100, memory=4, plain_first=False)
    together = iteration.solve(evaluate, torch.zeros_like(x), (x,), run_loop)
    alone = iteration.solve(evaluate, torch.zeros_like(x[:1]), (x[:1],), run_loop)
    torch.testing.assert_close(together.state[:1], alone.state)
    assert int(together.iterations[0]) == int(alone.iterations[0])


def test_anderson_takes_the_iterations_of_the_eager_solver() -> None:
    evaluate, x = map_of(1, 0.98)
    iteration = GraphIteration(tolerance=1e-8, max_iterations=100, memory=4, plain_first=False)
    result = iteration.solve(evaluate, torch.zeros_like(x), (x,), run_loop)
    layer = eq.EquilibriumLayer(
        lambda z, x: evaluate(z, (x,)),
        solver=eq.Anderson(memory=4, tolerance=1e-8, drop_share=1.0),
    ).eval()
    solution = layer.solve(x)
    assert result.iterations.tolist() == solution.iterations.tolist()
    torch.testing.assert_close(result.state, solution.state)


def test_slow_plain_steps_are_accelerated() -> None:
    def rotate(y: Tensor, constants: Sequence[Tensor]) -> Tensor:
        return 0.99 * y + constants[0]

    x = torch.ones(2, 3, dtype=torch.float64)
    plain = GraphIteration(tolerance=1e-8, max_iterations=5000, memory=1)
    mixed = GraphIteration(tolerance=1e-8, max_iterations=5000, memory=3)
    slow = plain.solve(rotate, x, (x,), run_loop)
    fast = mixed.solve(rotate, x, (x,), run_loop)
    assert bool(slow.converged.all())
    assert bool(fast.converged.all())
    assert int(fast.iterations.max()) < int(slow.iterations.max()) / 10


@pytest.mark.parametrize("memory", [1, 4])
def test_rows_that_diverge_fail_and_leave_the_others_alone(memory: int) -> None:
    def steep(y: Tensor, constants: Sequence[Tensor]) -> Tensor:
        return constants[0] * y**3 + 1

    factors = torch.tensor([[0.1], [5.0], [torch.nan]], dtype=torch.float64)
    iteration = GraphIteration(tolerance=1e-8, max_iterations=50, memory=memory)
    result = iteration.solve(steep, torch.full_like(factors, 2.0), (factors,), run_loop)
    assert result.converged.tolist() == [True, False, False]


def test_a_row_at_its_fixed_point_converges_at_once() -> None:
    _, x = map_of(2, 0.5)
    iteration = GraphIteration(tolerance=1e-6, max_iterations=50, memory=4)
    result = iteration.solve(lambda y, c: c[0], x, (x,), run_loop)
    assert result.converged.all()
    assert result.iterations.tolist() == [1] * len(x)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), condition=st.floats(1, 100))
def test_conjugate_gradients_solve_symmetric_systems(seed: int, condition: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    orthogonal = torch.linalg.qr(factor).Q
    spectrum = torch.linspace(1, condition, SIZE, dtype=torch.float64)
    matrix = orthogonal @ (spectrum[:, None] * orthogonal.mT)
    rhs = torch.randn(3, SIZE, generator=generator, dtype=torch.float64)
    rhs[0] = 0
    result = conjugate_gradients(
        lambda u, c: (c[0] @ u[:, :, None]).squeeze(2),
        rhs,
        rhs.norm(dim=1),
        (matrix,),
        run_loop,
        tolerance=1e-10,
        max_iterations=100,
    )
    assert bool(result.converged.all())
    torch.testing.assert_close(result.state, torch.linalg.solve(matrix, rhs), rtol=1e-7, atol=1e-7)
    assert int(result.iterations[0]) == 0
