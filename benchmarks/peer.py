"""The peer: TorchDEQ, with its defaults and tuned.

Both use the step of the same cell and include `inject` in their time, as Equilibria does.
`tuned_settings` and `default_settings` define the settings.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import MAX_ITERATIONS, Problem
from benchmarks.timing import Meter

NAME = "TorchDEQ"

TUNED_OPTIONS: dict[str, dict[str, Any]] = {
    "anderson": {"lam": 1e-10},
    "fixed_point_iter": {},
    # The default stores max_iter updates, which may not fit into memory.
    "broyden": {"LBFGS_thres": 30},
}

LAYOUTS = ("contiguous", "channels_last")
"""Memory formats of the images that the peer gets."""

REWRITTEN_LAYOUTS = ("pixels_first",)
"""Layout of the map rewritten by hand for the peer: the state is (batch, height, width, channels),
so that flattening it copies nothing. Equilibria does this automatically."""


def is_installed() -> bool:
    return importlib.util.find_spec("torchdeq") is not None


@dataclass(frozen=True)
class Setting:
    """Settings of the peer."""

    solver: str = "fixed_point_iter"
    tolerance: float = 1e-3
    stop: str = "abs"
    backward_solver: str = "fixed_point_iter"
    backward_tolerance: float = 1e-6
    backward_stop: str = "abs"
    tuned: bool = False
    layout: str = "contiguous"
    max_iterations: int = MAX_ITERATIONS
    gradient: str = "ift"
    """ift, hook_ift, or one_step (the peer's default: a phantom gradient of one step)."""

    @property
    def layout_label(self) -> str:
        return "" if self.layout == "contiguous" else f", {self.layout}"


def default_settings(problem: Problem, tolerance: float) -> list[Setting]:
    """Return the settings of `get_deq()`, from loose to tight.

    These are plain fixed-point iteration and absolute stopping. Two things differ: the limit of 40
    iterations is raised, and the relative tolerance is converted to an absolute one by a norm of
    the state. Norms between those of the largest and the smallest sample are tried; the loosest
    that suffices is used.

    Args:
        problem: The problem, which provides the norms.
        tolerance: Relative tolerance.
    """
    largest, smallest = problem.scales
    steps = 1 if largest < 1.2 * smallest else 5
    shares = [number / (steps - 1) for number in range(steps)] if steps > 1 else [1.0]
    return [
        Setting(tolerance=tolerance * largest ** (1 - share) * smallest**share) for share in shares
    ]


def tuned_settings(problem: Problem, tolerance: float, *, rewritten: bool = False) -> list[Setting]:
    """Return relative stopping with every solver, its best options, and every memory layout.

    Args:
        problem: The problem to solve.
        tolerance: Relative tolerance.
        rewritten: Use the map rewritten by hand. The list is empty if the inputs are not images.
    """
    if rewritten:
        layouts = REWRITTEN_LAYOUTS if problem.is_image else ()
    else:
        layouts = LAYOUTS if problem.is_image else LAYOUTS[:1]
    return [
        Setting(solver=solver, tolerance=tolerance, stop="rel", tuned=True, layout=layout)
        for solver, layout in itertools.product(TUNED_OPTIONS, layouts)
    ]


class Peer:
    """A problem solved by TorchDEQ."""

    def __init__(self, problem: Problem, setting: Setting) -> None:
        self.problem = problem
        self.setting = setting
        self.meter = Meter()
        self.deq = _deq(setting, self.meter)

    @torch.no_grad()
    def solve(self) -> Tensor:
        """Return the equilibrium, for inference."""
        self.deq.eval()
        function, start = self.map(self.problem.x)
        outputs, _ = self.deq(function, start)
        return self.restored(outputs[-1])

    def equilibrium(
        self, x: Tensor, *, start: Tensor | None = None, probe: Tensor | None = None
    ) -> Tensor:
        """Return the differentiable equilibrium; `probe` is added to the map."""
        self.deq.train()
        function, zeros = self.map(x, probe)
        outputs, _ = self.deq(function, zeros if start is None else self._laid_out(start))
        return self.restored(outputs[-1])

    def map(self, x: Tensor, probe: Tensor | None = None) -> tuple[Callable[..., Tensor], Tensor]:
        """Return the step of the cell in the layout of the peer, and the initial state."""
        cell = self.problem.cell
        x = self.formatted(x)
        context = cell.inject(x)
        start = cell.initial_state(x, context)
        pixels_first = self.setting.layout == "pixels_first"

        def step(z: Tensor) -> Tensor:
            image: Any = cell.step(z.permute(0, 3, 1, 2) if pixels_first else z, context)
            if probe is not None:
                image = image + probe
            return image.permute(0, 2, 3, 1) if pixels_first else image

        assert isinstance(start, Tensor)
        return step, self._laid_out(start)

    def formatted(self, x: Tensor) -> Tensor:
        """The input in the memory format of the setting."""
        if self.setting.layout == "contiguous":
            return x
        return x.contiguous(memory_format=torch.channels_last)

    def restored(self, state: Tensor) -> Tensor:
        """The state as (batch, channels, height, width)."""
        return state.permute(0, 3, 1, 2) if self.setting.layout == "pixels_first" else state

    def _laid_out(self, state: Tensor) -> Tensor:
        state = self.formatted(state)
        return state.permute(0, 2, 3, 1) if self.setting.layout == "pixels_first" else state

    def with_gradient(self, gradient: str) -> Peer:
        return Peer(self.problem, replace(self.setting, gradient=gradient))


def _library() -> Any:
    """The package, without the warnings of invalid escapes in its docstrings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*invalid escape sequence")
        import torchdeq

    return torchdeq


def _deq(setting: Setting, meter: Meter) -> torch.nn.Module:
    torchdeq = _library()

    # Solvers are looked up when a DEQ is made, so later DEQs can reuse these names.
    solvers = {
        "measured_forward": _counted(setting, setting.solver, meter.count_forward),
        "measured_backward": _counted(setting, setting.backward_solver, meter.count_backward),
    }
    for name, solver in solvers.items():
        torchdeq.solver.register_solver(name, solver)
    deq: torch.nn.Module = torchdeq.get_deq(
        f_solver="measured_forward",
        f_tol=setting.tolerance,
        f_stop_mode=setting.stop,
        f_max_iter=setting.max_iterations,
        b_solver="measured_backward",
        b_tol=setting.backward_tolerance,
        b_stop_mode=setting.backward_stop,
        b_max_iter=setting.max_iterations,
        ift=setting.gradient == "ift",
        hook_ift=setting.gradient == "hook_ift",
    )
    return deq


def _counted(setting: Setting, name: str, count: Callable[[], None]) -> Callable[..., Any]:
    """Wrap a solver of the peer so that calls of the map are counted; slow trials end."""
    solver = _library().solver.get_solver(name)
    if setting.tuned:
        solver = partial(solver, **TUNED_OPTIONS[name])

    def solve(function: Callable[..., Tensor], x0: Tensor, **options: Any) -> Any:
        def counted(z: Tensor) -> Tensor:
            count()
            return function(z)

        return solver(counted, x0, **options)

    return solve
