"""A cell, a solver and a gradient rule make a layer."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.activations import Activation
from equilibria.context import (
    Context,
    Packing,
    State,
    at_least_float32,
    batch_size,
    map_state,
    run_eagerly,
    state_tensors,
    warn_caller,
)
from equilibria.context.state import in_format_of
from equilibria.energies import Energy
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.equilibrium.function_cell import FunctionCell
from equilibria.equilibrium.objective import Objective
from equilibria.equilibrium.solving import Active, Solving
from equilibria.equilibrium.unsupported import (
    refuse_half_on_cpu,
    refuse_recording,
    refuse_transforms,
)
from equilibria.gradients import Backward, BackwardLog, GradientRule
from equilibria.operators.norm_control import is_wrapped
from equilibria.registry import accepts_old_names
from equilibria.solvers import (
    ConvergenceError,
    ConvergenceWarning,
    FixedPointProblem,
    LinearSolution,
    Solution,
    Solver,
    Status,
)
from equilibria.solvers.asking import is_free_to_ask
from equilibria.solvers.blocks import solve_in_blocks

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""One tensor, or several: image and task vector, measurement and noise level, nodes and graph."""


class BatchCouplingWarning(UserWarning):
    """At inference the answer for a sample depends on what else is in its batch."""


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
    compile_step: run the solver on `torch.compile(step)`, by default or with the backend named, and
        differentiate that one for `OneStep`; the other derivatives use the step as it is.

    Examples:
        >>> W = eq.Dense(4, 4, norm="bound", zeta=0.5)
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(4)) + eq.Quadratic(W), activation="relu")
        >>> y = layer(torch.randn(3, 4))
        >>> y.sum().backward()
        >>> layer.last_solution.summary()
        'all 3 samples converged to 1.0e-04'
    """

    @accepts_old_names
    def __init__(
        self,
        energy: Energy | Cell | Callable[..., Tensor] | None = None,
        *,
        cell: Cell | None = None,
        activation: str | Activation = "relu",
        solver: str | Mapping[str, Any] | Solver[Any] | None = None,
        gradient: str | Mapping[str, Any] | GradientRule | None = None,
        tolerance: float | None = None,
        max_iterations: int | None = None,
        strict: bool | None = None,
        solving: Solving | None = None,
        compile_step: bool | str = False,
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
        self.compile_step = compile_step
        self.last_solution: Solution | None = None
        """The last forward solve, without its state and context."""
        self.identity = object()
        """What `solving` blocks know a layer and its twins by."""
        self._warned: set[str] = set()
        self._backward_log = BackwardLog(self._warned)

    @property
    def solver(self) -> Solver[Any]:
        """What solves at this moment: the layer's own solver, or that of a `solving` block."""
        return Active(self, self.solving).solving.solver

    @property
    def gradient(self) -> GradientRule:
        """What differentiates at this moment."""
        return Active(self, self.solving).solving.gradient

    @property
    def strict(self) -> bool:
        """Whether a failed solve is an error at this moment."""
        return Active(self, self.solving).solving.strict

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
        """The feature at the equilibrium, differentiable in the input and the parameters.

        `start` is a state to start from, such as the `state` of an earlier solution.
        """
        refuse_recording()
        active = Active(self, self.solving)
        solver, gradient = active.solving.solver, active.solving.gradient
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # Energies differentiate inside a step, which inference tensors forbid.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            inputs = _usable(x)
            start = active.start() if start is None else start
            problem = self._problem(inputs, start, active, gradient)
            backward = Backward(self._backward_log, active.solving.strict, active.note_backward)
            state, solution = gradient.equilibrium(self.cell, problem, solver, backward)
            self._note(solution, active, solver)
            active.note_equilibrium(inputs, state, solution.context)
            output = self.cell.output(state, solution.context)
            return _without_diverged(output, solution)

    @torch.no_grad()
    def solve(
        self,
        x: Inputs,
        start: State | None = None,
        *,
        solver: str | Mapping[str, Any] | Solver[Any] | None = None,
        trace: bool | Literal["states"] = False,
    ) -> Solution:
        """The equilibrium as a `Solution`, without gradients; optionally with another solver."""
        refuse_recording()
        active = Active(self, self.solving)
        with torch.inference_mode(False):
            chosen = active.solving.changed(solver=solver).solver
            start = active.start() if start is None else start
            problem = self._problem(_usable(x), start, active)
            solution = solve_in_blocks(chosen, problem, trace=trace)
        return self._note(solution, active, chosen)

    def report_equilibrium(self, x: Inputs, state: State) -> None:
        """Tell the `solving` blocks of an equilibrium that was found by other means, as by JIIO."""
        inputs = _usable(x)
        Active(self, self.solving).note_equilibrium(inputs, state, self.cell.inject(*inputs))

    @property
    def is_heard(self) -> bool:
        """Whether a `solving` block around records its equilibria."""
        return Active(self, self.solving).records_equilibria

    def report_visited(self, make_inputs: Callable[[], Inputs], state: State) -> None:
        """Tell `solving` blocks that record equilibria of an iterate of a search over inputs.

        Its inputs are made only if there is such a block.
        """
        if self.is_heard:
            with torch.enable_grad():
                inputs = _usable(make_inputs())
                context = self.cell.inject(*inputs)
            Active(self, self.solving).note_visited(inputs, state, context)

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
        refuse_transforms(rule, [*inputs, *self.parameters()])
        self._warn_of_coupling(batch=len(inputs[0]))
        context = self.cell.inject(*inputs)
        first = self._start(inputs, context, start, rule is not None and rule.from_zero)
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
        return FixedPointProblem(
            step=self._solver_step(),
            context=context,
            start=start,
            couples_batch=self.couples_batch,
            separable=self._is_separable(),
            refresh=self._refresh() if capabilities.refresh_until(self.cell) else None,
            refresh_until=capabilities.refresh_until(self.cell),
            monotone=capabilities.is_monotone(self.cell),
            contraction=self.cell.limits.contraction,
            solved_once=True,
            remedy=self.cell.remedy,
            compiled=bool(self.compile_step),
            potential=capabilities.potential(self.cell),
            trace=trace,
        )

    def _is_separable(self) -> bool:
        """Whether samples can be solved in blocks: a compiled step would be compiled for each."""
        return not (
            self.couples_batch
            or capabilities.refresh_until(self.cell)
            or self.compile_step
            or any(isinstance(m, _BatchNorm) and m.training for m in self.cell.modules())
        )

    def _refresh(self) -> Callable[[State, Context], Context]:
        """The cell's `refresh` in the grad mode of the call: solvers run without gradients."""
        mode = torch.is_grad_enabled()

        def refresh(state: State, context: Context) -> Context:
            with torch.set_grad_enabled(mode):
                return capabilities.refresh(self.cell, state, context)

        return refresh

    def _start(
        self, inputs: tuple[Tensor, ...], context: Context, given: State | None, from_zero: bool
    ) -> State:
        skips = from_zero or given is not None
        first = None if skips else capabilities.first_image(self.cell, context)
        expected = self.cell.initial_state(*inputs, context) if first is None else first
        if torch.is_autocast_enabled(inputs[0].device.type):
            # The map computes in half precision; the iterates are kept in single.
            expected = map_state(at_least_float32, expected)
        if first is not None:
            return map_state(functools.partial(_finite_start, context=context), expected)
        if given is None:
            # What is unrolled is differentiated from its very start, where that is the input.
            return expected if from_zero else map_state(lambda t: t.detach(), expected)
        shapes, wanted = ([tuple(t.shape) for t in state_tensors(s)] for s in (given, expected))
        if shapes != wanted:
            raise ValueError(f"the start has shapes {shapes}, the state {wanted}")
        return map_state(lambda like, t: in_format_of(like, t.detach().to(like)), expected, given)

    def _solver_step(self) -> Any:
        if not self.compile_step:
            return self.cell.step
        compiled = self.__dict__.get("_compiled_step")
        if compiled is None:
            backend = self.compile_step if isinstance(self.compile_step, str) else "inductor"
            if backend == "inductor":
                _require_compiler()
            compiled = torch.compile(self.cell.step, backend=backend)
            self.__dict__["_compiled_step"] = compiled
        return compiled

    def _warn_of_coupling(self, batch: int) -> None:
        """Training expects batches; a prediction that depends on its batch mates surprises."""
        if self.training or not self.couples_batch or batch < 2 or "coupling" in self._warned:
            return
        self._warned.add("coupling")
        warn_caller(
            "this layer couples the samples of a batch (a regularizer such as decorrelation or "
            "HSIC): the result of each depends on the others in its batch. Run samples one by one, "
            "or always in the same batches, where that matters.",
            BatchCouplingWarning,
        )

    def _note(self, solution: Solution, active: Active, solver: Solver[Any]) -> Solution:
        """Keep the facts of a solve and report failures, with the remedy.

        A failed solve warns once for each status it can end with. In training, running out of
        iterations near the tolerance is ordinary and is not reported; neither is it where the
        gradient rule defines the output as the last iterate, or where a custom stopping criterion
        replaces the tolerance.
        """
        strict, status = active.solving.strict, solution.worst_status
        failed = status is not Status.CONVERGED
        reported = failed and not self.training
        if failed and self.training:
            by_design = active.solving.gradient.from_zero or solver.stop is not None
            ordinary = status is Status.OUT_OF_ITERATIONS and by_design
            reported = not ordinary and bool(solution.is_unusable.any())
        warns = reported and not strict and f"forward {status.name}" not in self._warned
        # The message of a stalled solve carries its own remedy.
        if failed and status is not Status.STALLED and (warns or strict or not self.training):
            remedy = capabilities.diagnosis(self.cell, solution.state, solution.context)
            solution = dataclasses.replace(solution, remedy=remedy)
        self.last_solution = solution.facts()
        active.note(solution)
        self._warn_of_precision(solver.tolerance, solution)
        if failed and strict:
            raise ConvergenceError(solution.summary())
        if warns:
            self._warned.add(f"forward {status.name}")
            warn_caller(solution.summary(), ConvergenceWarning)
        return solution

    def _warn_of_precision(self, asked: float, solution: Solution) -> None:
        """Report a tolerance that the numbers cannot resolve, and what was used instead."""
        if solution.tolerance <= asked or "precision" in self._warned:
            return
        self._warned.add("precision")
        warn_caller(
            f"the tolerance {asked:.1e} is below the precision of the numbers, "
            f"{solution.epsilon:.1e}: solves end at {solution.tolerance:.1e}. Raise the tolerance, "
            "or compute in a wider type (model.double())",
            ConvergenceWarning,
        )

    def __prepare_scriptable__(self) -> None:
        refuse_recording("torch.jit.script")

    def __getstate__(self) -> dict[str, Any]:
        # A compiled step belongs to the cell it was made of: copies compile their own.
        return {k: v for k, v in self.__dict__.items() if k != "_compiled_step"}

    def on_twin(self) -> None:
        """A twin's backward solves are its own; a compiled step would be that of another cell."""
        self._backward_log = BackwardLog(self._warned)
        self.compile_step = False

    def extra_repr(self) -> str:
        own = self.solving
        return f"solver={own.solver}, gradient={own.gradient}, strict={own.strict}"


def _require_compiler() -> None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    if not any(name and shutil.which(name) for name in names):
        raise RuntimeError(
            "compile_step=True needs a C++ compiler, and there is none: install g++ or clang++, "
            "name one in the variable CXX, or leave compile_step out"
        )


def as_inputs(x: Inputs) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _usable(x: Inputs) -> tuple[Tensor, ...]:
    """Inputs that can be differentiated, in the format in which they are fastest."""
    refuse_half_on_cpu(as_inputs(x))
    return tuple(
        in_fastest_format(one.clone() if one.is_inference() else one) for one in as_inputs(x)
    )


def in_fastest_format(x: Tensor) -> Tensor:
    """Images on a CPU in channels_last: its convolutions are several times faster there.

    The state takes the format of its input, and the solver's buffer that of the state.
    """
    fast = x.dim() == 4 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    if not fast or is_wrapped(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _without_diverged(output: Tensor, solution: Solution) -> Tensor:
    """Replace the features of samples that diverged by NaN: they have no equilibrium."""
    if solution.worst_status is not Status.DIVERGED:
        return output
    diverged = solution.status == Status.DIVERGED
    if len(diverged) == 1:  # The samples of a coupled batch are one problem.
        return torch.full_like(output, torch.nan)
    return output.masked_fill(diverged.reshape(-1, *[1] * (output.dim() - 1)), torch.nan)


def _finite_start(first: Tensor, context: Context) -> Tensor:
    """Where T(0) is not finite a solve starts at zero: it returns its start if nothing was."""
    first = first.detach()
    # A look at the sum is cheaper than a copy, which one that overflows asks for in vain. What
    # belongs to the context, and maybe to the caller, is not a state's own.
    if not is_wrapped(first) and is_free_to_ask(first) and math.isfinite(first.sum()):
        own = all(first.data_ptr() != tensor.data_ptr() for tensor in context.tensors())
        return first if own else first.clone()
    return first.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
