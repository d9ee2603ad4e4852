"""Equilibrium layers: a cell, a solver and a gradient rule."""

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
from equilibria.equilibrium.closed_form import closed_form_solution
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.equilibrium.formats import usable
from equilibria.equilibrium.function_cell import FunctionCell
from equilibria.equilibrium.objective import Objective
from equilibria.equilibrium.reporting import SolveReports, raise_or_warn, with_diagnosis
from equilibria.equilibrium.solving import Active, Solving, solving_of
from equilibria.equilibrium.starts import start_of, with_noise
from equilibria.equilibrium.unsupported import refuse_recording, refuse_transforms
from equilibria.gradients import GradientRule
from equilibria.gradients.base import Backward, BackwardLog
from equilibria.registry import check_options
from equilibria.solvers import FixedPointProblem, Solution, Status
from equilibria.solvers._cpu import solve_in_blocks
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""One input tensor, or a tuple of several, such as a measurement and its noise level."""


class EquilibriumLayer(nn.Module):
    """Layer whose output is the equilibrium y* = T(y*; x) of a cell.

    Define the map by an energy, whose hidden objective the output minimizes, by a function or
    module f(z, x), or by a custom cell. The input is a tensor, or a tuple of tensors if the cell
    takes several.

    The settings in `layer.solving` are immutable. To change them for a block of code, use
    `with solving(model, tolerance=1e-6):`.

    Args:
        energy: Energy E(y; x), function or module f(z, x), or `Cell`.
        cell: Custom `Cell`; give either `energy` or `cell`.
        activation: Activation of the cell if `energy` is an `Energy`.
        solver: Solver: its name, an object, or a mapping with `name` and options.
        gradient: Gradient rule: its name, an object, or a mapping with `name` and options.
        tolerance: Tolerance of the relative residual; None uses the solver's default.
        max_iterations: Iteration limit; None uses the solver's default.
        strict: Whether a forward or backward solve that does not converge raises
            `ConvergenceError`. Otherwise inference warns once with the fraction of samples, and
            `last_solution` has the details.
        solving: All of the settings above in one object, which also has `start`, `state_noise`,
            `starts` and `pick`; the others override it.

    Raises:
        ValueError: If both or neither of `energy` and `cell` are given.
        TypeError: If `energy` is not an energy, a cell or callable.

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
            raise ValueError("give exactly one of energy and cell")
        if isinstance(energy, Energy):
            cell = EnergyCell(energy, activation)
        elif not isinstance(energy, Cell) and callable(energy):
            cell = FunctionCell(energy)
        cell = energy if cell is None else cell  # type: ignore[assignment]
        if not isinstance(cell, Cell):
            raise TypeError(
                f"energy must be an Energy, a Cell or a function, got {type(cell).__name__}"
            )
        self.cell = cell
        settings = {
            "solver": solver,
            "gradient": gradient,
            "tolerance": tolerance,
            "max_iterations": max_iterations,
            "strict": strict,
        }
        changes: dict[str, Any] = {
            name: value for name, value in settings.items() if value is not None
        }
        self.solving = Solving(**changes) if solving is None else solving.changed(**changes)
        self.last_solution: Solution | None = None
        """Result of the last forward solve, without its state and context."""
        self.identity = object()
        """Key of the layer in `solving` blocks, shared with its functional copies."""
        self._reports = SolveReports()
        self._backward_log = BackwardLog(self._reports.issued)

    @property
    def solver(self) -> Method:
        """Current solver: the layer's own, or that of an enclosing `solving` block."""
        return solving_of(self).solver

    @property
    def gradient(self) -> GradientRule:
        """Current gradient rule: the layer's own, or that of an enclosing `solving` block."""
        return solving_of(self).gradient

    @property
    def strict(self) -> bool:
        """Whether a failed solve currently raises an error."""
        return solving_of(self).strict

    @property
    def last_backward(self) -> LinearSolution | None:
        """Result of the last backward solve, without its value."""
        return self._backward_log.latest

    @property
    def couples_batch(self) -> bool:
        """Whether the cell or the solver (`SAM`) treats a batch as one problem."""
        return self.cell.couples_batch or self.solver.couples_batch

    @run_eagerly
    def forward(self, x: Inputs, start: State | None = None) -> Tensor:
        """Return the output at the equilibrium, in the graph of the input and the parameters.

        Args:
            x: Input of the cell, or a tuple of its inputs.
            start: State to start from, such as the `state` of an earlier solution.

        Returns:
            Output of the cell; NaN for samples that diverged.
        """
        refuse_recording()
        active = Active(self)
        solver, gradient = active.solving.solver, active.solving.gradient
        if not self.training and active.solving.starts > 1:
            if gradient.from_zero:
                raise ValueError(
                    f"starts={active.solving.starts} needs a gradient rule that solves, but "
                    f"{type(gradient).__name__} iterates from one start: set starts=1, or choose "
                    "another rule"
                )
            solver = active.solving.method()
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # Energies differentiate inside a step, which inference tensors do not support.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            inputs = usable(as_inputs(x))
            closed_form = self._closed_form(active)
            if closed_form is None:
                start = active.start() if start is None else start
                problem = self._problem(inputs, start, active, gradient)
                backward = Backward(self._backward_log, active.solving.strict, active.note_backward)
                state, solution = gradient.equilibrium(self.cell, problem, solver, backward)
            else:
                context = self.cell.inject(*inputs)
                state = closed_form(context)
                solution = closed_form_solution(solver, state, context)
            self._conclude(solution, active, solver)
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
        **options: Any,
    ) -> Solution:
        """Return the equilibrium as a `Solution`, without gradients.

        More computation can give a better answer: allow more iterations, or solve every sample from
        several starts. `agreement` of the result is then the share of starts that ended at the
        same state.

        Args:
            x: Input of the cell, or a tuple of its inputs.
            start: State to start from, such as the `state` of an earlier solution.
            solver: Solver of this call; None uses that of the layer, or the formula of a cell whose
                equilibrium has one, unless `options` are given.
            trace: True records the residuals of every iteration, "states" also the states.
            options: Other settings of this call (see `Solving`): `tolerance`, `max_iterations`,
                `starts` and `pick`.

        Examples:
            >>> layer = eq.EquilibriumLayer(lambda z, x: torch.tanh(3 * z + x), solver="picard")
            >>> solution = layer.solve(torch.ones(1, 2), starts=8, pick="vote")
            >>> solution.agreement
            tensor([0.6250])
        """
        refuse_recording()
        check_options("solve", Solving, options)
        active = Active(self)
        settings = active.solving.changed(solver=solver).changed(**options)
        # Leaving inference mode enables gradients.
        with torch.inference_mode(False), torch.no_grad():
            inputs, method = usable(as_inputs(x)), settings.method()
            iterates = trace or solver is not None or options
            closed_form = None if iterates else self._closed_form(active)
            if closed_form is None:
                start = active.start() if start is None else start
                problem = self._problem(inputs, start, active, settings=settings)
                solution = solve_in_blocks(method, problem, trace=trace)
            else:
                context = self.cell.inject(*inputs)
                solution = closed_form_solution(method, closed_form(context), context)
        return self._conclude(solution, active, method)

    def report_equilibrium(self, x: Inputs, state: State) -> None:
        """Report an equilibrium computed elsewhere, such as by JIIO, to `solving` blocks.

        Args:
            x: Input of the cell, or a tuple of its inputs.
            state: The equilibrium at this input.
        """
        inputs = usable(as_inputs(x))
        Active(self).note_equilibrium(inputs, state, self.cell.inject(*inputs))

    @property
    def is_heard(self) -> bool:
        """Whether an enclosing `solving` block records equilibria of this layer."""
        return Active(self).records_equilibria

    def report_visited(self, make_inputs: Callable[[], Inputs], state: State) -> None:
        """Report an iterate of a search over inputs to `solving` blocks that record equilibria.

        Args:
            make_inputs: Returns the inputs; called only if there is such a block.
            state: State of the iterate.
        """
        if self.is_heard:
            with torch.enable_grad():
                inputs = usable(as_inputs(make_inputs()))
                context = self.cell.inject(*inputs)
            Active(self).note_visited(inputs, state, context)

    def output(self, solution: Solution) -> Tensor:
        """Return the output of a solution; NaN for samples that diverged."""
        return _without_diverged(self.cell.output(solution.state, solution.context), solution)

    def objective(self, x: Inputs) -> Objective:
        """Return the hidden objective, the function that the equilibrium for an input minimizes.

        If the map freezes signs or perturbations during a solve, this solves once to get them.

        Args:
            x: Input of the cell, or a tuple of its inputs.

        Raises:
            NoObjectiveError: If the cell has no hidden objective.
        """
        inputs = as_inputs(x)
        if capabilities.refresh_until(self.cell):
            return self.cell.objective(self.solve(inputs).context)
        return self.cell.objective(self.cell.inject(*inputs))

    @torch.no_grad()
    def contraction_bound(self, x: Inputs) -> Tensor | None:
        """Return a proven upper bound on the contraction factor q of the map.

        Args:
            x: Input of the cell, or a tuple of its inputs.

        Returns:
            One bound per sample, shape (B,), or None if no bound is known.
        """
        inputs = as_inputs(x)
        context = self.cell.inject(*inputs)
        state = self.cell.initial_state(*inputs, context)
        bound = self.cell.bounds(context, Packing.of(state).layout).contraction
        return None if bound is None else bound.expand(batch_size(state))

    def _closed_form(self, active: Active) -> Callable[[Context], State] | None:
        """Return the formula of the equilibrium; None without one, or if iterates are recorded."""
        return None if active.records_iterates else capabilities.closed_form(self.cell)

    def _problem(
        self,
        inputs: tuple[Tensor, ...],
        start: State | None,
        active: Active,
        rule: GradientRule | None = None,
        settings: Solving | None = None,
    ) -> FixedPointProblem:
        settings = active.solving if settings is None else settings
        refuse_transforms(rule, inputs, self.parameters)
        if not self.training and len(inputs[0]) > 1 and self.couples_batch:
            # Coupling is expected in training, but not in predictions.
            self._reports.warn_of_coupling()
        context = self.cell.inject(*inputs)
        from_zero = rule is not None and rule.from_zero
        first = start_of(
            self.cell,
            inputs,
            context,
            start,
            from_zero=from_zero,
            random=settings.random_start,
            training=self.training,
        )
        if self.training:
            first = with_noise(first, settings.state_noise)
        return self.problem_at(context, first, trace="states" if active.records_iterates else False)

    def problem_at(
        self, context: Context, start: State, *, trace: bool | Literal["states"] = False
    ) -> FixedPointProblem:
        """Build the fixed-point problem that this layer solves for one context.

        `forward`, `solve` and searches over inputs all use this problem, so that all of them
        support the same solvers, such as descent on the objective.

        Args:
            context: Result of the cell's `inject`.
            start: State to start from. The solver may overwrite its memory.
            trace: What the solver records in every iteration, see `solve`.

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
        """Return the cell's `refresh` in the current grad mode; solvers run without gradients."""
        mode = torch.is_grad_enabled()

        def refresh(state: State, context: Context) -> Context:
            with torch.set_grad_enabled(mode):
                return capabilities.refresh(self.cell, state, context)

        return refresh

    def _conclude(self, solution: Solution, active: Active, solver: Method) -> Solution:
        """Store and record the result of a solve, and report it if it failed."""
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

    def note_solution(self, solution: Solution) -> None:
        """Store the result of a solve that was computed elsewhere, such as by a compiled graph.

        Args:
            solution: The result; its state and context may be empty.
        """
        self.last_solution = solution

    def __prepare_scriptable__(self) -> None:
        refuse_recording("torch.jit.script")

    def on_twin(self) -> None:
        """Give a functional copy of the layer a separate log of backward solves."""
        self._backward_log = BackwardLog(self._reports.issued)

    def extra_repr(self) -> str:
        settings = self.solving
        return f"solver={settings.solver}, gradient={settings.gradient}, strict={settings.strict}"


def as_inputs(x: Inputs) -> tuple[Tensor, ...]:
    """Return the inputs as a tuple."""
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _without_diverged(output: Tensor, solution: Solution) -> Tensor:
    """Replace the output of samples that diverged, which have no equilibrium, by NaN."""
    if solution.worst_status is not Status.DIVERGED:
        return output
    diverged = solution.status == Status.DIVERGED
    if len(diverged) == 1:  # a coupled batch has one status
        return torch.full_like(output, torch.nan)
    return output.masked_fill(diverged.reshape(-1, *[1] * (output.dim() - 1)), torch.nan)
