"""A cell, a solver and a gradient rule make a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.context import run_eagerly
from equilibria.context.state import Packing, batch_size
from equilibria.energies import Energy
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.equilibrium.formats import usable
from equilibria.equilibrium.function_cell import FunctionCell
from equilibria.equilibrium.objective import Objective
from equilibria.equilibrium.reporting import SolveReports, raise_or_warn, with_diagnosis
from equilibria.equilibrium.solving import Active, Solving, solving_of
from equilibria.equilibrium.starts import start_of
from equilibria.equilibrium.unsupported import refuse_recording, refuse_transforms
from equilibria.gradients import GradientRule
from equilibria.gradients.base import Backward, BackwardLog
from equilibria.solvers import FixedPointProblem, Solution, Status
from equilibria.solvers._cpu import solve_in_blocks
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""One tensor, or several: image and task vector, measurement and noise level, nodes and graph."""


class EquilibriumLayer(nn.Module):
    """A layer whose output is the equilibrium y* = T(y*; x) of a cell.

    Give an `energy` (and an activation), whose hidden objective the output then minimizes, a map
    f(z, x) as a module or a function, or a `cell` of your own. Solver and gradient rule are chosen
    independently, by name or as objects.

    The input is a tensor, or a tuple of them where the cell takes several. How the layer solves is
    its value `solving`, which nobody changes: `with solving(model, tolerance=1e-6):` does for a
    block.

    strict: raise `ConvergenceError` where a solve, forward or backward, does not converge.
        Otherwise inference warns once with the share of samples, and `last_solution` holds the
        facts.
    solving: all of solver, gradient, tolerance, max_iterations and strict in one value.

    Examples:
        >>> W = eq.Dense(4, 4, norm="bound", zeta=0.5)
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(4)) + eq.Quadratic(W), activation="relu")
        >>> y = layer(torch.randn(3, 4))
        >>> y.sum().backward()
        >>> layer.last_solution.summary()
        'all 3 samples converged to 1.0e-04'
    """

    def __init__(
        self,
        energy: Energy | Cell | Callable[..., Tensor] | None = None,
        *,
        cell: Cell | None = None,
        activation: str | Activation = "relu",
        solver: str | Mapping[str, Any] | Method | None = None,
        gradient: str | Mapping[str, Any] | GradientRule | None = None,
        tolerance: float | None = None,
        max_iterations: int | None = None,
        strict: bool | None = None,
        solving: Solving | None = None,
    ) -> None:
        super().__init__()
        if (energy is None) == (cell is None):
            raise ValueError("give an energy or a cell, and not both")
        if isinstance(energy, Energy):
            cell = EnergyCell(energy, activation)
        elif not isinstance(energy, Cell) and callable(energy):
            cell = FunctionCell(energy)
        cell = energy if cell is None else cell  # type: ignore[assignment]
        if not isinstance(cell, Cell):
            raise TypeError(f"give an Energy, a Cell or a function, not {type(cell).__name__}")
        self.cell = cell
        given = {
            "solver": solver,
            "gradient": gradient,
            "tolerance": tolerance,
            "max_iterations": max_iterations,
            "strict": strict,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.solving = Solving(**chosen) if solving is None else solving.changed(**chosen)
        self.last_solution: Solution | None = None
        """The last forward solve, without its state and context."""
        self.identity = object()
        """What `solving` blocks know a layer and its twins by."""
        self._reports = SolveReports()
        self._backward_log = BackwardLog(self._reports.given)

    @property
    def solver(self) -> Method:
        """What solves at this moment: the layer's own solver, or that of a `solving` block."""
        return solving_of(self).solver

    @property
    def gradient(self) -> GradientRule:
        """What differentiates at this moment."""
        return solving_of(self).gradient

    @property
    def strict(self) -> bool:
        """Whether a failed solve is an error at this moment."""
        return solving_of(self).strict

    @property
    def last_backward(self) -> LinearSolution | None:
        """How the last backward solve went (without its value)."""
        return self._backward_log.latest

    @property
    def couples_batch(self) -> bool:
        """Whether the samples of a batch are one problem, by the cell or by the solver (`SAM`)."""
        return self.cell.couples_batch or self.solver.couples_batch

    @run_eagerly
    def forward(self, x: Inputs, start: State | None = None) -> Tensor:
        """Return the feature at the equilibrium, in the graph of the input and the parameters.

        Args:
            x: Input of the cell, or a tuple of its inputs.
            start: State to start from, such as the `state` of an earlier solution.
        """
        refuse_recording()
        active = Active(self)
        solver, gradient = active.solving.solver, active.solving.gradient
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # Energies differentiate inside a step, which inference tensors forbid.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            inputs = usable(as_inputs(x))
            start = active.start() if start is None else start
            problem = self._problem(inputs, start, active, gradient)
            backward = Backward(self._backward_log, active.solving.strict, active.note_backward)
            state, solution = gradient.equilibrium(self.cell, problem, solver, backward)
            self._concluded(solution, active, solver)
            active.note_equilibrium(inputs, state, solution.context)
            output = self.cell.output(state, solution.context)
            return _without_diverged(output, solution)

    @torch.no_grad()
    def solve(
        self,
        x: Inputs,
        start: State | None = None,
        *,
        solver: str | Mapping[str, Any] | Method | None = None,
        trace: bool | Literal["states"] = False,
    ) -> Solution:
        """Return the equilibrium as a `Solution`, without gradients.

        Args:
            x: Input of the cell, or a tuple of its inputs.
            start: State to start from, such as the `state` of an earlier solution.
            solver: Solver of this call; None: that of the layer.
            trace: Whether to record the residuals of every iteration, or the states too.
        """
        refuse_recording()
        active = Active(self)
        with torch.inference_mode(False):
            chosen = active.solving.changed(solver=solver).solver
            start = active.start() if start is None else start
            problem = self._problem(usable(as_inputs(x)), start, active)
            solution = solve_in_blocks(chosen, problem, trace=trace)
        return self._concluded(solution, active, chosen)

    def report_equilibrium(self, x: Inputs, state: State) -> None:
        """Tell the `solving` blocks of an equilibrium that was found by other means, as by JIIO."""
        inputs = usable(as_inputs(x))
        Active(self).note_equilibrium(inputs, state, self.cell.inject(*inputs))

    @property
    def is_heard(self) -> bool:
        """Whether a `solving` block around records its equilibria."""
        return Active(self).records_equilibria

    def report_visited(self, make_inputs: Callable[[], Inputs], state: State) -> None:
        """Tell `solving` blocks that record equilibria of an iterate of a search over inputs.

        Its inputs are made only if there is such a block.
        """
        if self.is_heard:
            with torch.enable_grad():
                inputs = usable(as_inputs(make_inputs()))
                context = self.cell.inject(*inputs)
            Active(self).note_visited(inputs, state, context)

    def output(self, solution: Solution) -> Tensor:
        """The feature that belongs to a solution; NaN for samples that diverged."""
        return _without_diverged(self.cell.output(solution.state, solution.context), solution)

    def objective(self, x: Inputs) -> Objective:
        """The hidden objective at an input.

        Where the map keeps signs or perturbations of its first iterations, it is solved for them.
        """
        inputs = as_inputs(x)
        kept = self.solve(inputs).context if capabilities.refresh_until(self.cell) else None
        return self.cell.objective(self.cell.inject(*inputs) if kept is None else kept)

    @torch.no_grad()
    def contraction_bound(self, x: Inputs) -> Tensor | None:
        """A proven bound of the contraction factor q of the map, for each sample, or None."""
        inputs = as_inputs(x)
        context = self.cell.inject(*inputs)
        state = self.cell.initial_state(*inputs, context)
        bound = self.cell.bounds(context, Packing.of(state).layout).contraction
        return None if bound is None else bound.expand(batch_size(state))

    def _problem(
        self,
        inputs: tuple[Tensor, ...],
        start: State | None,
        active: Active,
        rule: GradientRule | None = None,
    ) -> FixedPointProblem:
        refuse_transforms(rule, inputs, self.parameters)
        if not self.training and len(inputs[0]) > 1 and self.couples_batch:
            # Training expects batches; a prediction that depends on its batch mates surprises.
            self._reports.warn_of_coupling()
        context = self.cell.inject(*inputs)
        from_zero = rule is not None and rule.from_zero
        first = start_of(self.cell, inputs, context, start, from_zero=from_zero)
        return self.problem_at(context, first, trace="states" if active.records_iterates else False)

    def problem_at(
        self, context: Context, start: State, *, trace: bool | Literal["states"] = False
    ) -> FixedPointProblem:
        """Build the fixed-point problem that this layer solves for one context.

        Every solve of the layer's equilibrium uses this problem: `forward`, `solve`, and searches
        over inputs. So all of them can use the same solvers, such as descent on the objective.

        Args:
            context: Result of the cell's `inject`.
            start: State to start from. The solver may overwrite its memory.
            trace: What the solver records of every iteration.

        Returns:
            The problem, for one solve.
        """
        cell, couples_batch = self.cell, self.couples_batch
        refresh_until = capabilities.refresh_until(cell)
        return FixedPointProblem(
            step=self.cell.step,
            context=context,
            start=start,
            couples_batch=couples_batch,
            separable=not couples_batch and self._is_separable(),
            refresh=self._refresh() if refresh_until else None,
            refresh_until=refresh_until,
            monotone=capabilities.is_monotone(cell),
            contraction=cell.limits.contraction,
            solved_once=True,
            remedy=cell.remedy,
            potential=capabilities.potential(cell),
            trace=trace,
        )

    def _is_separable(self) -> bool:
        """Whether samples can be solved in blocks."""
        return not (
            capabilities.refresh_until(self.cell)
            or any(isinstance(m, _BatchNorm) and m.training for m in self.cell.modules())
        )

    def _refresh(self) -> Callable[[State, Context], Context]:
        """The cell's `refresh` in the grad mode of the call: solvers run without gradients."""
        mode = torch.is_grad_enabled()

        def refresh(state: State, context: Context) -> Context:
            with torch.set_grad_enabled(mode):
                return capabilities.refresh(self.cell, state, context)

        return refresh

    def _concluded(self, solution: Solution, active: Active, solver: Method) -> Solution:
        """Keep the facts of a solve, and report it if it failed."""
        solution = with_diagnosis(solution, self.cell)
        message = self._reports.failure_message(
            solution, active.solving, solver, training=self.training
        )
        if message is not None:
            solution = solution.explained()
        self.last_solution = solution.facts()
        active.note(solution)
        self._reports.warn_of_precision(solver.tolerance, solution)
        if message is not None:
            raise_or_warn(message, strict=active.solving.strict)
        return solution

    def __prepare_scriptable__(self) -> None:
        refuse_recording("torch.jit.script")

    def on_twin(self) -> None:
        """Give a twin a log of backward solves of its own."""
        self._backward_log = BackwardLog(self._reports.given)

    def extra_repr(self) -> str:
        own = self.solving
        return f"solver={own.solver}, gradient={own.gradient}, strict={own.strict}"


def as_inputs(x: Inputs) -> tuple[Tensor, ...]:
    """Return the inputs as a tuple."""
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _without_diverged(output: Tensor, solution: Solution) -> Tensor:
    """Replace the features of samples that diverged by NaN: they have no equilibrium."""
    if solution.worst_status is not Status.DIVERGED:
        return output
    diverged = solution.status == Status.DIVERGED
    if len(diverged) == 1:  # The samples of a coupled batch are one problem.
        return torch.full_like(output, torch.nan)
    return output.masked_fill(diverged.reshape(-1, *[1] * (output.dim() - 1)), torch.nan)
