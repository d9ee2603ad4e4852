"""Diagnoses of failed solves, and when they are computed."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor

import equilibria as eq

X = torch.ones(2, 3)


class CountedTerm:
    """Term of curvature 50, on which plain steps diverge; counts its evaluations."""

    def __init__(self) -> None:
        self.evaluations = 0

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        self.evaluations += 1
        return 25 * y.square().sum(dim=1)


def failing_layer(term: CountedTerm) -> eq.EquilibriumLayer:
    energy = eq.Input(torch.eye(3)) + eq.energy_term(term)
    return eq.EquilibriumLayer(energy, activation="identity", solver="picard").eval()


def solve_silently(layer: eq.EquilibriumLayer) -> eq.solvers.Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layer.solve(X)


def test_warnings_name_the_steepest_term() -> None:
    layer = failing_layer(CountedTerm())
    with pytest.warns(eq.ConvergenceWarning, match="curvature of about 50.*need a total below 1"):
        layer(X)
    assert "curvature of about 50" in layer.last_solution.summary()


@pytest.mark.parametrize("training", [False, True])
def test_later_failures_are_diagnosed_only_when_their_message_is_read(training: bool) -> None:
    term = CountedTerm()
    layer = failing_layer(term).train(training)
    solve_silently(layer)
    before = term.evaluations
    solution = solve_silently(layer)
    assert term.evaluations - before == solution.evaluations
    assert "curvature of about 50" in solution.summary()
    after = term.evaluations
    assert after - before > solution.evaluations
    assert "curvature of about 50" in solution.message(1)
    assert term.evaluations == after, "computed once per solution"


def test_last_solution_is_diagnosed_while_the_solution_is_referenced() -> None:
    layer = failing_layer(CountedTerm())
    solve_silently(layer)
    solution = solve_silently(layer)
    assert "curvature of about 50" in layer.last_solution.summary()
    del solution
    assert "bound the norm of W" in layer.last_solution.summary()


def test_copies_and_files_of_failed_solutions_do_not_contain_the_cell() -> None:
    layer = failing_layer(CountedTerm())
    solve_silently(layer)
    solution = solve_silently(layer)
    copied = copy.deepcopy(layer)
    assert copied.last_solution.status.tolist() == solution.status.tolist()
    file = io.BytesIO()
    torch.save(solution, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert "2 of 2 samples" in loaded.summary()
    assert "curvature of about 50" in solution.explained().summary()


def test_warnings_contain_the_remedy_of_the_cell() -> None:
    class Doubling(eq.Cell):
        remedy = "halve the weights"

        def inject(self, x: Tensor) -> eq.Context:
            return eq.Context(sample={"x": x})

        def initial_state(self, x: Tensor, context: eq.Context) -> Tensor:
            return torch.zeros_like(x)

        def step(self, state: Tensor, context: eq.Context) -> Tensor:
            return 2 * state + context["x"]

    layer = eq.EquilibriumLayer(Doubling(), max_iterations=3, solver="picard").eval()
    with pytest.warns(eq.ConvergenceWarning, match="halve the weights"):
        layer(X)


def test_errors_of_strict_layers_contain_the_diagnosis() -> None:
    layer = failing_layer(CountedTerm())
    with (
        eq.solving(layer, strict=True),
        pytest.raises(eq.ConvergenceError, match="curvature of about 50"),
    ):
        layer(X)
