"""Compare compiled solves with eager ones, JAX and TorchDEQ: `python -m benchmarks.compiled`.

Every side solves the same problems in one process on one core. For each side, the fastest of its
solvers and tolerances counts whose true error, relative to a solution in float64, is at most the
target of the row. Times are medians of wall time, taken in turns. JAX is optional
(`pip install -e '.[jax]'`): jaxopt's fixed-point iteration and Anderson acceleration and
optimistix's fixed-point iteration, jitted and warm. `--peer` adds TorchDEQ with relative stopping
and its best options (extra `bench`).
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from benchmarks import peer
from benchmarks import problems as problems_of_peer

TOLERANCES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6)
LIMIT = 500
LARGEST_DENSE_JACOBIAN = 2000
"""Largest state for gradients of optimistix, which factorizes the Jacobian of the whole batch: at
16,384 numbers, one step takes half a minute."""
TRAIN_TARGET = 3e-3
"""Target error of gradients. Larger than that of states, because a single unit of a ReLU that is
zero on one side only changes the gradient by about 1e-3."""
TRIAL_REPEATS = 7
DENSE = ((64, 16), (1, 256), (64, 256), (512, 256))
"""Batch and width of the dense maps."""
GROWTH = (
    *((batch, 64) for batch in (1, 8, 64, 512, 4096)),
    *((64, width) for width in (16, 32, 128, 256, 512)),
)
"""Batch and width of the dense maps of `--growth`."""

Run = Callable[[], Any]


class DenseMap(nn.Module):
    """relu(Wz + x)."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.W = nn.Parameter(W)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(z @ self.W.T + x)


class ConvMap(nn.Module):
    """relu(W * z + x) with a 3×3 convolution."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.W = nn.Parameter(W)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(F.conv2d(z, self.W, padding=1) + x)


@eq.energy_term(convex=True)
def smoothness(y: Tensor, x: Tensor) -> Tensor:
    return (y[:, 1:] - y[:, :-1]).square().sum(dim=1)


@dataclass(frozen=True)
class Problem:
    """A fixed-point problem for PyTorch and for JAX."""

    name: str
    layer: Callable[..., eq.EquilibriumLayer]
    """Makes the layer, given solver and tolerance."""
    x: Tensor
    weights: Tensor
    jax_map: Callable[[Any, Any, Any, Any], Any]
    """T(z, W, x), given jax first."""
    to_jax: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Brings states and inputs to the layout that is fastest in JAX."""


def dense_problems(sizes: Iterable[tuple[int, int]]) -> Iterator[Problem]:
    """Yield dense maps, given pairs of batch and width."""
    generator = torch.Generator().manual_seed(0)
    for batch, width in sizes:
        W = torch.randn(width, width, generator=generator)
        W *= 0.95 / torch.linalg.matrix_norm(W, 2)
        x = torch.randn(batch, width, generator=generator)

        def dense(jax: Any, z: Any, W: Any, x: Any) -> Any:
            return jax.nn.relu(z @ W.T + x)

        yield Problem(f"dense {batch} × {width}", _layer(DenseMap, W), x, W, dense)


def problems() -> Iterator[Problem]:
    """Yield the problems: dense maps, a convolution, and the energy of the README."""
    yield from dense_problems(DENSE)
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(32, 32, 3, 3, generator=generator)
    W *= 0.95 / torch.fft.fft2(W, s=(16, 16)).permute(2, 3, 0, 1).svd().S.max()
    x = torch.randn(32, 32, 16, 16, generator=generator)

    def conv(jax: Any, z: Any, W: Any, x: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")  # others are 20 times slower inside a loop
        image = jax.lax.conv_general_dilated(z, W, (1, 1), "SAME", dimension_numbers=layout)
        return jax.nn.relu(image + x)

    yield Problem(
        "convolution 32 × 32 × 16 × 16",
        _layer(ConvMap, W),
        x,
        W.permute(2, 3, 1, 0).contiguous(),
        conv,
        lambda tensor: tensor.permute(0, 2, 3, 1).contiguous(),
    )
    for size in (16, 256):
        torch.manual_seed(0)
        U = eq.Dense(8, size)
        W = eq.Dense(size * 3 // 4, size, norm="bound", zeta=0.6)
        x = torch.randn(5, 8)
        with torch.no_grad():
            matrices = torch.cat([U.weights()[0], W.weights()[0]], dim=1).detach()

        def energy_layer(U: Any = U, W: Any = W, **solving: Any) -> eq.EquilibriumLayer:
            U, W = copy.deepcopy(U), copy.deepcopy(W)
            energy = eq.Input(U) + eq.Quadratic(W) + 0.1 * smoothness
            return eq.EquilibriumLayer(energy, **solving)

        def energy(jax: Any, z: Any, W: Any, x: Any) -> Any:
            U, W = W[:, :8], W[:, 8:]

            def value(y: Any) -> Any:
                squares = ((y[:, 1:] - y[:, :-1]) ** 2).sum()
                return -(x @ U.T * y).sum() - 0.5 * ((y @ W) ** 2).sum() + 0.1 * squares

            return jax.nn.relu(-jax.grad(value)(z))

        yield Problem(f"energy of the README, {size}", energy_layer, x, matrices, energy)


def _layer(make: type[nn.Module], W: Tensor) -> Callable[..., eq.EquilibriumLayer]:
    def layer(**solving: Any) -> eq.EquilibriumLayer:
        return eq.EquilibriumLayer(make(W.clone()), **solving)

    return layer


def reference(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the equilibrium, and the gradient of ½‖z*‖² in x, in float64."""
    layer = problem.layer(tolerance=1e-13, max_iterations=5000).double().eval()
    x = problem.x.double().requires_grad_()
    z = layer(x)
    (gradient,) = torch.autograd.grad(0.5 * z.square().sum(), x)
    return z.detach(), gradient


def error(result: Any, exact: Tensor) -> float:
    values = torch.as_tensor(result.tolist() if not isinstance(result, Tensor) else result)
    return float((values.detach().double() - exact).norm() / exact.norm())


def torch_candidates(
    problem: Problem, *, train: bool, compiled: bool, loosest: float = TOLERANCES[0]
) -> Iterator[tuple[str, Run]]:
    """Yield our solves, from loose to tight, beginning at a tolerance."""
    for tolerance in (t for t in TOLERANCES if t <= loosest):
        for solver in ("auto", "picard", "anderson"):
            layer = problem.layer(solver=solver, tolerance=tolerance, max_iterations=LIMIT).eval()
            model: nn.Module = eq.compile(layer) if compiled else layer
            x = problem.x.clone().requires_grad_(train)
            variables = [x, *model.parameters()]

            def solve(model: nn.Module = model, x: Tensor = x) -> Tensor:
                with torch.no_grad():
                    return model(x)

            def step(
                model: nn.Module = model, x: Tensor = x, variables: list[Tensor] = variables
            ) -> Tensor:
                for variable in variables:
                    variable.grad = None
                (0.5 * model(x).square().sum()).backward()
                assert x.grad is not None
                return x.grad

            yield f"{solver} {tolerance:g}", step if train else solve


def jax_candidates(problem: Problem, *, train: bool) -> Iterator[tuple[str, Run]]:
    """Yield jitted solves of jaxopt and optimistix, from loose to tight."""
    import jax
    import jax.numpy as jnp
    import jaxopt
    import optimistix

    x = jnp.asarray(problem.to_jax(problem.x).numpy())
    W = jnp.asarray(problem.weights.numpy())

    def step(z: Any, W: Any, x: Any) -> Any:
        return problem.jax_map(jax, z, W, x)

    exact = problem.to_jax(reference(problem)[0])
    start = jnp.zeros(tuple(exact.shape), dtype=jnp.float32)
    scale = float(exact.norm())

    def jaxopt_solve(make: Any, tolerance: float) -> Any:
        solver = make(step, maxiter=LIMIT, tol=tolerance * scale, implicit_diff=True)
        return lambda W, x: solver.run(start, W, x).params

    def optimistix_solve(tolerance: float) -> Any:
        solver = optimistix.FixedPointIteration(rtol=tolerance, atol=tolerance)

        def solve(W: Any, x: Any) -> Any:
            solution = optimistix.fixed_point(
                lambda z, args: step(z, *args), solver, start, args=(W, x), max_steps=LIMIT
            )
            return solution.value

        return solve

    makers = {
        "jaxopt fixed point": lambda t: jaxopt_solve(jaxopt.FixedPointIteration, t),
        "jaxopt Anderson": lambda t: jaxopt_solve(jaxopt.AndersonAcceleration, t),
        "optimistix": optimistix_solve,
    }
    if train and exact.numel() > LARGEST_DENSE_JACOBIAN:
        del makers["optimistix"]
    for tolerance in TOLERANCES:
        for name, make in makers.items():
            solve = make(tolerance)

            def loss(W: Any, x: Any, solve: Any = solve) -> Any:
                return 0.5 * (solve(W, x) ** 2).sum()

            function = jax.jit(jax.grad(loss, argnums=(0, 1)) if train else solve)

            def run(function: Any = function) -> Any:
                result = function(W, x)
                return jax.block_until_ready(result[1] if train else result)

            yield f"{name} {tolerance:g}", run


def peer_candidates(problem: Problem, *, train: bool) -> Iterator[tuple[str, Run]]:
    """Yield tuned solves of TorchDEQ, from loose to tight."""
    cell = problem.layer().cell
    x = problem.x.clone().requires_grad_(train)
    variables = [x, *cell.parameters()]
    for tolerance in TOLERANCES:
        for solver in ("fixed_point_iter", "anderson"):
            setting = peer.Setting(
                solver=solver,
                tolerance=tolerance,
                stop="rel",
                backward_solver=solver,
                backward_tolerance=tolerance,
                backward_stop="rel",
                tuned=True,
                max_iterations=LIMIT,
            )
            solve = peer.Peer(problems_of_peer.Problem(problem.name, cell, x), setting)

            def step(solve: peer.Peer = solve) -> Tensor:
                for variable in variables:
                    variable.grad = None
                (0.5 * solve.equilibrium(x).square().sum()).backward()
                assert x.grad is not None
                return x.grad

            yield f"{solver} {tolerance:g}", step if train else solve.solve


def wall(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def fastest(
    candidates: Iterator[tuple[str, Run]], exact: Tensor, target: float
) -> tuple[str, Run, float] | None:
    """Return the fastest candidate that reaches the target, and the loosest tolerance that does.

    Candidates come from loose to tight, several per tolerance. The search ends one tolerance after
    the first that reaches the target.
    """
    best: tuple[float, str, Run] | None = None
    last, loosest = "", 0.0
    for name, run in candidates:
        tolerance = name.rsplit(" ", 1)[1]
        if best is not None and tolerance not in (last, best[1].rsplit(" ", 1)[1]):
            break
        last = tolerance
        if not error(run(), exact) <= target:
            continue
        loosest = max(loosest, float(tolerance))
        seconds = statistics.median(wall(run) for _ in range(TRIAL_REPEATS))
        if best is None or seconds < best[0]:
            best = seconds, name, run
    return None if best is None else (*best[1:], loosest)


def interleaved(sides: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """Return the median seconds of each side; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for _ in range(repeats):
        for name, run in sides.items():
            times[name].append(wall(run))
    return {name: statistics.median(values) for name, values in times.items()}


def compare(
    problem: Problem, *, train: bool, target: float, repeats: int, with_peer: bool = False
) -> str:
    """Return one row of the table."""
    z, gradient = reference(problem)
    exact = gradient if train else z
    eager = fastest(torch_candidates(problem, train=train, compiled=False), exact, target)
    # Compiling takes seconds, so tolerances that are too loose for eager solves are left out.
    loosest = TOLERANCES[0] if eager is None else eager[2]
    compiled = torch_candidates(problem, train=train, compiled=True, loosest=loosest)
    chosen = {"eager": eager, "compiled": fastest(compiled, exact, target)}
    if with_peer:
        chosen["TorchDEQ"] = fastest(peer_candidates(problem, train=train), exact, target)
    if find_spec("jax") is not None:
        exact = problem.to_jax(exact)
        chosen["JAX"] = fastest(jax_candidates(problem, train=train), exact, target)
    sides = {name: choice[1] for name, choice in chosen.items() if choice is not None}
    medians = interleaved(sides, repeats)
    sides_shown = ["eager", "compiled", "JAX", *(["TorchDEQ"] if with_peer else [])]
    cells = [
        f"{1e3 * medians[side]:.3f} ({chosen[side][0]})" if side in medians else "–"  # type: ignore[index]
        for side in sides_shown
    ]
    pairs = [("compiled", other) for other in ("eager", "JAX")]
    pairs += [(ours, "TorchDEQ") for ours in ("eager", "compiled") if with_peer]
    ratios = [
        f"{medians[ours] / medians[other]:.2f}" if {ours, other} <= medians.keys() else "–"
        for ours, other in pairs
    ]
    kind = "training step" if train else "forward"
    return "| " + " | ".join([f"{problem.name}, {kind}, {target:g}", *cells, *ratios]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--repeats", type=int, default=101, help="rounds per row")
    parser.add_argument("--rows", nargs="+", help="only problems whose names contain one of these")
    parser.add_argument("--targets", nargs="+", type=float, default=[1e-3, 1e-5])
    parser.add_argument("--forward", action="store_true", help="without training steps")
    parser.add_argument(
        "--growth", action="store_true", help="dense maps of growing batch and width"
    )
    parser.add_argument("--peer", action="store_true", help="also compare with TorchDEQ")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    columns = ["problem, target error", "eager, ms", "compiled, ms", "JAX, ms"]
    columns += ["TorchDEQ, ms"] if options.peer else []
    columns += ["compiled ÷ eager", "compiled ÷ JAX"]
    columns += ["eager ÷ TorchDEQ", "compiled ÷ TorchDEQ"] if options.peer else []
    print("| " + " | ".join(columns) + " |")
    print("|---" + "|---:" * (len(columns) - 1) + "|")
    measured = partial(compare, repeats=options.repeats, with_peer=options.peer)
    for problem in dense_problems(GROWTH) if options.growth else problems():
        if options.rows and not any(row in problem.name for row in options.rows):
            continue
        for target in options.targets:
            print(measured(problem, train=False, target=target), flush=True)
        if not options.forward:
            print(measured(problem, train=True, target=TRAIN_TARGET), flush=True)


if __name__ == "__main__":
    main()
